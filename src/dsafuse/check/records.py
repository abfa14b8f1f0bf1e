"""Recorded runs: rows, the machine that they come from, and their JSON file."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsafuse.check.document import dump, load
from dsafuse.check.environment import environment, of_commit

WRAPPER = "wrapper"
"""The form of a call where nothing else is said: what a wrapper around vLLM's attention passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One op, shape, arm and state of the L2. Graph times are of one launch; host times of one eager call."""

    op: str
    case: str
    heads: str
    """Attention heads/indexer heads."""
    tokens: int
    arm: str
    what: str
    """The provider, or whose code it is, with its version."""
    l2: str
    median_us: float
    p10_us: float
    p90_us: float
    bytes_moved: int
    gb_per_s: float
    fraction_of_copy: float
    empty_launches: float
    """How many empty launches take as long."""
    input_sets: int
    eager_us: float | None = None
    """A whole call, the queue drained: the longer of host and GPU."""
    host_us: float | None = None
    """The host's part alone."""
    mul_us: float | None = None
    """What a torch.mul took, in turn with it."""
    torch_ops_us: float | None = None
    """The host's part through torch.ops."""
    form: str = WRAPPER
    """Of bench.FORMS."""
    captures: int = 1
    """How often its graphs were captured, on input sets of their own: 1, or more near a target."""

    @property
    def call(self) -> str:
        """What was called: the op, and its form where it is not the usual one."""
        return named(self.op, self.form)

    @property
    def host_of_mul(self) -> float | None:
        """Host time over that of a torch.mul."""
        return self.host_us / self.mul_us if self.host_us is not None and self.mul_us else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unproven:
    """An arm that was not timed at a shape, since its results do not hold."""

    op: str
    heads: str
    tokens: int
    arm: str
    reason: str
    form: str = WRAPPER

    def __str__(self) -> str:
        return f"{named(self.op, self.form)} {self.heads} T={self.tokens}, {self.arm}: {self.reason}"


def named(op: str, form: str) -> str:
    """An op and its form, as tables and sentences have them."""
    return op if form == WRAPPER else f"{op} ({form})"


@dataclass(frozen=True, slots=True, kw_only=True)
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
    unproven: tuple[Unproven, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    """Arms that could not be called, and why."""
    unreached: int = 0
    """Cells that were asked for, or were to be timed again, and that it did not come to: the run was cut short."""

    @staticmethod
    def of(
        rows: Sequence[Row],
        copy_bytes_per_s: float,
        empty_us: float,
        commit: str | None = None,
        unproven: Sequence[Unproven] = (),
        absent: Mapping[str, str] | None = None,
    ) -> Run:
        """A run of this process. `commit` is what the caller says; else the checkout tells."""
        e = of_commit(environment(), commit)
        return Run(
            gpu=str(e["gpu"]),
            driver=e["driver"],
            torch=e["torch"],
            triton=e["triton"] or e["pytorch-triton-rocm"],
            dsafuse=e["dsafuse"],
            commit=e["commit"],
            clean=e["clean"],
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            copy_gb_per_s=copy_bytes_per_s / 1e9,
            empty_kernel_us=empty_us,
            rows=tuple(rows),
            unproven=tuple(unproven),
            absent=dict(absent or {}),
        )

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def write(self, path: Path) -> None:
        """Write the run's JSON file."""
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        dump(path, self.record())

    @staticmethod
    def read(path: Path) -> Run:
        """Read what write() wrote. Raises ValueError for a file that is no such run."""
        try:
            data = load(path)
            rows = tuple(Row(**row) for row in data.pop("rows"))
            unproven = tuple(Unproven(**entry) for entry in data.pop("unproven"))
            return Run(**data, rows=rows, unproven=unproven)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: no recorded run of this version: {error}") from None

    def row(self, op: str, heads: str, tokens: int, arm: str, l2: str, form: str = WRAPPER) -> Row | None:
        """The row of one cell."""
        wanted = (op, heads, tokens, arm, l2, form)
        return next((r for r in self.rows if (r.op, r.heads, r.tokens, r.arm, r.l2, r.form) == wanted), None)


def commit_and_state(commit: str | None, clean: bool | None) -> str:
    """Which code it was, and how that is known: by a checkout, clean or not, or because somebody said so."""
    state = {True: "clean", False: "with changes", None: "as stated"}[clean]
    return f"{commit} ({state})" if commit else "an unknown commit"


def origin(run: Run) -> str:
    """One sentence that says where a run's numbers come from."""
    return (
        f"{run.gpu}, driver {run.driver}, torch {run.torch}, Triton {run.triton}, dsafuse {run.dsafuse} at "
        f"{commit_and_state(run.commit, run.clean)}, {run.date}; copy bandwidth {run.copy_gb_per_s:.0f} GB/s, "
        f"an empty kernel {run.empty_kernel_us:.2f} us"
    )

"""A measurement as data: what ran where, every repeat's own numbers, and the JSON file that holds them.

The file is written after every turn, and is the state that a later run continues from.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsafuse.serving.grid import OFF, ON, Cell, Turn

FORMAT = 1

Metrics = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Start:
    """One start of one server."""

    arm: str
    command: list[str]
    mode: str
    gpus: str | None
    seconds: float
    plans: list[str]


@dataclass(frozen=True, slots=True)
class Result:
    """One turn, and what `vllm bench serve` found in it. `start` counts the starts of servers."""

    turn: Turn
    start: int
    seconds: float
    metrics: Metrics


@dataclass(slots=True)
class Record:
    """A measurement, complete or not.

    conditions: what makes two turns comparable: model, server arguments, prompts a slot, where the arms run.
    environment: GPU, driver, versions, commit, switches.
    """

    conditions: dict[str, Any]
    environment: dict[str, Any]
    starts: list[Start] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    ended: str = "not yet"
    """How it came to its end: `complete`, or why not."""

    def done(self) -> set[Turn]:
        """Turns that need not be taken again."""
        return {result.turn for result in self.results}

    def cells(self) -> list[Cell]:
        """Those with any result, small ones first."""
        return sorted({result.turn.cell for result in self.results})

    def repeats(self, cell: Cell) -> list[tuple[Metrics, Metrics]]:
        """(off, on) of every repeat of a cell that has both."""
        found = {(r.turn.repeat, r.turn.arm): r.metrics for r in self.results if r.turn.cell == cell}
        numbers = sorted({repeat for repeat, _ in found})
        return [(found[n, OFF], found[n, ON]) for n in numbers if (n, OFF) in found and (n, ON) in found]

    def document(self) -> dict[str, Any]:
        """As JSON has it, summaries included."""
        return {
            "format": FORMAT,
            "ended": self.ended,
            "environment": self.environment,
            "conditions": self.conditions,
            "starts": [asdict(start) for start in self.starts],
            "summary": [
                {**asdict(cell), "repeats": len(self.repeats(cell)), "metrics": _summary(self.repeats(cell))}
                for cell in self.cells()
            ],
            "results": [asdict(result) for result in self.results],
        }

    def write(self, path: Path) -> None:
        """Write the file, so that at no time there is half a file."""
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self.document(), indent=1) + "\n")
        os.replace(part, path)

    @staticmethod
    def read(path: Path) -> Record:
        """Read what write() wrote. Raises ValueError for a file that is none of these."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"{path}: got format {data['format']!r}, expected {FORMAT}")
            results = [
                Result(
                    Turn(Cell(**r["turn"]["cell"]), r["turn"]["repeat"], r["turn"]["arm"]),
                    r["start"],
                    r["seconds"],
                    dict(r["metrics"]),
                )
                for r in data["results"]
            ]
            return Record(
                dict(data["conditions"]),
                dict(data["environment"]),
                [Start(**start) for start in data["starts"]],
                results,
                data["ended"],
            )
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: no measurement of this version: {error}") from None


def differences(before: Record, now: Record) -> list[str]:
    """Why the results of two measurements can't stand in one table, a line for each reason."""
    pairs = [
        (f"{part} {key}", old.get(key), new.get(key))
        for part, old, new in (
            ("condition", before.conditions, now.conditions),
            ("environment", before.environment, now.environment),
        )
        for key in sorted({*old, *new})
        if key not in VOLATILE
    ]
    return [f"{name} was {old!r}, is {new!r}" for name, old, new in pairs if old != new]


VOLATILE = {"memory_bytes", "in_turn_because", "entry_points"}
"""What may differ between two runs of one measurement."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of `vllm bench serve`. A ratio above 1 always means that the plugin is better."""

    key: str
    name: str
    more_is_better: bool = False

    def ratio(self, off: Metrics, on: Metrics) -> float | None:
        """How many times better `on` is; None where one of the two is 0, as an inter-token latency of one token."""
        a, b = float(off[self.key]), float(on[self.key])
        if not a or not b:
            return None
        return b / a if self.more_is_better else a / b


LATENCIES = ("ttft", "tpot", "itl", "e2el")
METRICS = (
    *(
        Metric(f"{how}_{what}_ms", f"{what.upper()} {word}, ms")
        for what in LATENCIES
        for how, word in (("median", "p50"), ("mean", "mean"))
    ),
    Metric("output_throughput", "output tokens/s", more_is_better=True),
)
TPOT = next(metric for metric in METRICS if metric.key == "median_tpot_ms")


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of one cell: medians over the repeats, and the ratio of each repeat's pair."""

    off: float
    on: float
    ratio: float | None
    low: float | None
    high: float | None


def compare(metric: Metric, repeats: Sequence[tuple[Metrics, Metrics]]) -> Compared | None:
    """Medians of both arms, and median, smallest and largest ratio; None without a pair."""
    if not repeats:
        return None
    ratios = [ratio for off, on in repeats if (ratio := metric.ratio(off, on)) is not None]
    off, on = (statistics.median(float(pair[arm][metric.key]) for pair in repeats) for arm in (0, 1))
    if not ratios:
        return Compared(off, on, None, None, None)
    return Compared(off, on, statistics.median(ratios), min(ratios), max(ratios))


def _summary(repeats: Sequence[tuple[Metrics, Metrics]]) -> dict[str, Any]:
    compared = {metric.key: compare(metric, repeats) for metric in METRICS}
    return {key: asdict(found) for key, found in compared.items() if found is not None}

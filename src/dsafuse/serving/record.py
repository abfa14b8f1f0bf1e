"""A measurement as data: what ran where, every repeat's own numbers, and the JSON file that holds them.

The file is written after every turn, and is the state that a later run continues from.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dsafuse.check.document import NONE, Kinds, dump, entry, load, natural, number, words
from dsafuse.serving.grid import ARMS, OFF, ON, Cell, Turn

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
    """One turn, and what `vllm bench serve` found in it.

    start: counts the starts of servers.
    server: what the server itself says of the turn's requests, warm-ups included: means in ms, as in server.SPANS.
    compiled: what it says was compiled meanwhile, which some request had to wait for.
    """

    turn: Turn
    start: int
    seconds: float
    metrics: Metrics
    server: Mapping[str, float]
    compiled: list[str]


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
        dump(path, self.document())

    @staticmethod
    def read(path: Path) -> Record:
        """Read what write() wrote. Raises ValueError, which names the place, for a file that is none of these."""
        try:
            data = load(path)
            if (found := entry(data, "format", int)) != FORMAT:
                raise ValueError(f"format: got {found}, expected {FORMAT}")
            return Record(
                _fields({**EARLIER, **entry(data, "conditions", dict)}, "conditions", CONDITIONS),
                _fields(entry(data, "environment", dict), "environment", ENVIRONMENT),
                [_start(start, f"starts[{n}]") for n, start in enumerate(entry(data, "starts", list))],
                [_result(result, f"results[{n}]") for n, result in enumerate(entry(data, "results", list))],
                entry(data, "ended", str),
            )
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: no JSON: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: no measurement of this version: {error}") from None


CONDITIONS: Mapping[str, Kinds] = {
    "model": str, "heads": int, "layers": int, "weights": str, "kv_cache_dtype": str, "load_format": str,
    "prompts_per_slot": int, "in_turn": bool, "server_arguments": list,
}  # fmt: skip
ENVIRONMENT: Mapping[str, Kinds] = {
    "dsafuse": str, "torch": str, "commit": (str, NONE), "clean": (bool, NONE), "gpu": (str, NONE),
}  # fmt: skip
"""What a record can't be shown without, and of which type it is; there may be more."""
EARLIER: Mapping[str, Any] = {"weights": "bf16"}
"""Conditions that were the same in every measurement before they were recorded."""


def _fields(data: Any, where: str, kinds: Mapping[str, Kinds]) -> dict[str, Any]:
    """The object, its fields held to their types."""
    for name, kind in kinds.items():
        entry(data, name, kind, where)
    return dict(data)


def _arm(data: Any, where: str) -> str:
    found: str = entry(data, "arm", str, where)
    if found not in ARMS:
        raise ValueError(f"{where}.arm: got {found!r}, expected one of {', '.join(ARMS)}")
    return found


def _start(data: Any, where: str) -> Start:
    return Start(
        _arm(data, where),
        words(data, "command", where),
        entry(data, "mode", str, where),
        entry(data, "gpus", (str, NONE), where),
        number(data, "seconds", where),
        words(data, "plans", where),
    )


def _result(data: Any, where: str) -> Result:
    turn = entry(data, "turn", dict, where)
    cell, at = entry(turn, "cell", dict, f"{where}.turn"), f"{where}.turn.cell"
    metrics, server = entry(data, "metrics", dict, where), entry(data, "server", dict, where)
    for metric in METRICS:
        number(metrics, metric.key, f"{where}.metrics")
    lengths = (natural(cell, name, at, 1) for name in ("isl", "osl", "concurrency"))
    for name in REQUESTS:
        times = entry(metrics, name, list, f"{where}.metrics")
        if not times or not all(type(time) in (int, float) and 0 <= time < math.inf for time in times):
            raise ValueError(f"{where}.metrics.{name}: got {times!r:.60}, expected a list of seconds")
    return Result(
        Turn(
            Cell(*lengths),
            natural(turn, "repeat", f"{where}.turn"),
            _arm(turn, f"{where}.turn"),
        ),
        natural(data, "start", where),
        number(data, "seconds", where),
        metrics,
        {name: number(server, name, f"{where}.server") for name in server},
        words(data, "compiled", where),
    )


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
REQUESTS = ("ttfts", "start_times")
"""Seconds, one for every request, in the order of sending: time to first token; when it was sent, since the first."""

BY_KEY: Mapping[str, Metric] = {metric.key: metric for metric in METRICS}
TTFT, TPOT, TOKENS = (BY_KEY[key] for key in ("median_ttft_ms", "median_tpot_ms", "output_throughput"))


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

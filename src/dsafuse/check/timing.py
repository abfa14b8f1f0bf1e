"""Times of launches: replayed CUDA graphs over rotating inputs, arms interleaved, beside copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

Launch = Callable[[], object]

MAX_LAUNCHES = 256
"""Most launches of a graph, and so most input sets. Where so many do not pass twice the L2, the memory that is read
between replays makes up for it."""

WARM_SETS = 4
"""Input sets of a warm graph: an engine's buffers come back, and the GEMM before has just written them."""

BACKLOG_READS = 4
"""Reads of twice the L2 before each cold replay: some 100 us on an H200, in which the host queues event and graph."""

ROUNDS = 31

COPY_BYTES = 4_000_000_000

HOST_CALLS = 100
HOST_ROUNDS = 7

EAGER_CALLS = 50
EAGER_ROUNDS = 9
UNTIMED_CALLS = 2
"""Before each round of eager calls, since another arm's calls came between."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How often something is run: launches in a graph, which share the cost of starting it, and rounds of replays."""

    launches: int
    rounds: int


def effort(bytes_touched: int) -> Effort:
    """Less of it for what takes long: a graph should run for some 200 us, and a median needs fewer samples then."""
    if bytes_touched < 32_000_000:
        return Effort(40, ROUNDS)
    return Effort(8, ROUNDS) if bytes_touched < 256_000_000 else Effort(4, 11)


@dataclass(frozen=True, slots=True)
class Spread:
    """Microseconds of one launch: the median of the rounds, and where four fifths of them lie."""

    median_us: float
    p10_us: float
    p90_us: float

    @staticmethod
    def of(samples: Sequence[float]) -> Spread:
        """Summarise samples."""
        ordered = sorted(samples)
        last = len(ordered) - 1
        return Spread(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


@cache
def l2_bytes(device: torch.device) -> int:
    """Size of the GPU's L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def sets_needed(bytes_touched: int, device: torch.device) -> int:
    """How many input sets of `bytes_touched` pass twice the L2, but not more than a graph can launch."""
    return max(2, min(MAX_LAUNCHES, 2 * l2_bytes(device) // max(1, bytes_touched) + 1))


class GraphTimer:
    """One captured graph that launches each of its calls in turn, every one on inputs of its own.

    Args:
        calls: the launches.
        device: the GPU.
        launches: the fewest of the graph; calls are repeated until there are so many.
        warm: whether a replay finds what the one before has left in L2.
    """

    def __init__(
        self, calls: Sequence[Launch], device: torch.device, launches: int = 40, *, warm: bool = False
    ) -> None:
        repeats = -(-launches // len(calls))
        self.launches = repeats * len(calls)
        self._device, self._warm = device, warm
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for call in calls:  # compiles, and touches every set once
                call()
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for _ in range(repeats):
                for call in calls:
                    call()
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def replay_us(self) -> float:
        """Microseconds per launch of one replay; before it the GPU is kept busy, so that host time does not count."""
        if self._warm:
            self._graph.replay()
        else:
            # A write would leave dirty lines for the timed launches to evict.
            for _ in range(BACKLOG_READS):
                _ballast(self._device).sum()
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return 1e3 * float(self._start.elapsed_time(self._end)) / self.launches


@cache
def _ballast(device: torch.device) -> torch.Tensor:
    """Memory that nothing else uses, twice the L2."""
    return torch.zeros(l2_bytes(device) // 2 + 1, dtype=torch.int32, device=device)


def samples(timers: dict[str, GraphTimer], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Replay the timers in turn, the order reversed every other round, so that drift meets all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in timers}
    for timer in timers.values():
        timer.replay_us()
    for round_ in range(rounds):
        for name in list(timers)[:: 1 if round_ % 2 else -1]:
            taken[name].append(timers[name].replay_us())
    return taken


def interleaved(timers: dict[str, GraphTimer], rounds: int = ROUNDS) -> dict[str, Spread]:
    """The same, summarised."""
    return {name: Spread.of(values) for name, values in samples(timers, rounds).items()}


def eager_us(calls: Sequence[Launch], count: int = EAGER_CALLS) -> float:
    """Microseconds per eager call of one round, queue drained at the end: the longer of host and GPU time."""
    for call in calls[:UNTIMED_CALLS]:
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for i in range(count):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - started) / count


def host_us(calls: dict[str, Launch], rounds: int = HOST_ROUNDS, count: int = HOST_CALLS) -> dict[str, float]:
    """Microseconds of host time per eager call: the host's clock, the queue empty at the start and never awaited.

    The calls are interleaved, since what a host takes for anything drifts by tens of percent.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(count):
                call()
            taken[name].append(1e6 * (time.perf_counter() - started) / count)
    torch.cuda.synchronize()
    return {name: statistics.median(values) for name, values in taken.items()}


def eager_mul(device: torch.device) -> Launch:
    """The yardstick of host time: torch.mul of two small tensors."""
    x = torch.ones(8, device=device)
    return lambda: torch.mul(x, x)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of an fp32 multiply by one over 4 GB, replayed as a graph."""
    source = torch.randn(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        torch.mul(source, 1.0, out=target)

    timer = GraphTimer([copy], device, launches=4)
    timer.replay_us()
    return 2 * COPY_BYTES / (1e-6 * Spread.of([timer.replay_us() for _ in range(5)]).median_us)


def empty_kernel_us(device: torch.device) -> float:
    """Microseconds of a kernel that does nothing, in such a graph: the least that a launch can take."""
    from dsafuse.check.empty_kernel import launch_empty

    timer = GraphTimer([launch_empty], device, launches=100)
    timer.replay_us()
    return Spread.of([timer.replay_us() for _ in range(ROUNDS)]).median_us

"""Fused against split and against peers: rows that are written only after that very configuration is proven."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsafuse.check.arms import PROVIDERS, BenchArm, out_form
from dsafuse.check.cases import Case
from dsafuse.check.inputs import Inputs
from dsafuse.check.records import Row, Unproven
from dsafuse.check.timing import (
    WARM_SETS,
    GraphTimer,
    Launch,
    Spread,
    eager_mul,
    eager_us,
    effort,
    host_us,
    interleaved,
    sets_needed,
)
from dsafuse.check.traffic import bytes_moved
from dsafuse.check.verify import check_case
from dsafuse.check.working_sets import working_sets

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS = ((128, 64), (16, 32))
"""(attention heads, indexer heads): DeepSeek-V3.2, and GLM-5.x on four GPUs."""

L2_STATES = ("cold", "warm")
"""cold: inputs rotate over more than twice the L2, or other memory is read between replays. warm: a few input sets come
back at once, as an engine's do that a GEMM has just written."""

MOST_WARM_TOKENS = 512
"""Beyond, inputs do not fit into any L2, and warm would be cold."""

MOST_EAGER_TOKENS = 1024
"""Beyond, an eager call waits for the GPU, not for the host."""


@dataclass(frozen=True, slots=True)
class Yardsticks:
    """What this GPU can do: bytes per second of a copy, microseconds of an empty launch in a graph."""

    copy_bytes_per_s: float
    empty_us: float


@dataclass(slots=True)
class Cell:
    """One op at one shape: its rows, and the arms that were not timed since they are not proven."""

    rows: list[Row] = field(default_factory=list)
    unproven: list[Unproven] = field(default_factory=list)


def bench_case(op: str, tokens: int, heads: tuple[int, int]) -> Case:
    """One configuration, as an engine has it: bf16 activations, fp8 queries and caches, block size 64, 2,048 top-k."""
    own = {"heads": heads[0], "index_heads": heads[1], "query": "fp8", "layout": "fp8", "topk": "wide"}
    return Case(op=op, tokens=tokens, key_outs="absent", **own)  # type: ignore[arg-type]


def bench_cell(
    case: Case,
    arms: Sequence[BenchArm],
    states: Sequence[str],
    seed: int,
    device: torch.device,
    yardsticks: Yardsticks,
) -> Cell:
    """Prove every arm on one case, then time those that hold, interleaved. No arm's failure ends the others."""
    cell = Cell()
    proven = _proven_providers(case, arms, seed, device, cell)
    moved = bytes_moved(case)
    count = max(WARM_SETS if "warm" in states else 1, sets_needed(moved, device) if "cold" in states else 1)
    inputs, sets = working_sets(case, count, seed, device)
    calls = _calls(case, [arm for arm in arms if arm.name in proven], inputs, sets, cell)
    host = _host_times(case, calls, sets[0], device) if case.tokens <= MOST_EAGER_TOKENS else {}
    for state in states:
        if state == "warm" and case.tokens > MOST_WARM_TOKENS:
            continue
        most = WARM_SETS if state == "warm" else len(sets)
        kept = {name: (arm, launches[:most]) for name, (arm, launches) in calls.items()}
        timers = _timers(case, kept, state, moved, device, cell)
        for name, spread in interleaved(timers, effort(moved).rounds).items():
            arm, launches = kept[name]
            cell.rows.append(_row(case, arm, state, spread, moved, len(launches), host.get(name, {}), yardsticks))
    return cell


def label(case: Case) -> str:
    """The shape of a case as bench names it."""
    return f"{case.heads}/{case.index_heads}"


def _unproven(case: Case, arm: str, reasons: Sequence[str]) -> Unproven:
    return Unproven(op=case.op, heads=label(case), tokens=case.tokens, arm=arm, reason="; ".join(reasons))


def _proven_providers(case: Case, arms: Sequence[BenchArm], seed: int, device: torch.device, cell: Cell) -> set[str]:
    """The arms that may be timed so far: peers, and providers that verify has passed on this very case."""
    names = {PROVIDERS[arm.name]: arm.name for arm in arms if arm.peer is None}
    for result in check_case(case, list(names), seed, device) if names else ():
        if result.status != "passed":
            cell.unproven.append(_unproven(case, names.pop(result.provider), [result.call, *result.reasons]))
    return {*names.values(), *(arm.name for arm in arms if arm.peer is not None)}


Calls = dict[str, tuple[BenchArm, list[Launch]]]


def _calls(case: Case, arms: Sequence[BenchArm], inputs: Inputs, sets: list[dict[str, Any]], cell: Cell) -> Calls:
    """Each arm's calls, one for each input set; peers have been held to float64 on the first."""
    calls: Calls = {}
    for arm in arms:
        try:
            with arm.context():
                wrong = list(arm.prove(case, inputs, sets[0]))
                launches = [] if wrong else [arm.launch(case, arguments) for arguments in sets]
        except Exception as error:  # noqa: BLE001  what others' code raises is reported, and ours goes on
            wrong, launches = [f"raised {type(error).__name__}: {error}"], []
        if wrong:
            cell.unproven.append(_unproven(case, arm.name, wrong))
        else:
            calls[arm.name] = arm, launches
    return calls


def _timers(
    case: Case, calls: Calls, state: str, moved: int, device: torch.device, cell: Cell
) -> dict[str, GraphTimer]:
    timers = {}
    for name, (arm, launches) in calls.items():
        try:
            with arm.context():
                timers[name] = GraphTimer(launches, device, effort(moved).launches, warm=state == "warm")
        except Exception as error:  # noqa: BLE001  as above
            reason = f"{state} L2, in a CUDA graph: raised {type(error).__name__}: {error}"
            cell.unproven.append(_unproven(case, name, [reason]))
    return timers


def _host_times(
    case: Case, calls: Calls, arguments: dict[str, Any], device: torch.device
) -> dict[str, dict[str, float]]:
    """For each arm: eager_us, host_us, beside a torch.mul; for fused through torch.ops, too."""
    times = {}
    for name, (arm, launches) in calls.items():
        with arm.context():
            measured: dict[str, Launch] = {"host_us": launches[0], "mul_us": eager_mul(device)}
            if name == "fused":
                measured["torch_ops_us"] = out_form(case.op, arguments)
            for call in measured.values():
                call()
            times[name] = {"eager_us": eager_us(launches), **host_us(measured)}
    return times


def _row(
    case: Case,
    arm: BenchArm,
    state: str,
    spread: Spread,
    moved: int,
    sets: int,
    host: dict[str, float],
    yardsticks: Yardsticks,
) -> Row:
    return Row(
        op=case.op,
        case=case.name,
        heads=label(case),
        tokens=case.tokens,
        arm=arm.name,
        what=arm.what,
        l2=state,
        median_us=spread.median_us,
        p10_us=spread.p10_us,
        p90_us=spread.p90_us,
        bytes_moved=moved,
        gb_per_s=moved / spread.median_us / 1e3,
        fraction_of_copy=1e6 * moved / yardsticks.copy_bytes_per_s / spread.median_us,
        empty_launches=spread.median_us / yardsticks.empty_us,
        input_sets=sets,
        eager_us=host.get("eager_us"),
        host_us=host.get("host_us"),
        mul_us=host.get("mul_us"),
        torch_ops_us=host.get("torch_ops_us"),
    )

"""Fused against split and against peers: rows that are written only after that very configuration is proven."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsafuse.check.arms import PROVIDERS, BenchArm, out_form
from dsafuse.check.cases import PREPARE_LATENTS, PREPARE_QUERIES, ROLES, Case
from dsafuse.check.inputs import Inputs
from dsafuse.check.records import WRAPPER, Row, Unproven
from dsafuse.check.timing import (
    EAGER_ROUNDS,
    WARM_SETS,
    GraphTimer,
    Launch,
    Spread,
    eager_mul,
    eager_us,
    effort,
    host_us,
    samples,
    sets_needed,
)
from dsafuse.check.traffic import bytes_moved
from dsafuse.check.verify import check_case
from dsafuse.check.working_sets import working_sets

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS = ((128, 64), (16, 32))
"""(attention heads, indexer heads): DeepSeek-V3.2, and GLM-5.x on four GPUs."""

FORMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    WRAPPER: (tuple(ROLES), {"query": "fp8", "layout": "fp8"}),
    "model": (
        (PREPARE_LATENTS, PREPARE_QUERIES),
        {"query": "rope", "layout": "fp8_ds_mla", "rounding": "fp32"},
    ),
}
"""(the ops, the fields of a case) of each form of a call. wrapper: around vLLM's attention, fp8 queries and caches.
model: in place of its own model's two functions, as that calls them on Hopper, with its numerics: an fp8_ds_mla cache,
whose reader takes a bf16 query in two parts, so that q_nope is not touched."""

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


def bench_case(op: str, tokens: int, heads: tuple[int, int], form: str = WRAPPER) -> Case:
    """One configuration, as an engine has it: bf16 activations, a quantised cache, block size 64.

    2,048 top-k indices a token are cleared beside the norm of q_c, not by `prepare_qk`, whose peers do not.
    """
    topk = "wide" if "norm_q" in ROLES[op] else "absent"
    own = {"heads": heads[0], "index_heads": heads[1], "topk": topk, **FORMS[form][1]}
    return Case(op=op, tokens=tokens, key_outs="absent", **own)  # type: ignore[arg-type]


def form_of(case: Case) -> str:
    """The form that a case has."""
    return next(form for form, (_, own) in FORMS.items() if all(getattr(case, name) == own[name] for name in own))


def bench_cell(
    case: Case,
    arms: Sequence[BenchArm],
    states: Sequence[str],
    seed: int,
    device: torch.device,
    yardsticks: Yardsticks,
    captures: int = 1,
) -> Cell:
    """Prove every arm on one case, then time those that hold, interleaved. No arm's failure ends the others.

    With several `captures` the inputs are laid out, the graphs captured and everything timed so many times; a median is
    then one of all samples.
    """
    cell = Cell()
    moved, taken, hosts = bytes_moved(case), _Samples(), _Samples()
    count = max(WARM_SETS if "warm" in states else 1, sets_needed(moved, device) if "cold" in states else 1)
    kept = {"warm": WARM_SETS, "cold": count}
    shown = [state for state in states if state == "cold" or case.tokens <= MOST_WARM_TOKENS]
    proven = _proven_providers(case, arms, seed, device, cell)
    for _ in range(captures):
        inputs, sets = working_sets(case, count, seed, device)
        calls = _calls(case, [arm for arm in arms if arm.name in proven], inputs, sets, cell)
        if case.tokens <= MOST_EAGER_TOKENS:
            hosts.add(_host_times(case, calls, sets[0], device))
        for state in shown:
            some = {name: (arm, launches[: kept[state]]) for name, (arm, launches) in calls.items()}
            timers = _timers(case, some, state, moved, device, cell)
            found = samples(timers, effort(moved).rounds)
            taken.add({name: {state: values} for name, values in found.items()})
    failed = {entry.arm for entry in cell.unproven} if captures > 1 else set()
    for state in shown:
        for arm in arms:
            values = taken[arm.name].get(state)
            if values and arm.name not in failed:
                host = {name: statistics.median(each) for name, each in hosts[arm.name].items()}
                spread = Spread.of(values)
                cell.rows.append(_row(case, arm, state, spread, moved, kept[state], host, captures, yardsticks))
    return cell


class _Samples(dict[str, dict[str, list[float]]]):
    """Samples by arm and by what was sampled."""

    def __missing__(self, arm: str) -> dict[str, list[float]]:
        return self.setdefault(arm, {})

    def add(self, more: dict[str, dict[str, list[float]]]) -> None:
        """Put samples to those of the same arm and kind."""
        for arm, kinds in more.items():
            for kind, values in kinds.items():
                self[arm].setdefault(kind, []).extend(values)


def label(case: Case) -> str:
    """The shape of a case as bench names it."""
    return f"{case.heads}/{case.index_heads}"


def _unproven(case: Case, arm: str, reasons: Sequence[str]) -> Unproven:
    reason, form = "; ".join(reasons), form_of(case)
    return Unproven(op=case.op, heads=label(case), tokens=case.tokens, arm=arm, reason=reason, form=form)


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
) -> dict[str, dict[str, list[float]]]:
    """For each arm samples of eager_us, and host_us beside a torch.mul; for fused through torch.ops, too."""
    times: dict[str, dict[str, list[float]]] = {name: {"eager_us": []} for name in calls}
    for _ in range(EAGER_ROUNDS):
        for name, (arm, launches) in calls.items():
            with arm.context():
                times[name]["eager_us"].append(eager_us(launches))
    for name, (arm, launches) in calls.items():
        with arm.context():
            measured: dict[str, Launch] = {"host_us": launches[0], "mul_us": eager_mul(device)}
            if name == "fused":
                measured["torch_ops_us"] = out_form(case.op, arguments)
            for call in measured.values():
                call()
            times[name] |= {key: [value] for key, value in host_us(measured).items()}
    return times


def _row(
    case: Case,
    arm: BenchArm,
    state: str,
    spread: Spread,
    moved: int,
    sets: int,
    host: dict[str, float],
    captures: int,
    yardsticks: Yardsticks,
) -> Row:
    return Row(
        op=case.op,
        form=form_of(case),
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
        captures=captures,
        eager_us=host.get("eager_us"),
        host_us=host.get("host_us"),
        mul_us=host.get("mul_us"),
        torch_ops_us=host.get("torch_ops_us"),
    )

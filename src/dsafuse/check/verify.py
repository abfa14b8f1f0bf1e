"""Every provider against the oracle: poisoned memory, the kernel first, the oracle second, bytes compared."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from dsafuse import switches
from dsafuse.check.caches import blocks_of, caches_of
from dsafuse.check.cases import PREPARE_QK, Case
from dsafuse.check.compare import Arm, Comparison, compare
from dsafuse.check.composed import unlike_its_parts
from dsafuse.check.inputs import Inputs, Outputs, blank_outputs, draw_inputs
from dsafuse.check.memory import chunks, poison_free_memory
from dsafuse.check.reference import max_error
from dsafuse.check.sets import case_set
from dsafuse.dispatch import PROVIDERS, Rejected
from dsafuse.registry import OPS, Op
from dsafuse.target import Target

ERROR_SLACK = 2.0**-4
"""How much larger than the split chain's a provider's error may be, relatively. Only keys of the indexer can differ:
a bf16 rounding that flips at a tie moves a value by 2**-8, and fp8, whose error is 2**-4, may round it elsewhere."""

ERROR_FLOOR = 2.0**-20
"""And how much larger absolutely: 16 roundings of fp32, where a norm's sum is all the error that there is."""


@dataclass(slots=True)
class Result:
    """One case on one provider."""

    op: str
    case: str
    seed: int
    provider: str
    device: str
    how: str = "eager"
    """eager, or graph: replayed with inputs, positions and slots changed in place."""
    status: str = "passed"
    """passed; failed; or declined, decided before the call."""
    reasons: list[str] = field(default_factory=list)
    comparison: Comparison = field(default_factory=Comparison)
    error: float | None = None
    """The largest error against float64, relative to the largest value of its row."""
    split_error: float | None = None
    seconds: float = 0.0

    @property
    def call(self) -> str:
        """The command that reproduces this result."""
        return (
            f"dsafuse verify {self.op} --case {self.case} --seed {self.seed} "
            f"--provider {self.provider} --device {self.device}"
        )

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "call": self.call}


def plan(ops: Iterable[str], which: str, device: torch.device) -> list[Case]:
    """The cases of some ops on a device, in the order in which verify() takes them."""
    return [case for op in ops for case in case_set(op, which, Target.of(device))]


def verify(cases: Sequence[Case], providers: Sequence[str] | None, seed: int, device: torch.device) -> Iterator[Result]:
    """Run cases on providers (None: on every one that accepts) and yield a result for each, in order."""
    from dsafuse.check.replay import replay_case, replayed

    for case in cases:
        if case.huge and device.type == "cuda":
            torch.cuda.empty_cache()  # what earlier shapes have left in pieces is needed in one
        yield from check_case(case, providers, seed, device)
        if replayed(case, device):
            yield from replay_case(case, providers, seed, device)


def check_case(case: Case, providers: Sequence[str] | None, seed: int, device: torch.device) -> Iterator[Result]:
    """One case, called eagerly: the providers first, then split for its error, then the oracle."""
    op, inputs = OPS[case.op], draw_inputs(case, seed, device)
    untouched = {name: buffer.clone() for name, buffer in inputs.memory.buffers.items()}
    results, arms = [], {}
    for provider in providers or tuple(PROVIDERS):
        result = Result(case.op, case.name, seed, provider, str(device))
        results.append(result)
        reason = why_declined(op, case, inputs, provider, device)
        if reason is not None:
            result.status, result.reasons = "declined", [reason]
            continue
        started = time.perf_counter()
        if provider == "split" and raises_beyond(case, inputs):
            result.reasons = _expect_index_error(op, case, inputs, provider, seed, device)
        else:
            arm = attempt(op, case, inputs, provider, seed, device, result)
            if arm is not None:
                arms[provider] = arm
                if case.op == PREPARE_QK:
                    result.reasons += unlike_its_parts(case, inputs, arm, provider, seed)
        result.reasons += _changed_inputs(inputs, untouched)
        result.seconds = time.perf_counter() - started
    del untouched
    judge(case, inputs, results, arms, seed, device, _split_error(case, inputs, results, arms, seed, device))
    yield from results


def _split_error(
    case: Case, inputs: Inputs, results: list[Result], arms: dict[str, Arm], seed: int, device: torch.device
) -> float | None:
    """The split chain's error against float64; None where it has no result to measure."""
    op, arm = OPS[case.op], arms.get("split")
    asked = any(result.provider == "split" for result in results)
    if not asked and arms and why_declined(op, case, inputs, "split", device) is None:
        run = Result(case.op, case.name, seed, "split", str(device))
        arm = attempt(op, case, inputs, "split", seed, device, run, arguments=inputs.cleaned)
        for result in results:
            result.reasons += [f"split, run for its error against float64, {reason}" for reason in run.reasons]
    return None if arm is None else max_error(case, inputs, arm.tensors)


def judge(
    case: Case,
    inputs: Inputs,
    results: list[Result],
    arms: dict[str, Arm],
    seed: int,
    device: torch.device,
    split_error: float | None = None,
) -> None:
    """Compare the arms with float64 and with the oracle, which runs now, and set each result's status."""
    for result in results:
        if result.provider in arms:
            if split_error is not None:
                arm = arms[result.provider]
                result.error = split_error if result.provider == "split" else max_error(case, inputs, arm.tensors)
                result.split_error = split_error
                if result.error > split_error * (1 + ERROR_SLACK) + ERROR_FLOOR:
                    result.reasons.append(f"error {result.error:.3g} against float64, and split has {split_error:.3g}")
            expected = run_arm(OPS[case.op], case, inputs.cleaned, "oracle", seed, device)
            result.comparison = compare(case, inputs, arms.pop(result.provider), expected)
            result.reasons += result.comparison.notes
        if result.status != "declined" and result.reasons:
            result.status = "failed"


def why_declined(op: Op[..., Any], case: Case, inputs: Inputs, provider: str, device: torch.device) -> str | None:
    """The reason for which a provider would not run this case; None if it would."""
    outputs = blank_outputs(replace(case, capacity="snug"), 0, device)  # gates look at shapes and dtypes alone
    _, config = op.resolve(**{**inputs.cleaned, **outputs.arguments})
    with switches.override(mode="auto", ops=frozenset(switches.FAMILIES), provider=provider):
        trace = op.choose(config, Target.of(device), here=True).trace
    return next((v.reason for v in trace if isinstance(v, Rejected) and v.provider == provider), None)


def raises_beyond(case: Case, inputs: Inputs) -> bool:
    """Whether the split chain refuses the case's addresses: on CPU it looks, on a GPU looking would synchronise."""
    positions, safe = inputs.arguments["positions"], inputs.cleaned["positions"]
    if positions.device.type != "cpu":
        return False
    outside = positions != safe
    for cache in caches_of(case):
        slots = inputs.arguments[cache.slot_mapping]
        if bool((slots >= blocks_of(case, cache) * cache.block_size).any()):
            return True
        if bool(((slots >= 0) & outside[: len(slots)]).any()):
            return True
    return False


def attempt(
    op: Op[..., Any],
    case: Case,
    inputs: Inputs,
    provider: str,
    seed: int,
    device: torch.device,
    result: Result,
    *,
    arguments: dict[str, Any] | None = None,
) -> Arm | None:
    """Run a provider. That it raises is a failure of this case, and no reason to leave out the next."""
    try:
        return run_arm(op, case, arguments or inputs.arguments, provider, seed, device)
    except Exception as error:  # noqa: BLE001  whatever it is, it is reported with the call that reproduces it
        result.status, result.reasons = "failed", [f"raised {type(error).__name__}: {error}"]
        return None


def run_arm(
    op: Op[..., Any], case: Case, arguments: dict[str, Any], provider: str, seed: int, device: torch.device
) -> Arm:
    """Call a provider, or the oracle, on poisoned memory of its own."""
    outputs = blank_outputs(case, seed, device)
    poison_free_memory(device, _sizes_to_allocate(case))
    returned = op.with_provider(provider)(**{**arguments, **outputs.arguments})
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return gather(op, outputs, returned)


def _sizes_to_allocate(case: Case) -> list[int]:
    """Bytes of what an op may allocate: queries, head weights, the normed latent."""
    width = 4 if case.activation == "fp32" else 2
    heads, index_heads = case.tokens * case.heads, case.tokens * case.index_heads
    return [heads * 576 * width, index_heads * 128, index_heads * 4, case.tokens * case.q_width * width]


def gather(op: Op[..., Any], outputs: Outputs, returned: Any) -> Arm:
    """The arm that a call has left behind; an output that the op allocated is a buffer of its own."""
    values = returned if isinstance(returned, tuple) else (returned,)
    named = {name: value for name, value in zip(op.output_names, values) if value is not None}
    buffers = dict(outputs.memory.buffers)
    for name, tensor in named.items():
        if name not in buffers:
            buffers[name] = tensor.view(torch.uint8).flatten()
    given = {name: value for name, value in outputs.arguments.items() if isinstance(value, torch.Tensor)}
    return Arm({**given, **named}, buffers)


def _expect_index_error(
    op: Op[..., Any], case: Case, inputs: Inputs, provider: str, seed: int, device: torch.device
) -> list[str]:
    """What is wrong if an address beyond the cache does not raise, or raises after something was written."""
    outputs, blank = blank_outputs(case, seed, device), blank_outputs(case, seed, device)
    try:
        op.with_provider(provider)(**{**inputs.arguments, **outputs.arguments})
    except IndexError:
        same = (torch.equal(outputs.memory.buffers[name], buffer) for name, buffer in blank.memory.buffers.items())
        return [] if all(same) else ["IndexError came after something had been written"]
    return ["an address beyond its table did not raise IndexError"]


def _changed_inputs(inputs: Inputs, untouched: dict[str, torch.Tensor]) -> list[str]:
    changed = []
    for name, before in untouched.items():
        if not all(torch.equal(*pair) for pair in zip(chunks(inputs.memory.buffers[name]), chunks(before))):
            changed.append(f"{name}: the call changed an input")
    return changed


@dataclass(slots=True)
class Summary:
    """A case set on one provider; the rates of design.md section 4 hold over it, not over one case."""

    op: str
    provider: str
    how: str
    passed: int = 0
    failed: int = 0
    declined: int = 0
    comparison: Comparison = field(default_factory=Comparison)
    error: float = 0.0
    split_error: float = 0.0
    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    """Why cases were declined."""

    @property
    def ok(self) -> bool:
        """Whether the set has passed; a set of which nothing ran has not failed."""
        return not self.failed and not self.faults()

    def faults(self) -> list[str]:
        """What is wrong with the set as a whole."""
        return self.comparison.over_rates()


def summarise(results: Iterable[Result]) -> list[Summary]:
    """One summary for each op, provider and way of calling, in the order of their first results."""
    found: dict[tuple[str, str, str], Summary] = {}
    for result in results:
        key = result.op, result.provider, result.how
        summary = found.setdefault(key, Summary(*key))
        setattr(summary, result.status, getattr(summary, result.status) + 1)
        summary.comparison.add(result.comparison)
        summary.seconds += result.seconds
        if result.status == "declined":
            summary.reasons += [r for r in result.reasons if r not in summary.reasons]
        if result.error is not None and result.split_error is not None:
            summary.error = max(summary.error, result.error)
            summary.split_error = max(summary.split_error, result.split_error)
    return list(found.values())

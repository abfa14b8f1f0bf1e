"""The same checks under CUDA-graph replay, with inputs, positions and slots changed in place between replays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dsafuse.check.cases import Case
from dsafuse.check.inputs import blank_outputs, draw_inputs
from dsafuse.dispatch import PROVIDERS
from dsafuse.registry import OPS

REPLAYS = 3
LARGEST_TOKENS = 1023


def replayed(case: Case, device: torch.device) -> bool:
    """Whether a case is replayed: on a GPU, with tokens, with outputs that stay where they are, and not huge."""
    sized = 0 < case.tokens <= LARGEST_TOKENS and not case.huge
    return device.type == "cuda" and sized and case.out != "allocated"


def replay_case(case: Case, providers: Sequence[str] | None, seed: int, device: torch.device) -> Iterator[Any]:
    """Capture copies of staged inputs, the op, and a copy of its outputs in one graph; replay it on new inputs.

    The copies stand directly before and after the op, so that a launch that starts early, or lets its successor
    start early, is caught.
    """
    from dsafuse.check.verify import Result, gather, judge, why_declined

    op = OPS[case.op]
    inputs, outputs = draw_inputs(case, seed, device), blank_outputs(case, seed, device)
    staged, poison = draw_inputs(case, seed, device), blank_outputs(case, seed, device)
    results = blank_outputs(case, seed, device)
    for provider in providers or tuple(PROVIDERS):
        if why_declined(op, case, inputs, provider, device) is not None:
            continue  # check_case has said so
        call = op.with_provider(provider)

        def step(call: Any = call) -> Any:
            for name, buffer in inputs.memory.buffers.items():
                buffer.copy_(staged.memory.buffers[name])
            for name, buffer in outputs.memory.buffers.items():
                buffer.copy_(poison.memory.buffers[name])
            returned = call(**{**inputs.arguments, **outputs.arguments})
            for name, buffer in outputs.memory.buffers.items():
                results.memory.buffers[name].copy_(buffer)
            return returned

        result = Result(case.op, case.name, seed, provider, str(device), how="graph")
        graph = _captured(step, result)
        for round_ in range(1, REPLAYS + 1) if graph is not None else ():
            fresh = draw_inputs(case, seed + round_, device)
            for name, buffer in staged.memory.buffers.items():
                buffer.copy_(fresh.memory.buffers[name])
            graph.replay()
            torch.cuda.synchronize(device)
            returned = tuple(results.arguments.get(name) for name in op.output_names)
            part = Result(case.op, case.name, seed, provider, str(device))
            judge(case, fresh, [part], {provider: gather(op, results, returned)}, seed, device)
            result.comparison.add(part.comparison)
            result.reasons += [f"replay {round_}: {reason}" for reason in part.reasons]
        if result.reasons:
            result.status = "failed"
        yield result


def _captured(step: Any, result: Any) -> Any:
    """The graph of one step, after a warm-up that compiles; None if capture raised, which the result then says."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except Exception as error:  # noqa: BLE001  as in verify.attempt
        result.status, result.reasons = "failed", [f"raised {type(error).__name__}: {error}"]
        return None
    return graph

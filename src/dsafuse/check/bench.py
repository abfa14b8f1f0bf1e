"""Fused against split: rows that are written only after that very configuration has passed verify."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dsafuse import switches
from dsafuse.check.cases import Case, IndexerCase, MlaCase
from dsafuse.check.inputs import blank_outputs, draw_inputs, layout_of, query_dtype
from dsafuse.check.records import Row
from dsafuse.check.timing import GraphTimer, Launch, Spread, eager_us, interleaved, sets_needed
from dsafuse.check.verify import Result, check_case
from dsafuse.layouts import INDEX_DIM, QUERY_DIM, ROPE_DIM
from dsafuse.registry import OPS
from dsafuse.target import Target

TOKENS = (1, 8, 32, 64, 128, 256, 1024, 4096, 8192)
HEADS = ((128, 64), (16, 32))
"""(attention heads, indexer heads): DeepSeek-V3.2, and GLM-5.x on four GPUs."""

PROVIDERS = ("triton", "split")


class UnprovenError(RuntimeError):
    """A configuration did not pass verify, so that its times mean nothing; the message says what failed."""

    def __init__(self, result: Result) -> None:
        super().__init__("\n".join([result.call, *result.reasons]))
        self.result = result


def bench_case(op: str, tokens: int, heads: tuple[int, int]) -> Case:
    """One configuration, as an engine has it: bf16 activations, fp8 query and cache, block size 64."""
    if op == MlaCase.op:
        return MlaCase(tokens=tokens, heads=heads[0], query="fp8", layout="fp8")
    return IndexerCase(tokens=tokens, heads=heads[1])


def bytes_moved(case: Case) -> int:
    """Every input read once and every output written once."""
    activation = 4 if case.activation == "fp32" else 2
    tokens, heads = case.tokens, case.heads
    addresses = tokens * (8 + 8 + ROPE_DIM * (4 if case.table == "fp32" else 2))
    key = tokens * layout_of(case).row_bytes(torch.bfloat16)
    query = query_dtype(case).itemsize
    if isinstance(case, MlaCase):
        return addresses + key + tokens * QUERY_DIM * (heads * (activation + query) + activation)
    return addresses + key + tokens * (INDEX_DIM * (heads * (activation + query) + activation) + heads * 8)


def bench(cases: Sequence[Case], seed: int, device: torch.device, copy_bytes_per_s: float) -> Iterator[list[Row]]:
    """Rows of one case at a time, a row for each provider. Raises UnprovenError where verify fails."""
    for case in cases:
        yield bench_one(case, seed, device, copy_bytes_per_s)


def bench_one(case: Case, seed: int, device: torch.device, copy_bytes_per_s: float) -> list[Row]:
    """Verify one case, then time it on every provider, interleaved."""
    for result in check_case(case, PROVIDERS, seed, device):
        if result.status != "passed":
            raise UnprovenError(result)
    op, moved = OPS[case.op], bytes_moved(case)
    sets = [
        {**draw_inputs(case, seed + i, device).arguments, **blank_outputs(case, seed + i, device).arguments}
        for i in range(sets_needed(moved, device))
    ]
    _, config = op.resolve(**sets[0])
    timers: dict[str, GraphTimer] = {}
    eager: dict[str, Spread] = {}
    traces: dict[str, str] = {}
    for provider in PROVIDERS:
        with switches.override(mode="auto", ops=frozenset(switches.FAMILIES), provider=provider):
            traces[provider] = str(op.choose(config, Target.of(device), here=True))
            calls = [_call(op, arguments) for arguments in sets]
            timers[provider] = GraphTimer(calls, device)
            eager[provider] = eager_us(calls)
    times = interleaved(timers)
    fraction = moved / copy_bytes_per_s
    return [
        Row(
            op=case.op,
            case=case.name,
            tokens=case.tokens,
            heads=case.heads,
            provider=provider,
            trace=traces[provider],
            median_us=times[provider].median_us,
            p10_us=times[provider].p10_us,
            p90_us=times[provider].p90_us,
            eager_us=eager[provider].median_us,
            bytes_moved=moved,
            gb_per_s=moved / times[provider].median_us / 1e3,
            fraction_of_copy=1e6 * fraction / times[provider].median_us,
            input_sets=len(sets),
        )
        for provider in PROVIDERS
    ]


def _call(op: Any, arguments: dict[str, Any]) -> Launch:
    def call() -> object:
        return op(**arguments)

    return call

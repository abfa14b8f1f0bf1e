"""The unfused chain: which steps, in which order, and that its intermediates pass through memory."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import split, torch_steps
from tests.inputs import FN, OPS, Call, call_of, indexer_call, mla_call, qk_call, run

MLA_STEPS = ["rotate", "concat_query", "write_latent"]
INDEXER_STEPS = ["norm_key", "rotate", "quantise_index_query", "fold_weights", "write_key"]


@pytest.fixture
def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Every step that the chain takes, with its arguments."""
    taken: list[tuple[str, tuple[Any, ...]]] = []

    def watched(name: str) -> Any:
        def step(*args: Any) -> None:
            taken.append((name, args))
            getattr(torch_steps, name)(*args)

        return step

    names = (*MLA_STEPS, "quantise_query", *INDEXER_STEPS, "clear_topk")
    steps = SimpleNamespace(**{name: watched(name) for name in names})
    monkeypatch.setattr(split, "steps_for", lambda _device: steps)
    return taken


@pytest.mark.parametrize(
    ("op", "call", "names"),
    [
        ("mla", mla_call(2, layout="plain"), MLA_STEPS),
        ("mla", mla_call(2, query=FN), [*MLA_STEPS[:2], "quantise_query", *MLA_STEPS[2:]]),
        ("indexer", indexer_call(2), INDEXER_STEPS),
        ("qk", qk_call(2, topk=40), ["clear_topk", *MLA_STEPS, *INDEXER_STEPS]),
    ],
    ids=["mla", "mla with an fp8 query", "indexer", "prepare_qk that clears top-k rows"],
)
def test_the_chain_takes_one_step_for_each_launch_of_an_engine(
    op: str, call: Call, names: list[str], steps_taken: list[tuple[str, tuple[Any, ...]]]
) -> None:
    run(op, "split", call)
    assert [name for name, _ in steps_taken] == names


@pytest.mark.parametrize(("rounding", "kept"), [("split", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("op", OPS)
def test_intermediates_are_kept_in_the_activation_dtype_or_in_fp32(
    op: str, rounding: str, kept: torch.dtype, steps_taken: list[tuple[str, tuple[Any, ...]]]
) -> None:
    run(op, "split", call_of(op, 2, rounding=rounding))
    rotated = next(args[2:4] for name, args in steps_taken if name == "rotate")
    assert [tensor.dtype for tensor in rotated] == [kept, kept]


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_are_no_step(op: str, steps_taken: list[tuple[str, tuple[Any, ...]]]) -> None:
    run(op, "split", call_of(op, 0))
    assert steps_taken == []


def test_steps_are_torch_on_cpu_and_wherever_triton_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsafuse.kernels import steps

    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert split.steps_for(cpu) is torch_steps
    assert split.steps_for(gpu) is steps
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert split.steps_for(gpu) is torch_steps

"""The unfused chain as a GPU runs it: its kernels, interpreted, give the oracle's bytes in the promised launches."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import triton

from dsafuse import split
from dsafuse.kernels import interpreter, steps
from tests.inputs import FN, FNUZ, OPS, assert_same_memory, call_of, indexer_call, memory, run

MODULES = ("tiles", "roles", "grids", "chain")
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mla plain": ("mla", 3, {"layout": "plain"}),
    "mla plain, fp8 query": ("mla", 4, {"layout": "plain", "query": FN, "heads": 7}),
    "mla fp8 fp16, neox, fp8 query": (
        "mla",
        4,
        {"layout": "fp8", "activation": torch.float16, "query": FN, "rope_style": "neox", "block_size": 1},
    ),
    "mla fp8_ds_mla": ("mla", 3, {"heads": 17}),
    "mla fp8_ds_mla fp32 fnuz, unrounded": (
        "mla",
        4,
        {"activation": torch.float32, "query": FNUZ, "fp8": FNUZ, "rounding": "fp32"},
    ),
    "indexer": ("indexer", 5, {}),
    "indexer interleaved, unrounded, 17 heads": (
        "indexer",
        5,
        {"rope_style": "interleaved", "rounding": "fp32", "heads": 17},
    ),
    "indexer fp16 fnuz, fp32 scales, block of 1": (
        "indexer",
        5,
        {"activation": torch.float16, "fp8": FNUZ, "scale_rule": "fp32", "block_size": 1},
    ),
}


@pytest.fixture(scope="module")
def interpreted_chain() -> ModuleType:
    """`dsafuse.kernels.chain`, imported with interpretation on, beside the compiled one."""
    names = [f"dsafuse.kernels.{name}" for name in MODULES]
    package = sys.modules["dsafuse.kernels"]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    shorts = {name: package.__dict__.pop(name) for name in MODULES if name in package.__dict__}
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            return importlib.import_module("dsafuse.kernels.chain")
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
        package.__dict__.update(shorts)


class Launches:
    """The chain's kernels, their launches written down by name."""

    def __init__(self, chain: ModuleType) -> None:
        self.chain, self.names = chain, []

    def __getattr__(self, name: str) -> Any:
        self.names.append(name)
        return getattr(self.chain, name)


@pytest.fixture
def launches(interpreted_chain: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    launches = Launches(interpreted_chain)
    monkeypatch.setattr(steps, "chain", launches)
    monkeypatch.setattr(split, "steps_for", lambda _device: steps)
    with interpreter.corrected_casts(), np.errstate(all="ignore"):
        yield launches


@pytest.mark.parametrize(("op", "count", "case"), CASES.values(), ids=CASES)
def test_the_chains_kernels_give_the_oracles_bytes(
    op: str, count: int, case: dict[str, Any], launches: Launches
) -> None:
    call = call_of(op, 4, **{"heads": 3, **case}, seed=3)
    got = run(op, "split", call)
    assert_same_memory(got, run(op, "oracle", call))
    assert len(launches.names) == len(set(launches.names)) == count


@pytest.mark.parametrize("rope_style", ["neox", "interleaved"])
def test_the_chain_and_the_fused_kernel_sum_a_key_in_one_order(rope_style: str, launches: Launches) -> None:
    """Scales in fp32 of what was not rounded before: the other style's order would change some of these rows."""
    unrounded = {"activation": torch.float32, "rounding": "fp32", "scale_rule": "fp32"}
    call = indexer_call(20, 1, rope_style=rope_style, seed=5, **unrounded)
    split_cache, fused_cache = (memory(run("indexer", name, call))["kv_cache"] for name in ("split", "interpreter"))
    assert torch.equal(split_cache, fused_cache)
    assert "norm_key" in launches.names


@pytest.mark.parametrize("op", OPS)
def test_the_chain_launches_nothing_for_no_tokens(op: str, launches: Launches) -> None:
    run(op, "split", call_of(op, 0))
    assert launches.names == []


def test_torch_and_triton_steps_have_the_same_functions() -> None:
    from dsafuse import torch_steps

    def public(module: ModuleType) -> dict[str, inspect.Signature]:
        return {
            name: inspect.signature(value)
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
        }

    assert public(torch_steps) == public(steps)

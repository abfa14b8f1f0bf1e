"""How often Triton compiles: counted in its own cache of kernels, as on a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from dsafuse.kernels import ahead, grids, launch
from dsafuse.models import MODELS
from dsafuse.target import Target, assumed
from dsafuse.warming import meta_call, warm_up
from tests.inputs import EVERY_OP, FN, Call, indexer_call, latents_call, mla_call, qk_call, queries_call, twin

CALLS: dict[str, Callable[..., Call]] = {
    "mla": lambda tokens: mla_call(tokens, layout="fp8", query=FN, block_size=64),
    "indexer": lambda tokens: indexer_call(tokens, block_size=64),
    "qk": lambda tokens: qk_call(tokens, layout="fp8", query=FN, block_size=64),
    "latents": lambda tokens: latents_call(tokens, layout="fp8", block_size=64),
    "queries": lambda tokens: queries_call(tokens, query=FN),
}
DEVICE = 7777
"""An index under which nothing else has compiled."""


class Jit:
    """Triton's launch up to the point where a GPU would be needed; counts the kernels that it has compiled."""

    def __init__(self) -> None:
        grids.prepare.device_caches.pop(DEVICE, None)
        self.prepare = self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *args, **kwargs: grids.prepare.warmup(*args, grid=grid, **kwargs)

    @property
    def compiled(self) -> int:
        return len(grids.prepare.device_caches[DEVICE][0])

    def launch(self, op: str, call: Call) -> None:
        arguments, config = EVERY_OP[op].resolve(**call)
        launch.launch(EVERY_OP[op].name, arguments, config, self)  # type: ignore[arg-type]


@pytest.fixture
def jit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Jit]:
    gpu = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(Target, "of", staticmethod(lambda _device: Target.named("sm_90")))
    yield Jit()
    grids.prepare.device_caches.pop(DEVICE, None)


def restrided(call: Call, columns: int) -> Call:
    """The same call with every activation in rows that are `columns` elements longer."""
    return call | {
        name: torch.nn.functional.pad(value, (0, columns))[..., : value.shape[-1]]
        for name, value in call.items()
        if isinstance(value, torch.Tensor) and value.dim() > 1 and "cache" not in name and "out" not in name
    }


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_configuration_is_compiled_once_for_aligned_rows_and_once_for_others(op: str, jit: Jit) -> None:
    # 1 and multiples of 16 are what Triton specialises on where it is let.
    for tokens in (1, 2, 3, 15, 16, 17, 64, 200):
        jit.launch(op, CALLS[op](tokens))
        assert jit.compiled == 1, tokens
    for columns in (8, 16, 120, 2048):
        jit.launch(op, restrided(CALLS[op](5), columns))
        assert jit.compiled == 1, columns
    for tokens, columns in ((1, 1), (5, 3), (16, 7)):
        jit.launch(op, restrided(CALLS[op](tokens), columns))
        assert jit.compiled == 2, (tokens, columns)
    jit.launch(op, CALLS[op](33))
    assert jit.compiled == 2


@pytest.mark.parametrize("op", EVERY_OP)
def test_another_configuration_is_compiled_apart(op: str, jit: Jit) -> None:
    call = CALLS[op](3)
    jit.launch(op, call)
    jit.launch(op, call | {"rounding": "fp32"})
    assert jit.compiled == 2


def test_the_number_of_blocks_and_the_length_of_the_table_compile_nothing(jit: Jit) -> None:
    call = CALLS["mla"](3)
    jit.launch("mla", call)
    more = torch.cat([call["kv_cache"].view(torch.uint8)] * 3).view(call["kv_cache"].dtype)
    jit.launch("mla", twin(call) | {"kv_cache": more, "cos_sin_cache": torch.randn(1024, 64)})
    assert jit.compiled == 1


@pytest.mark.parametrize("op", ["indexer_qk_rope_quant_and_cache", "prepare_qk"])
def test_what_was_compiled_ahead_is_what_a_launch_looks_for(op: str, jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    target, whole = Target.named("sm_90"), next(each for each in EVERY_OP.values() if each.name == op)
    call = meta_call(whole, MODELS["glm-5.2"], 8, target)
    with assumed(target):
        arguments, config = whole.resolve(**call)
    hashes: list[str] = []
    compiled = ahead.offline.compiled
    monkeypatch.setattr(
        ahead.offline, "compiled", lambda *args: hashes.append((kernel := compiled(*args)).hash) or kernel
    )
    for alignment in ahead.ALIGNMENTS:
        ahead.compile_call(op, arguments, config, target, alignment, here=False)
    launch.launch(op, arguments, config, jit)  # type: ignore[arg-type]
    (kernel,) = grids.prepare.device_caches[DEVICE][0].values()
    assert kernel.hash == hashes[0]
    assert len(set(hashes)) == 2


def test_warming_up_on_the_gpu_itself_leaves_nothing_to_compile(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(ahead, "is_here", lambda _target: True)
    monkeypatch.setattr(ahead, "load", loaded.append)
    done = warm_up("glm-5.2", "sm_90", tp=8, ops=["fused_qk_rope_concat_and_cache_mla"], kv_layouts=["fp8"])
    assert done.loaded
    assert len(done.compiled) == jit.compiled == len(loaded) == 4  # query in bf16 and in fp8
    heads = MODELS["glm-5.2"].local_heads(8)
    for query in (None, FN):
        call = mla_call(7, heads, layout="fp8", query=query, block_size=64)
        call |= {name: call[name].long() for name in ("slot_mapping", "positions")}
        call["kv_cache"] = call["kv_cache"].view(torch.uint8)
        jit.launch("mla", call)
        jit.launch("mla", restrided(call, 3))
    assert jit.compiled == 4

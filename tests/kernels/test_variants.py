"""How often Triton compiles: counted in its own cache of kernels, as on a GPU that need not be there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
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
SM_90 = Target.named("sm_90")
DEVICE = 7777
"""An index under which nothing else has compiled."""


class Jit:
    """Triton's launch, up to where it would ask for code; counts for how many kernels it has asked."""

    def __init__(self) -> None:
        self.prepare = self
        self.asked: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return lambda *args, **kwargs: grids.prepare.warmup(*args, grid=grid, **kwargs)

    def compile(self, source: Any, target: GPUTarget, options: dict[str, Any], **_: Any) -> Any:
        """Stands where Triton's compiler does; the key is that of its cache on disk."""
        backend = make_backend(target)
        key = f"{source.hash()} {target} {backend.parse_options(options).hash()}"
        self.asked.append(key)
        return SimpleNamespace(run=True, key=key)

    @property
    def compiled(self) -> int:
        assert len(set(self.asked)) == len(self.asked)
        return len(self.asked)

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
    found = Jit()
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(triton.compiler, "compile", found.compile)
    monkeypatch.setattr(Target, "of", staticmethod(lambda _device: SM_90))
    caches = (DEVICE, SM_90.arch)
    for device in caches:
        grids.prepare.device_caches.pop(device, None)
    yield found
    for device in caches:
        grids.prepare.device_caches.pop(device, None)


def restrided(call: Call, columns: int) -> Call:
    """The same call with every activation in rows that are `columns` elements longer."""
    return call | {
        name: torch.nn.functional.pad(value, (0, columns))[..., : value.shape[-1]]
        for name, value in call.items()
        if isinstance(value, torch.Tensor) and value.dim() > 1 and "cache" not in name and "out" not in name
    }


COUNTS = (1, 2, 3, 15, 16, 17, 64, 200, 513, 1025)
"""Of tokens; 1 and multiples of 16 are what Triton would specialise on."""


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_kernel_is_compiled_once_for_aligned_rows_and_once_for_others(op: str, jit: Jit) -> None:
    for tokens in COUNTS:
        jit.launch(op, restrided(CALLS[op](tokens), 8))
        assert jit.compiled == 1, tokens
    for columns in (16, 120, 2048):
        jit.launch(op, restrided(CALLS[op](COUNTS[0]), columns))
        assert jit.compiled == 1, columns
    for tokens, columns in zip(COUNTS, (1, 3, 7)):
        jit.launch(op, restrided(CALLS[op](tokens), columns))
        assert jit.compiled == 2, (tokens, columns)


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_configuration_has_two_variants_times_two_for_each_cache(op: str, jit: Jit) -> None:
    """Rows that are aligned or not; and the same of a cache, which an engine does not move, so that it meets two."""
    caches = [name for name in CALLS[op](3) if name.endswith("kv_cache")]
    for tokens, columns in ((1, 8), (1, 1), (1025, 8), (1025, 3)):
        call = restrided(CALLS[op](tokens), columns)
        for shifts in itertools.product((0, 4, 8), repeat=len(caches)):
            moved = {name: shifted(call[name], shift) for name, shift in zip(caches, shifts)}
            jit.launch(op, call | moved)
    assert jit.compiled == 2 ** (1 + len(caches))


def shifted(cache: torch.Tensor, count: int) -> torch.Tensor:
    """An empty cache of one block of this shape, `count` bytes behind a multiple of 16."""
    block_bytes = cache[0].numel() * cache.element_size()
    memory = torch.zeros(block_bytes + 32, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + count
    return memory[start : start + block_bytes].view(cache.dtype).view(1, *cache.shape[1:])


@pytest.mark.parametrize("op", EVERY_OP)
def test_another_configuration_is_compiled_apart(op: str, jit: Jit) -> None:
    call = CALLS[op](3)
    jit.launch(op, call)
    jit.launch(op, call | {"rounding": "fp32"})
    assert jit.compiled == 2


def test_a_rule_for_tiles_is_compiled_where_there_are_tiles(jit: Jit) -> None:
    for layout, kernels in (("fp8", 1), ("plain", 2), ("fp8_ds_mla", 4)):
        for rule in ("ue8m0", "fp32"):
            jit.launch("mla", mla_call(3, layout=layout, block_size=64, scale_rule=rule))
        assert jit.compiled == kernels, layout


def test_the_number_of_blocks_and_the_length_of_the_table_compile_nothing(jit: Jit) -> None:
    call = CALLS["mla"](3)
    jit.launch("mla", call)
    more = torch.cat([call["kv_cache"].view(torch.uint8)] * 3).view(call["kv_cache"].dtype)
    jit.launch("mla", twin(call) | {"kv_cache": more, "cos_sin_cache": torch.randn(1024, 64)})
    assert jit.compiled == 1


@pytest.mark.parametrize("op", EVERY_OP)
def test_what_was_compiled_ahead_is_what_a_launch_looks_for(op: str, jit: Jit) -> None:
    name = EVERY_OP[op].name
    call = meta_call(EVERY_OP[op], MODELS["glm-5.2"], 8, SM_90)
    with assumed(SM_90):
        arguments, config = EVERY_OP[op].resolve(**call)
    for alignment in ahead.ALIGNMENTS:
        ahead.compile_call(name, arguments, config, SM_90, alignment, here=False)
    on_disk = list(jit.asked)
    assert len(set(on_disk)) == len(ahead.ALIGNMENTS)
    jit.asked.clear()
    launch.launch(name, arguments, config, jit)  # type: ignore[arg-type]
    assert jit.asked
    assert set(jit.asked) <= set(on_disk)


def test_warming_up_on_the_gpu_itself_leaves_nothing_to_compile(jit: Jit, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(ahead, "is_here", lambda _target: True)
    monkeypatch.setattr(ahead, "load", loaded.append)
    done = warm_up("glm-5.2", "sm_90", tp=8, ops=["fused_qk_rope_concat_and_cache_mla"], kv_layouts=["fp8"])
    assert done.loaded
    assert len(done.compiled) == 4  # query in bf16 and in fp8
    assert jit.compiled == len(loaded) == 4
    heads = MODELS["glm-5.2"].local_heads(8)
    for query in (None, FN):
        for tokens in (1, 1025):
            call = mla_call(tokens, heads, layout="fp8", query=query, block_size=64)
            call |= {name: call[name].long() for name in ("slot_mapping", "positions")}
            call["kv_cache"] = call["kv_cache"].view(torch.uint8)
            jit.launch("mla", call)
            jit.launch("mla", restrided(call, 3))
    assert jit.compiled == len(loaded)

"""The two opaque ops of the bridge in the runs that are not ordinary: profiling, no tokens, padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.vllm import counters, plan

HEADS, BLOCK_SIZE = 4, 16
TOKENS, ACTUAL = 6, 4
POISON = 77.0


@pytest.fixture(autouse=True)
def interpreter() -> Any:
    counters.reset()
    with switches.override(provider="interpreter"):
        yield


def mla_layer() -> Any:
    """A layer whose attention returns the latent part of the query, and whose value projection takes 8 dims of it."""
    seen: list[torch.Tensor] = []

    def forward_mqa(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, None]:
        seen.append(query)
        return query[..., :512], None

    return SimpleNamespace(
        dsafuse_plan=SimpleNamespace(mla_call=plan.MlaCall("plain", "interleaved", torch.float32, torch.float8_e4m3fn)),
        seen=seen,
        num_heads=HEADS,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        kv_lora_rank=512,
        W_UK_T=torch.randn(HEADS, 128, 512),
        _q_scale=torch.ones(()),
        _k_scale=torch.ones(()),
        impl=SimpleNamespace(forward_mqa=forward_mqa),
        _v_up_proj=lambda x, out: out.copy_(x[..., :8].flatten(1)),
    )


def call_mla(monkeypatch: pytest.MonkeyPatch, layer: Any, metadata: Any, cache: torch.Tensor, slots: Any) -> Any:
    from dsafuse.vllm import wrapper

    monkeypatch.setattr(wrapper, "get_attention_context", lambda name: (metadata, layer, cache, slots))
    output = torch.full((TOKENS, HEADS * 8), POISON)
    wrapper.mla_prepare_and_attend(
        torch.randn(TOKENS, HEADS, 192),
        torch.randn(TOKENS, 512),
        torch.randn(TOKENS, 64),
        torch.arange(TOKENS),
        torch.randn(32, 64),
        None,
        output,
        "layer",
    )
    return output


@pytest.mark.parametrize("cached", [True, False])
def test_a_profiling_run_gives_zeros_and_calls_nothing(monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    layer = mla_layer()
    metadata = None if cached else SimpleNamespace(num_actual_tokens=TOKENS)
    cache = torch.zeros(2, BLOCK_SIZE, 576) if cached else torch.tensor([])
    output = call_mla(monkeypatch, layer, metadata, cache, torch.zeros(TOKENS, dtype=torch.long))
    assert not output.any()
    assert not layer.seen
    assert counters.CALLS["mla"]["fused"] == 0


def test_no_tokens_are_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache = mla_layer(), torch.full((2, BLOCK_SIZE, 576), POISON)
    slots = torch.full((TOKENS,), -1)
    output = call_mla(monkeypatch, layer, SimpleNamespace(num_actual_tokens=0), cache, slots)
    assert (output == POISON).all()
    assert (cache == POISON).all()
    assert not layer.seen


def test_padding_is_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache = mla_layer(), torch.full((2, BLOCK_SIZE, 576), POISON)
    slots = torch.tensor([3, -1, 20, 9, -1, -1])
    output = call_mla(monkeypatch, layer, SimpleNamespace(num_actual_tokens=ACTUAL), cache, slots)
    (query,) = layer.seen
    assert query.shape == (ACTUAL, HEADS, 576)
    assert (output[ACTUAL:] == POISON).all()
    assert not (output[:ACTUAL] == POISON).any()
    written = (cache != POISON).any(-1).flatten().nonzero().flatten().tolist()
    assert written == [3, 9, 20]
    assert counters.CALLS["mla"]["fused"] == 1


def test_a_layer_without_slots_writes_nothing_and_still_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, cache = mla_layer(), torch.full((2, BLOCK_SIZE, 576), POISON)
    call_mla(monkeypatch, layer, SimpleNamespace(num_actual_tokens=ACTUAL), cache, None)
    assert len(layer.seen) == 1
    assert (cache == POISON).all()


def call_indexer(monkeypatch: pytest.MonkeyPatch, cache: torch.Tensor, slots: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from dsafuse.vllm import wrapper

    call = plan.IndexerCall("flat", "neox", "ue8m0", 1e-6, 0.1, torch.float8_e4m3fn)
    layer = SimpleNamespace(kv_cache=cache, dsafuse_plan=SimpleNamespace(indexer_call=call))
    context = SimpleNamespace(no_compile_layers={"layer": layer}, slot_mapping=slots)
    monkeypatch.setattr(wrapper, "get_forward_context", lambda: context)
    arguments = (
        torch.randn(TOKENS, HEADS, 128),
        torch.randn(TOKENS, 128 + HEADS),
        torch.ones(128),
        torch.zeros(128),
        torch.arange(TOKENS),
        torch.randn(32, 64),
        "layer",
    )
    fakes = wrapper._fake_indexer_prepare(*arguments)
    results = wrapper.indexer_prepare(*arguments)
    assert [(x.shape, x.dtype, x.stride()) for x in results] == [(x.shape, x.dtype, x.stride()) for x in fakes]
    return results


@pytest.mark.parametrize("slots", [None, {}, {"layer": torch.full((TOKENS + 2,), -1)}])
def test_an_indexer_without_live_slots_writes_nothing(monkeypatch: pytest.MonkeyPatch, slots: Any) -> None:
    """Slots may be absent, or padded beyond the tokens of the call."""
    cache = torch.full((2, BLOCK_SIZE, 132), 7, dtype=torch.uint8)
    call_indexer(monkeypatch, cache, slots)
    assert (cache == 7).all()
    assert counters.CALLS["indexer"]["fused"] == 1


def test_an_indexer_writes_its_live_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = torch.full((2, BLOCK_SIZE * 132), 7, dtype=torch.uint8)
    call_indexer(monkeypatch, cache.unflatten(1, (BLOCK_SIZE, 132)), {"layer": torch.tensor([0, -1, 17, -1, -1, -1])})
    touched = (cache[:, : BLOCK_SIZE * 128].unflatten(1, (BLOCK_SIZE, 128)) != 7).any(-1)
    assert touched.nonzero().tolist() == [[0, 0], [1, 1]]


def test_an_indexer_without_a_cache_is_a_profiling_run(monkeypatch: pytest.MonkeyPatch) -> None:
    results = call_indexer(monkeypatch, torch.tensor([]), None)
    assert not any(result.float().any() for result in results)
    assert counters.CALLS["indexer"]["fused"] == 0

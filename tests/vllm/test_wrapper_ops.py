"""The opaque ops of the wrapper path without an engine: ordinary runs, and those that are not."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.vllm import counters
from tests.vllm.layer_case import (
    ACTUAL,
    BLOCK_SIZE,
    HEADS,
    NAME,
    POISON,
    STALE,
    TOKENS,
    Case,
    decode,
    dense_026,
    dense_032,
    launches_of,
)


@pytest.fixture(autouse=True)
def interpreter() -> Any:
    counters.reset()
    with switches.override(provider="interpreter"):
        yield


def rotated(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, 64] in vLLM's interleaved pairs, each value rounded once, as vLLM's compiled rotation does."""
    cos, sin = table[positions][:, None].chunk(2, dim=-1)
    even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


@pytest.mark.parametrize("way", ["together", "apart"])
def test_a_profiling_run_takes_the_memory_of_a_dense_prefills_context(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """As vLLM's own does, or its caches would take that memory."""
    case = Case(monkeypatch, None)
    taken: list[Any] = []
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **k: taken.append(a) or empty(self, *a, **k))
    getattr(case, way)()
    assert ((640, HEADS, 128 + 8),) in taken


@pytest.mark.parametrize("way", ["together", "apart"])
@pytest.mark.parametrize("cached", [True, False])
def test_a_profiling_run_gives_zeros_and_calls_nothing(monkeypatch: pytest.MonkeyPatch, way: str, cached: bool) -> None:
    case = Case(monkeypatch, None if cached else decode(TOKENS))
    if not cached:
        case.cache = case.index_cache = torch.tensor([])
    getattr(case, way)()
    for out in (case.output, case.index_q_out, case.weights_out):
        assert not out.float().any()
    assert not case.impl.queries
    assert (case.index_cache == 7).all()
    assert not any(sum(calls.values()) for calls in counters.CALLS.values())
    assert (case.query._made is not None) == (
        not cached
    )  # its memory is taken before there are caches, where vLLM measures


@pytest.mark.parametrize("way", ["together", "mla_prepare_and_attend"])
def test_no_tokens_are_no_work(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """A batch of padding only."""
    case = Case(monkeypatch, decode(0))
    getattr(case, way)()
    assert (case.output == POISON).all()
    assert (case.cache == POISON).all()
    assert (case.index_cache == 7).all()
    assert not case.impl.queries


@pytest.mark.parametrize("way", ["together", "apart"])
def test_padding_is_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Slots of -1, as captured graphs have them, and tokens beyond the batch."""
    case = Case(monkeypatch, decode())
    getattr(case, way)()
    (query,) = case.impl.queries
    assert query.shape == (ACTUAL, HEADS, 576)
    assert (case.output[ACTUAL:] == POISON).all()
    assert not (case.output[:ACTUAL] == POISON).any()
    assert (case.cache != POISON).any(-1).flatten().nonzero().flatten().tolist() == [3, 9, 20]
    keys = (case.index_cache.flatten(1)[:, : BLOCK_SIZE * 128].unflatten(1, (BLOCK_SIZE, 128)) != 7).any(-1)
    assert keys.nonzero().tolist() == [[0, 0], [0, 8], [1, 1]]
    expected = {"mla": 1, "indexer": 1, "prepare_qk": int(way == "together")}
    assert {op: calls["fused"] for op, calls in counters.CALLS.items() if op in expected} == expected
    assert not any(calls["fallback"] for calls in counters.CALLS.values())


def test_one_launch_gives_the_bytes_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    together, apart = Case(monkeypatch, decode()), Case(monkeypatch, decode())
    for case, way in ((apart, "apart"), (together, "together")):
        monkeypatch.setattr(case.ops, "get_attention_context", case._context)
        getattr(case, way)()
    assert torch.equal(together.impl.queries[0], apart.impl.queries[0])
    for name in ("output", "cache", "index_cache"):
        assert torch.equal(getattr(together, name), getattr(apart, name)), name
    assert torch.equal(together.weights_out[:ACTUAL], apart.weights_out[:ACTUAL])
    assert torch.equal(together.index_q_out[:ACTUAL].view(torch.uint8), apart.index_q_out[:ACTUAL].view(torch.uint8))


def test_layers_without_slots_write_nothing_and_still_attend(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, decode())
    case.slots = case.index_slots = None
    case.together()
    case.apart()
    assert len(case.impl.queries) == 2
    assert (case.cache == POISON).all()
    assert (case.index_cache == 7).all()


@pytest.mark.parametrize("way", ["together", "mla_prepare_and_attend"])
def test_a_wider_query_is_the_same_with_zeros_behind(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """FlashMLA's padding: the kernel gets as many heads as it wants, the layer takes its own."""
    plain, wide = Case(monkeypatch, decode()), Case(monkeypatch, decode(), query_heads=64)
    for case in (plain, wide):
        monkeypatch.setattr(case.ops, "get_attention_context", case._context)
        getattr(case, way)()
    (query,) = wide.impl.queries
    assert query.shape == (ACTUAL, 64, 576)
    assert query.is_contiguous()
    assert torch.equal(query[:, :HEADS], plain.impl.queries[0])
    assert not query[:, HEADS:].any()
    assert torch.equal(wide.output, plain.output)


def test_a_backend_that_takes_the_parts_gets_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention's sparse backend refuses one tensor."""
    one, pair = Case(monkeypatch, decode()), Case(monkeypatch, decode(), form="pair")
    for case in (one, pair):
        monkeypatch.setattr(case.ops, "get_attention_context", case._context)
        case.together()
    assert (one.impl.pairs, pair.impl.pairs) == (0, 1)
    assert torch.equal(one.impl.queries[0], pair.impl.queries[0])
    assert torch.equal(one.output, pair.output)


def test_reloaded_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(monkeypatch, decode())
    case.together()
    case.layer.W_UK_T = 2 * case.layer.W_UK_T
    case.together()
    first, second = case.impl.queries
    assert torch.equal(second[..., :512], 2 * first[..., :512])
    assert torch.equal(second[..., 512:], first[..., 512:])


def test_micro_batches_do_not_share_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dual-batch overlap: one prepares while the other attends."""
    case = Case(monkeypatch, decode())
    case.qk_prepare()
    monkeypatch.setattr(case.launches, "dbo_current_ubatch_id", lambda: 1)
    case.q = case.q + 1
    case.qk_prepare()
    case.mla_attend()
    monkeypatch.setattr(case.launches, "dbo_current_ubatch_id", lambda: 0)
    case.mla_attend()
    second, first = case.impl.queries
    assert not torch.equal(first, second)


@pytest.mark.parametrize("say", [dense_026, dense_032])
@pytest.mark.parametrize("way", ["together", "mla_prepare_and_attend"])
@pytest.mark.parametrize("decodes", [2, 0])
def test_a_short_prefill_is_attended_densely_by_vllm_and_prepared_by_the_ops(
    monkeypatch: pytest.MonkeyPatch, say: Any, way: str, decodes: int
) -> None:
    mixed = SimpleNamespace(num_actual_tokens=ACTUAL, num_decode_tokens=decodes, prefill_max_seq_len=40, topk_tokens=64)
    case, sparse = Case(monkeypatch, mixed), Case(monkeypatch, mixed)
    say(sparse, False)
    monkeypatch.setattr(sparse.ops, "get_attention_context", sparse._context)
    getattr(sparse, way)()
    counters.reset()
    say(case, True)
    untouched = case.q.clone(), case.k_pe.clone()
    monkeypatch.setattr(case.ops, "get_attention_context", case._context)
    launched = launches_of(case, monkeypatch)
    getattr(case, way)()
    # One launch for all keys, one for the decodes' queries, one to rotate the rest.
    first = "prepare_qk" if way == "together" else "fused_qk_rope_concat_and_cache_mla"
    assert [(name, tokens) for name, _, tokens in launched] == [
        (first, ACTUAL),
        *([("prepare_queries", decodes)] if decodes else []),
        ("prepare_queries", ACTUAL - decodes),
    ]
    # Caches and the decodes' queries have the bytes of a batch without dense tokens.
    assert torch.equal(case.cache, sparse.cache)
    assert torch.equal(case.index_cache, sparse.index_cache)
    if decodes:
        assert torch.equal(case.impl.queries[0], sparse.impl.queries[0][:decodes])
        assert torch.equal(case.output[:decodes], sparse.output[:decodes])
    else:
        assert not case.impl.queries
    # vLLM's dense attention gets what its own rotation gives.
    ((q, kv_c, key),) = case.impl.dense
    rows = slice(decodes, ACTUAL)
    q_pe = rotated(case.q[rows, :, 128:], case.positions[rows], case.table)
    assert torch.equal(q, torch.cat([case.q[rows, :, :128], q_pe], dim=-1))
    assert torch.equal(kv_c, case.kv_c[rows])
    assert torch.equal(key, rotated(case.k_pe[rows, None], case.positions[rows], case.table))
    assert (case.output[rows] == 5).all()
    assert (case.output[ACTUAL:] == POISON).all()
    assert torch.equal(case.q, untouched[0])
    assert torch.equal(case.k_pe, untouched[1])
    if way == "together":
        assert torch.equal(case.weights_out[:ACTUAL], sparse.weights_out[:ACTUAL])
        assert counters.CALLS["prepare_qk"] == {"fused": 0, "fallback": 1}
        assert counters.CALLS["indexer"]["fused"] == 1
    assert counters.CALLS["mla"] == {"fused": 1, "fallback": 0}
    assert counters.CALLS["dense_prefill"] == {"fused": 1, "fallback": 0}


@pytest.mark.parametrize("way", ["together", "mla_prepare_and_attend"])
def test_a_dense_prefill_takes_16_bit_under_a_quantised_cache_and_query(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """fp8_ds_mla, an fp8 query, a padded width: keys and queries of dense tokens stay what the activations hold."""
    mixed = SimpleNamespace(num_actual_tokens=ACTUAL, num_decode_tokens=2, prefill_max_seq_len=40, topk_tokens=64)
    case, sparse = Case(monkeypatch, mixed), Case(monkeypatch, mixed)
    for each, dense in ((sparse, False), (case, True)):
        each.to(torch.bfloat16, "fp8_ds_mla", 656)
        dense_026(each, dense)
        monkeypatch.setattr(each.ops, "get_attention_context", each._context)
        getattr(each, way)()
    ((q, _, key),) = case.impl.dense
    rows = slice(2, ACTUAL)
    assert (q.dtype, key.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(q[..., 128:], rotated(case.q[rows, :, 128:], case.positions[rows], case.table))
    assert torch.equal(key, rotated(case.k_pe[rows, None], case.positions[rows], case.table))
    assert torch.equal(case.cache, sparse.cache)
    assert torch.equal(case.impl.queries[0].view(torch.uint8), sparse.impl.queries[0][:2].view(torch.uint8))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("way", ["together", "mla_prepare_and_attend"])
def test_every_launch_scales_tiles_by_the_plans_rule(monkeypatch: pytest.MonkeyPatch, way: str, dense: bool) -> None:
    mixed = SimpleNamespace(num_actual_tokens=ACTUAL, num_decode_tokens=2, prefill_max_seq_len=40, topk_tokens=64)
    case = Case(monkeypatch, mixed)
    case.to(torch.bfloat16, "fp8_ds_mla", 656)
    made = case.layer.dsafuse.plan
    fp32 = replace(made, mla_call=replace(made.mla_call, scale_rule="fp32"))
    case.layer.dsafuse = replace(case.layer.dsafuse, plan=fp32)
    dense_026(case, dense)
    getattr(case, way)()
    for token in (0, 2, 3):  # a decode, and two of a prefill
        block, row = divmod(int(case.slots[token]), BLOCK_SIZE)
        scales = case.cache[block, row, 512:528].clone().view(torch.float32)
        assert torch.equal(scales, case.kv_c[token].float().view(4, 128).abs().amax(-1) / torch.tensor(448.0))


def cleared(case: Case) -> list[bool]:
    """Of each top-k row, whether it was cleared; no row is cleared in part."""
    assert case.topk is not None
    rows = case.topk.unique(dim=1)
    assert rows.shape[1] == 1
    assert set(rows.flatten().tolist()) <= {-1, STALE}
    return (rows == -1).flatten().tolist()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, ACTUAL])
def test_top_k_rows_are_cleared_as_far_as_vllms_own_fill_goes(
    monkeypatch: pytest.MonkeyPatch, tokens: int, dense: bool
) -> None:
    """Padding included: with drafts of unlike lengths vLLM's top-k reads rows beyond the batch. Not the rest."""
    mixed = SimpleNamespace(num_actual_tokens=tokens, num_decode_tokens=1, prefill_max_seq_len=40, topk_tokens=64)
    case = Case(monkeypatch, mixed)
    dense_026(case, dense)
    launched = launches_of(case, monkeypatch)
    case.qk_prepare()
    assert cleared(case) == [True] * TOKENS + [False] * 2
    assert [config.clear_topk is not None for name, config, _ in launched] == [
        name == "prepare_qk" for name, *_ in launched
    ]
    assert [name for name, *_ in launched] == ["prepare_qk"] + ["prepare_queries"] * dense


def test_top_k_rows_are_vllms_own_where_its_op_fills_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = Case(monkeypatch, decode()), Case(monkeypatch, decode())
    case.topk = None
    launched = launches_of(case, monkeypatch)
    for each in (case, other):
        monkeypatch.setattr(each.ops, "get_attention_context", each._context)
        each.together()
    assert [config.clear_topk is not None for _, config, _ in launched] == [False, True]
    assert torch.equal(case.output, other.output)
    assert torch.equal(case.index_cache, other.index_cache)


@pytest.mark.parametrize("metadata", [None, decode(0)])
def test_top_k_rows_without_a_batch_are_left_alone(monkeypatch: pytest.MonkeyPatch, metadata: Any) -> None:
    """vLLM's op returns there before it would fill them, or nobody reads them."""
    case = Case(monkeypatch, metadata)
    case.qk_prepare()
    assert not any(cleared(case))


@pytest.mark.parametrize("changes", [{"prefill_max_seq_len": 65}, {"prefill_max_seq_len": 64}])
def test_vllm_026_attends_densely_up_to_the_number_of_chosen_tokens(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    metadata = SimpleNamespace(num_actual_tokens=ACTUAL, num_decode_tokens=1, topk_tokens=64, **changes)
    case = Case(monkeypatch, metadata)
    dense_026(case, True)
    expected = 3 if changes["prefill_max_seq_len"] <= 64 else 0
    assert case.ops._dense_tokens(case.layer, metadata) == expected
    case.layer._vllm_config.attention_config.sparse_mla_force_mqa = True
    assert case.ops._dense_tokens(case.layer, metadata) == 0


def test_each_op_is_an_eager_break_with_the_kv_connector_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM says of its own: a connector's waiting and saving outside of the break would be recorded into a graph."""
    from vllm.compilation import breakable_cudagraph
    from vllm.model_executor.layers.attention import kv_transfer_utils

    from dsafuse.vllm import layer_ops, torch_ops

    broken: dict[Any, Any] = {}  # what is registered: what it breaks at

    def recorder(body: Any) -> Any:
        @functools.wraps(body)
        def outermost(*args: Any) -> Any:
            return body(*args)

        broken[outermost] = body
        return outermost

    registered: dict[str, Any] = {}
    monkeypatch.setattr(breakable_cudagraph, "eager_break_during_capture", recorder)
    monkeypatch.setattr(torch_ops, "define", lambda name, body, *_, **__: registered.update({name: body}))
    # The module once more, under another name: its ops are registered when it is imported.
    found = importlib.util.spec_from_file_location("layer_ops_once_more", layer_ops.__file__)
    assert found is not None
    assert found.loader is not None
    found.loader.exec_module(importlib.util.module_from_spec(found))
    assert list(registered.values()) == list(broken)
    told = {name: broken[body].__code__.co_filename == kv_transfer_utils.__file__ for name, body in registered.items()}
    assert told == {
        "qk_prepare": False,
        "mla_attend": True,
        "mla_prepare_and_attend": True,
        "indexer_prepare": False,
    }


@pytest.mark.parametrize("op", ["mla_attend", "mla_prepare_and_attend"])
def test_a_kv_connector_is_told_of_the_layer(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """It waits before, and saves after, as around vLLM's own attention op."""
    from vllm.model_executor.layers.attention import attention, kv_transfer_utils
    from vllm.utils.torch_utils import _encode_layer_name

    case = Case(monkeypatch, decode())
    case.qk_prepare()
    said: list[tuple[str, str, int]] = []
    connector = SimpleNamespace(
        has_connector_metadata=lambda: True,
        wait_for_layer_load=lambda name: said.append(("wait", name, len(case.impl.queries))),
        save_kv_layer=lambda name, cache, metadata: said.append(("save", name, len(case.impl.queries))),
    )
    case.layer.kv_cache = case.cache
    context = SimpleNamespace(
        attn_metadata={NAME: case.metadata}, no_compile_layers={NAME: case.layer}, slot_mapping={NAME: case.slots}
    )
    monkeypatch.setattr(attention, "get_forward_context", lambda: context)
    for name, value in (
        ("has_kv_transfer_group", True),
        ("is_v1_kv_transfer_group", True),
        ("get_kv_transfer_group", connector),
    ):
        monkeypatch.setattr(kv_transfer_utils, name, lambda value=value: value)
    k_pe = [case.k_pe] if op == "mla_prepare_and_attend" else []
    getattr(torch.ops.dsafuse, op)(
        case.q, case.kv_c, *k_pe, case.positions, case.table, None, case.output, _encode_layer_name(NAME)
    )
    assert said == [("wait", NAME, 0), ("save", NAME, 1)]

"""The opaque ops of the wrapper path without an engine: ordinary runs, and those that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.vllm import counters, plan
from dsafuse.vllm.buffers import QueryBuffer

HEADS, INDEX_HEADS, BLOCK_SIZE = 4, 8, 16
TOKENS, ACTUAL = 6, 4
POISON = 77.0
FP8 = torch.float8_e4m3fn
NAME, INDEXER = "layer", "layer.indexer"


@pytest.fixture(autouse=True)
def interpreter() -> Any:
    counters.reset()
    with switches.override(provider="interpreter"):
        yield


class Rotary(torch.nn.Module):
    """vLLM's interleaved pairs; in place, as its CUDA kernel does."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.cos_sin_cache = table

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.cos_sin_cache[positions][:, None].chunk(2, dim=-1)
        for x in (q, k):
            even, odd = x[..., 0::2].clone(), x[..., 1::2].clone()
            x[..., 0::2], x[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
        return q, k


class Impl:
    """Attention that returns the latent part of the query, and remembers what it was given."""

    is_sparse = True
    dcp_world_size = -1

    def __init__(self) -> None:
        self.num_heads = HEADS
        self.queries: list[torch.Tensor] = []
        self.pairs = 0
        self.dense: list[tuple[torch.Tensor, ...]] = []
        self.written: list[tuple[torch.Tensor, ...]] = []

    def forward_mqa(self, query: Any, *_: Any) -> tuple[torch.Tensor, None]:
        if isinstance(query, tuple):
            assert [part.shape[-1] for part in query] == [512, 64]
            self.pairs += 1
            query = torch.cat(query, dim=-1)
        self.queries.append(query.clone())
        return query[..., :512].clone(), None

    def forward_mha(self, q: Any, kv_c: Any, k_pe: Any, cache: Any, metadata: Any, scale: Any, output: Any) -> None:
        assert self.dcp_world_size == 1  # as vLLM 0.26 asserts it
        self.dense.append((q.clone(), kv_c.clone(), k_pe.clone()))
        output.fill_(5)

    def do_kv_cache_update(self, kv_c: Any, k_pe: Any, cache: Any, slots: Any, word: str, scale: Any) -> None:
        self.written.append((kv_c.clone(), k_pe.clone(), slots.clone()))


class Case:
    """One layer, its caches and one step's inputs."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, metadata: Any = None, *, query_heads: int = HEADS, form: str = "one"
    ) -> None:
        from dsafuse.vllm import wrapper

        torch.manual_seed(0)
        mla = plan.MlaCall("plain", "interleaved", torch.float32, query_heads, form, FP8)
        index = plan.IndexerCall("flat", "neox", "ue8m0", 1e-6, 0.1, FP8)
        fused = plan.OpPlan("", fused=True)
        made = plan.LayerPlan(NAME, "DSA layer", fused, fused, mla, index, together=True)
        self.impl = Impl()
        self.table = torch.randn(32, 64)
        self.query = QueryBuffer(TOKENS, query_heads, torch.float32, 2)
        self.layer = SimpleNamespace(
            dsafuse=wrapper.Layer(made, self.query, self.impl, Rotary(self.table), INDEXER, BLOCK_SIZE),
            num_heads=HEADS,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            kv_lora_rank=512,
            kv_cache_dtype="auto",
            W_UK_T=torch.randn(HEADS, 128, 512),
            _q_scale=torch.ones(()),
            _k_scale=torch.ones(()),
            impl=self.impl,
            prefill_backend=None,
            _v_up_proj=lambda x, out: out.copy_(x[..., :8].flatten(1)),
        )
        self.cache = torch.full((2, BLOCK_SIZE, 576), POISON)
        self.index_cache = torch.full((2, BLOCK_SIZE, 132), 7, dtype=torch.uint8)
        self.slots: Any = torch.tensor([3, -1, 20, 9, -1, -1])
        self.index_slots: Any = torch.tensor([0, -1, 17, 8, -1, -1])
        self.metadata = metadata
        self.q = torch.randn(TOKENS, HEADS, 192)
        self.kv_c, self.k_pe = torch.randn(TOKENS, 512), torch.randn(TOKENS, 64)
        self.positions = torch.arange(TOKENS)
        self.index_q = torch.randn(TOKENS, INDEX_HEADS, 128)
        self.k_and_weights = torch.randn(TOKENS, 128 + INDEX_HEADS)
        self.norm = (torch.rand(128), torch.rand(128))
        self.index_table = torch.randn(32, 64)
        self.output = torch.full((TOKENS, HEADS * 8), POISON)
        self.index_q_out = torch.full((TOKENS, INDEX_HEADS, 128), 1.0).to(FP8)
        self.weights_out = torch.full((TOKENS, INDEX_HEADS), POISON)
        self.wrapper = wrapper
        self.index_layer = SimpleNamespace(dsafuse=made)
        monkeypatch.setattr(wrapper, "get_attention_context", self._context)

    def _context(self, name: str) -> Any:
        if name == INDEXER:
            # vLLM's indexer takes its slots from its metadata, not from the forward context.
            metadata = None if self.metadata is None else SimpleNamespace(slot_mapping=self.index_slots)
            return metadata, self.index_layer, self.index_cache, None
        return self.metadata, self.layer, self.cache, self.slots

    def qk_prepare(self) -> None:
        self.wrapper.qk_prepare(
            self.q,
            self.kv_c,
            self.k_pe,
            self.positions,
            self.table,
            self.index_q,
            self.k_and_weights,
            *self.norm,
            self.index_table,
            self.index_q_out,
            self.weights_out,
            NAME,
        )

    def mla_attend(self) -> None:
        self.wrapper.mla_attend(self.q, self.kv_c, self.k_pe, self.positions, None, self.output, NAME)

    def mla_prepare_and_attend(self) -> None:
        self.wrapper.mla_prepare_and_attend(
            self.q, self.kv_c, self.k_pe, self.positions, self.table, None, self.output, NAME
        )

    def indexer_prepare(self) -> None:
        self.wrapper.indexer_prepare(
            self.index_q,
            self.k_and_weights,
            *self.norm,
            self.positions,
            self.index_table,
            self.index_q_out,
            self.weights_out,
            INDEXER,
        )

    def together(self) -> None:
        self.qk_prepare()
        self.mla_attend()

    def apart(self) -> None:
        self.indexer_prepare()
        self.mla_prepare_and_attend()


def decode(tokens: int = ACTUAL) -> Any:
    return SimpleNamespace(num_actual_tokens=tokens, num_decode_tokens=tokens)


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


def test_a_profiling_run_rehearses_every_launch_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU: what a batch may launch is compiled before the first request, for few tokens and for many."""
    case = Case(monkeypatch)
    launched: list[tuple[str, int]] = []
    names = ("fused_qk_rope_concat_and_cache_mla", "indexer_qk_rope_quant_and_cache", "prepare_qk")
    for name in names:
        op = getattr(case.wrapper, name)

        def call(*args: Any, name: str = name, op: Any = op, **kwargs: Any) -> Any:
            launched.append((name, args[0].shape[0]))
            return op(*args, **kwargs)

        monkeypatch.setattr(case.wrapper, name, call)
    mla = case.wrapper.MlaInputs(case.q, case.kv_c, case.k_pe, case.positions, case.table)
    index = case.wrapper.IndexInputs(
        *(case.index_q, case.k_and_weights, *case.norm, case.positions, case.index_table),
        *(case.index_q_out, case.weights_out),
    )
    monkeypatch.setattr(case.wrapper, "_REHEARSED", set())
    monkeypatch.setattr(case.wrapper, "_compiles", lambda tensor: True)
    for _ in range(2):  # once for its kind
        case.wrapper._rehearse(case.layer, mla, index)
    assert sorted(launched) == sorted((name, tokens) for name in names for tokens in (1, TOKENS))
    fewer = index._replace(q=index.q[:, :1], k_and_weights=index.k_and_weights[:, : index.q.shape[-1] + 1])
    fewer = fewer._replace(q_out=index.q_out[:, :1], weights_out=index.weights_out[:, :1])
    case.wrapper._rehearse(case.layer, mla, fewer)  # another model of this process, other heads alone
    assert len(launched) == 4 * len(names)
    assert (case.cache == POISON).all()
    assert (case.index_cache == 7).all()


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
        monkeypatch.setattr(case.wrapper, "get_attention_context", case._context)
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
        monkeypatch.setattr(case.wrapper, "get_attention_context", case._context)
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
        monkeypatch.setattr(case.wrapper, "get_attention_context", case._context)
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
    monkeypatch.setattr(case.wrapper, "dbo_current_ubatch_id", lambda: 1)
    case.q = case.q + 1
    case.qk_prepare()
    case.mla_attend()
    monkeypatch.setattr(case.wrapper, "dbo_current_ubatch_id", lambda: 0)
    case.mla_attend()
    second, first = case.impl.queries
    assert not torch.equal(first, second)


# How two vLLMs say that the last two of a batch's four tokens are attended densely.
def dense_026(case: Case, dense: bool) -> None:
    case.layer.prefill_backend = object() if dense else None
    case.layer._vllm_config = SimpleNamespace(attention_config=SimpleNamespace(sparse_mla_force_mqa=False))


def dense_032(case: Case, dense: bool) -> None:
    case.layer._use_sparse_mha = lambda metadata: dense


@pytest.mark.parametrize("say", [dense_026, dense_032])
@pytest.mark.parametrize("way", ["together", "mla_prepare_and_attend"])
@pytest.mark.parametrize("decodes", [2, 0])
def test_a_short_prefill_that_is_attended_densely_is_vllms(
    monkeypatch: pytest.MonkeyPatch, say: Any, way: str, decodes: int
) -> None:
    mixed = SimpleNamespace(num_actual_tokens=ACTUAL, num_decode_tokens=decodes, prefill_max_seq_len=40, topk_tokens=64)
    case, sparse = Case(monkeypatch, mixed), Case(monkeypatch, mixed)
    say(sparse, False)
    monkeypatch.setattr(sparse.wrapper, "get_attention_context", sparse._context)
    getattr(sparse, way)()
    counters.reset()
    say(case, True)
    untouched = case.q.clone(), case.k_pe.clone()
    monkeypatch.setattr(case.wrapper, "get_attention_context", case._context)
    getattr(case, way)()
    # The op prepares the decodes alone, with the bytes that it would have given them in a batch of their own.
    assert torch.equal(case.cache.view(-1, 576)[3], sparse.cache.view(-1, 576)[3]) == (decodes > 0)
    assert (case.cache.view(-1, 576)[[20, 9]] == POISON).all()
    if decodes:
        assert torch.equal(case.impl.queries[0], sparse.impl.queries[0][:decodes])
        assert torch.equal(case.output[:decodes], sparse.output[:decodes])
    else:
        assert not case.impl.queries
    # vLLM's functions get the rest: rotated as the op rotates, and what it is to write and attend to.
    ((q, kv_c, key),) = case.impl.dense
    ((kv_written, key_written, slots),) = case.impl.written
    rotated = sparse.impl.queries[0][decodes:, :, 512:]
    torch.testing.assert_close(q, torch.cat([case.q[decodes:ACTUAL, :, :128], rotated], dim=-1))
    assert torch.equal(kv_c, case.kv_c[decodes:ACTUAL])
    assert key.shape == (ACTUAL - decodes, 1, 64)
    torch.testing.assert_close(key[-1, 0], sparse.cache.view(-1, 576)[9, 512:])
    assert torch.equal(kv_written, kv_c)
    assert torch.equal(key_written, key)
    assert torch.equal(slots, case.slots[decodes:ACTUAL])
    assert (case.output[decodes:ACTUAL] == 5).all()
    assert (case.output[ACTUAL:] == POISON).all()
    assert torch.equal(case.q, untouched[0])
    assert torch.equal(case.k_pe, untouched[1])
    # The indexer is not concerned: later steps read its keys.
    if way == "together":
        for name in ("weights_out", "index_cache"):
            assert torch.equal(getattr(case, name), getattr(sparse, name)), name
        assert counters.CALLS["prepare_qk"] == {"fused": 0, "fallback": 1}
        assert counters.CALLS["indexer"]["fused"] == 1
    assert counters.CALLS["mla"] == {"fused": int(decodes > 0), "fallback": 0}
    assert counters.CALLS["dense_prefill"] == {"fused": 0, "fallback": 1}


@pytest.mark.parametrize("changes", [{"prefill_max_seq_len": 65}, {"prefill_max_seq_len": 64}])
def test_vllm_026_attends_densely_up_to_the_number_of_chosen_tokens(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    metadata = SimpleNamespace(num_actual_tokens=ACTUAL, num_decode_tokens=1, topk_tokens=64, **changes)
    case = Case(monkeypatch, metadata)
    dense_026(case, True)
    expected = 3 if changes["prefill_max_seq_len"] <= 64 else 0
    assert case.wrapper._dense_tokens(case.layer, metadata) == expected
    case.layer._vllm_config.attention_config.sparse_mla_force_mqa = True
    assert case.wrapper._dense_tokens(case.layer, metadata) == 0


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
    table = [case.table] if op == "mla_prepare_and_attend" else []
    getattr(torch.ops.dsafuse, op)(
        case.q, case.kv_c, case.k_pe, case.positions, *table, None, case.output, _encode_layer_name(NAME)
    )
    assert said == [("wait", NAME, 0), ("save", NAME, 1)]

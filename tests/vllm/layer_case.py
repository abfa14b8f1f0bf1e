"""One layer of the wrapper path without an engine: what its opaque ops find, and a step's inputs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse.vllm import plan
from dsafuse.vllm.buffers import QueryBuffer

HEADS, INDEX_HEADS, BLOCK_SIZE = 4, 8, 16
TOKENS, ACTUAL = 6, 4
POISON = 77.0
STALE = 5
FP8 = torch.float8_e4m3fn
NAME, INDEXER = "layer", "layer.indexer"


class Backend:
    """Of which every block size of vLLM's is a kernel's, too."""

    @staticmethod
    def get_supported_kernel_block_sizes(_spec: Any = None) -> list[Any]:
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(1)]


class Impl:
    """Attention that returns the latent part of the query, and remembers what it was given."""

    is_sparse = True
    dcp_world_size = -1

    def __init__(self, heads: int) -> None:
        self.num_heads = heads
        self.queries: list[torch.Tensor] = []
        self.pairs = 0
        self.dense: list[tuple[torch.Tensor, ...]] = []

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


class Case:
    """One layer, its caches and one step's inputs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        metadata: Any = None,
        *,
        tokens: int = TOKENS,
        heads: int = HEADS,
        query_heads: int | None = None,
        form: str = "one",
    ) -> None:
        from dsafuse.vllm import launches, layer_ops

        torch.manual_seed(0)
        self.tokens, self.heads = tokens, heads
        query_heads = query_heads or heads
        mla = plan.MlaCall("plain", "interleaved", torch.float32, query_heads, form, FP8, "ue8m0")
        index = plan.IndexerCall("flat", "neox", "ue8m0", 1e-6, 0.1, FP8)
        fused = plan.OpPlan("", fused=True)
        made = plan.LayerPlan(NAME, "DSA layer", fused, fused, mla, index, together=True)
        self.impl = Impl(heads)
        self.table = torch.randn(32, 64)
        self.query = QueryBuffer(tokens, query_heads, torch.float32, 2)
        self.keys = QueryBuffer(tokens, 1, torch.float32, 2)
        self.cache_config = SimpleNamespace(block_size=BLOCK_SIZE)
        self.blocks = launches.Blocks(self.cache_config, (Backend,))
        self.layer = SimpleNamespace(
            dsafuse=launches.Layer(made, self.query, self.keys, self.impl, INDEXER, self.blocks),
            num_heads=heads,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            kv_lora_rank=512,
            kv_cache_dtype="auto",
            W_UK_T=torch.randn(heads, 128, 512),
            _q_scale=torch.ones(()),
            _k_scale=torch.ones(()),
            impl=self.impl,
            prefill_backend=None,
            v_head_dim=8,
            chunked_prefill_workspace_size=640,
            _v_up_proj=lambda x, out: out.copy_(x[..., :8].flatten(1)),
        )
        self.cache = torch.full((2, BLOCK_SIZE, 576), POISON)
        self.index_cache = torch.full((2, BLOCK_SIZE, 132), 7, dtype=torch.uint8)
        self.slots: Any = torch.tensor([3, -1, 20, 9, -1, -1])
        self.index_slots: Any = torch.tensor([0, -1, 17, 8, -1, -1])
        self.metadata = metadata
        self.q = torch.randn(tokens, heads, 192)
        self.kv_c, self.k_pe = torch.randn(tokens, 512), torch.randn(tokens, 64)
        self.positions = torch.arange(tokens)
        self.index_q = torch.randn(tokens, INDEX_HEADS, 128)
        self.k_and_weights = torch.randn(tokens, 128 + INDEX_HEADS)
        self.norm = (torch.rand(128), torch.rand(128))
        self.index_table = torch.randn(32, 64)
        self.output = torch.full((tokens, heads * 8), POISON)
        self.index_q_out = torch.full((tokens, INDEX_HEADS, 128), 1.0).to(FP8)
        self.weights_out = torch.full((tokens, INDEX_HEADS), POISON)
        # Of vLLM's op: rows for the most tokens of a batch, more than this one's.
        self.topk: torch.Tensor | None = torch.full((tokens + 2, 8), STALE, dtype=torch.int32)
        self.ops, self.launches = layer_ops, launches
        self.index_layer = SimpleNamespace(dsafuse=launches.IndexLayer(index, self.blocks))
        monkeypatch.setattr(layer_ops, "get_attention_context", self._context)

    def to(self, activation: torch.dtype, kv_layout: str, row: int) -> None:
        """Another activation dtype and cache, with an fp8 query of twice the heads."""
        for name in ("q", "kv_c", "k_pe", "index_q", "k_and_weights"):
            setattr(self, name, getattr(self, name).to(activation))
        self.layer.W_UK_T = self.layer.W_UK_T.to(activation)
        self.layer._q_scale, self.layer._k_scale = torch.ones(1), torch.ones(1)
        state = self.layer.dsafuse
        call = replace(state.plan.mla_call, kv_layout=kv_layout, query_dtype=FP8, query_heads=2 * self.heads)
        self.query = QueryBuffer(self.tokens, 2 * self.heads, FP8, 2)
        self.keys = QueryBuffer(self.tokens, 1, activation, 2)
        made = replace(state.plan, mla_call=call)
        self.layer.dsafuse = replace(state, plan=made, query=self.query, keys=self.keys)
        self.cache = torch.full((2, BLOCK_SIZE, row), 7, dtype=torch.uint8)
        self.layer._v_up_proj = lambda x, out: out.copy_(x[..., :8].float().flatten(1))

    def _context(self, name: str) -> Any:
        if name == INDEXER:
            # vLLM's indexer takes its slots from its metadata, not from the forward context.
            metadata = None if self.metadata is None else SimpleNamespace(slot_mapping=self.index_slots)
            return metadata, self.index_layer, self.index_cache, None
        return self.metadata, self.layer, self.cache, self.slots

    def qk_prepare(self) -> None:
        self.ops.qk_prepare(
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
            self.topk,
            NAME,
        )

    def mla_attend(self) -> None:
        self.ops.mla_attend(self.q, self.kv_c, self.positions, self.table, None, self.output, NAME)

    def mla_prepare_and_attend(self) -> None:
        self.ops.mla_prepare_and_attend(
            self.q, self.kv_c, self.k_pe, self.positions, self.table, None, self.output, NAME
        )

    def indexer_prepare(self) -> None:
        self.ops.indexer_prepare(
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


# How two vLLMs say that the last two of a batch's four tokens are attended densely.
def dense_026(case: Case, dense: bool) -> None:
    case.layer.prefill_backend = object() if dense else None
    case.layer._vllm_config = SimpleNamespace(attention_config=SimpleNamespace(sparse_mla_force_mqa=False))


def dense_032(case: Case, dense: bool) -> None:
    case.layer._use_sparse_mha = lambda metadata: dense


OPS = ("fused_qk_rope_concat_and_cache_mla", "indexer_qk_rope_quant_and_cache", "prepare_qk", "prepare_queries")
WAYS = ("together", "mla_prepare_and_attend", "indexer_prepare")


def launches_of(case: Case, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, int]]:
    """(op, config, tokens) of each call from now on."""
    launched: list[tuple[str, Any, int]] = []
    for name in OPS:
        op = getattr(case.launches, name)

        def call(*args: Any, name: str = name, op: Any = op, **kwargs: Any) -> Any:
            arguments, config = op.resolve(*args, **kwargs)
            launched.append((name, config, len(arguments["positions"])))
            return op(*args, **kwargs)

        monkeypatch.setattr(case.launches, name, call)
    return launched

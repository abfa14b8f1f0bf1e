"""The hook: vLLM's MLA wrapper, with the preparation of queries and keys done by the fused ops.

What is touched, why, and when it can go: docs/vllm.md, "What each hook touches".

`forward` re-states vLLM's, with the opaque ops of `layer_ops` in it. A layer on which nothing is fused runs vLLM's own
forward, untouched.
"""

import copy
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import _encode_layer_name

from dsafuse.vllm import (
    counters,
    host,
    layer_ops,  # noqa: F401 -- registers the ops that forward calls
    plan,
    scoring,
)
from dsafuse.vllm.buffers import query_buffer
from dsafuse.vllm.launches import Blocks, IndexLayer, Layer

KEY = "MultiHeadLatentAttentionWrapper"


class FusedMultiHeadLatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's wrapper with a plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        made = self.dsafuse_plan = plan.build(self, config)
        # What a version may lack. Looked up once: forward is traced.
        self._gated = getattr(self, "g_proj", None) is not None
        self._records_topk = hasattr(self.mla_attn.impl, "record_logical_topk_ready")
        index_cache: Any = getattr(self.indexer, "k_cache", None)
        backends = [self.mla_attn.attn_backend, *([] if index_cache is None else [index_cache.get_attn_backend()])]
        blocks = Blocks(config.cache_config, tuple(backends))
        if made.mla_call is not None:
            heads = made.mla_call.query_heads
            impl = self.mla_attn.impl
            if heads != self.num_heads:
                impl = copy.copy(impl)
                impl.num_heads = heads
            self.mla_attn.dsafuse = Layer(
                made,
                query_buffer(config, heads, made.mla_call.query_dtype),
                query_buffer(config, 1, config.model_config.dtype),
                impl,
                index_cache.prefix if made.indexer.fused else None,
                blocks,
            )
        if made.indexer.fused:
            assert made.indexer_call is not None
            index_cache.dsafuse = IndexLayer(made.indexer_call, blocks)
            self.indexer.indexer_op.skip_k_cache_insert = True

    def forward(
        self,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        llama_4_scaling: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's, but what the plan calls fused is left to the ops: rotation, concatenation, cache writes."""
        if not self.dsafuse_plan.fused:
            self._count_fallbacks()
            return self._tensor(super().forward(positions, hidden_states, llama_4_scaling))
        if llama_4_scaling is not None:  # gated by the model's config; reaching this would scale nothing
            raise RuntimeError("dsafuse: a fused layer was called with llama_4_scaling, which its gate excludes")
        self._count_fallbacks()
        latents = self.fused_qkv_a_proj(hidden_states)[0]
        q_c, kv_c, k_pe = latents.split([self.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        q_c, kv_c = self.q_a_layernorm(q_c), self.kv_a_layernorm(kv_c)
        q = self.q_b_proj(q_c)[0].view(-1, self.num_heads, self.qk_head_dim)
        chooses = self.indexer is not None and not self.skip_topk
        if not self.dsafuse_plan.mla.fused:
            # vLLM rotates before it indexes; the two do not depend on each other.
            rotary = slice(self.qk_nope_head_dim, None)
            q[..., rotary], k_pe = self.rotary_emb(positions, q[..., rotary], k_pe.unsqueeze(1))
            self._choose(hidden_states, q_c, positions)
            attended = self.mla_attn(q, kv_c, k_pe, output_shape=(q.shape[0], self.num_heads * self.v_head_dim))
        elif chooses and self.dsafuse_plan.together:
            attended = self._together(hidden_states, q_c, q, kv_c, k_pe, positions)
        else:
            self._choose(hidden_states, q_c, positions)
            attended = self._output(q)
            torch.ops.dsafuse.mla_prepare_and_attend(
                q,
                kv_c,
                k_pe,
                positions,
                self.rotary_emb.cos_sin_cache,
                getattr(self.mla_attn.impl, "topk_indices_buffer", None),
                attended,
                _encode_layer_name(self.mla_attn.layer_name),
            )
        if self._gated:
            attended = attended * self.g_proj(hidden_states)[0].sigmoid()
        return self._tensor(self.o_proj(attended)[0])

    def _together(
        self,
        hidden_states: torch.Tensor,
        q_c: torch.Tensor,
        q: torch.Tensor,
        kv_c: torch.Tensor,
        k_pe: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        # Everything is made before the three opaque ops, so that they stand in a row: a piecewise graph has no piece
        # between them.
        index_q, k_and_weights, index_q_out, weights_out = self._index_inputs(hidden_states, q_c)
        output = self._output(q)
        name = _encode_layer_name(self.mla_attn.layer_name)
        # The buffer of vLLM's op, asked each time: a draft gets its model's when it has been loaded.
        topk = self.indexer.indexer_op.topk_indices_buffer if self.dsafuse_plan.clears_topk else None
        torch.ops.dsafuse.qk_prepare(
            q,
            kv_c,
            k_pe,
            positions,
            self.rotary_emb.cos_sin_cache,
            index_q,
            k_and_weights,
            self.indexer.k_norm.weight,
            self.indexer.k_norm.bias,
            self.indexer_rope_emb.cos_sin_cache,
            index_q_out,
            weights_out,
            topk,
            name,
        )
        self._run_indexer(hidden_states, index_q_out, k_and_weights, weights_out, cleared=topk is not None)
        self._topk_is_ready()
        torch.ops.dsafuse.mla_attend(
            q,
            kv_c,
            positions,
            self.rotary_emb.cos_sin_cache,
            self.mla_attn.impl.topk_indices_buffer,
            output,
            name,
        )
        return output

    def _choose(self, hidden_states: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor) -> None:
        """Choose this layer's tokens, unless it takes over another layer's choice."""
        if self.indexer is not None and not self.skip_topk:
            if self.dsafuse_plan.indexer.fused:
                index_q, k_and_weights, q_out, weights_out = self._index_inputs(hidden_states, q_c)
                torch.ops.dsafuse.indexer_prepare(
                    index_q,
                    k_and_weights,
                    self.indexer.k_norm.weight,
                    self.indexer.k_norm.bias,
                    positions,
                    self.indexer_rope_emb.cos_sin_cache,
                    q_out,
                    weights_out,
                    _encode_layer_name(self.indexer.k_cache.prefix),
                )
                self._run_indexer(hidden_states, q_out, k_and_weights, weights_out)
            else:
                self.indexer(hidden_states, q_c, positions, self.indexer_rope_emb)
        self._topk_is_ready()

    def _index_inputs(
        self, hidden_states: torch.Tensor, q_c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The indexer's projections, and the memory of its outputs (q fp8, weights fp32)."""
        indexer, call = self.indexer, self.dsafuse_plan.indexer_call
        assert call is not None
        q = indexer.wq_b(q_c)[0].view(-1, indexer.n_head, indexer.head_dim)
        k_and_weights = indexer.wk_weights_proj(hidden_states)[0]
        q_out = torch.empty(q.shape, dtype=call.fp8_dtype, device=q.device)
        weights_out = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return q, k_and_weights, q_out, weights_out

    def _run_indexer(
        self,
        hidden_states: torch.Tensor,
        q: torch.Tensor,
        k_and_weights: torch.Tensor,
        weights: torch.Tensor,
        cleared: bool = False,
    ) -> None:
        # The key is written already. vLLM 0.26's op wants a tensor in its place all the same, and reads none of it.
        if cleared:
            scoring.on_cleared_rows(self.indexer.indexer_op, hidden_states, q, k_and_weights, weights)
        else:
            self.indexer.indexer_op(hidden_states, q, k_and_weights, weights)

    def _topk_is_ready(self) -> None:
        if self._records_topk:
            self.mla_attn.impl.record_logical_topk_ready()

    def _output(self, q: torch.Tensor) -> torch.Tensor:
        return q.new_empty((q.shape[0], self.num_heads * self.v_head_dim))

    def _count_fallbacks(self) -> None:
        """Count an op that vLLM's own code does. Not while tracing: a counter is no part of a graph."""
        if torch.compiler.is_compiling():
            return
        mla, indexer = self.dsafuse_plan.mla, self.dsafuse_plan.indexer
        if not mla.fused and not mla.absent:
            counters.count("mla", "fallback")
        if not indexer.fused and not indexer.absent and not self.skip_topk:
            counters.count("indexer", "fallback")

    @staticmethod
    def _tensor(value: Any) -> torch.Tensor:
        result: torch.Tensor = value
        return result


def install() -> list[str]:
    """Register the class once per process. Returns why not, or an empty list."""
    holder = op_registry_oot.get(KEY)
    if holder is FusedMultiHeadLatentAttentionWrapper:
        return []
    if holder is not None:
        return [host.taken(KEY, holder)]
    PluggableLayer.register_oot(name=KEY)(FusedMultiHeadLatentAttentionWrapper)
    return []

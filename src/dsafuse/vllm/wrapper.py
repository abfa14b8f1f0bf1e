"""The hook: vLLM's MLA wrapper, with the preparation of queries and keys done by the fused ops.

| touched | how | why |
|---|---|---|
| `MultiHeadLatentAttentionWrapper` | `PluggableLayer.register_oot`, official | it calls rope, indexer and attention |
| `indexer_op.skip_k_cache_insert` | set where the indexer is fused | the fused op has written the key |
| `MLAAttention`, `DeepseekV32IndexerCache` | an attribute, `dsafuse_plan` | an op finds its layer by name |

All of it can go when vLLM itself has an op for this seam that others may provide.

`forward` re-states vLLM's, and the opaque attention op the top-k part of `MLAAttention.forward_impl`; `host` holds a
digest of what they re-state. A layer on which nothing is fused runs vLLM's own forward, untouched.
"""

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name

from dsafuse import fused_qk_rope_concat_and_cache_mla, indexer_qk_rope_quant_and_cache
from dsafuse.vllm import counters, gates, host, plan
from dsafuse.vllm.torch_ops import define

KEY = "MultiHeadLatentAttentionWrapper"


def mla_prepare_and_attend(
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    topk_indices: torch.Tensor | None,
    output: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Absorb, prepare and write in one fused op, attend over the top-k rows, and project the values.

    q [tokens, heads, nope + rope] and k_pe [tokens, rope] are not rotated. topk_indices is here for the data
    dependency alone: the indexer must have filled it, and a compiler sees that only from an argument.
    """
    metadata, layer, kv_cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    if metadata is None or kv_cache.numel() == 0:  # a profiling run
        output.zero_()
        return
    # Rows beyond are padding for a graph's fixed size: nobody reads them, and their slots are negative.
    tokens = metadata.num_actual_tokens
    if tokens == 0:
        return
    call: plan.MlaCall = layer.dsafuse_plan.mla_call
    q, kv_c, k_pe, positions = q[:tokens], kv_c[:tokens], k_pe[:tokens], positions[:tokens]
    q_nope, q_pe = q.split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
    # Written through a transposed view, as vLLM does: the same bmm, and a token-major query.
    ql_nope = q.new_empty((tokens, layer.num_heads, layer.kv_lora_rank))
    torch.bmm(q_nope.transpose(0, 1), layer.W_UK_T, out=ql_nope.transpose(0, 1))
    if call.kv_layout == "fp8":
        kv_cache = kv_cache.view(call.fp8_dtype)
    query = fused_qk_rope_concat_and_cache_mla(
        ql_nope,
        q_pe,
        kv_c,
        k_pe,
        kv_cache,
        slots.flatten()[:tokens] if slots is not None else positions.new_empty(0),
        positions,
        cos_sin_cache,
        rope_style=call.rope_style,
        kv_layout=call.kv_layout,
        q_scale=layer._q_scale,
        k_scale=layer._k_scale,
        q_dtype=call.query_dtype,
        fp8_dtype=call.fp8_dtype,
    )
    counters.count("mla", "fused")
    attended, _ = layer.impl.forward_mqa(query, kv_cache, metadata, layer)
    layer._v_up_proj(attended, out=output[:tokens])


def indexer_prepare(
    q: torch.Tensor,
    k_and_weights: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    layer_name: LayerNameType,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare index query, head weights and key, and write the key. Returns (q fp8, weights fp32).

    q [tokens, heads, 128] and k_and_weights [tokens, 128 + heads], straight from their projections.
    """
    name = _resolve_layer_name(layer_name)
    context = get_forward_context()
    cache = context.no_compile_layers[name]
    call: plan.IndexerCall = cache.dsafuse_plan.indexer_call
    k, weights = k_and_weights.split([q.shape[-1], q.shape[1]], dim=-1)
    slots = context.slot_mapping.get(name) if isinstance(context.slot_mapping, dict) else None
    if cache.kv_cache.numel() == 0:  # a profiling run, before there are caches
        return torch.zeros_like(q, dtype=call.fp8_dtype), torch.zeros_like(weights, dtype=torch.float32)
    q_out, weights_out = indexer_qk_rope_quant_and_cache(
        q,
        weights,
        k,
        cache.kv_cache,
        slots.flatten()[: q.shape[0]] if slots is not None else positions.new_empty(0),
        norm_weight,
        norm_bias,
        positions,
        cos_sin_cache,
        weights_scale=call.weights_scale,
        eps=call.eps,
        rope_style=call.rope_style,
        kv_layout=call.kv_layout,
        scale_rule=call.scale_rule,
        fp8_dtype=call.fp8_dtype,
    )
    counters.count("indexer", "fused")
    return q_out, weights_out


def _fake_indexer_prepare(
    q: torch.Tensor, k_and_weights: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        q.new_empty(q.shape, dtype=gates.fp8_dtype()),
        q.new_empty(q.shape[:2], dtype=torch.float32),
    )


class FusedMultiHeadLatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's wrapper with a plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dsafuse_plan = plan.build(self, get_current_vllm_config())
        if self.dsafuse_plan.mla.fused:
            self.mla_attn.dsafuse_plan = self.dsafuse_plan
        if self.dsafuse_plan.indexer.fused:
            self.indexer.k_cache.dsafuse_plan = self.dsafuse_plan
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
        if self.dsafuse_plan.mla.fused:
            self._index(hidden_states, q_c, positions)
            attended = self._prepare_and_attend(q, kv_c, k_pe, positions)
        else:
            # vLLM rotates before it indexes; the two do not depend on each other.
            rotary = slice(self.qk_nope_head_dim, None)
            q[..., rotary], k_pe = self.rotary_emb(positions, q[..., rotary], k_pe.unsqueeze(1))
            self._index(hidden_states, q_c, positions)
            attended = self.mla_attn(q, kv_c, k_pe, output_shape=(q.shape[0], self.num_heads * self.v_head_dim))
        if self.g_proj is not None:
            attended = attended * self.g_proj(hidden_states)[0].sigmoid()
        return self._tensor(self.o_proj(attended)[0])

    def _index(self, hidden_states: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor) -> None:
        """Choose this layer's tokens, unless it takes over another layer's choice."""
        if self.indexer is not None and not self.skip_topk:
            if self.dsafuse_plan.indexer.fused:
                self._prepare_and_choose(hidden_states, q_c, positions)
            else:
                self.indexer(hidden_states, q_c, positions, self.indexer_rope_emb)
        self.mla_attn.impl.record_logical_topk_ready()

    def _prepare_and_choose(self, hidden_states: torch.Tensor, q_c: torch.Tensor, positions: torch.Tensor) -> None:
        indexer = self.indexer
        q = indexer.wq_b(q_c)[0].view(-1, indexer.n_head, indexer.head_dim)
        q_fp8, weights = torch.ops.dsafuse.indexer_prepare(
            q,
            indexer.wk_weights_proj(hidden_states)[0],
            indexer.k_norm.weight,
            indexer.k_norm.bias,
            positions,
            self.indexer_rope_emb.cos_sin_cache,
            _encode_layer_name(indexer.k_cache.prefix),
        )
        indexer.indexer_op(hidden_states, q_fp8, None, weights)

    def _prepare_and_attend(
        self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        output = q.new_empty((q.shape[0], self.num_heads * self.v_head_dim))
        torch.ops.dsafuse.mla_prepare_and_attend(
            q,
            kv_c,
            k_pe,
            positions,
            self.rotary_emb.cos_sin_cache,
            self.mla_attn.impl.topk_indices_buffer,
            output,
            _encode_layer_name(self.mla_attn.layer_name),
        )
        return output

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


# The order of the two wrappers is vLLM's: the eager break outermost, so that a KV connector's waiting and saving are
# not recorded into a graph.
_attend = eager_break_during_capture(maybe_transfer_kv_layer(mla_prepare_and_attend))
define("mla_prepare_and_attend", _attend, lambda *args: None, mutates=["output"])
define("indexer_prepare", indexer_prepare, _fake_indexer_prepare, mutates=[])


def install() -> list[str]:
    """Register the class once per process. Returns why not, or an empty list."""
    holder = op_registry_oot.get(KEY)
    if holder is FusedMultiHeadLatentAttentionWrapper:
        return []
    if holder is not None:
        return [host.taken(KEY, holder)]
    PluggableLayer.register_oot(name=KEY)(FusedMultiHeadLatentAttentionWrapper)
    return []

"""The hook: vLLM's MLA wrapper, with the preparation of queries and keys done by the fused ops.

| touched | how | why |
|---|---|---|
| `MultiHeadLatentAttentionWrapper` | `PluggableLayer.register_oot`, official | it calls rope, indexer and attention |
| `indexer_op.skip_k_cache_insert` | set where the indexer is fused | the fused op has written the key |
| `MLAAttention`, `DeepseekV32IndexerCache` | an attribute, `dsafuse` | an op finds its layer by name |
| `compilation_config.splitting_ops` | appended to | piecewise graphs split at our ops |
| `additional_config["dsafuse"]` | set | vLLM's compile cache tells plans apart |
| FlashMLA's sparse impl | a shallow copy that is told the padded width | it would pad the query with a copy |

All of it can go when vLLM itself has an op for this seam that others may provide.

A layer with both fusions runs three opaque ops in a row, the middle one vLLM's:

    qk_prepare      absorb (bmm), then prepare_qk in one launch: query, index query, weights, both cache rows
    indexer_op      scores and top-k
    mla_attend      attention over the chosen rows, and the value projection (bmm)

A layer that shares another layer's top-k has no indexer, nor has a dense MLA layer (DeepSeek-V3, R1);
`mla_prepare_and_attend` is the first and last in one.

vLLM attends densely to the tokens of a short prefill, on a dense layer of every prefill (`forward_mha`). These have no
absorbed query; for them the attention op does what vLLM does, with vLLM's own functions: rotate, write, attend.

`forward` re-states vLLM's, and the opaque ops the parts of `MLAAttention.forward_impl` that are used here; `host` holds
digests of what they re-state. A layer on which nothing is fused runs vLLM's own forward, untouched.
"""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import get_current_vllm_config
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name
from vllm.v1.worker.ubatching import dbo_current_ubatch_id

from dsafuse import fused_qk_rope_concat_and_cache_mla, indexer_qk_rope_quant_and_cache, prepare_qk
from dsafuse.layouts import MLA_LAYOUTS
from dsafuse.vllm import counters, host, plan
from dsafuse.vllm.buffers import QueryBuffer, query_buffer
from dsafuse.vllm.torch_ops import define

KEY = "MultiHeadLatentAttentionWrapper"

# Of a cache row, in elements of the tensor that vLLM makes.
MLA_WIDTHS = {name: 576 if name == "plain" else layout.row_bytes() for name, layout in MLA_LAYOUTS.items()}


@dataclass(frozen=True)
class Layer:
    """What the ops of a layer find at its MLAAttention, under the attribute `dsafuse`.

    impl: vLLM's, or a copy of it that takes the padded query. indexer: name of the indexer's cache, if there is one.
    No module of vLLM's becomes a child of another by this: a dataclass is no Module.
    """

    plan: plan.LayerPlan
    query: QueryBuffer
    impl: Any
    rotary: Any
    indexer: str | None
    block_size: int


def qk_prepare(
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    index_q: torch.Tensor,
    k_and_weights: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    index_cos_sin_cache: torch.Tensor,
    index_q_out: torch.Tensor,
    weights_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Prepare everything of a layer that has an indexer, in one launch behind the absorbing bmm.

    q [tokens, heads, nope + rope], k_pe [tokens, rope] and index_q [tokens, index heads, 128] are not rotated;
    k_and_weights [tokens, 128 + index heads], straight from their projection. Writes index_q_out (fp8), weights_out
    (fp32), both caches, and the layer's query buffer, from which `mla_attend` reads.
    """
    metadata, layer, kv_cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    mla = MlaInputs(q, kv_c, k_pe, positions, cos_sin_cache)
    index = IndexInputs(
        index_q, k_and_weights, norm_weight, norm_bias, positions, index_cos_sin_cache, index_q_out, weights_out
    )
    if kv_cache.numel() == 0:  # a profiling run, before there are caches
        _rehearse(layer, mla, index)
    if metadata is None or kv_cache.numel() == 0:
        index_q_out.zero_()
        weights_out.zero_()
        return
    tokens = metadata.num_actual_tokens
    if tokens == 0:
        return
    index_name = layer.dsafuse.indexer
    assert index_name is not None
    index_metadata, _, index_cache, _ = get_attention_context(index_name)
    index_slots = index_metadata.slot_mapping  # where vLLM's indexer op looks for them
    dense = _dense_tokens(layer, metadata)
    if not dense:
        _prepare_both(layer, tokens, mla, kv_cache, slots, index, index_cache, index_slots)
        counters.count("prepare_qk", "fused")
    else:
        _prepare_index(layer.dsafuse.plan.indexer_call, tokens, index, index_cache, index_slots)
        if dense < tokens:
            _prepare_mla(layer, tokens - dense, mla, kv_cache, slots)
        counters.count("prepare_qk", "fallback")
    counters.count("indexer", "fused")
    if dense < tokens:
        counters.count("mla", "fused")


def mla_attend(
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    topk_indices: torch.Tensor | None,
    output: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Attend with the query that `qk_prepare` left in the layer's buffer, and project the values.

    topk_indices is here for the data dependency alone: the indexer must have filled it, and a compiler sees that only
    from an argument. The indexer in turn depends on what `qk_prepare` wrote.
    """
    metadata, layer, kv_cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    if metadata is None or kv_cache.numel() == 0:
        output.zero_()
        return
    _attend(layer, metadata, kv_cache, slots, q, kv_c, k_pe, positions, output)


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
    """Absorb, prepare and write in one fused op, attend, and project the values: a layer whose MLA part is alone.

    Arguments as in `qk_prepare` and `mla_attend`.
    """
    metadata, layer, kv_cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    mla = MlaInputs(q, kv_c, k_pe, positions, cos_sin_cache)
    if kv_cache.numel() == 0:
        _rehearse(layer, mla, None)
    if metadata is None or kv_cache.numel() == 0:
        output.zero_()
        return
    # Rows beyond are padding for a graph's fixed size: nobody reads them, and their slots are negative.
    if metadata.num_actual_tokens == 0:
        return
    tokens = metadata.num_actual_tokens - _dense_tokens(layer, metadata)
    if tokens:
        _prepare_mla(layer, tokens, mla, kv_cache, slots)
        counters.count("mla", "fused")
    _attend(layer, metadata, kv_cache, slots, q, kv_c, k_pe, positions, output)


def indexer_prepare(
    q: torch.Tensor,
    k_and_weights: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_out: torch.Tensor,
    weights_out: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Prepare index query, head weights and key, and write the key: a layer whose indexer alone is fused.

    Arguments as in `qk_prepare`. The layer's name is that of the indexer's cache.
    """
    metadata, layer, cache, _ = get_attention_context(_resolve_layer_name(layer_name))
    if metadata is None or cache.numel() == 0:
        q_out.zero_()
        weights_out.zero_()
        return
    index = IndexInputs(q, k_and_weights, norm_weight, norm_bias, positions, cos_sin_cache, q_out, weights_out)
    _prepare_index(layer.dsafuse.indexer_call, q.shape[0], index, cache, metadata.slot_mapping)
    counters.count("indexer", "fused")


class MlaInputs(NamedTuple):
    """What the MLA op of a layer reads, as the projections leave it."""

    q: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor


class IndexInputs(NamedTuple):
    """What the indexer's op of a layer reads, and the memory of its outputs."""

    q: torch.Tensor
    k_and_weights: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    q_out: torch.Tensor
    weights_out: torch.Tensor

    def parts(self, tokens: int) -> list[Any]:
        """(query, head weights, key) of the first tokens."""
        k, weights = self.k_and_weights[:tokens].split([self.q.shape[-1], self.q.shape[1]], dim=-1)
        return [self.q[:tokens], weights, k]


def _mla_arguments(
    layer: Any, tokens: int, given: MlaInputs, kv_cache: torch.Tensor, slots: torch.Tensor | None
) -> tuple[list[Any], dict[str, Any]]:
    """What the MLA op takes for the first tokens; prepare_qk takes the same, and then the indexer's."""
    call = layer.dsafuse.plan.mla_call
    q, positions = given.q[:tokens], given.positions[:tokens]
    return [
        _absorbed(layer, q),
        q[..., layer.qk_nope_head_dim :],
        given.kv_c[:tokens],
        given.k_pe[:tokens],
        _cache(kv_cache, call),
        _slots(slots, positions, tokens),
        positions,
        given.cos_sin_cache,
    ], {
        "rope_style": call.rope_style,
        "kv_layout": call.kv_layout,
        "q_scale": layer._q_scale,
        "k_scale": layer._k_scale,
        "q_out": _query_rows(layer.dsafuse, q, tokens),
        "q_dtype": call.query_dtype,
        "fp8_dtype": call.fp8_dtype,
    }


def _prepare_mla(layer: Any, tokens: int, given: MlaInputs, kv_cache: torch.Tensor, slots: torch.Tensor | None) -> None:
    """The MLA op alone, over the first tokens."""
    arguments, options = _mla_arguments(layer, tokens, given, kv_cache, slots)
    fused_qk_rope_concat_and_cache_mla(*arguments, **options)


def _prepare_index(call: Any, tokens: int, given: IndexInputs, cache: torch.Tensor, slots: torch.Tensor | None) -> None:
    """The indexer's op alone, over the first tokens."""
    positions = given.positions[:tokens]
    arguments = [
        *given.parts(tokens),
        cache,
        _slots(slots, positions, tokens),
        given.norm_weight,
        given.norm_bias,
        positions,
        given.cos_sin_cache,
    ]
    indexer_qk_rope_quant_and_cache(
        *arguments,
        weights_scale=call.weights_scale,
        eps=call.eps,
        rope_style=call.rope_style,
        kv_layout=call.kv_layout,
        scale_rule=call.scale_rule,
        q_out=given.q_out[:tokens],
        weights_out=given.weights_out[:tokens],
        fp8_dtype=call.fp8_dtype,
    )


def _prepare_both(
    layer: Any,
    tokens: int,
    mla: MlaInputs,
    kv_cache: torch.Tensor,
    slots: torch.Tensor | None,
    index: IndexInputs,
    index_cache: torch.Tensor,
    index_slots: torch.Tensor | None,
) -> None:
    """Both ops in one launch, over the first tokens."""
    call = layer.dsafuse.plan.indexer_call
    arguments, options = _mla_arguments(layer, tokens, mla, kv_cache, slots)
    arguments += [
        *index.parts(tokens),
        index_cache,
        _slots(index_slots, index.positions, tokens),
        index.norm_weight,
        index.norm_bias,
        index.cos_sin_cache,
    ]
    prepare_qk(
        *arguments,
        **options,
        index_q_out=index.q_out[:tokens],
        index_weights_out=index.weights_out[:tokens],
        index_weights_scale=call.weights_scale,
        index_eps=call.eps,
        index_rope_style=call.rope_style,
        index_kv_layout=call.kv_layout,
        index_scale_rule=call.scale_rule,
    )


_REHEARSED: set[tuple[Any, ...]] = set()


def _compiles(tensor: torch.Tensor) -> bool:
    """Whether kernels are compiled for this tensor; interpreted ones are not, and would only take time."""
    return tensor.is_cuda


def _rehearse(layer: Any, mla: MlaInputs, index: IndexInputs | None) -> None:
    """Take the query's memory and compile the layer's kernels, in vLLM's profiling run, before there are caches.

    Without it the first prefills would wait for Triton. Each launch that a batch may need is made once per kind of
    layer, for one token and for all, on caches of one block, without slots: so nothing is written but outputs.
    """
    state: Layer = layer.dsafuse
    tokens = mla.q.shape[0]
    _query_rows(state, mla.q, tokens)
    index_heads = None if index is None else index.q.shape[1]
    key = (
        *(str(state.plan), state.plan.mla_call, state.plan.indexer_call, index_heads, state.block_size),
        *(mla.q.shape, mla.q.dtype, mla.q.device),
    )
    if not _compiles(mla.q) or key in _REHEARSED or not tokens:
        return
    _REHEARSED.add(key)
    call = state.plan.mla_call
    assert call is not None
    dtype = mla.q.dtype if call.kv_layout == "plain" else torch.uint8
    kv_cache = torch.empty((1, state.block_size, MLA_WIDTHS[call.kv_layout]), dtype=dtype, device=mla.q.device)
    for count in sorted({1, tokens}):
        _prepare_mla(layer, count, mla, kv_cache, None)
        if index is not None:
            shape = (1, state.block_size, index.q.shape[-1] + 4)
            index_cache = torch.empty(shape, dtype=torch.uint8, device=mla.q.device)
            _prepare_index(state.plan.indexer_call, count, index, index_cache, None)
            _prepare_both(layer, count, mla, kv_cache, None, index, index_cache, None)


def _attend(
    layer: Any,
    metadata: Any,
    kv_cache: torch.Tensor,
    slots: torch.Tensor | None,
    q: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """The attention of `MLAAttention.forward_impl`, with the query and the cache rows prepared already.

    A dense prefill comes first there, too. It writes cache rows that only its own requests read later.
    """
    state: Layer = layer.dsafuse
    tokens = metadata.num_actual_tokens
    dense = _dense_tokens(layer, metadata)
    call = state.plan.mla_call
    assert call is not None
    cache = _cache(kv_cache, call)
    if dense:
        rows = slice(tokens - dense, tokens)
        # The rotary module may work in place, and q belongs to the caller.
        q_nope, q_pe = q[rows].split([layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        q_pe, key_pe = state.rotary(positions[rows], q_pe.clone(), k_pe[rows].unsqueeze(1).clone())
        if slots is not None:
            layer.impl.do_kv_cache_update(
                kv_c[rows], key_pe, kv_cache, slots.flatten()[rows], layer.kv_cache_dtype, layer._k_scale
            )
        if getattr(layer.impl, "dcp_world_size", 1) == -1:  # vLLM 0.26 asks at the first call; a gate says it is 1
            layer.impl.dcp_world_size = 1
        layer.impl.forward_mha(
            torch.cat([q_nope, q_pe], dim=-1), kv_c[rows], key_pe, cache, metadata, layer._k_scale, output=output[rows]
        )
        counters.count("dense_prefill", "fallback")
    if dense < tokens:
        query: Any = _query_rows(state, q, tokens - dense)
        if call.query_form == "pair":
            query = query.split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
        attended, _ = state.impl.forward_mqa(query, cache, metadata, layer)
        layer._v_up_proj(attended[:, : layer.num_heads], out=output[: tokens - dense])


def _dense_tokens(layer: Any, metadata: Any) -> int:
    """How many of the batch's last tokens vLLM attends to densely, as `MLAAttention.forward_impl` decides it."""
    prefill = metadata.num_actual_tokens - metadata.num_decode_tokens
    if not prefill or not layer.impl.is_sparse:
        return int(prefill)
    decide = getattr(layer, "_use_sparse_mha", None)
    if decide is None:  # vLLM 0.26 decides in line
        dense = (
            layer.prefill_backend is not None
            and metadata.prefill_max_seq_len <= metadata.topk_tokens
            and not layer._vllm_config.attention_config.sparse_mla_force_mqa
        )
    else:
        dense = decide(metadata)
    return int(prefill) if dense else 0


def _absorbed(layer: Any, q: torch.Tensor) -> torch.Tensor:
    """ql_nope [tokens, heads, 512] = q_nope x W_UK_T, which is read anew: reloading weights replaces it.

    Written through a transposed view, as vLLM 0.32 does: one bmm, and a token-major result.
    """
    tokens, heads, _ = q.shape
    result = q.new_empty((tokens, heads, layer.kv_lora_rank))
    q_nope = q[..., : layer.qk_nope_head_dim].transpose(0, 1)
    torch.bmm(q_nope, layer.W_UK_T, out=result.transpose(0, 1))
    return result


def _query_rows(state: Layer, q: torch.Tensor, tokens: int) -> torch.Tensor:
    return state.query.rows(tokens, dbo_current_ubatch_id(), q.device)


def _slots(slots: torch.Tensor | None, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """The step's slots; none if vLLM has none for the layer."""
    return slots.flatten()[:tokens] if slots is not None else positions.new_empty(0)


def _cache(kv_cache: torch.Tensor, call: Any) -> torch.Tensor:
    """vLLM keeps per-tensor fp8 as bytes."""
    return kv_cache.view(call.fp8_dtype) if call.kv_layout == "fp8" else kv_cache


class FusedMultiHeadLatentAttentionWrapper(MultiHeadLatentAttentionWrapper):
    """vLLM's wrapper with a plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = get_current_vllm_config()
        made = self.dsafuse_plan = plan.build(self, config)
        # What a version may lack. Looked up once: forward is traced.
        self._gated = getattr(self, "g_proj", None) is not None
        self._records_topk = hasattr(self.mla_attn.impl, "record_logical_topk_ready")
        if made.mla_call is not None:
            heads = made.mla_call.query_heads
            impl = self.mla_attn.impl
            if heads != self.num_heads:
                impl = copy.copy(impl)
                impl.num_heads = heads
            self.mla_attn.dsafuse = Layer(
                made,
                query_buffer(config, heads, made.mla_call.query_dtype),
                impl,
                self.rotary_emb,
                self.indexer.k_cache.prefix if made.indexer.fused else None,
                config.cache_config.block_size,
            )
        if made.indexer.fused:
            self.indexer.k_cache.dsafuse = made
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
            name,
        )
        self._run_indexer(hidden_states, index_q_out, k_and_weights, weights_out)
        self._topk_is_ready()
        torch.ops.dsafuse.mla_attend(q, kv_c, k_pe, positions, self.mla_attn.impl.topk_indices_buffer, output, name)
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
        self, hidden_states: torch.Tensor, q: torch.Tensor, k_and_weights: torch.Tensor, weights: torch.Tensor
    ) -> None:
        # The key is written already. vLLM 0.26's op wants a tensor in its place all the same, and reads none of it.
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


# The order of the two wrappers is vLLM's: the eager break outermost, so that a KV connector's waiting and saving are
# not recorded into a graph. What only prepares is broken at, too: it reads the batch.
for _op, _mutates in (
    (eager_break_during_capture(qk_prepare), ["index_q_out", "weights_out"]),
    (eager_break_during_capture(maybe_transfer_kv_layer(mla_attend)), ["output"]),
    (eager_break_during_capture(maybe_transfer_kv_layer(mla_prepare_and_attend)), ["output"]),
    (eager_break_during_capture(indexer_prepare), ["q_out", "weights_out"]),
):
    define(_op.__name__, _op, lambda *args: None, mutates=_mutates)


def install() -> list[str]:
    """Register the class once per process. Returns why not, or an empty list."""
    holder = op_registry_oot.get(KEY)
    if holder is FusedMultiHeadLatentAttentionWrapper:
        return []
    if holder is not None:
        return [host.taken(KEY, holder)]
    PluggableLayer.register_oot(name=KEY)(FusedMultiHeadLatentAttentionWrapper)
    return []

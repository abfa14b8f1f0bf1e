"""The opaque ops of the wrapper path: what runs of a layer between its projections.

A layer with both fusions runs three in a row, the middle one vLLM's:

    qk_prepare      absorb (bmm), then prepare_qk in one launch: query, index query, weights, both cache rows, and -1
                    in the top-k rows
    indexer_op      scores and top-k
    mla_attend      attention over the chosen rows, and the value projection (bmm)

A layer that shares another layer's top-k has no indexer, nor has a dense MLA layer (DeepSeek-V3, R1);
`mla_prepare_and_attend` is the first and last in one.

vLLM attends densely to the tokens of a short prefill, on a dense layer of every prefill (`forward_mha`). These have no
absorbed query. In such a batch the first launch takes no queries and every key (`prepare_keys`), a second the queries
of the decodes, and the attention op rotates the rest into a copy.

They re-state the parts of `MLAAttention.forward_impl` that are used here; `host` holds digests of what they re-state.
"""

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

from dsafuse.vllm import counters
from dsafuse.vllm.launches import (
    IndexInputs,
    IndexLayer,
    Layer,
    MlaInputs,
    buffer_rows,
    cache_of,
    prepare_both,
    prepare_index,
    prepare_keys,
    prepare_mla,
    prepare_mla_queries,
    rotated,
)
from dsafuse.vllm.rehearsal import rehearse, rehearse_index
from dsafuse.vllm.torch_ops import define


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
    topk_indices: torch.Tensor | None,
    layer_name: LayerNameType,
) -> None:
    """Prepare everything of a layer that has an indexer, in one launch behind the absorbing bmm.

    q [tokens, heads, nope + rope], k_pe [tokens, rope] and index_q [tokens, index heads, 128] are not rotated;
    k_and_weights [tokens, 128 + index heads], straight from their projection. Writes index_q_out (fp8), weights_out
    (fp32), both caches, and the layer's query buffer, from which `mla_attend` reads.

    topk_indices: [>= tokens, topk] int32, the buffer of vLLM's indexer op, whose rows [0, tokens) become -1, padding
    included, as by its own fill: where drafts have unlike lengths, its top-k writes and reads rows beyond the batch.
    None where vLLM's op fills them. A step without a batch, or without tokens, leaves them: nobody reads them then.
    """
    metadata, layer, kv_cache, slots = get_attention_context(_resolve_layer_name(layer_name))
    mla = MlaInputs(q, kv_c, k_pe, positions, cos_sin_cache)
    index = IndexInputs(
        index_q,
        k_and_weights,
        norm_weight,
        norm_bias,
        positions,
        index_cos_sin_cache,
        index_q_out,
        weights_out,
        topk_indices,
    )
    if kv_cache.numel() == 0:  # a profiling run, before there are caches
        rehearse(layer, mla, index)
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
    if dense:
        prepare_keys(layer, tokens, mla, kv_cache, slots, index, index_cache, index_slots)
        prepare_mla_queries(layer, tokens - dense, mla)
    else:
        prepare_both(layer, tokens, mla, kv_cache, slots, index, index_cache, index_slots)
    if topk_indices is not None and tokens < len(q):  # eager steps and piecewise graphs; others are captured full
        topk_indices[tokens : len(q)].fill_(-1)
    counters.count("prepare_qk", "fallback" if dense else "fused")
    counters.count("indexer", "fused")
    counters.count("mla", "fused")


def mla_attend(
    q: torch.Tensor,
    kv_c: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    topk_indices: torch.Tensor | None,
    output: torch.Tensor,
    layer_name: LayerNameType,
) -> None:
    """Attend with what `qk_prepare` left in the layer's buffers, and project the values.

    topk_indices is here for the data dependency alone: the indexer must have filled it, and a compiler sees that only
    from an argument. The indexer in turn depends on what `qk_prepare` wrote.
    """
    metadata, layer, kv_cache, _ = get_attention_context(_resolve_layer_name(layer_name))
    if metadata is None or kv_cache.numel() == 0:
        _without_batch(layer, kv_c, output)
        return
    _attend(layer, metadata, kv_cache, MlaInputs(q, kv_c, None, positions, cos_sin_cache), output)


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
        rehearse(layer, mla, None)
    if metadata is None or kv_cache.numel() == 0:
        _without_batch(layer, kv_c, output)
        return
    # Rows beyond are padding for a graph's fixed size: nobody reads them, and their slots are negative.
    tokens = metadata.num_actual_tokens
    if tokens == 0:
        return
    if dense := _dense_tokens(layer, metadata):
        prepare_keys(layer, tokens, mla, kv_cache, slots)
        prepare_mla_queries(layer, tokens - dense, mla)
    else:
        prepare_mla(layer, tokens, mla, kv_cache, slots)
    counters.count("mla", "fused")
    _attend(layer, metadata, kv_cache, mla, output)


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
    state: IndexLayer = layer.dsafuse
    index = IndexInputs(q, k_and_weights, norm_weight, norm_bias, positions, cos_sin_cache, q_out, weights_out)
    if cache.numel() == 0:
        rehearse_index(state, index)
    if metadata is None or cache.numel() == 0:
        q_out.zero_()
        weights_out.zero_()
        return
    prepare_index(state.call, q.shape[0], index, cache, metadata.slot_mapping)
    counters.count("indexer", "fused")


def _without_batch(layer: Any, kv_c: torch.Tensor, output: torch.Tensor) -> None:
    """Zeros; and, as vLLM does there, the memory that a dense prefill takes for its context's keys and values.

    vLLM measures memory in such a call. Caches that leave no room for this would make a later prefill fail.
    """
    shape = (layer.chunked_prefill_workspace_size, layer.num_heads, layer.qk_nope_head_dim + layer.v_head_dim)
    kv_c.new_empty(shape)
    output.zero_()


def _attend(layer: Any, metadata: Any, kv_cache: torch.Tensor, given: MlaInputs, output: torch.Tensor) -> None:
    """The attention of `MLAAttention.forward_impl`, with queries and cache rows prepared already.

    A dense prefill comes first there, too. Of `given` it takes what its own tokens need.
    """
    state: Layer = layer.dsafuse
    tokens = metadata.num_actual_tokens
    dense = _dense_tokens(layer, metadata)
    call = state.plan.mla_call
    assert call is not None
    cache = cache_of(kv_cache, call)
    if getattr(layer.impl, "dcp_world_size", 1) == -1:  # vLLM 0.26 asks at the first call; a gate says it is 1
        layer.impl.dcp_world_size = 1
    if dense:
        rows = slice(tokens - dense, tokens)
        key_pe = buffer_rows(state.keys, given.kv_c, tokens)[rows, :, layer.kv_lora_rank :]
        layer.impl.forward_mha(
            rotated(layer, rows, given),
            given.kv_c[rows],
            key_pe,
            cache,
            metadata,
            layer._k_scale,
            output=output[rows],
        )
        counters.count("dense_prefill", "fused")
    if dense < tokens:
        query: Any = buffer_rows(state.query, given.q, tokens - dense)
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


# The order of the two wrappers is vLLM's: the eager break outermost, so that a KV connector's waiting and saving are
# not recorded into a graph. What only prepares is broken at, too: it reads the batch.
for _op, _mutates in (
    (eager_break_during_capture(qk_prepare), ["index_q_out", "weights_out", "topk_indices"]),
    (eager_break_during_capture(maybe_transfer_kv_layer(mla_attend)), ["output"]),
    (eager_break_during_capture(maybe_transfer_kv_layer(mla_prepare_and_attend)), ["output"]),
    (eager_break_during_capture(indexer_prepare), ["q_out", "weights_out"]),
):
    define(_op.__name__, _op, lambda *args: None, mutates=_mutates)

"""The fused launches that a layer's batch is made of: which op takes which rows, and where the outputs go."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from vllm.v1.worker.ubatching import dbo_current_ubatch_id
from vllm.v1.worker.utils import select_common_block_size

from dsafuse import (
    fused_qk_rope_concat_and_cache_mla,
    indexer_qk_rope_quant_and_cache,
    prepare_qk,
    prepare_queries,
)
from dsafuse.vllm import plan
from dsafuse.vllm.buffers import QueryBuffer


class Blocks(NamedTuple):
    """What says how many tokens a block of a layer's caches will hold.

    config: vLLM's CacheConfig. Its block_size is settled when the model is loaded, after its layers are built.
    backends: of the layer's caches. Where they take other blocks than vLLM manages, their kernels see smaller ones.
    """

    config: Any
    backends: tuple[Any, ...]

    @property
    def size(self) -> int:
        """Tokens of a block, as kernels see it. Not to be asked before the model is loaded."""
        found: int = select_common_block_size(self.config.block_size, list(self.backends))
        return found


@dataclass(frozen=True)
class Layer:
    """What the ops of a layer find at its MLAAttention, under the attribute `dsafuse`.

    keys: [tokens, 1, 576], the keys of a batch that is attended densely in part, rotated, as they were before the cache
    quantised them. impl: vLLM's, or a copy of it that takes the padded query. indexer: name of the indexer's cache, if
    there is one. blocks: of both caches.
    """

    plan: plan.LayerPlan
    query: QueryBuffer
    keys: QueryBuffer
    impl: Any
    indexer: str | None
    blocks: Blocks


class IndexLayer(NamedTuple):
    """What the indexer's op finds at its cache, under the attribute `dsafuse`."""

    call: plan.IndexerCall
    blocks: Blocks


class MlaInputs(NamedTuple):
    """What the MLA op of a layer reads, as the projections leave it; no k_pe where it is in the caches already."""

    q: torch.Tensor
    kv_c: torch.Tensor
    k_pe: torch.Tensor | None
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor


class IndexInputs(NamedTuple):
    """What the indexer's op of a layer reads, and the memory of its outputs.

    topk: the top-k rows of vLLM's indexer op, which follows; a launch of prepare_qk clears those of its tokens. None
    where vLLM's op does it.
    """

    q: torch.Tensor
    k_and_weights: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    positions: torch.Tensor
    cos_sin_cache: torch.Tensor
    q_out: torch.Tensor
    weights_out: torch.Tensor
    topk: torch.Tensor | None = None

    def parts(self, tokens: int) -> list[Any]:
        """(query, head weights, key) of the first tokens."""
        k, weights = self.k_and_weights[:tokens].split([self.q.shape[-1], self.q.shape[1]], dim=-1)
        return [self.q[:tokens], weights, k]


def _latents(
    layer: Any, tokens: int, given: MlaInputs, kv_cache: torch.Tensor, slots: torch.Tensor | None
) -> tuple[list[Any], dict[str, Any]]:
    """What the MLA op takes behind its query for the first tokens. In prepare_qk the indexer's follow."""
    call = layer.dsafuse.plan.mla_call
    assert given.k_pe is not None
    positions = given.positions[:tokens]
    return [
        given.kv_c[:tokens],
        given.k_pe[:tokens],
        cache_of(kv_cache, call),
        _slots(slots, positions, tokens),
        positions,
        given.cos_sin_cache,
    ], {
        "rope_style": call.rope_style,
        "kv_layout": call.kv_layout,
        "k_scale": layer._k_scale,
        "scale_rule": call.scale_rule,
        "fp8_dtype": call.fp8_dtype,
    }


def _query(layer: Any, tokens: int, given: MlaInputs) -> tuple[list[Any], dict[str, Any]]:
    """The absorbed query of the first tokens, its rotary part, and where they go."""
    call, q = layer.dsafuse.plan.mla_call, given.q[:tokens]
    return [_absorbed(layer, q), q[..., layer.qk_nope_head_dim :]], {
        "q_scale": layer._q_scale,
        "q_out": buffer_rows(layer.dsafuse.query, q, tokens),
        "q_dtype": call.query_dtype,
    }


def _index(
    layer: Any, tokens: int, given: IndexInputs, cache: torch.Tensor, slots: torch.Tensor | None
) -> tuple[list[Any], dict[str, Any]]:
    """What prepare_qk takes of the indexer for the first tokens."""
    call = layer.dsafuse.plan.indexer_call
    return [
        *given.parts(tokens),
        cache,
        _slots(slots, given.positions, tokens),
        given.norm_weight,
        given.norm_bias,
        given.cos_sin_cache,
    ], {
        "index_q_out": given.q_out[:tokens],
        "index_weights_out": given.weights_out[:tokens],
        "index_weights_scale": call.weights_scale,
        "index_eps": call.eps,
        "index_rope_style": call.rope_style,
        "index_kv_layout": call.kv_layout,
        "index_scale_rule": call.scale_rule,
        "topk_indices": given.topk,
    }


def prepare_mla(layer: Any, tokens: int, given: MlaInputs, kv_cache: torch.Tensor, slots: torch.Tensor | None) -> None:
    """The MLA op alone, over the first tokens."""
    query, query_options = _query(layer, tokens, given)
    latents, options = _latents(layer, tokens, given, kv_cache, slots)
    arguments, options = query + latents, query_options | options
    fused_qk_rope_concat_and_cache_mla(*arguments, **options)


def prepare_index(call: Any, tokens: int, given: IndexInputs, cache: torch.Tensor, slots: torch.Tensor | None) -> None:
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


def prepare_both(
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
    query, query_options = _query(layer, tokens, mla)
    latents, options = _latents(layer, tokens, mla, kv_cache, slots)
    indexed, index_options = _index(layer, tokens, index, index_cache, index_slots)
    arguments, options = query + latents + indexed, query_options | options | index_options
    prepare_qk(*arguments, **options)


def prepare_keys(
    layer: Any,
    tokens: int,
    mla: MlaInputs,
    kv_cache: torch.Tensor,
    slots: torch.Tensor | None,
    index: IndexInputs | None = None,
    index_cache: torch.Tensor | None = None,
    index_slots: torch.Tensor | None = None,
) -> None:
    """All of a batch but its attention queries, in one launch: cache rows, the indexer and its top-k rows, 16-bit keys.

    vLLM's dense attention reads rotated keys, which no op but the caches holds. A key is what a query of one head is,
    concat(latent, rotate(rope)), so it is passed as one: the bytes are those that the cache rounds.
    """
    arguments, options = _latents(layer, tokens, mla, kv_cache, slots)
    kv_c, k_pe = arguments[:2]
    arguments = [kv_c.unsqueeze(1), k_pe.unsqueeze(1), *arguments]
    options["q_out"] = buffer_rows(layer.dsafuse.keys, kv_c, tokens)
    if index is None:
        fused_qk_rope_concat_and_cache_mla(*arguments, **options)
    else:
        assert index_cache is not None
        indexed, index_options = _index(layer, tokens, index, index_cache, index_slots)
        arguments, options = arguments + indexed, options | index_options
        prepare_qk(*arguments, **options)


def prepare_mla_queries(layer: Any, tokens: int, given: MlaInputs) -> None:
    """The attention queries of the first tokens alone."""
    if not tokens:
        return
    call = layer.dsafuse.plan.mla_call
    (absorbed, q_pe), options = _query(layer, tokens, given)
    prepare_queries(
        absorbed,
        q_pe,
        given.positions[:tokens],
        given.cos_sin_cache,
        rope_style=call.rope_style,
        fp8_dtype=call.fp8_dtype,
        **options,
    )


def rotated(layer: Any, rows: slice, given: MlaInputs) -> torch.Tensor:
    """The query of some tokens as vLLM's dense attention takes it: [tokens, heads, nope + rope], a copy."""
    q, rope = given.q[rows], slice(layer.qk_nope_head_dim, None)
    result = q.clone(memory_format=torch.contiguous_format)
    prepare_queries(
        None,
        q[..., rope],
        given.positions[rows],
        given.cos_sin_cache,
        q_out=result[..., rope],
        rope_style=layer.dsafuse.plan.mla_call.rope_style,
    )
    return result


def _absorbed(layer: Any, q: torch.Tensor) -> torch.Tensor:
    """ql_nope [tokens, heads, 512] = q_nope x W_UK_T, which is read anew: reloading weights replaces it.

    Written through a transposed view, as vLLM 0.32 does: one bmm, and a token-major result.
    """
    tokens, heads, _ = q.shape
    result = q.new_empty((tokens, heads, layer.kv_lora_rank))
    q_nope = q[..., : layer.qk_nope_head_dim].transpose(0, 1)
    torch.bmm(q_nope, layer.W_UK_T, out=result.transpose(0, 1))
    return result


def buffer_rows(buffer: QueryBuffer, like: torch.Tensor, tokens: int) -> torch.Tensor:
    """[tokens, heads, 576]: the first rows of the running micro-batch's buffer."""
    return buffer.rows(tokens, dbo_current_ubatch_id(), like.device)


def _slots(slots: torch.Tensor | None, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """The step's slots; none if vLLM has none for the layer."""
    return slots.flatten()[:tokens] if slots is not None else positions.new_empty(0)


def cache_of(kv_cache: torch.Tensor, call: Any) -> torch.Tensor:
    """vLLM keeps per-tensor fp8 as bytes."""
    return kv_cache.view(call.fp8_dtype) if call.kv_layout == "fp8" else kv_cache

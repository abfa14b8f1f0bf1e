"""Compiling a layer's kernels ahead, in vLLM's profiling run: without it the first prefills would wait for Triton."""

from itertools import product
from typing import Any

import torch

from dsafuse.layouts import FLAT, MLA_LAYOUTS, CacheLayout
from dsafuse.vllm import gates
from dsafuse.vllm.launches import (
    IndexInputs,
    IndexLayer,
    Layer,
    MlaInputs,
    buffer_rows,
    prepare_both,
    prepare_index,
    prepare_keys,
    prepare_mla,
    prepare_mla_queries,
    rotated,
)
from dsafuse.vllm.model_path.functions import Functions, Kind

_REHEARSED: set[tuple[Any, ...]] = set()


def _new_to(key: tuple[Any, ...], q: torch.Tensor) -> bool:
    """Whether no kernels were compiled for such a layer and query."""
    if (key := (*key, q.shape, q.dtype, q.device)) in _REHEARSED:
        return False
    _REHEARSED.add(key)
    return True


def _compiles(tensor: torch.Tensor) -> bool:
    """Whether kernels are compiled for this tensor; interpreted ones are not, and would only take time."""
    return tensor.is_cuda and bool(len(tensor))


def rehearse(layer: Any, mla: MlaInputs, index: IndexInputs | None) -> None:
    """Take the buffers' memory and compile the layer's kernels, in vLLM's profiling run, before there are caches.

    Each launch that a batch may need is made once per kind of layer, on caches of one block, without slots: so nothing
    is written but outputs.
    """
    state: Layer = layer.dsafuse
    tokens = len(mla.q)
    for buffer in (state.query, state.keys):
        buffer_rows(buffer, mla.q, tokens)
    if not _compiles(mla.q):
        return
    call, block_size = state.plan.mla_call, state.blocks.size
    assert call is not None
    widths = None if index is None else (index.q.shape[1], None if index.topk is None else index.topk.shape[1])
    if not _new_to((str(state.plan), call, state.plan.indexer_call, widths, block_size), mla.q):
        return
    kv_cache = _mla_block(mla.q, MLA_LAYOUTS[call.kv_layout], block_size)
    indexed = () if index is None else (index, _index_block(index.q, block_size), None)
    if indexed:
        prepare_both(layer, tokens, mla, kv_cache, None, *indexed)
    else:
        prepare_mla(layer, tokens, mla, kv_cache, None)
    prepare_keys(layer, tokens, mla, kv_cache, None, *indexed)
    prepare_mla_queries(layer, tokens, mla)
    rotated(layer, slice(tokens), mla)


def rehearse_index(state: IndexLayer, index: IndexInputs) -> None:
    """The same for the indexer's op where it is alone."""
    if not _compiles(index.q):
        return
    block_size = state.blocks.size
    if _new_to((state.call, block_size), index.q):
        prepare_index(state.call, len(index.q), index, _index_block(index.q, block_size), None)


def rehearse_latents(functions: Functions, given: tuple[Any, ...], options: dict[str, Any]) -> None:
    """On vLLM's own fused model, before q_b: each kind of call that is ours and that such a layer may make.

    given, options: the call of `fused_norm_rope` in the profiling run. Behind it a draft's layer may leave out its
    indexer, and AMD's class asks for the keys where a prefill is attended densely.
    """
    q_c, kv_c, k_pe, word = given[1], given[4], given[7], options["mla_kv_cache_dtype"]
    if not _compiles(q_c):
        return
    block_size = functions.blocks[word].size
    asked = [options]
    if options.get("kv_c_out", kv_c) is None:
        asked.append(options | {"kv_c_out": torch.empty_like(kv_c), "k_pe_out": torch.empty_like(k_pe)})
    caches = {
        "mla_kv_cache": _mla_block(q_c, MLA_LAYOUTS[gates.MLA_LAYOUTS.get(word, "plain")], block_size),
        "indexer_k_cache": _index_block(q_c, block_size),
        "mla_k_scale": q_c.new_ones((), dtype=torch.float32),
        "slot_mapping": q_c.new_full((len(q_c),), -1, dtype=torch.int64),
        "indexer_slot_mapping": None,
    }
    for indexed in {options["has_indexer"], False}:
        index = (options["index_rope_interleave"], options.get("indexer_cache_shuffled"), given[-1].shape[1])
        ours = functions.latents.get((indexed, q_c.dtype, word), False)
        if ours and _new_to(("latents", word, block_size, indexed and index), q_c[:1]):
            for each in asked:
                functions.norm_rope(given, each | caches | {"has_indexer": indexed})


def rehearse_queries(functions: Functions, given: tuple[Any, ...], kind: Kind, index_rope_interleave: bool) -> None:
    """The same behind q_b. A prefill that is attended densely wants its query unpacked, where others are packed."""
    (indexed, activation, packed), q_pe, index_q = kind, given[1], given[3]
    if not _compiles(q_pe):
        return
    for each in product({indexed, False}, (activation,), {packed, False}):
        index = (index_rope_interleave, index_q.shape[1]) if each[0] else None
        if functions.queries.get(each, False) and _new_to(("queries", each, index), q_pe[:1]):
            functions.q(given, each, index_rope_interleave)


def _mla_block(like: torch.Tensor, layout: CacheLayout, block_size: int) -> torch.Tensor:
    """An MLA cache of one block, as vLLM makes it."""
    dtype = torch.uint8 if layout.has_fp8 else like.dtype
    return like.new_empty((1, block_size, layout.row_bytes(like.dtype) // dtype.itemsize), dtype=dtype)


def _index_block(like: torch.Tensor, block_size: int) -> torch.Tensor:
    """An indexer cache of one block."""
    return like.new_empty((1, block_size, FLAT.row_bytes()), dtype=torch.uint8)

"""Compiling a layer's kernels ahead, in vLLM's profiling run: without it the first prefills would wait for Triton."""

from typing import Any

import torch

from dsafuse.layouts import MLA_LAYOUTS
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

# Of a cache row, in elements of the tensor that vLLM makes.
MLA_WIDTHS = {name: 576 if name == "plain" else layout.row_bytes() for name, layout in MLA_LAYOUTS.items()}

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
    dtype = mla.q.dtype if call.kv_layout == "plain" else torch.uint8
    kv_cache = mla.q.new_empty((1, block_size, MLA_WIDTHS[call.kv_layout]), dtype=dtype)
    indexed = () if index is None else (index, _block(index, block_size), None)
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
        prepare_index(state.call, len(index.q), index, _block(index, block_size), None)


def _block(index: IndexInputs, block_size: int) -> torch.Tensor:
    """An indexer cache of one block."""
    return index.q.new_empty((1, block_size, index.q.shape[-1] + 4), dtype=torch.uint8)

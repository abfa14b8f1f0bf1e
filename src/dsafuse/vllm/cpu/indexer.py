"""Scoring and top-k of the indexer on CPU, as an opaque torch op and a vLLM custom-op class."""

from itertools import pairwise
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.utils.torch_utils import LayerNameType, _encode_layer_name, _resolve_layer_name

from dsafuse.vllm.cpu import attention, formats
from dsafuse.vllm.torch_ops import define


def cpu_index_topk(
    q: torch.Tensor,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    topk_indices: torch.Tensor,
    insert: bool,
    clear: bool,
    layer_name: LayerNameType,
) -> None:
    """Write this step's index keys unless they are written already, score, and fill the top-k rows.

    As vLLM says of its kernels, a row keeps what it held behind a context that is shorter than it; so it must be -1
    before, and is with `clear`.
    """
    context = get_forward_context()
    name = _resolve_layer_name(layer_name)
    metadata = context.attn_metadata
    if clear:
        topk_indices[: q.shape[0]] = -1
    if not isinstance(metadata, dict):  # a profiling run: there is no batch and no cache
        return
    batch = metadata[name]
    kv_cache = context.no_compile_layers[name].kv_cache
    if insert and k is not None:
        formats.write_index_keys(k, kv_cache, batch.slot_mapping)
    block_size, dim = kv_cache.shape[1], q.shape[-1]
    starts = batch.query_start_loc_cpu.tolist()
    for request, (first, last) in enumerate(pairwise(starts)):
        if first == last:
            continue
        length = int(batch.seq_lens[request])
        blocks = batch.block_table[request, : -(-length // block_size)].long()
        keys = formats.read_index_keys(kv_cache, blocks, length, dim)
        count = min(length, topk_indices.shape[1])
        topk_indices[first:last, :count] = attention.choose(q[first:last], weights[first:last], keys, count)


define("cpu_index_topk", cpu_index_topk, lambda *args: None, mutates=["topk_indices"])


class TorchSparseAttnIndexer(SparseAttnIndexer):
    """vLLM's indexer op, with the torch mathematics in place of its CPU kernels (V4 only, top-k 512)."""

    def forward_cpu(
        self, hidden_states: torch.Tensor, q_quant: Any, k: torch.Tensor | None, weights: torch.Tensor
    ) -> torch.Tensor:
        """Fill the shared top-k buffer and return it."""
        self._choose(q_quant, k, weights, clear=True)
        buffer: torch.Tensor = self.topk_indices_buffer
        return buffer

    forward_native = forward_cpu

    def forward_on_cleared_rows(
        self, hidden_states: torch.Tensor, q_quant: Any, k: torch.Tensor | None, weights: torch.Tensor
    ) -> None:
        """The same where the buffer's rows are -1 already; `dsafuse.vllm.scoring`."""
        self._choose(q_quant, k, weights, clear=False)

    def _choose(self, q_quant: Any, k: torch.Tensor | None, weights: torch.Tensor, clear: bool) -> None:
        torch.ops.dsafuse.cpu_index_topk(
            q_quant,
            k,
            weights,
            self.topk_indices_buffer,
            not self.skip_k_cache_insert,
            clear,
            _encode_layer_name(self.k_cache.prefix),
        )


def per_token_group_quant_fp8(
    x: torch.Tensor,
    group_size: int,
    eps: float = 1e-10,
    dtype: torch.dtype | None = None,
    column_major_scales: bool = False,
    tma_aligned_scales: bool = False,
    out_q: torch.Tensor | None = None,
    use_ue8m0: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's function of this name, for the arguments with which the generic indexer calls it."""
    groups = x.unflatten(-1, (-1, group_size))
    values, scale = formats.quantise_groups(groups, eps, power_of_two=bool(use_ue8m0))
    return values.flatten(-2), scale

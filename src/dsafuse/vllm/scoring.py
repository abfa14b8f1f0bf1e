"""vLLM's indexer op on top-k rows that the launch before it has cleared: scores and top-k, without the fill.

The op fills its rows with -1 before the top-k kernels scatter into them, unless it is told that they are clear. vLLM's
own fused model tells it so; `SparseAttnIndexer`, through which the wrapper path comes, does not, so its call is
re-stated here. `gates.why_vllm_clears` says where.
"""

from typing import Any

import torch
from vllm.utils.torch_utils import _encode_layer_name


def on_cleared_rows(
    op: Any, hidden_states: torch.Tensor, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor
) -> None:
    """Choose each token's top-k into op's buffer, whose rows [0, tokens) are -1.

    Args:
        op: the layer's `SparseAttnIndexer`, of an fp8 cache; on CPU builds dsafuse's own.
        hidden_states, q, k, weights: as its forward takes them.

    `SparseAttnIndexer.forward_cuda` of vLLM 0.26, and `skip_topk_buffer_clear`.
    """
    own = getattr(op, "forward_on_cleared_rows", None)
    if own is not None:
        own(hidden_states, q, k, weights)
        return
    torch.ops.vllm.sparse_attn_indexer(
        hidden_states,
        _encode_layer_name(op.k_cache.prefix),
        op.k_cache.kv_cache,
        q,
        None,  # scales of an fp4 query
        k,
        weights,
        op.quant_block_size,
        op.scale_fmt,
        op.topk_tokens,
        op.head_dim,
        op.max_model_len,
        op.max_total_seq_len,
        op.topk_indices_buffer,
        op.skip_k_cache_insert,
        op.use_pcp,
        op.use_fp4_cache,
        op.dcp_rank,
        op.dcp_world_size,
        op.cp_kv_cache_interleave_size,
        skip_topk_buffer_clear=True,
    )

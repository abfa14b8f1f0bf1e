"""A DSA layer as the gates see it, without an engine: every gate accepts it until a test changes something."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def rotary(**changes: Any) -> Any:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    class Rotary:
        forward_native = RotaryEmbedding.forward_native

    made = Rotary()
    made.__dict__.update({"rotary_dim": 64, "is_neox_style": False, **changes})
    return made


def indexer() -> Any:
    from vllm.model_executor.models.deepseek_v2 import Indexer

    made = Indexer.__new__(Indexer)
    torch.nn.Module.__init__(made)
    made.__dict__.update(
        head_dim=128,
        rope_dim=64,
        quant_block_size=128,
        n_head=4,
        scale_fmt="ue8m0",
        softmax_scale=128**-0.5,
        n_head_scale=0.5,
        k_norm=SimpleNamespace(eps=1e-6),
        k_cache=SimpleNamespace(uses_shuffled_layout=False),
        indexer_op=SimpleNamespace(
            use_fp4_cache=False,
            compress_ratio=1,
            topk_indices_buffer=torch.empty((16, 64), dtype=torch.int32),
            forward_on_cleared_rows=None,
        ),
    )
    return made


def wrapper(**changes: Any) -> Any:
    made = SimpleNamespace(
        is_sparse=True,
        q_lora_rank=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        num_heads=4,
        fuse_qkv_rmsnorm=False,
        dcp_q_replicate=False,
        rotary_emb=rotary(),
        indexer_rope_emb=rotary(is_neox_style=True),
        indexer=indexer(),
        mla_attn=SimpleNamespace(
            layer_name="model.layers.0.self_attn.attn",
            kv_cache_dtype="auto",
            attn_backend=SimpleNamespace(get_name=lambda: "DSAFUSE_TORCH_SPARSE_MLA"),
            impl=SimpleNamespace(supports_quant_query_input=False),
            dcp_manager=None,
            use_pcp=False,
            use_direct_call=False,
            prefill_backend=None,
        ),
    )
    return change(made, **changes)


def config(**changes: Any) -> Any:
    made = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, hf_text_config=SimpleNamespace(), uses_mrope=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(block_size=64),
        compilation_config=SimpleNamespace(cudagraph_mode=None, splitting_ops=None),
        additional_config={},
        lora_config=None,
    )
    return change(made, **changes)


def change(made: Any, **changes: Any) -> Any:
    """Set attributes by path, with two underscores for a dot: mla_attn__kv_cache_dtype="fp8"."""
    for path, value in changes.items():
        *parents, name = path.split("__")
        holder = made
        for parent in parents:
            holder = getattr(holder, parent)
        holder.__dict__[name] = value
    return made

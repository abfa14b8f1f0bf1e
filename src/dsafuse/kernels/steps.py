"""The steps of the unfused chains as one launch each; the functions of `torch_steps`, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from dsafuse.kernels import chain
from dsafuse.kernels.launch import (
    PLANS,
    alignment,
    launch_options,
    next_power_of_two,
    numeric_constants,
    on_device_of,
)
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.numerics import RopeStyle, ScaleRule
from dsafuse.ops.indexer import IndexerConfig
from dsafuse.ops.mla import MlaConfig
from dsafuse.target import Target

FOLD_BLOCK = 1024
KEY_WARPS = 1


def _head_blocks(family: str, heads: int, tensor: torch.Tensor) -> tuple[int, dict[str, Any]]:
    """Programs for each token, and the constexprs and options that cut heads as the fused kernel does."""
    target = Target.of(tensor.device)
    plan = PLANS[family, target.vendor]
    block_heads = min(plan.block_heads, next_power_of_two(heads))
    options = launch_options(target, plan.num_warps)
    return -(-heads // block_heads), {"HEADS": heads, "BLOCK_HEADS": block_heads, **options}


def _options(tensor: torch.Tensor, num_warps: int) -> dict[str, Any]:
    return launch_options(Target.of(tensor.device), num_warps)


def _numbers(config: MlaConfig | IndexerConfig, *names: str) -> dict[str, Any]:
    constants = numeric_constants(config)
    return {name: constants[name] for name in names}


def _rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    family: str,
    config: MlaConfig | IndexerConfig,
) -> None:
    blocks, options = _head_blocks(family, config.heads, q)
    tokens = len(q)
    with on_device_of(q):
        chain.rotate_heads_and_key[(tokens * (1 + blocks),)](
            q,
            q.stride(0),
            q.stride(1),
            k,
            k.stride(0),
            q_rot,
            k_rot,
            positions,
            table,
            table.stride(0),
            table.shape[0],
            tokens,
            NEOX=config.rope_style == RopeStyle.NEOX,
            ALIGN=alignment(q, k, table),
            **options,
        )


def rotate_latent(
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    config: MlaConfig,
) -> None:
    """RoPE of q_pe and k_pe."""
    _rotate(q_pe, k_pe, q_rot, k_rot, positions, table, "mla", config)


def rotate_index(
    q: torch.Tensor,
    k_norm: torch.Tensor,
    q_rot: torch.Tensor,
    k_rot: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    config: IndexerConfig,
) -> None:
    """RoPE of the leading dims of q and of the normed key."""
    _rotate(q, k_norm, q_rot, k_rot, positions, table, "indexer", config)


def concat_query(q_nope: torch.Tensor, q_rot: torch.Tensor, query: torch.Tensor, config: MlaConfig) -> None:
    """query[:, :heads] = concat(q_nope, q_rot)."""
    blocks, options = _head_blocks("mla", config.heads, q_nope)
    with on_device_of(q_nope):
        chain.concat_query[(len(q_nope) * blocks,)](
            q_nope,
            q_nope.stride(0),
            q_nope.stride(1),
            q_rot,
            query,
            query.stride(0),
            query.stride(1),
            ALIGN=alignment(q_nope, query),
            **options,
        )


def quantise_query(query: torch.Tensor, q_scale: torch.Tensor, q_out: torch.Tensor, config: MlaConfig) -> None:
    """q_out[:, :heads] = fp8(query / q_scale)."""
    blocks, options = _head_blocks("mla", config.heads, query)
    with on_device_of(query):
        chain.quantise_query[(len(query) * blocks,)](
            query,
            q_scale,
            q_out,
            q_out.stride(0),
            q_out.stride(1),
            ALIGN=alignment(q_out),
            **_numbers(config, "FP8", "FP8_MAX"),
            **options,
        )


def write_latent(
    kv_c: torch.Tensor,
    k_rot: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    config: MlaConfig,
) -> None:
    """kv_cache[slot] = quantise(concat(kv_c, k_rot))."""
    with on_device_of(kv_c):
        chain.write_latent[(len(kv_c),)](
            kv_c,
            kv_c.stride(0),
            k_rot,
            kv_cache,
            kv_cache.stride(0),
            kv_cache.stride(1),
            slot_mapping,
            slot_mapping.shape[0],
            kv_cache.shape[0] * kv_cache.shape[1],
            k_scale,
            BLOCK_SIZE=config.block_size,
            LAYOUT=config.layout,
            ALIGN=alignment(kv_c),
            CACHE_ALIGN=alignment(kv_cache, at_least=MLA_LAYOUTS[config.layout].alignment_bytes),
            **_numbers(config, "NEOX", "FP8", "FP8_MAX"),
            **_options(kv_c, KEY_WARPS),
        )


def norm_key(
    k: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, k_norm: torch.Tensor, _: IndexerConfig
) -> None:
    """k_norm = layer_norm(k)."""
    with on_device_of(k):
        chain.norm_key[(len(k),)](
            k, k.stride(0), weight, bias, eps, k_norm, NEOX=False, ALIGN=alignment(k), **_options(k, KEY_WARPS)
        )


def quantise_index_query(
    q: torch.Tensor, q_rot: torch.Tensor, q_out: torch.Tensor, scales: torch.Tensor, config: IndexerConfig
) -> None:
    """(q_out, scales) = quantise(concat(q_rot, rest of q)), one scale a head."""
    blocks, options = _head_blocks("indexer", config.heads, q)
    with on_device_of(q):
        chain.quantise_index_query[(len(q) * blocks,)](
            q,
            q.stride(0),
            q.stride(1),
            q_rot,
            q_out,
            q_out.stride(0),
            q_out.stride(1),
            scales,
            UE8M0=config.scale_rule == ScaleRule.UE8M0,
            ALIGN=alignment(q, q_out),
            **_numbers(config, "NEOX", "FP8", "FP8_MAX"),
            **options,
        )


def fold_weights(weights: torch.Tensor, scales: torch.Tensor, weights_scale: float, weights_out: torch.Tensor) -> None:
    """weights_out = (weights * scales) * weights_scale, in fp32."""
    tokens, heads = weights.shape
    with on_device_of(weights):
        chain.fold_weights[(-(-tokens * heads // FOLD_BLOCK),)](
            weights,
            weights.stride(0),
            scales,
            weights_scale,
            weights_out,
            weights_out.stride(0),
            tokens * heads,
            HEADS=heads,
            BLOCK=FOLD_BLOCK,
            **_options(weights, 4),
        )


def write_key(
    k_norm: torch.Tensor,
    k_rot: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    config: IndexerConfig,
) -> None:
    """kv_cache[slot] = quantise(concat(k_rot, rest of k_norm)), one scale a row."""
    layout = INDEXER_LAYOUTS[config.layout]
    with on_device_of(k_norm):
        chain.write_key[(len(k_norm),)](
            k_norm,
            k_rot,
            kv_cache,
            kv_cache.stride(0),
            slot_mapping,
            slot_mapping.shape[0],
            kv_cache.shape[0] * kv_cache.shape[1],
            BLOCK_SIZE=config.block_size,
            UE8M0=config.scale_rule == ScaleRule.UE8M0,
            CACHE_ALIGN=alignment(kv_cache[:, 0], at_least=layout.alignment_bytes),
            **_numbers(config, "NEOX", "FP8", "FP8_MAX"),
            **_options(k_norm, KEY_WARPS),
        )

"""The steps of the unfused chains as one launch each; the functions of `torch_steps`, on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from dsafuse.kernels import chain
from dsafuse.kernels.launch import on_device_of
from dsafuse.kernels.parameters import alignment, format_constants, launch_options
from dsafuse.kernels.plans import PLANS, LaunchPlan, head_block
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.numerics import RopeStyle, Rounding, ScaleRule
from dsafuse.ops.config import Config
from dsafuse.target import Target

FOLD_BLOCK = 1024


def _options(tensor: torch.Tensor) -> dict[str, Any]:
    target = Target.of(tensor.device)
    return {**launch_options(target, _plan(target).threads), "PDL": target.dependent_launch}


def _plan(target: Target) -> LaunchPlan:
    """The chain's steps are cut alike."""
    return PLANS[target.vendor]["indexer"]


def _cut(heads: int, tensor: torch.Tensor, role: str) -> tuple[int, dict[str, Any]]:
    """Programs for each token, and the constants that cut heads as the fused kernel does."""
    block = head_block(getattr(_plan(Target.of(tensor.device)), role), heads)
    return -(-heads // block), {"HEADS": heads, "BLOCK_HEADS": block}


def _format(dtype: torch.dtype, tensor: torch.Tensor) -> dict[str, Any]:
    return format_constants(dtype, Target.of(tensor.device))


def rotate(
    q: torch.Tensor | None,
    k: torch.Tensor | None,
    q_rot: torch.Tensor | None,
    k_rot: torch.Tensor | None,
    positions: torch.Tensor,
    table: torch.Tensor,
    rope_style: str,
) -> None:
    """RoPE of the leading dims of a query [tokens, heads, ...] and of a key [tokens, ...]; either may be absent."""
    blocks, cut = _cut(q.shape[1], q, "index_block_heads") if q is not None else (0, {"HEADS": 0, "BLOCK_HEADS": 1})
    key = int(k is not None)
    with on_device_of(positions):
        chain.rotate_heads_and_key[(len(positions) * (key + blocks),)](
            q,
            *((0, 0) if q is None else q.stride()[:2]),
            k,
            0 if k is None else k.stride(0),
            q_rot,
            k_rot,
            positions,
            table,
            table.stride(0),
            table.shape[0],
            KEY=key,
            NEOX=rope_style == RopeStyle.NEOX,
            ALIGN=alignment(table, *(x for x in (q, k) if x is not None)),
            **cut,
            **_options(positions),
        )


def concat_query(q_nope: torch.Tensor, q_rot: torch.Tensor, query: torch.Tensor) -> None:
    """query[:, :heads] = concat(q_nope, q_rot)."""
    blocks, cut = _cut(q_nope.shape[1], q_nope, "block_heads")
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
            **cut,
            **_options(q_nope),
        )


def quantise_query(query: torch.Tensor, q_scale: torch.Tensor, q_out: torch.Tensor) -> None:
    """q_out[:, :heads] = fp8(query / q_scale)."""
    blocks, cut = _cut(query.shape[1], query, "block_heads")
    with on_device_of(query):
        chain.quantise_query[(len(query) * blocks,)](
            query,
            q_scale,
            q_out,
            q_out.stride(0),
            q_out.stride(1),
            ALIGN=alignment(q_out),
            **cut,
            **_format(q_out.dtype, q_out),
            **_options(query),
        )


def write_latent(
    latent: torch.Tensor,
    k_rot: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    config: Config,
) -> None:
    """kv_cache[slot] = quantise(concat(latent, k_rot))."""
    role = config.latent_kv
    assert role is not None
    with on_device_of(latent):
        chain.write_latent[(len(latent),)](
            latent,
            latent.stride(0),
            k_rot,
            kv_cache,
            kv_cache.stride(0),
            kv_cache.stride(1),
            slot_mapping,
            slot_mapping.shape[0],
            kv_cache.shape[0] * kv_cache.shape[1],
            k_scale,
            BLOCK_SIZE=role.block_size,
            LAYOUT=role.layout,
            TILE_UE8M0=role.scale_rule == ScaleRule.UE8M0,
            NEOX=role.rope_style == RopeStyle.NEOX,
            ALIGN=alignment(latent),
            CACHE_ALIGN=alignment(kv_cache, at_least=MLA_LAYOUTS[role.layout].alignment_bytes),
            **_format(config.fp8, kv_cache),
            **_options(latent),
        )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = rms_norm(x)."""
    with on_device_of(x):
        chain.normalise[(len(x),)](
            x,
            x.stride(0),
            weight,
            eps,
            out,
            out.stride(0),
            WIDTH=x.shape[1],
            ALIGN=alignment(x, weight, out),
            **_options(x),
        )


def clear_topk(topk_indices: torch.Tensor, tokens: int) -> None:
    """topk_indices[:tokens] = -1: torch's own fill is one launch and well made."""
    topk_indices[:tokens].fill_(-1)


def norm_key(
    k: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, k_norm: torch.Tensor, rope_style: str
) -> None:
    """k_norm = layer_norm(k); the columns that rope_style pairs are summed first, as in the fused kernel."""
    rows = _plan(Target.of(k.device)).index_rows
    with on_device_of(k):
        chain.norm_key[(-(-len(k) // rows),)](
            k,
            k.stride(0),
            len(k),
            weight,
            bias,
            eps,
            k_norm,
            ROWS=rows,
            NEOX=rope_style == RopeStyle.NEOX,
            ALIGN=alignment(k),
            **_options(k),
        )


def quantise_index_query(
    q: torch.Tensor, q_rot: torch.Tensor, q_out: torch.Tensor, scales: torch.Tensor, config: Config
) -> None:
    """(q_out, scales) = quantise(concat(q_rot, rest of q)), one scale a head."""
    role = config.index_q
    assert role is not None
    blocks, cut = _cut(role.heads, q, "index_block_heads")
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
            NEOX=role.rope_style == RopeStyle.NEOX,
            UE8M0=role.scale_rule == ScaleRule.UE8M0,
            ROUND=config.rounding == Rounding.SPLIT,
            ALIGN=alignment(q, q_out),
            **cut,
            **_format(q_out.dtype, q_out),
            **_options(q),
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
            **_options(weights),
        )


def write_key(
    k_norm: torch.Tensor, k_rot: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, config: Config
) -> None:
    """kv_cache[slot] = quantise(concat(k_rot, rest of k_norm)), one scale a row."""
    role = config.index_k
    assert role is not None
    with on_device_of(k_norm):
        chain.write_key[(len(k_norm),)](
            k_norm,
            k_rot,
            kv_cache,
            kv_cache.stride(0),
            slot_mapping,
            slot_mapping.shape[0],
            kv_cache.shape[0] * kv_cache.shape[1],
            LAYOUT=role.layout,
            BLOCK_SIZE=role.block_size,
            NEOX=role.rope_style == RopeStyle.NEOX,
            UE8M0=role.scale_rule == ScaleRule.UE8M0,
            CACHE_ALIGN=alignment(kv_cache[:, 0], at_least=INDEXER_LAYOUTS[role.layout].alignment_bytes),
            **_format(config.fp8, kv_cache),
            **_options(k_norm),
        )

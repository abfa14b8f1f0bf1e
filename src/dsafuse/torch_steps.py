"""The steps of the unfused chains in torch. `kernels.steps` has the same functions as Triton kernels."""

from __future__ import annotations

import torch

from dsafuse import numerics
from dsafuse.layouts import INDEXER_LAYOUTS, LATENT_DIM, MLA_LAYOUTS, ROPE_DIM
from dsafuse.numerics import FP8_FORMATS, RopeStyle, ScaleRule
from dsafuse.ops import roles
from dsafuse.ops.indexer import IndexerConfig
from dsafuse.ops.mla import MlaConfig


def _rotate(x: torch.Tensor, out: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, rope_style: str) -> None:
    out.copy_(numerics.rotate(x[..., :ROPE_DIM].float(), roles.rope_rows(table, positions), RopeStyle(rope_style)))


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
    _rotate(q_pe, q_rot, positions, table, config.rope_style)
    _rotate(k_pe, k_rot, positions, table, config.rope_style)


def concat_query(q_nope: torch.Tensor, q_rot: torch.Tensor, query: torch.Tensor, config: MlaConfig) -> None:
    """query[:, :heads] = concat(q_nope, q_rot)."""
    query[:, : config.heads, :LATENT_DIM] = q_nope
    query[:, : config.heads, LATENT_DIM:] = q_rot


def quantise_query(query: torch.Tensor, q_scale: torch.Tensor, q_out: torch.Tensor, config: MlaConfig) -> None:
    """q_out[:, :heads] = fp8(query / q_scale)."""
    codes = numerics.to_fp8(query.float() * numerics.reciprocal(q_scale.reshape(())), FP8_FORMATS[config.query])
    q_out[:, : config.heads].view(torch.uint8).copy_(codes.view(torch.uint8))


def write_latent(
    kv_c: torch.Tensor,
    k_rot: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    config: MlaConfig,
) -> None:
    """kv_cache[slot] = quantise(concat(kv_c, k_rot))."""
    rows = roles.store_latent(kv_c, k_rot.float(), config.layout, k_scale, FP8_FORMATS[config.fp8])
    roles.write_rows(kv_cache, MLA_LAYOUTS[config.layout], slot_mapping, rows, config.activation)


def norm_key(
    k: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, k_norm: torch.Tensor, _: IndexerConfig
) -> None:
    """k_norm = layer_norm(k)."""
    k_norm.copy_(numerics.layer_norm(k.float(), weight, bias, eps))


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
    _rotate(q, q_rot, positions, table, config.rope_style)
    _rotate(k_norm, k_rot, positions, table, config.rope_style)


def _quantise(
    rotated: torch.Tensor, source: torch.Tensor, floor: float, config: IndexerConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.cat([rotated.float(), source[..., ROPE_DIM:].float()], -1)
    fmt = FP8_FORMATS[config.fp8]
    scale = numerics.group_scale(numerics.amax(values), floor, fmt, ScaleRule(config.scale_rule))
    return numerics.to_fp8(values / scale, fmt), scale


def quantise_index_query(
    q: torch.Tensor, q_rot: torch.Tensor, q_out: torch.Tensor, scales: torch.Tensor, config: IndexerConfig
) -> None:
    """(q_out, scales) = quantise(concat(q_rot, rest of q)), one scale a head."""
    codes, scale = _quantise(q_rot, q, numerics.INDEX_Q_FLOOR, config)
    q_out[:, : config.heads].view(torch.uint8).copy_(codes.view(torch.uint8))
    scales.copy_(scale.squeeze(-1))


def fold_weights(weights: torch.Tensor, scales: torch.Tensor, weights_scale: float, weights_out: torch.Tensor) -> None:
    """weights_out = (weights * scales) * weights_scale, in fp32."""
    factor = torch.tensor(weights_scale, dtype=torch.float32, device=weights.device)
    weights_out[:, : weights.shape[1]] = (weights.float() * scales) * factor


def write_key(
    k_norm: torch.Tensor,
    k_rot: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    config: IndexerConfig,
) -> None:
    """kv_cache[slot] = quantise(concat(k_rot, rest of k_norm)), one scale a row."""
    codes, scale = _quantise(k_rot, k_norm, numerics.INDEX_K_FLOOR, config)
    rows = {"key": codes, "scale": scale}
    roles.write_rows(kv_cache, INDEXER_LAYOUTS[config.layout], slot_mapping, rows, config.activation)

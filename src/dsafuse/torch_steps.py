"""The steps of the unfused chains in torch. `kernels.steps` has the same functions as Triton kernels."""

from __future__ import annotations

import torch

from dsafuse import numerics
from dsafuse.layouts import INDEXER_LAYOUTS, LATENT_DIM, MLA_LAYOUTS, ROPE_DIM
from dsafuse.numerics import FP8_FORMATS, Fp8Format, RopeStyle, Rounding, ScaleRule
from dsafuse.ops import roles
from dsafuse.ops.config import Config


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
    rows = roles.rope_rows(table, positions)
    for x, out in ((q, q_rot), (k, k_rot)):
        if x is not None and out is not None:
            out.copy_(numerics.rotate(x[..., :ROPE_DIM].float(), rows, RopeStyle(rope_style)))


def concat_query(q_nope: torch.Tensor, q_rot: torch.Tensor, query: torch.Tensor) -> None:
    """query[:, :heads] = concat(q_nope, q_rot)."""
    heads = q_nope.shape[1]
    query[:, :heads, :LATENT_DIM] = q_nope
    query[:, :heads, LATENT_DIM:] = q_rot


def quantise_query(query: torch.Tensor, q_scale: torch.Tensor, q_out: torch.Tensor) -> None:
    """q_out[:, :heads] = fp8(query / q_scale)."""
    codes = numerics.to_fp8(query.float() * numerics.reciprocal(q_scale.reshape(())), FP8_FORMATS[q_out.dtype])
    q_out[:, : query.shape[1]].view(torch.uint8).copy_(codes.view(torch.uint8))


def write_latent(
    latent: torch.Tensor,
    k_rot: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None,
    config: Config,
) -> None:
    """kv_cache[slot] = quantise(concat(latent, k_rot))."""
    assert config.latent_kv is not None
    role, fmt = config.latent_kv, FP8_FORMATS[config.fp8]
    rows = roles.store_latent(latent, k_rot.float(), role.layout, k_scale, role.scale_rule, fmt, config.activation)
    roles.write_rows(kv_cache, MLA_LAYOUTS[role.layout], slot_mapping, rows, config.activation)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = rms_norm(x)."""
    out.copy_(numerics.rms_norm(x.float(), weight, eps))


def clear_topk(topk_indices: torch.Tensor, tokens: int) -> None:
    """topk_indices[:tokens] = -1."""
    roles.clear_topk(topk_indices, tokens)


def norm_key(
    k: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, k_norm: torch.Tensor, rope_style: str
) -> None:
    """k_norm = layer_norm(k); torch sums in an order of its own, whatever the rope_style."""
    k_norm.copy_(numerics.layer_norm(k.float(), weight, bias, eps))


def _quantise(
    rotated: torch.Tensor, source: torch.Tensor, floor: float, fmt: Fp8Format, scale_rule: str
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.cat([rotated.float(), source[..., ROPE_DIM:].float()], -1)
    scale = numerics.group_scale(numerics.amax(values), floor, fmt, ScaleRule(scale_rule))
    return numerics.to_fp8(values / scale, fmt), scale


def quantise_index_query(
    q: torch.Tensor, q_rot: torch.Tensor, q_out: torch.Tensor, scales: torch.Tensor, config: Config
) -> None:
    """(q_out, scales) = quantise(concat(q_rot, rest of q)), one scale a head."""
    role, floor = config.index_q, numerics.INDEX_Q_FLOOR[Rounding(config.rounding)]
    assert role is not None
    codes, scale = _quantise(q_rot, q, floor, FP8_FORMATS[q_out.dtype], role.scale_rule)
    q_out[:, : role.heads].view(torch.uint8).copy_(codes.view(torch.uint8))
    scales.copy_(scale.squeeze(-1))


def fold_weights(weights: torch.Tensor, scales: torch.Tensor, weights_scale: float, weights_out: torch.Tensor) -> None:
    """weights_out = (weights * scales) * weights_scale, in fp32."""
    factor = torch.tensor(weights_scale, dtype=torch.float32, device=weights.device)
    weights_out[:, : weights.shape[1]] = (weights.float() * scales) * factor


def write_key(
    k_norm: torch.Tensor, k_rot: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, config: Config
) -> None:
    """kv_cache[slot] = quantise(concat(k_rot, rest of k_norm)), one scale a row."""
    role = config.index_k
    assert role is not None
    codes, scale = _quantise(k_rot, k_norm, numerics.INDEX_K_FLOOR, FP8_FORMATS[config.fp8], role.scale_rule)
    rows = {"key": codes, "scale": scale}
    roles.write_rows(kv_cache, INDEXER_LAYOUTS[role.layout], slot_mapping, rows, config.activation)

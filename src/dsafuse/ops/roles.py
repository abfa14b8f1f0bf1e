"""The roles' oracles in torch: what each one prepares. Ops are sets of roles; kernels.roles has their twins.

Arguments are those of the public ops, already resolved. Every oracle writes its outputs in place.
"""

from __future__ import annotations

import torch

from dsafuse import numerics
from dsafuse.layouts import INDEX_DIM, INDEXER_LAYOUTS, LATENT_TILE, MLA_LAYOUTS, ROPE_DIM, CacheLayout
from dsafuse.numerics import FP8_FORMATS, Fp8Format, RopeStyle, Rounding, ScaleRule


def check_addresses(
    kv_cache: torch.Tensor, slot_mapping: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, prefix: str = ""
) -> None:
    """Raise IndexError for a slot beyond the cache, or a position beyond the table on a row that is written.

    Only on CPU: on a GPU looking would synchronise, and the row is skipped or the position clamped.
    """
    if positions.device.type != "cpu":
        return
    capacity, rows = kv_cache.shape[0] * kv_cache.shape[1], table.shape[0]
    for token, (slot, position) in enumerate(zip(slot_mapping.tolist(), positions.tolist())):
        if slot >= capacity:
            raise IndexError(f"{prefix}slot_mapping[{token}]: got {slot}, expected less than the capacity {capacity}")
        if slot >= 0 and not 0 <= position < rows:
            raise IndexError(
                f"positions[{token}]: got {position}, expected a row of {prefix}cos_sin_cache, which has {rows}"
            )


def rope_rows(cos_sin_cache: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[tokens, R] fp32 rows of the table; positions are clamped into it."""
    return cos_sin_cache[positions.long().clamp(0, cos_sin_cache.shape[0] - 1)].float()


def rotate_leading(
    x: torch.Tensor, cos_sin_cache: torch.Tensor, positions: torch.Tensor, style: str, rounding: str
) -> torch.Tensor:
    """fp32 x with its leading rotary dims rotated, and rounded to x's dtype if `rounding` is split."""
    head, tail = x[..., :ROPE_DIM].float(), x[..., ROPE_DIM:].float()
    rotated = numerics.rotate(head, rope_rows(cos_sin_cache, positions), RopeStyle(style))
    if rounding == Rounding.SPLIT:
        rotated = numerics.round_to(rotated, x.dtype)
    return torch.cat([rotated, tail], -1)


def write_rows(
    kv_cache: torch.Tensor,
    layout: CacheLayout,
    slot_mapping: torch.Tensor,
    rows: dict[str, torch.Tensor],
    activation: torch.dtype,
) -> None:
    """Put `rows[field]` [tokens, count] where slots say; a slot outside the cache, or none, writes nothing."""
    slots = slot_mapping.long()
    live = (slots >= 0) & (slots < kv_cache.shape[0] * kv_cache.shape[1])
    where = slots[live]
    for name, values in rows.items():
        stored = values[: len(slots)][live].contiguous().view(torch.uint8)
        layout.store_rows(kv_cache, name, activation, where, stored)


def latent_kv(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    rope_style: str,
    kv_layout: str,
    k_scale: torch.Tensor | None,
    scale_rule: str,
    fp8_dtype: torch.dtype,
    rounding: str,
    norm: tuple[torch.Tensor, float] | None = None,
    kv_c_out: torch.Tensor | None = None,
    k_pe_out: torch.Tensor | None = None,
) -> None:
    """kv_cache[slot] = quantise(concat([rms_norm](kv_c), rotate(k_pe))); norm is (weight, eps)."""
    activation = kv_c.dtype
    rotated = rotate_leading(k_pe.reshape(len(k_pe), ROPE_DIM), cos_sin_cache, positions, rope_style, rounding)
    if norm is not None:
        kv_c = numerics.rms_norm(kv_c.float(), *norm)
        if rounding == Rounding.SPLIT:
            kv_c = kv_c.to(activation)
    if kv_c_out is not None:
        kv_c_out.copy_(kv_c)
    if k_pe_out is not None:
        k_pe_out.copy_(rotated)
    rows = store_latent(kv_c, rotated, kv_layout, k_scale, scale_rule, FP8_FORMATS[fp8_dtype], activation)
    write_rows(kv_cache, MLA_LAYOUTS[kv_layout], slot_mapping, rows, activation)


def norm_q(q_c: torch.Tensor, norm_weight: torch.Tensor, eps: float, q_c_out: torch.Tensor) -> None:
    """q_c_out = rms_norm(q_c)."""
    q_c_out.copy_(numerics.rms_norm(q_c.float(), norm_weight, eps))


def clear_topk(topk_indices: torch.Tensor, tokens: int) -> None:
    """topk_indices[:tokens] = -1."""
    topk_indices[:tokens] = -1


def store_latent(
    kv_c: torch.Tensor,
    rotated: torch.Tensor,
    kv_layout: str,
    k_scale: torch.Tensor | None,
    scale_rule: str,
    fmt: Fp8Format,
    activation: torch.dtype,
) -> dict[str, torch.Tensor]:
    """The fields of an MLA cache row in their stored dtypes, from the latent and the fp32 rotated key."""
    if kv_layout == "plain":
        return {"latent": kv_c.to(activation), "rope": rotated.to(activation)}
    if kv_layout == "fp8":
        assert k_scale is not None
        inverse = numerics.reciprocal(k_scale.reshape(()))
        return {
            "latent": numerics.to_fp8(kv_c.float() * inverse, fmt),
            "rope": numerics.to_fp8(rotated * inverse, fmt),
        }
    tiles = kv_c.float().unflatten(-1, (-1, LATENT_TILE))
    scale = numerics.tile_scale(numerics.amax(tiles), fmt, ScaleRule(scale_rule))
    return {
        "latent": numerics.to_fp8(tiles / scale, fmt).flatten(-2),
        "scale": scale.flatten(-2),
        "rope": rotated.to(torch.bfloat16),
    }


def latent_q(
    q_nope: torch.Tensor | None,
    q_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_out: torch.Tensor,
    *,
    rope_style: str,
    q_scale: torch.Tensor | None,
    rounding: str,
) -> None:
    """q_out[:, :H] = quantise(concat([q_nope], rotate(q_pe)))."""
    query = rotate_leading(q_pe, cos_sin_cache, positions, rope_style, rounding)
    if q_nope is not None:
        query = torch.cat([q_nope.float(), query], -1)
    target = q_out[:, : q_pe.shape[1]]
    if q_out.dtype not in FP8_FORMATS:
        target.copy_(query)
        return
    assert q_scale is not None
    scaled = query * numerics.reciprocal(q_scale.reshape(()))
    target.view(torch.uint8).copy_(numerics.to_fp8(scaled, FP8_FORMATS[q_out.dtype]).view(torch.uint8))


def index_k(
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    eps: float,
    rope_style: str,
    kv_layout: str,
    scale_rule: str,
    fp8_dtype: torch.dtype,
    rounding: str,
) -> None:
    """kv_cache[slot] = quantise(rotate(layer_norm(k))), one scale a row."""
    normed = numerics.layer_norm(k.float(), norm_weight, norm_bias, eps)
    if rounding == Rounding.SPLIT:
        normed = normed.to(k.dtype)
    prepared = rotate_leading(normed, cos_sin_cache, positions, rope_style, rounding)
    fmt = FP8_FORMATS[fp8_dtype]
    scale = numerics.group_scale(numerics.amax(prepared), numerics.INDEX_K_FLOOR, fmt, ScaleRule(scale_rule))
    rows = {"key": numerics.to_fp8(prepared / scale, fmt), "scale": scale}
    write_rows(kv_cache, INDEXER_LAYOUTS[kv_layout], slot_mapping, rows, k.dtype)


def index_q(
    q: torch.Tensor,
    weights: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_out: torch.Tensor,
    weights_out: torch.Tensor,
    *,
    weights_scale: float,
    rope_style: str,
    scale_rule: str,
    rounding: str,
) -> None:
    """q_out = quantise(rotate(q)), one scale a head; weights_out = (weights * scale) * weights_scale."""
    assert q.shape[-1] == INDEX_DIM
    heads = q.shape[1]
    prepared = rotate_leading(q, cos_sin_cache, positions, rope_style, rounding)
    fmt, floor = FP8_FORMATS[q_out.dtype], numerics.INDEX_Q_FLOOR[Rounding(rounding)]
    scale = numerics.group_scale(numerics.amax(prepared), floor, fmt, ScaleRule(scale_rule))
    codes = numerics.to_fp8(prepared / scale, fmt)
    q_out[:, :heads].view(torch.uint8).copy_(codes.view(torch.uint8))
    factor = torch.tensor(weights_scale, dtype=torch.float32, device=weights.device)
    weights_out[:, :heads] = (weights.float() * scale.squeeze(-1)) * factor

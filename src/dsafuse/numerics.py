"""Number formats and rounding rules, each with its torch round trip.

Everything that decides a bit is stated here once: fp8 formats, scale rules, RoPE styles, where intermediates
are rounded. The oracles call these functions; the Triton kernels are compared with them byte for byte.
docs/numerics.md explains every choice and lists where other implementations differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).tiny

INDEX_K_FLOOR = 1e-4
"""Smallest amax of an indexer key row, before the division by fp8_max (DeepSeek reference, vLLM)."""


class RopeStyle(StrEnum):
    """Which dims rotate together. MLA is interleaved; the indexer is neox (V3.2) or interleaved (GLM-5)."""

    INTERLEAVED = "interleaved"
    """Pairs (2i, 2i + 1)."""

    NEOX = "neox"
    """Pairs (i, i + R/2)."""


class ScaleRule(StrEnum):
    """How a group scale follows from amax / fp8_max."""

    UE8M0 = "ue8m0"
    """The smallest power of two that is not below it."""

    FP32 = "fp32"
    """The quotient itself."""


DS_MLA_FLOOR = {ScaleRule.UE8M0: 1e-4, ScaleRule.FP32: FLT_MIN}
"""Smallest tile scale of `fp8_ds_mla`, after the division by fp8_max: what the writers of that rule have, FlashMLA's
packer and vLLM from 0.32 on, and vLLM 0.26."""


class Rounding(StrEnum):
    """Where intermediates are rounded to the activation dtype."""

    SPLIT = "split"
    """Wherever the unfused chain writes an intermediate to memory: after a norm and after RoPE."""

    FP32 = "fp32"
    """Nowhere: fp32 from load to the final cast, as vLLM's fused kernels."""


INDEX_Q_FLOOR = {Rounding.SPLIT: 1e-10, Rounding.FP32: 1e-4}
"""Smallest amax of an indexer query head, before the division by fp8_max: what the writers of that rounding have,
vLLM's group quantisation and vLLM's `fused_q`."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """An 8-bit e4m3 format and the largest magnitude that is ever stored in it."""

    dtype: torch.dtype
    max: float
    nan_byte: int
    triton_name: str
    """Name of the element type in `triton.language`."""


FP8_FORMATS: dict[torch.dtype, Fp8Format] = {
    torch.float8_e4m3fn: Fp8Format(torch.float8_e4m3fn, 448.0, 0x7F, "float8e4nv"),
    # e4m3fnuz holds 240; vLLM stores at most 224 on gfx942, so that e4m3fn weights halve exactly.
    torch.float8_e4m3fnuz: Fp8Format(torch.float8_e4m3fnuz, 224.0, 0x80, "float8e4b8"),
}

ACTIVATION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round fp32 `x` to `dtype` and back (nearest even): what a store and a load would do."""
    return x.to(dtype).float()


def rotate(x: torch.Tensor, cos_sin: torch.Tensor, style: RopeStyle) -> torch.Tensor:
    """out1 = x1 * cos - x2 * sin, out2 = x2 * cos + x1 * sin, every product and sum rounded to fp32.

    Args:
        x: [tokens, ..., R] fp32.
        cos_sin: [tokens, R] fp32; cos in the first half, sin in the second.
        style: which dims are (x1, x2).
    """
    half = x.shape[-1] // 2
    rows = cos_sin.reshape(cos_sin.shape[0], *[1] * (x.dim() - 2), 2 * half)
    cos, sin = rows[..., :half], rows[..., half:]
    x1, x2 = (x[..., :half], x[..., half:]) if style is RopeStyle.NEOX else (x[..., ::2], x[..., 1::2])
    pair = x1 * cos - x2 * sin, x2 * cos + x1 * sin
    return torch.cat(pair, -1) if style is RopeStyle.NEOX else torch.stack(pair, -1).flatten(-2)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """((x - mean) / sqrt(var + eps)) * weight + bias over the last axis; variance in a second pass."""
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return centred * (1.0 / torch.sqrt(variance + eps)) * weight.float() + bias.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """(x / sqrt(mean(x * x) + eps)) * weight over the last axis."""
    return x * (1.0 / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)) * weight.float()


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """One correctly rounded fp32 1/scale, clamped so that a zero scale stays finite."""
    return (1.0 / scale).clamp(-FLT_MAX, FLT_MAX)


def to_fp8(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Clamp to +-max, round to nearest even; every NaN becomes the format's one canonical NaN byte."""
    codes = x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
    return codes.masked_fill_(x.isnan(), fmt.nan_byte).view(fmt.dtype)


def amax(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of the last axis, as a column; NaN does not count."""
    return x.abs().nan_to_num(nan=0.0, posinf=FLT_MAX).amax(-1, keepdim=True)


def power_of_two_at_least(s: torch.Tensor) -> torch.Tensor:
    """The smallest power of two >= s, on the exponent bits: log2 is approximate on a GPU (s normal, > 0)."""
    exponent = (s.view(torch.int32) + 0x7FFFFF) >> 23
    return (exponent << 23).view(torch.float32)


def _over(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """x / divisor, correctly rounded: on a GPU torch multiplies by the reciprocal of a Python number."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def group_scale(amax_: torch.Tensor, floor: float, fmt: Fp8Format, rule: ScaleRule) -> torch.Tensor:
    """Scale of an indexer group: max(amax, floor) / fp8_max, as the rule has it."""
    s = _over(amax_.clamp(min=floor), fmt.max)
    return power_of_two_at_least(s) if rule is ScaleRule.UE8M0 else s


def tile_scale(amax_: torch.Tensor, fmt: Fp8Format, rule: ScaleRule) -> torch.Tensor:
    """Scale of an `fp8_ds_mla` tile: max(amax / fp8_max, floor), as the rule has it; the floor is the rule's own."""
    s = _over(amax_, fmt.max).clamp(min=DS_MLA_FLOOR[rule])
    return power_of_two_at_least(s) if rule is ScaleRule.UE8M0 else s

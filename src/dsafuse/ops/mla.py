"""The sparse-MLA fusion: RoPE, query concat, key concat, and the write into the paged MLA cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsafuse.layouts import LATENT_DIM, MLA_LAYOUTS, QUERY_DIM, ROPE_DIM
from dsafuse.numerics import FP8_FORMATS, RopeStyle, Rounding
from dsafuse.ops import roles
from dsafuse.ops.arguments import (
    expect_activations,
    expect_addresses,
    expect_cache,
    expect_disjoint,
    expect_fp8_dtype,
    expect_member,
    expect_output,
    expect_rope_table,
    expect_same_device,
    expect_scale,
    expect_shape,
    expect_tensor,
)
from dsafuse.registry import Arguments, Shapes, fused_op


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Static facts of a call: what gates look at, and what a kernel is specialised for."""

    heads: int
    activation: torch.dtype
    query: torch.dtype
    layout: str
    fp8: torch.dtype
    block_size: int
    rope_style: str
    rounding: str

    @property
    def fp8_formats(self) -> frozenset[torch.dtype]:
        """The fp8 formats that the call writes."""
        used = {self.query} & FP8_FORMATS.keys()
        return frozenset(used | ({self.fp8} if MLA_LAYOUTS[self.layout].has_fp8 else set()))


def _layout(kv_layout: str, kv_cache: torch.Tensor, activation: torch.dtype) -> str:
    """The name of the cache's layout; `auto` tells it from dtype and width."""
    if kv_layout != "auto":
        if kv_layout not in MLA_LAYOUTS:
            raise ValueError(f"kv_layout: got {kv_layout!r}, expected auto or one of {', '.join(MLA_LAYOUTS)}")
        return kv_layout
    width = kv_cache.shape[-1] if kv_cache.dim() else 0
    if kv_cache.dtype == activation and width == QUERY_DIM:
        return "plain"
    if kv_cache.dtype in (torch.uint8, *FP8_FORMATS) and width == QUERY_DIM:
        return "fp8"
    if kv_cache.dtype == torch.uint8 and width == MLA_LAYOUTS["fp8_ds_mla"].row_bytes():
        return "fp8_ds_mla"
    raise ValueError(
        f"kv_cache: got {kv_cache.dtype} {width} wide, expected {activation} or fp8 {QUERY_DIM} wide, "
        f"or uint8 {QUERY_DIM} or {MLA_LAYOUTS['fp8_ds_mla'].row_bytes()} wide, for kv_layout='auto'"
    )


def _outputs(a: Arguments) -> Shapes:
    tokens, heads = a["q_nope"].shape[:2]
    return {"q_out": ((tokens, heads, QUERY_DIM), a["q_dtype"] or a["q_nope"].dtype)}


def _resolve(a: Arguments) -> MlaConfig:
    q_nope = expect_tensor("q_nope", a["q_nope"])
    expect_shape("q_nope", q_nope, tokens=None, heads=None, latent=LATENT_DIM)
    tokens, heads = q_nope.shape[:2]
    q_pe, kv_c, k_pe = (expect_tensor(name, a[name]) for name in ("q_pe", "kv_c", "k_pe"))
    expect_shape("q_pe", q_pe, tokens=tokens, heads=heads, rope=ROPE_DIM)
    expect_shape("kv_c", kv_c, tokens=tokens, latent=LATENT_DIM)
    if k_pe.dim() == 3:
        expect_shape("k_pe", k_pe, tokens=tokens, one=1, rope=ROPE_DIM)
    else:
        expect_shape("k_pe", k_pe, tokens=tokens, rope=ROPE_DIM)
    activation = expect_activations({"q_nope": q_nope, "q_pe": q_pe, "kv_c": kv_c, "k_pe": k_pe})
    expect_addresses(tokens, a["positions"], a["slot_mapping"])
    expect_rope_table("cos_sin_cache", a["cos_sin_cache"], ROPE_DIM, tokens)
    a["rope_style"] = expect_member("rope_style", a["rope_style"], RopeStyle).value
    a["rounding"] = expect_member("rounding", a["rounding"], Rounding).value

    kv_cache = expect_tensor("kv_cache", a["kv_cache"])
    a["kv_layout"] = _layout(a["kv_layout"], kv_cache, activation)
    expect_cache(kv_cache, MLA_LAYOUTS[a["kv_layout"]], activation)

    q_out, q_dtype = a["q_out"], a["q_dtype"]
    if q_out is not None:
        expect_output("q_out", q_out, heads, tokens=tokens, heads=None, dim=QUERY_DIM)
        if q_dtype is not None and q_out.dtype != q_dtype:
            raise TypeError(f"q_out: got {q_out.dtype}, expected q_dtype={q_dtype}")
        q_dtype = q_out.dtype
    q_dtype = activation if q_dtype is None else q_dtype
    if q_dtype != activation and q_dtype not in FP8_FORMATS:
        raise TypeError(f"q_dtype: got {q_dtype}, expected {activation} or {' or '.join(map(str, FP8_FORMATS))}")
    expect_fp8_dtype(a["fp8_dtype"], {"kv_cache": kv_cache.dtype, "q_dtype": q_dtype})
    a["q_scale"] = _scale("q_scale", a["q_scale"], "an fp8 query" if q_dtype in FP8_FORMATS else None)
    a["k_scale"] = _scale("k_scale", a["k_scale"], "the fp8 layout" if a["kv_layout"] == "fp8" else None)

    inputs = {
        name: a[name]
        for name in ("q_nope", "q_pe", "kv_c", "k_pe", "kv_cache", "slot_mapping", "positions", "cos_sin_cache")
    } | {"q_scale": a["q_scale"], "k_scale": a["k_scale"]}
    expect_same_device({**inputs, "q_out": q_out})
    if q_out is None:
        a["q_dtype"] = q_dtype
        shape, dtype = _outputs(a)["q_out"]
        a["q_out"] = q_nope.new_empty(shape, dtype=dtype)
    else:
        expect_disjoint({"q_out": q_out}, inputs)
    return MlaConfig(
        heads,
        activation,
        q_dtype,
        a["kv_layout"],
        a["fp8_dtype"],
        kv_cache.shape[1],
        a["rope_style"],
        a["rounding"],
    )


def _scale(name: str, value: torch.Tensor | None, purpose: str | None) -> torch.Tensor | None:
    """The scale if something needs it; one that nothing needs is ignored."""
    if purpose is None:
        return None
    expect_scale(name, value, purpose)
    return value


@fused_op(
    resolve=_resolve,
    outputs=_outputs,
    output_names=("q_out",),
    derived=("q_dtype",),
    families=frozenset({"mla"}),
)
def fused_qk_rope_concat_and_cache_mla(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    rope_style: str = "interleaved",
    kv_layout: str = "auto",
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    q_dtype: torch.dtype | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "split",
) -> torch.Tensor:
    """Rotate, concatenate and quantise the MLA query, and write the MLA key into its paged cache.

    q_out = quantise(concat(q_nope, rotate(q_pe)));  kv_cache[slot] = quantise(concat(kv_c, rotate(k_pe)))

    Args:
        q_nope: [tokens, heads, 512] bf16 | fp16 | fp32; last axis contiguous, other strides free (the absorbed
            query is a transposed bmm output).
        q_pe: [tokens, heads, 64] same dtype; last axis contiguous, other strides free; not rotated yet.
        kv_c: [tokens, 512] same dtype; row stride free; already normed.
        k_pe: [tokens, 64] or [tokens, 1, 64] same dtype; row stride free; not rotated yet.
        kv_cache: [blocks, block_size, row], written in place by its own strides; any block size.
        slot_mapping: [<= tokens] int32 | int64; block * block_size + row; negative means "do not write".
        positions: [tokens] int32 | int64; row of cos_sin_cache, clamped into it.
        cos_sin_cache: [max_position, 64] fp32 | bf16 | fp16; cos in the first half, sin in the second.
        rope_style: "interleaved" pairs (2i, 2i + 1), "neox" pairs (i, i + 32). DSA models: "interleaved".
        kv_layout: "plain" (the activation dtype, 576 wide), "fp8" (576 bytes, one scale), "fp8_ds_mla" (656
            bytes: 512 fp8, 4 fp32 tile scales, 64 bf16), or "auto": told from dtype and width.
        q_scale: one fp32 element; needed for an fp8 query, which is concat / q_scale.
        k_scale: one fp32 element; needed for layout "fp8", whose row is concat / k_scale.
        q_out: [tokens, >= heads, 576], allocated if None; the first `heads` heads are written, strides free.
        q_dtype: the activation dtype or fp8_dtype; that of q_out, else of q_nope, if None.
        fp8_dtype: float8_e4m3fn, or float8_e4m3fnuz (gfx942); the format of every fp8 tensor of the call.
        rounding: "split" rounds the rotated values to the activation dtype, as the unfused chain does;
            "fp32" rounds once, at the store.

    Returns:
        q_out.

    Numerics: fp32 inside, no fma; x * (1 / scale), clamped, nearest even. Every provider gives the oracle's bytes.
    Invariants: row i of q_out depends on token i alone and is computed whatever its slot is; a negative slot,
        one beyond the cache, and a token past the end of slot_mapping write no cache byte.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, scale or name, before anything is
        written. On CPU a slot beyond the cache, or a position beyond the table, is an IndexError.
    Source: vllm-project/vllm#47757, ROCm/aiter `fused_qk_rope_concat_and_cache_mla`; `fp8_ds_mla`: FlashMLA.
    """
    assert q_out is not None
    roles.check_addresses(kv_cache, slot_mapping, positions, cos_sin_cache.shape[0])
    roles.latent_q(
        q_nope, q_pe, positions, cos_sin_cache, q_out, rope_style=rope_style, q_scale=q_scale, rounding=rounding
    )
    roles.latent_kv(
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping,
        positions,
        cos_sin_cache,
        rope_style=rope_style,
        kv_layout=kv_layout,
        k_scale=k_scale,
        fp8_dtype=fp8_dtype,
        rounding=rounding,
    )
    return q_out

"""The sparse-MLA fusion: RoPE, query concat, key concat, and the write into the paged MLA cache."""

from __future__ import annotations

import torch

from dsafuse.layouts import QUERY_DIM, ROPE_DIM
from dsafuse.numerics import Rounding
from dsafuse.ops import resolve, roles
from dsafuse.ops.config import Config
from dsafuse.registry import Arguments, Shapes, fused_op


def query_shapes(a: Arguments) -> Shapes:
    """The output of the query role."""
    q_pe, width = a["q_pe"], ROPE_DIM if a["q_nope"] is None else QUERY_DIM
    return {"q_out": ((*q_pe.shape[:2], width), a["q_dtype"] or q_pe.dtype)}


def _resolve(a: Arguments) -> Config:
    n = resolve.Named(a)
    rounding = n.member("rounding", Rounding)
    latent_q = resolve.latent_q(n)
    resolve.same_tokens(a, "q_nope", "kv_c", "k_pe")
    activation = resolve.activation_of(a, "q_nope", "q_pe", "kv_c", "k_pe")
    latent_kv = resolve.latent_kv(n)
    resolve.allocate(a, query_shapes(a), "q_nope")
    return Config(activation, a["fp8_dtype"], rounding, latent_q=latent_q, latent_kv=latent_kv)


@fused_op(
    resolve=_resolve,
    outputs=query_shapes,
    output_names=("q_out",),
    derived=("q_dtype",),
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
    scale_rule: str = "ue8m0",
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
        scale_rule: of the tile scales of layout "fp8_ds_mla", ignored elsewhere. "ue8m0": the smallest power of two >=
            max(amax / fp8_max, 1e-4) (FlashMLA, vLLM from 0.32 on); "fp32": max(amax / fp8_max, FLT_MIN) (vLLM 0.26).
        q_out: [tokens, >= heads, 576], allocated if None; the first `heads` heads are written, strides free.
        q_dtype: the activation dtype or fp8_dtype; that of q_out, else of q_nope, if None.
        fp8_dtype: float8_e4m3fn, or float8_e4m3fnuz (gfx942); the format of every fp8 tensor of the call.
        rounding: "split" rounds the rotated values to the activation dtype, as the unfused chain does;
            "fp32" rounds once, at the store.

    Returns:
        q_out.

    Numerics: fp32 inside, no fma; x * (1 / scale), in a tile x / scale, clamped, nearest even. Every provider gives the
        oracle's bytes.
    Invariants: row i of q_out depends on token i alone and is computed whatever its slot is; a negative slot,
        one beyond the cache, and a token past the end of slot_mapping write no cache byte.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, scale or name, before anything is
        written. On CPU a slot beyond the cache, or a position beyond the table, is an IndexError.
    Source: vllm-project/vllm#47757, ROCm/aiter `fused_qk_rope_concat_and_cache_mla`; `fp8_ds_mla`: FlashMLA.
    """
    assert q_out is not None
    roles.check_addresses(kv_cache, slot_mapping, positions, cos_sin_cache)
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
        scale_rule=scale_rule,
        fp8_dtype=fp8_dtype,
        rounding=rounding,
    )
    return q_out

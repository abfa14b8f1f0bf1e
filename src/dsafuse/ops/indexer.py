"""The indexer fusion: LayerNorm of k, RoPE, fp8 of q and k, the weight fold, and the paged cache write."""

from __future__ import annotations

import torch

from dsafuse.layouts import INDEX_DIM
from dsafuse.numerics import Rounding
from dsafuse.ops import resolve, roles
from dsafuse.ops.config import Config
from dsafuse.registry import Arguments, Shapes, fused_op


def index_shapes(a: Arguments, prefix: str = "") -> Shapes:
    """The outputs of the index query role; none on a layer without an indexer."""
    n = resolve.Named(a, prefix)
    if n["q"] is None:
        return {}
    tokens, heads = n["q"].shape[:2]
    return {
        n.name("q_out"): ((tokens, heads, INDEX_DIM), a["fp8_dtype"]),
        n.name("weights_out"): ((tokens, heads), torch.float32),
    }


def _resolve(a: Arguments) -> Config:
    n = resolve.Named(a)
    rounding = n.member("rounding", Rounding)
    index_q = resolve.index_q(n)
    resolve.same_tokens(a, "q", "k")
    index_k = resolve.index_k(n)
    activation = resolve.activation_of(a, "q", "k")
    resolve.allocate(a, index_shapes(a), "q")
    return Config(activation, a["fp8_dtype"], rounding, index_q=index_q, index_k=index_k)


@fused_op(
    resolve=_resolve,
    outputs=index_shapes,
    output_names=("q_out", "weights_out"),
)
def indexer_qk_rope_quant_and_cache(
    q: torch.Tensor,
    weights: torch.Tensor,
    k: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    weights_scale: float,
    eps: float = 1e-6,
    rope_style: str = "neox",
    kv_layout: str = "flat",
    scale_rule: str = "ue8m0",
    q_out: torch.Tensor | None = None,
    weights_out: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "split",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare the indexer's queries, head weights and keys, and write the keys into their paged cache.

    (q_out, s) = quantise(rotate(q));  weights_out = (weights * s) * weights_scale
    (k8, z) = quantise(rotate(layer_norm(k)));  kv_cache[slot] = (k8, z)

    Args:
        q: [tokens, heads, 128] bf16 | fp16 | fp32; last axis contiguous, other strides free.
        weights: [tokens, heads] any float dtype; row stride free.
        k: [tokens, 128] dtype of q; row stride free (usually a slice of a wider GEMM output).
        kv_cache: [blocks, block_size, >= 132] uint8 or fp8_dtype, written in place. Layout "flat": in each block
            block_size x 128 fp8, then block_size fp32 scales; blocks contiguous, 4-byte aligned. Layout "tiled16": the
            same, but value d of token t at (t // 16) * 2048 + (d // 16) * 256 + (t % 16) * 16 + d % 16.
        slot_mapping: [<= tokens] int32 | int64; block * block_size + row; negative means "do not write".
        norm_weight, norm_bias: [128], each in its own float dtype; LayerNorm affine.
        positions: [tokens] int32 | int64; row of cos_sin_cache, clamped into it.
        cos_sin_cache: [max_position, 64] fp32 | bf16 | fp16; cos in the first half, sin in the second. The leading
            64 of the 128 dims rotate.
        weights_scale: folded into weights_out; softmax_scale * heads**-0.5 in the models.
        eps: added to the variance.
        rope_style: "neox" pairs (i, i + 32): DeepSeek-V3.2. "interleaved" pairs (2i, 2i + 1): GLM-5.x.
        kv_layout: "flat", or "tiled16" for block sizes that are multiples of 16 (AITER's preshuffled cache).
        scale_rule: "ue8m0", the smallest power of two that fits, or "fp32", the exact quotient amax / fp8_max.
        q_out: [tokens, >= heads, 128] fp8_dtype, allocated if None; strides free.
        weights_out: [tokens, >= heads] fp32, allocated if None; row stride free.
        fp8_dtype: float8_e4m3fn, or float8_e4m3fnuz (gfx942); the format of every fp8 tensor of the call.
        rounding: "split" rounds to the activation dtype after LayerNorm and after RoPE; "fp32" nowhere.

    Returns:
        (q_out, weights_out).

    Numerics: fp32 inside, no fma; scale = max(amax, floor) / fp8_max by scale_rule, floor 1e-4 (1e-10 for q with
        rounding "split"). q_out and weights_out are the oracle's bytes on every provider; a key may differ by one code
        where the order of LayerNorm's sums moves it across a rounding boundary (docs/numerics.md).
    Invariants: rows of q_out and weights_out depend on their token alone and are computed whatever its slot is;
        a negative slot, one beyond the cache, and a token past the end of slot_mapping write no cache byte.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, number or name, before anything is
        written. On CPU a slot beyond the cache, or a position beyond the table, is an IndexError.
    Source: vllm-project/vllm#53094, ROCm/aiter `indexer_qk_rope_quant_and_cache`; layout: DeepGEMM, vLLM.
    """
    assert q_out is not None
    assert weights_out is not None
    roles.check_addresses(kv_cache, slot_mapping, positions, cos_sin_cache)
    roles.index_q(
        q,
        weights,
        positions,
        cos_sin_cache,
        q_out,
        weights_out,
        weights_scale=weights_scale,
        rope_style=rope_style,
        scale_rule=scale_rule,
        rounding=rounding,
    )
    roles.index_k(
        k,
        kv_cache,
        slot_mapping,
        norm_weight,
        norm_bias,
        positions,
        cos_sin_cache,
        eps=eps,
        rope_style=rope_style,
        kv_layout=kv_layout,
        scale_rule=scale_rule,
        fp8_dtype=fp8_dtype,
        rounding=rounding,
    )
    return q_out, weights_out

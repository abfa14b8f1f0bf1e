"""The indexer fusion: LayerNorm of k, RoPE, fp8 of q and k, the weight fold, and the paged cache write."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsafuse.layouts import INDEX_DIM, INDEXER_LAYOUTS, ROPE_DIM
from dsafuse.numerics import RopeStyle, Rounding, ScaleRule
from dsafuse.ops import roles
from dsafuse.ops.arguments import (
    FLOAT_DTYPES,
    expect_activations,
    expect_addresses,
    expect_cache,
    expect_disjoint,
    expect_dtype,
    expect_finite,
    expect_fp8_dtype,
    expect_member,
    expect_output,
    expect_rope_table,
    expect_same_device,
    expect_shape,
    expect_tensor,
)
from dsafuse.registry import Arguments, Shapes, fused_op


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """Static facts of a call: what gates look at, and what a kernel is specialised for."""

    heads: int
    activation: torch.dtype
    layout: str
    fp8: torch.dtype
    block_size: int
    rope_style: str
    scale_rule: str
    rounding: str

    @property
    def fp8_formats(self) -> frozenset[torch.dtype]:
        """The fp8 formats that the call writes."""
        return frozenset({self.fp8})


def _outputs(a: Arguments) -> Shapes:
    tokens, heads = a["q"].shape[:2]
    return {
        "q_out": ((tokens, heads, INDEX_DIM), a["fp8_dtype"]),
        "weights_out": ((tokens, heads), torch.float32),
    }


def _resolve(a: Arguments) -> IndexerConfig:
    q, k, weights = (expect_tensor(name, a[name]) for name in ("q", "k", "weights"))
    expect_shape("q", q, tokens=None, heads=None, dim=INDEX_DIM)
    tokens, heads = q.shape[:2]
    expect_shape("k", k, tokens=tokens, dim=INDEX_DIM)
    activation = expect_activations({"q": q, "k": k})
    expect_shape("weights", weights, tokens=tokens, heads=heads)
    expect_dtype("weights", weights, FLOAT_DTYPES)
    for name in ("norm_weight", "norm_bias"):
        parameter = expect_tensor(name, a[name])
        expect_dtype(name, parameter, FLOAT_DTYPES)
        expect_shape(name, parameter, dim=INDEX_DIM)
    expect_addresses(tokens, a["positions"], a["slot_mapping"])
    expect_rope_table("cos_sin_cache", a["cos_sin_cache"], ROPE_DIM, tokens)
    a["eps"] = expect_finite("eps", a["eps"])
    a["weights_scale"] = expect_finite("weights_scale", a["weights_scale"])
    for name, kind in (("rope_style", RopeStyle), ("scale_rule", ScaleRule), ("rounding", Rounding)):
        a[name] = expect_member(name, a[name], kind).value
    if a["kv_layout"] not in INDEXER_LAYOUTS:
        raise ValueError(f"kv_layout: got {a['kv_layout']!r}, expected one of {', '.join(INDEXER_LAYOUTS)}")
    kv_cache = expect_tensor("kv_cache", a["kv_cache"])
    expect_cache(kv_cache, INDEXER_LAYOUTS[a["kv_layout"]], activation)

    given = {name: a[name] for name in ("q_out", "weights_out") if a[name] is not None}
    expect_fp8_dtype(a["fp8_dtype"], {"kv_cache": kv_cache.dtype})
    if "q_out" in given:
        q_out = expect_output("q_out", a["q_out"], heads, tokens=tokens, heads=None, dim=INDEX_DIM)
        expect_dtype("q_out", q_out, (a["fp8_dtype"],))
    if "weights_out" in given:
        weights_out = expect_output("weights_out", a["weights_out"], heads, tokens=tokens, heads=None)
        expect_dtype("weights_out", weights_out, (torch.float32,))
    names = ("q", "weights", "k", "kv_cache", "slot_mapping", "norm_weight", "norm_bias", "positions", "cos_sin_cache")
    inputs = {name: a[name] for name in names}
    expect_same_device({**inputs, **given})
    expect_disjoint(given, inputs)
    for name, (shape, dtype) in _outputs(a).items():
        if a[name] is None:
            a[name] = q.new_empty(shape, dtype=dtype)
    return IndexerConfig(
        heads,
        activation,
        a["kv_layout"],
        a["fp8_dtype"],
        kv_cache.shape[1],
        a["rope_style"],
        a["scale_rule"],
        a["rounding"],
    )


@fused_op(
    resolve=_resolve,
    outputs=_outputs,
    output_names=("q_out", "weights_out"),
    families=frozenset({"indexer"}),
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
            block_size x 128 fp8, then block_size fp32 scales; blocks contiguous, 4-byte aligned.
        slot_mapping: [<= tokens] int32 | int64; block * block_size + row; negative means "do not write".
        norm_weight, norm_bias: [128], each in its own float dtype; LayerNorm affine.
        positions: [tokens] int32 | int64; row of cos_sin_cache, clamped into it.
        cos_sin_cache: [max_position, 64] fp32 | bf16 | fp16; cos in the first half, sin in the second. The leading
            64 of the 128 dims rotate.
        weights_scale: folded into weights_out; softmax_scale * heads**-0.5 in the models.
        eps: added to the variance.
        rope_style: "neox" pairs (i, i + 32): DeepSeek-V3.2. "interleaved" pairs (2i, 2i + 1): GLM-5.x.
        kv_layout: "flat".
        scale_rule: "ue8m0", the smallest power of two that fits, or "fp32", the exact quotient amax / fp8_max.
        q_out: [tokens, >= heads, 128] fp8_dtype, allocated if None; strides free.
        weights_out: [tokens, >= heads] fp32, allocated if None; row stride free.
        fp8_dtype: float8_e4m3fn, or float8_e4m3fnuz (gfx942); the format of every fp8 tensor of the call.
        rounding: "split" rounds to the activation dtype after LayerNorm and after RoPE; "fp32" nowhere.

    Returns:
        (q_out, weights_out).

    Numerics: fp32 inside, no fma; scale = max(amax, floor) / fp8_max by scale_rule, floor 1e-10 for q and 1e-4 for
        k. q_out and weights_out are the oracle's bytes on every provider; a key may differ by one code where
        the order of LayerNorm's sums moves it across a rounding boundary (docs/numerics.md).
    Invariants: rows of q_out and weights_out depend on their token alone and are computed whatever its slot is;
        a negative slot, one beyond the cache, and a token past the end of slot_mapping write no cache byte.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, number or name, before anything is
        written. On CPU a slot beyond the cache, or a position beyond the table, is an IndexError.
    Source: vllm-project/vllm#53094, ROCm/aiter `indexer_qk_rope_quant_and_cache`; layout: DeepGEMM, vLLM.
    """
    assert q_out is not None
    assert weights_out is not None
    roles.check_addresses(kv_cache, slot_mapping, positions, cos_sin_cache.shape[0])
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

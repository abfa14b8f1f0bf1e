"""Both fusions in one launch, and vLLM's two seams with the norms inside.

Layers without an indexer of their own use the same ops, with every index argument absent (None).
"""

from __future__ import annotations

import torch

from dsafuse.numerics import Rounding
from dsafuse.ops import resolve, roles
from dsafuse.ops.config import Config
from dsafuse.ops.indexer import index_shapes, indexer_qk_rope_quant_and_cache
from dsafuse.ops.mla import fused_qk_rope_concat_and_cache_mla, query_shapes
from dsafuse.registry import Arguments, Shapes, fused_op

INDEX = "index_"
INDEX_Q_INPUTS = ("index_q", "index_weights", "index_cos_sin_cache", "index_weights_scale")
INDEX_K_INPUTS = ("index_k", "index_kv_cache", "index_slot_mapping", "index_norm_weight", "index_norm_bias")


def _has_index(a: Arguments, first: str, names: tuple[str, ...], outputs: tuple[str, ...] = ()) -> bool:
    """Whether the indexer's arguments are there: all of them, or none."""
    present = a[first] is not None
    for name in names:
        if (a[name] is not None) != present:
            state = "None" if a[name] is None else "a value"
            raise ValueError(f"{name}: got {state}, expected {first} and it to be both given or both None")
    for name in outputs:
        if a[name] is not None and not present:
            raise ValueError(f"{name}: got a value, expected None without {first}")
    if not present:
        resolve.index_options(resolve.Named(a, INDEX))
    return present


def _given(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Tensors that `_has_index` has found present, as a type checker wants them."""
    present = tuple(tensor for tensor in tensors if tensor is not None)
    assert len(present) == len(tensors)
    return present


def _number(value: float | None) -> float:
    """A number that `_has_index` has found present, as a type checker wants it."""
    assert value is not None
    return value


def _qk_shapes(a: Arguments) -> Shapes:
    return {**query_shapes(a), **index_shapes(a, INDEX)}


def _resolve_qk(a: Arguments) -> Config:
    n, index = resolve.Named(a), resolve.Named(a, INDEX)
    rounding = n.member("rounding", Rounding)
    latent_q = resolve.latent_q(n)
    resolve.same_tokens(a, "q_nope", "kv_c", "k_pe", "index_q", "index_k")
    activation = resolve.activation_of(a, "q_nope", "kv_c", "k_pe", "index_q", "index_k")
    latent_kv = resolve.latent_kv(n)
    outputs = ("index_q_out", "index_weights_out", "topk_indices")
    indexed = _has_index(a, "index_q", INDEX_Q_INPUTS + INDEX_K_INPUTS, outputs)
    index_q = resolve.index_q(index) if indexed else None
    index_k = resolve.index_k(index) if indexed else None
    clear_topk = resolve.clear_topk(n, a["q_nope"].shape[0])
    resolve.allocate(a, _qk_shapes(a), "q_nope")
    return Config(
        activation,
        a["fp8_dtype"],
        rounding,
        latent_q=latent_q,
        latent_kv=latent_kv,
        index_q=index_q,
        index_k=index_k,
        clear_topk=clear_topk,
    )


@fused_op(
    resolve=_resolve_qk,
    outputs=_qk_shapes,
    output_names=("q_out", "index_q_out", "index_weights_out"),
    mutates=("kv_cache", "index_kv_cache", "topk_indices"),
    derived=("q_dtype",),
    index_prefix=INDEX,
)
def prepare_qk(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    index_q: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
    index_k: torch.Tensor | None = None,
    index_kv_cache: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    index_norm_weight: torch.Tensor | None = None,
    index_norm_bias: torch.Tensor | None = None,
    index_cos_sin_cache: torch.Tensor | None = None,
    *,
    rope_style: str = "interleaved",
    kv_layout: str = "auto",
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    scale_rule: str = "ue8m0",
    q_out: torch.Tensor | None = None,
    q_dtype: torch.dtype | None = None,
    index_weights_scale: float | None = None,
    index_eps: float = 1e-6,
    index_rope_style: str = "neox",
    index_kv_layout: str = "flat",
    index_scale_rule: str = "ue8m0",
    index_q_out: torch.Tensor | None = None,
    index_weights_out: torch.Tensor | None = None,
    topk_indices: torch.Tensor | None = None,
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "split",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Both original fusions in one launch: all query and key preparation after the projections.

    Equal, byte for byte, to `fused_qk_rope_concat_and_cache_mla` on the arguments without a prefix followed by
    `indexer_qk_rope_quant_and_cache` on those with `index_`; see these two for shapes, strides and numerics. Then
    topk_indices[:tokens] = -1.

    Args:
        q_nope, q_pe, kv_c, k_pe, kv_cache, slot_mapping, positions, cos_sin_cache, rope_style, kv_layout, q_scale,
            k_scale, scale_rule, q_out, q_dtype: as in `fused_qk_rope_concat_and_cache_mla`.
        index_q, index_weights, index_k, index_kv_cache, index_slot_mapping, index_norm_weight, index_norm_bias,
            index_cos_sin_cache, index_weights_scale, index_eps, index_rope_style, index_kv_layout,
            index_scale_rule, index_q_out, index_weights_out: as in `indexer_qk_rope_quant_and_cache`, which
            shares positions; all None on a layer without an indexer.
        topk_indices: [>= tokens, topk] int32; rows [0, tokens) are filled with -1 when given, whatever the slots are.
            None on a layer without an indexer, which reads another layer's choice.
        fp8_dtype, rounding: for both.

    Returns:
        (q_out, index_q_out, index_weights_out); the last two are None without an indexer.

    Invariants: those of the two ops; the caches have slot mappings of their own, and neither guards the other.
    Errors: those of the two ops; ValueError if the indexer's arguments are given in part, or topk_indices without them.
    """
    roles.check_addresses(kv_cache, slot_mapping, positions, cos_sin_cache)
    if index_q is not None:
        index_weights, index_k, index_kv_cache, index_slot_mapping, index_cos_sin_cache = _given(
            index_weights, index_k, index_kv_cache, index_slot_mapping, index_cos_sin_cache
        )
        index_norm_weight, index_norm_bias = _given(index_norm_weight, index_norm_bias)
        roles.check_addresses(index_kv_cache, index_slot_mapping, positions, index_cos_sin_cache, "index_")
        index_q_out, index_weights_out = indexer_qk_rope_quant_and_cache.oracle(
            index_q,
            index_weights,
            index_k,
            index_kv_cache,
            index_slot_mapping,
            index_norm_weight,
            index_norm_bias,
            positions,
            index_cos_sin_cache,
            weights_scale=_number(index_weights_scale),
            eps=index_eps,
            rope_style=index_rope_style,
            kv_layout=index_kv_layout,
            scale_rule=index_scale_rule,
            q_out=index_q_out,
            weights_out=index_weights_out,
            fp8_dtype=fp8_dtype,
            rounding=rounding,
        )
    if topk_indices is not None:
        roles.clear_topk(topk_indices, len(positions))
    q_out = fused_qk_rope_concat_and_cache_mla.oracle(
        q_nope,
        q_pe,
        kv_c,
        k_pe,
        kv_cache,
        slot_mapping,
        positions,
        cos_sin_cache,
        rope_style=rope_style,
        kv_layout=kv_layout,
        q_scale=q_scale,
        k_scale=k_scale,
        scale_rule=scale_rule,
        q_out=q_out,
        fp8_dtype=fp8_dtype,
        rounding=rounding,
    )
    return q_out, index_q_out, index_weights_out


def _latents_shapes(a: Arguments) -> Shapes:
    return {"q_c_out": (tuple(a["q_c"].shape), a["q_c"].dtype)}


def _resolve_latents(a: Arguments) -> Config:
    n, index = resolve.Named(a), resolve.Named(a, INDEX)
    rounding = n.member("rounding", Rounding)
    norm_q = resolve.norm_q(n)
    clear_topk = resolve.clear_topk(n, a["q_c"].shape[0])
    resolve.same_tokens(a, "q_c", "kv_c", "k_pe", "index_k")
    activation = resolve.activation_of(a, "q_c", "kv_c", "k_pe", "index_k")
    latent_kv = resolve.latent_kv(n, norm=True)
    indexed = _has_index(a, "index_k", (*INDEX_K_INPUTS, "index_cos_sin_cache"))
    index_k = resolve.index_k(index) if indexed else None
    resolve.allocate(a, _latents_shapes(a), "q_c")
    return Config(
        activation,
        a["fp8_dtype"],
        rounding,
        latent_kv=latent_kv,
        index_k=index_k,
        norm_q=norm_q,
        clear_topk=clear_topk,
    )


@fused_op(
    resolve=_resolve_latents,
    outputs=_latents_shapes,
    output_names=("q_c_out",),
    mutates=("kv_cache", "index_kv_cache", "topk_indices", "kv_c_out", "k_pe_out"),
    index_prefix=INDEX,
)
def prepare_latents(
    q_c: torch.Tensor,
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    q_norm_weight: torch.Tensor,
    q_norm_eps: float,
    kv_norm_weight: torch.Tensor,
    kv_norm_eps: float,
    index_k: torch.Tensor | None = None,
    index_kv_cache: torch.Tensor | None = None,
    index_slot_mapping: torch.Tensor | None = None,
    index_norm_weight: torch.Tensor | None = None,
    index_norm_bias: torch.Tensor | None = None,
    index_eps: float = 1e-6,
    index_cos_sin_cache: torch.Tensor | None = None,
    index_rope_style: str = "neox",
    topk_indices: torch.Tensor | None = None,
    q_c_out: torch.Tensor | None = None,
    kv_c_out: torch.Tensor | None = None,
    k_pe_out: torch.Tensor | None = None,
    rope_style: str = "interleaved",
    kv_layout: str = "auto",
    k_scale: torch.Tensor | None = None,
    scale_rule: str = "ue8m0",
    index_kv_layout: str = "flat",
    index_scale_rule: str = "ue8m0",
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "split",
) -> torch.Tensor:
    """The seam before q_b: both RMSNorms, and the rows of both caches.

    q_c_out = rms_norm(q_c);  kv_cache[slot] = quantise(concat(rms_norm(kv_c), rotate(k_pe)))
    index_kv_cache[slot] = quantise(rotate(layer_norm(index_k)));  topk_indices[:tokens] = -1

    Args:
        q_c: [tokens, q_lora_rank] bf16 | fp16 | fp32; row stride free; not normed yet.
        kv_c: [tokens, 512] same dtype; row stride free; not normed yet.
        k_pe, positions, cos_sin_cache, kv_cache, slot_mapping, rope_style, kv_layout, k_scale, scale_rule: as in
            `fused_qk_rope_concat_and_cache_mla`.
        q_norm_weight: [q_lora_rank], kv_norm_weight: [512], any float dtype; RMSNorm weights.
        q_norm_eps, kv_norm_eps: added to the mean square.
        index_k, index_kv_cache, index_slot_mapping, index_norm_weight, index_norm_bias, index_eps,
            index_cos_sin_cache, index_rope_style, index_kv_layout, index_scale_rule: as in
            `indexer_qk_rope_quant_and_cache`; the tensors are all None on a layer without an indexer.
        topk_indices: [>= tokens, topk] int32; rows [0, tokens) are filled with -1 when given. A layer that shares
            another layer's choice must not give it.
        q_c_out: [tokens, q_lora_rank] of q_c's dtype, allocated if None; row stride free.
        kv_c_out: [tokens, 512], k_pe_out: [tokens, 64], of kv_c's dtype: the normed latent and the rotated key,
            written only when given, whatever the slots are.
        fp8_dtype, rounding: "split" rounds to the activation dtype after each norm and after RoPE.

    Returns:
        q_c_out.

    Numerics: RMSNorm is (x * r) * weight with r = 1 / sqrt(mean(x * x) + eps), rounded once; the rest as in the two
        ops named. Norms may differ from the oracle by one rounding (docs/numerics.md).
    Invariants: rows depend on their token alone; a slot that is negative or beyond its cache writes no cache byte.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, number or name, before anything is
        written; ValueError if the indexer's arguments are given in part.
    Source: vLLM `fused_norm_rope` (vllm-project/vllm#46876).
    """
    assert q_c_out is not None
    roles.check_addresses(kv_cache, slot_mapping, positions, cos_sin_cache)
    if index_k is not None:
        index_kv_cache, index_slot_mapping, index_norm_weight, index_norm_bias, index_cos_sin_cache = _given(
            index_kv_cache, index_slot_mapping, index_norm_weight, index_norm_bias, index_cos_sin_cache
        )
        roles.check_addresses(index_kv_cache, index_slot_mapping, positions, index_cos_sin_cache, "index_")
        roles.index_k(
            index_k,
            index_kv_cache,
            index_slot_mapping,
            index_norm_weight,
            index_norm_bias,
            positions,
            index_cos_sin_cache,
            eps=index_eps,
            rope_style=index_rope_style,
            kv_layout=index_kv_layout,
            scale_rule=index_scale_rule,
            fp8_dtype=fp8_dtype,
            rounding=rounding,
        )
    roles.norm_q(q_c, q_norm_weight, q_norm_eps, q_c_out)
    if topk_indices is not None:
        roles.clear_topk(topk_indices, len(positions))
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
        norm=(kv_norm_weight, kv_norm_eps),
        kv_c_out=kv_c_out,
        k_pe_out=k_pe_out,
    )
    return q_c_out


def _resolve_queries(a: Arguments) -> Config:
    n, index = resolve.Named(a), resolve.Named(a, INDEX)
    rounding = n.member("rounding", Rounding)
    latent_q = resolve.latent_q(n, rope_alone=True)
    first = "q_nope" if latent_q.nope else "q_pe"
    if latent_q.heads < 1:
        raise ValueError(f"{first}: got {latent_q.heads} heads, expected at least 1")
    resolve.same_tokens(a, first, "index_q")
    activation = resolve.activation_of(a, first, "index_q")
    outputs = ("index_q_out", "index_weights_out")
    indexed = _has_index(a, "index_q", INDEX_Q_INPUTS, outputs)
    index_q = resolve.index_q(index) if indexed else None
    resolve.allocate(a, _qk_shapes(a), first)
    return Config(activation, a["fp8_dtype"], rounding, latent_q=latent_q, index_q=index_q)


@fused_op(
    resolve=_resolve_queries,
    outputs=_qk_shapes,
    output_names=("q_out", "index_q_out", "index_weights_out"),
    mutates=(),
    derived=("q_dtype",),
    index_prefix=INDEX,
)
def prepare_queries(
    q_nope: torch.Tensor | None,
    q_pe: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    q_scale: torch.Tensor | None = None,
    q_dtype: torch.dtype | None = None,
    q_out: torch.Tensor | None = None,
    index_q: torch.Tensor | None = None,
    index_weights: torch.Tensor | None = None,
    index_cos_sin_cache: torch.Tensor | None = None,
    index_rope_style: str = "neox",
    index_weights_scale: float | None = None,
    index_scale_rule: str = "ue8m0",
    index_q_out: torch.Tensor | None = None,
    index_weights_out: torch.Tensor | None = None,
    rope_style: str = "interleaved",
    fp8_dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: str = "split",
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """The seam after q_b: the query side of both fusions, in one launch.

    q_out = quantise(concat(q_nope, rotate(q_pe)));  (index_q_out, s) = quantise(rotate(index_q))
    index_weights_out = (index_weights * s) * index_weights_scale

    Args:
        q_nope, q_pe, positions, cos_sin_cache, q_scale, q_dtype, q_out, rope_style: as in
            `fused_qk_rope_concat_and_cache_mla`. q_nope may be None, for readers that take the parts apart (FlashMLA):
            q_out is then rotate(q_pe) alone, [tokens, >= heads, 64], in the activation dtype.
        index_q, index_weights, index_cos_sin_cache, index_rope_style, index_weights_scale, index_scale_rule,
            index_q_out, index_weights_out: as in `indexer_qk_rope_quant_and_cache`; all None on a layer without an
            indexer.
        fp8_dtype, rounding: for both.

    Returns:
        (q_out, index_q_out, index_weights_out); the last two are None without an indexer.

    Numerics: the oracle's bytes on every provider.
    Invariants: rows depend on their token alone.
    Errors: TypeError for a dtype, ValueError for a shape, stride, device, number or name, before anything is
        written; ValueError if the indexer's arguments are given in part.
    Source: vLLM `fused_q` (vllm-project/vllm#46876).
    """
    assert q_out is not None
    if index_q is not None:
        index_weights, index_cos_sin_cache, index_q_out, index_weights_out = _given(
            index_weights, index_cos_sin_cache, index_q_out, index_weights_out
        )
        roles.index_q(
            index_q,
            index_weights,
            positions,
            index_cos_sin_cache,
            index_q_out,
            index_weights_out,
            weights_scale=_number(index_weights_scale),
            rope_style=index_rope_style,
            scale_rule=index_scale_rule,
            rounding=rounding,
        )
    roles.latent_q(
        q_nope, q_pe, positions, cos_sin_cache, q_out, rope_style=rope_style, q_scale=q_scale, rounding=rounding
    )
    return q_out, index_q_out, index_weights_out

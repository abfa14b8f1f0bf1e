"""The equations in float64, apart from the oracle's code: how far a result is from the mathematics.

Rotation is a complex product, the norms are torch's own; nothing is rounded. What is clamped stays clamped, since
saturation is part of the meaning of a per-tensor scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsafuse.check.caches import Cache, caches_of
from dsafuse.check.cases import DTYPES, Case
from dsafuse.check.inputs import Inputs
from dsafuse.layouts import LATENT_TILE, ROPE_DIM, CacheLayout
from dsafuse.numerics import FP8_FORMATS
from dsafuse.ops.resolve import Named
from dsafuse.registry import OPS

_CHUNK_ELEMENTS = 1 << 26

Pair = tuple[torch.Tensor, torch.Tensor]


def max_error(case: Case, inputs: Inputs, outputs: dict[str, torch.Tensor]) -> float:
    """The largest |result - exact| over the largest |exact| of its row; rows that are not finite do not count."""
    return max((error for _, error in errors(case, inputs, outputs)), default=0.0)


def errors(case: Case, inputs: Inputs, outputs: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
    """(role, such an error) of every piece of the outputs that `outputs` holds."""
    for role, (got, exact) in _pieces(case, inputs.cleaned, outputs):
        finite = exact.isfinite().all(-1) & got.isfinite().all(-1)
        if bool(finite.any()):
            largest = exact[finite].abs().amax(-1).clamp(min=1e-30)
            yield role, float(((got - exact)[finite].abs().amax(-1) / largest).max())


def _pieces(case: Case, a: dict[str, Any], outputs: dict[str, torch.Tensor]) -> Iterator[tuple[str, Pair]]:
    """(role, (dequantised result, exact value)): queries of some tokens, head weights, norms, live cache rows."""
    index = Named(a, OPS[case.op].index_prefix)
    step = max(1, _CHUNK_ELEMENTS // (max(case.heads, case.index_heads) * 576))
    for start in range(0, case.tokens, step):
        part = slice(start, start + step)
        if "latent_q" in case.roles and "q_out" in outputs:
            yield "latent_q", _mla_query(case, a, outputs["q_out"], part)
        if "index_q" in case.roles and index.name("q_out") in outputs:
            yield "index_q", _index_query(case, index, outputs, part)
        if "norm_q" in case.roles and "q_c_out" in outputs:
            yield "norm_q", (outputs["q_c_out"][part].double(), _rms_norm(a, "q_c", "q", part))
    for cache in caches_of(case):
        slots = a[cache.slot_mapping].long()
        tokens = (slots >= 0).nonzero().flatten()
        if len(tokens) and cache.name in outputs:
            key = _index_key if cache.role == "index_k" else _mla_key
            named = index if cache.role == "index_k" else Named(a)
            yield cache.role, key(case, cache, named, outputs[cache.name], tokens, slots[tokens])
    if case.tokens and "kv_c_out" in outputs:
        yield "latent_kv", (outputs["kv_c_out"].double(), _rms_norm(a, "kv_c", "kv", slice(None)))
    if case.tokens and "k_pe_out" in outputs:
        every = torch.arange(case.tokens, device=a["positions"].device)
        yield "latent_kv", (outputs["k_pe_out"].double(), _rotated_key(case, Named(a), every))


def rotated(x: torch.Tensor, angles: torch.Tensor, rope_style: str) -> torch.Tensor:
    """(x1 + i x2) (cos + i sin), in float64, back in the places that x1 and x2 came from."""
    angles = angles.double().reshape(angles.shape[0], *[1] * (x.dim() - 2), ROPE_DIM)
    turn = torch.complex(angles[..., : ROPE_DIM // 2].contiguous(), angles[..., ROPE_DIM // 2 :].contiguous())
    axis = -2 if rope_style == "neox" else -1
    pairs = x.double().unflatten(-1, (2, -1) if axis == -2 else (-1, 2))
    z = torch.complex(*(half.contiguous() for half in pairs.unbind(axis))) * turn
    return torch.stack([z.real, z.imag], axis).flatten(-2)


def _angles(n: Named, tokens: Any) -> torch.Tensor:
    table: torch.Tensor = n["cos_sin_cache"]
    return table[n["positions"][tokens].long()]


def _rms_norm(a: dict[str, Any], name: str, norm: str, tokens: Any) -> torch.Tensor:
    weight = a[f"{norm}_norm_weight"].double()
    return torch.nn.functional.rms_norm(a[name][tokens].double(), weight.shape, weight, a[f"{norm}_norm_eps"])


def _saturated(x: torch.Tensor, scale: torch.Tensor | None, fp8: str) -> torch.Tensor:
    """x, as far as a per-tensor scale reaches; x itself without one."""
    if scale is None:
        return x
    reach = FP8_FORMATS[DTYPES[fp8]].max * scale.double().abs()
    return torch.where(reach.isfinite(), x.clamp(-reach, reach), x.new_tensor(float("nan")))


def _mla_query(case: Case, a: dict[str, Any], q_out: torch.Tensor, part: slice) -> Pair:
    scale = a["q_scale"] if case.query == "fp8" else None
    rope = rotated(a["q_pe"][part], _angles(Named(a), part), case.rope_style)
    whole = rope if a["q_nope"] is None else torch.cat([a["q_nope"][part].double(), rope], -1)
    exact = _saturated(whole, scale, case.fp8)
    got = q_out[part, : case.heads].double()
    return got if scale is None else got * scale.double(), exact


def _rotated_key(case: Case, n: Named, tokens: torch.Tensor) -> torch.Tensor:
    return rotated(n["k_pe"].reshape(case.tokens, ROPE_DIM)[tokens], _angles(n, tokens), case.rope_style)


def _mla_key(
    case: Case, cache: Cache, n: Named, stored: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor
) -> Pair:
    activation, fp8, layout = DTYPES[case.activation], DTYPES[case.fp8], cache.layout
    scale = n["k_scale"] if layout.name == "fp8" else None
    latent = _rms_norm(n.arguments, "kv_c", "kv", tokens) if case.normed else n["kv_c"][tokens].double()
    exact = _saturated(torch.cat([latent, _rotated_key(case, n, tokens)], -1), scale, case.fp8)
    dtypes = {
        "plain": {"latent": activation, "rope": activation},
        "fp8": {"latent": fp8, "rope": fp8},
        "fp8_ds_mla": {"latent": fp8, "scale": torch.float32, "rope": torch.bfloat16},
    }[layout.name]
    row = {
        name: field_rows(layout, stored, name, slots, activation).view(dtype).double() for name, dtype in dtypes.items()
    }
    if "scale" in row:
        row["latent"] = row["latent"] * row["scale"].repeat_interleave(LATENT_TILE, -1)
    got = torch.cat([row["latent"], row["rope"]], -1)
    return got if scale is None else got * scale.double(), exact


def _index_query(case: Case, n: Named, outputs: dict[str, torch.Tensor], part: slice) -> Pair:
    """The head weight carries the query's scale: their product is what the logits see."""
    q, heads = n["q"][part].double(), case.index_heads
    rope = rotated(q[..., :ROPE_DIM], _angles(n, part), case.index_rope_style)
    exact = torch.cat([rope, q[..., ROPE_DIM:]], -1)
    weights = n["weights"][part].double() * n["weights_scale"]
    codes = outputs[n.name("q_out")][part, :heads].double()
    return codes * outputs[n.name("weights_out")][part, :heads, None].double(), exact * weights[..., None]


def _index_key(
    case: Case, cache: Cache, n: Named, stored: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor
) -> Pair:
    weight, bias = n["norm_weight"].double(), n["norm_bias"].double()
    k = torch.nn.functional.layer_norm(n["k"][tokens].double(), weight.shape, weight, bias, n["eps"])
    rope = rotated(k[..., :ROPE_DIM], _angles(n, tokens), case.index_rope_style)
    codes = field_rows(cache.layout, stored, "key", slots, k.dtype).view(DTYPES[case.fp8]).double()
    scale = field_rows(cache.layout, stored, "scale", slots, k.dtype).view(torch.float32).double()
    return codes * scale, torch.cat([rope, k[..., ROPE_DIM:]], -1)


def field_rows(
    layout: CacheLayout, cache: torch.Tensor, name: str, slots: torch.Tensor, activation: torch.dtype
) -> torch.Tensor:
    """Field `name` of the given slots, uint8 [slots, bytes], a copy."""
    return layout.load_rows(cache, name, activation, slots).contiguous()

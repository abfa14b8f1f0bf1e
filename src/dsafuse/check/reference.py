"""The equations in float64, apart from the oracle's code: how far a result is from the mathematics.

Rotation is a complex product, the norm is torch's own; nothing is rounded. What is clamped stays clamped, since
saturation is part of the meaning of a per-tensor scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsafuse.check.cases import DTYPES, Case, IndexerCase, MlaCase
from dsafuse.check.inputs import Inputs, layout_of
from dsafuse.layouts import LATENT_TILE, ROPE_DIM, CacheLayout
from dsafuse.numerics import FP8_FORMATS

_CHUNK_ELEMENTS = 1 << 26

Pair = tuple[torch.Tensor, torch.Tensor]


def max_error(case: Case, inputs: Inputs, outputs: dict[str, torch.Tensor]) -> float:
    """The largest |result - exact| over the largest |exact| of its row; rows that are not finite do not count."""
    worst = 0.0
    for got, exact in _rows(case, inputs.cleaned, outputs):
        finite = exact.isfinite().all(-1) & got.isfinite().all(-1)
        if bool(finite.any()):
            largest = exact[finite].abs().amax(-1).clamp(min=1e-30)
            worst = max(worst, float(((got - exact)[finite].abs().amax(-1) / largest).max()))
    return worst


def _rows(case: Case, a: dict[str, Any], outputs: dict[str, torch.Tensor]) -> Iterator[Pair]:
    """(dequantised result, exact value) in pieces: queries of some tokens, head weights, live cache rows."""
    step = max(1, _CHUNK_ELEMENTS // (case.heads * 576))
    for start in range(0, case.tokens, step):
        part = slice(start, start + step)
        if isinstance(case, MlaCase):
            yield _mla_query(case, a, outputs["q_out"], part)
        else:
            assert isinstance(case, IndexerCase)
            yield from _index_query(case, a, outputs, part)
    slots = a["slot_mapping"].long()
    tokens = (slots >= 0).nonzero().flatten()
    if len(tokens):
        key = _mla_key if isinstance(case, MlaCase) else _index_key
        yield key(case, a, outputs["kv_cache"], tokens, slots[tokens])


def rotated(x: torch.Tensor, angles: torch.Tensor, rope_style: str) -> torch.Tensor:
    """(x1 + i x2) (cos + i sin), in float64, back in the places that x1 and x2 came from."""
    angles = angles.double().reshape(angles.shape[0], *[1] * (x.dim() - 2), ROPE_DIM)
    turn = torch.complex(angles[..., : ROPE_DIM // 2].contiguous(), angles[..., ROPE_DIM // 2 :].contiguous())
    axis = -2 if rope_style == "neox" else -1
    pairs = x.double().unflatten(-1, (2, -1) if axis == -2 else (-1, 2))
    z = torch.complex(*(half.contiguous() for half in pairs.unbind(axis))) * turn
    return torch.stack([z.real, z.imag], axis).flatten(-2)


def _angles(a: dict[str, Any], tokens: Any) -> torch.Tensor:
    table: torch.Tensor = a["cos_sin_cache"]
    return table[a["positions"][tokens].long()]


def _saturated(x: torch.Tensor, scale: torch.Tensor | None, fp8: str) -> torch.Tensor:
    """x, as far as a per-tensor scale reaches; x itself without one."""
    if scale is None:
        return x
    reach = FP8_FORMATS[DTYPES[fp8]].max * scale.double().abs()
    return torch.where(reach.isfinite(), x.clamp(-reach, reach), x.new_tensor(float("nan")))


def _mla_query(case: MlaCase, a: dict[str, Any], q_out: torch.Tensor, part: slice) -> Pair:
    scale = a["q_scale"] if case.query == "fp8" else None
    rope = rotated(a["q_pe"][part], _angles(a, part), case.rope_style)
    exact = _saturated(torch.cat([a["q_nope"][part].double(), rope], -1), scale, case.fp8)
    got = q_out[part, : case.heads].double()
    return got if scale is None else got * scale.double(), exact


def _mla_key(case: Case, a: dict[str, Any], cache: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor) -> Pair:
    assert isinstance(case, MlaCase)
    layout, activation, fp8 = layout_of(case), DTYPES[case.activation], DTYPES[case.fp8]
    rope = rotated(a["k_pe"].reshape(case.tokens, ROPE_DIM)[tokens], _angles(a, tokens), case.rope_style)
    scale = a["k_scale"] if layout.name == "fp8" else None
    exact = _saturated(torch.cat([a["kv_c"][tokens].double(), rope], -1), scale, case.fp8)
    stored = {
        "plain": {"latent": activation, "rope": activation},
        "fp8": {"latent": fp8, "rope": fp8},
        "fp8_ds_mla": {"latent": fp8, "scale": torch.float32, "rope": torch.bfloat16},
    }[layout.name]
    row = {
        name: field_rows(layout, cache, name, slots, activation).view(dtype).double() for name, dtype in stored.items()
    }
    if "scale" in row:
        row["latent"] = row["latent"] * row["scale"].repeat_interleave(LATENT_TILE, -1)
    got = torch.cat([row["latent"], row["rope"]], -1)
    return got if scale is None else got * scale.double(), exact


def _index_query(case: IndexerCase, a: dict[str, Any], outputs: dict[str, torch.Tensor], part: slice) -> Iterator[Pair]:
    """The head weight carries the query's scale: their product is what the logits see."""
    q = a["q"][part].double()
    exact = torch.cat([rotated(q[..., :ROPE_DIM], _angles(a, part), case.rope_style), q[..., ROPE_DIM:]], -1)
    weights = a["weights"][part].double() * a["weights_scale"]
    codes = outputs["q_out"][part, : case.heads].double()
    yield codes * outputs["weights_out"][part, : case.heads, None].double(), exact * weights[..., None]


def _index_key(case: Case, a: dict[str, Any], cache: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor) -> Pair:
    weight, bias = a["norm_weight"].double(), a["norm_bias"].double()
    k = torch.nn.functional.layer_norm(a["k"][tokens].double(), weight.shape, weight, bias, a["eps"])
    rope = rotated(k[..., :ROPE_DIM], _angles(a, tokens), case.rope_style)
    layout = layout_of(case)
    codes = field_rows(layout, cache, "key", slots, k.dtype).view(DTYPES[case.fp8]).double()
    scale = field_rows(layout, cache, "scale", slots, k.dtype).view(torch.float32).double()
    return codes * scale, torch.cat([rope, k[..., ROPE_DIM:]], -1)


def field_rows(
    layout: CacheLayout, cache: torch.Tensor, name: str, slots: torch.Tensor, activation: torch.dtype
) -> torch.Tensor:
    """Field `name` of the given slots, uint8 [slots, bytes], a copy."""
    block_size = cache.shape[1]
    return layout.field_bytes(cache, name, activation)[slots // block_size, slots % block_size].contiguous()

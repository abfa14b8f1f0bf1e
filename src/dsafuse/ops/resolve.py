"""Checks of a role's arguments, under whatever names an op gives them, and the facts that follow.

Every function checks, writes back what it settled (a layout instead of "auto", a canonical name), and returns the
role's facts. Outputs are allocated by `allocate`, after all checks of all roles.
"""

from __future__ import annotations

from typing import Any

import torch

from dsafuse.layouts import INDEX_DIM, INDEXER_LAYOUTS, LATENT_DIM, MLA_LAYOUTS, QUERY_DIM, ROPE_DIM
from dsafuse.numerics import FP8_FORMATS, RopeStyle, Rounding, ScaleRule
from dsafuse.ops.arguments import (
    FLOAT_DTYPES,
    expect_activations,
    expect_cache,
    expect_dtype,
    expect_finite,
    expect_fp8_dtype,
    expect_layout,
    expect_member,
    expect_output,
    expect_positions,
    expect_rope_table,
    expect_same_device,
    expect_scale,
    expect_shape,
    expect_slots,
    expect_tensor,
    expect_width,
)
from dsafuse.ops.config import ClearTopk, IndexK, IndexQ, LatentKv, LatentQ, NormQ
from dsafuse.registry import Arguments, Shapes

SHARED = frozenset({"positions", "fp8_dtype", "rounding"})


class Named:
    """An op's arguments under a role's names: `Named(a, "index_")["q"]` is `a["index_q"]`."""

    def __init__(self, arguments: Arguments, prefix: str = "") -> None:
        self.arguments = arguments
        self.prefix = prefix

    def name(self, key: str) -> str:
        """What the op calls the role's argument `key`."""
        return key if key in SHARED else self.prefix + key

    def __getitem__(self, key: str) -> Any:
        return self.arguments[self.name(key)]

    def __setitem__(self, key: str, value: Any) -> None:
        self.arguments[self.name(key)] = value

    def tensor(self, key: str, **shape: int | None) -> torch.Tensor:
        """The tensor called `key`, of exactly these axes."""
        tensor = expect_tensor(self.name(key), self[key])
        expect_shape(self.name(key), tensor, **shape)
        return tensor

    def member(self, key: str, kind: type[RopeStyle] | type[ScaleRule] | type[Rounding]) -> str:
        """The enum value called `key`, in its canonical spelling."""
        name = self.name(key)
        value = self.arguments[name] = expect_member(name, self.arguments[name], kind)
        return value

    def number(self, key: str) -> None:
        """A finite number called `key`."""
        if self[key] is None:
            raise ValueError(f"{self.name(key)}: got None, expected a finite number")
        self[key] = expect_finite(self.name(key), self[key])

    def epsilon(self, key: str) -> None:
        """A finite number called `key` that can be added to a variance."""
        self.number(key)
        if self[key] < 0:
            raise ValueError(f"{self.name(key)}: got {self[key]}, expected no negative number")

    def rope_table(self, tokens: int) -> None:
        """The rope table of this family."""
        expect_rope_table(self.name("cos_sin_cache"), self["cos_sin_cache"], ROPE_DIM, tokens)


def activation_of(a: Arguments, *names: str) -> torch.dtype:
    """The one dtype of these tensors; absent ones do not count."""
    return expect_activations({name: expect_tensor(name, a[name]) for name in names if a[name] is not None})


def same_tokens(a: Arguments, *names: str) -> None:
    """One token count for all of these tensors; absent ones do not count."""
    present = [name for name in names if isinstance(a[name], torch.Tensor) and a[name].dim()]
    for name in present[1:]:
        if len(a[name]) != len(a[present[0]]):
            expected = f"tokens={len(a[present[0]])} as {present[0]}"
            raise ValueError(f"{name}: got {len(a[name])} tokens, expected {expected}")


def latent_q(n: Named, rope_alone: bool = False) -> LatentQ:
    """q_nope, q_pe, q_out, q_dtype and q_scale; with `rope_alone`, q_nope may be None."""
    nope = not rope_alone or n["q_nope"] is not None
    shape: dict[str, int | None] = {"tokens": None, "heads": None}
    if nope:
        shape = dict(zip(shape, n.tensor("q_nope", **shape, latent=LATENT_DIM).shape))
    tokens, heads = n.tensor("q_pe", **shape, rope=ROPE_DIM).shape[:2]
    activation = activation_of(n.arguments, "q_nope", "q_pe")
    q_out, q_dtype = n["q_out"], n["q_dtype"]
    if q_out is not None:
        expect_output("q_out", q_out, heads, tokens=tokens, heads=None, dim=QUERY_DIM if nope else ROPE_DIM)
        if q_dtype is not None and q_out.dtype != q_dtype:
            raise TypeError(f"q_out: got {q_out.dtype}, expected q_dtype={q_dtype}")
        q_dtype = q_out.dtype
    q_dtype = activation if q_dtype is None else q_dtype
    if q_dtype != activation and (q_dtype not in FP8_FORMATS or not nope):
        blamed = "q_dtype" if q_out is None else "q_out"
        expected = f"{activation} or {' or '.join(map(str, FP8_FORMATS))}" if nope else f"{activation} without q_nope"
        raise TypeError(f"{blamed}: got {q_dtype}, expected {expected}")
    expect_fp8_dtype(n["fp8_dtype"], {"q_dtype": q_dtype})
    n["q_dtype"] = q_dtype
    n["q_scale"] = _scale(n, "q_scale", "an fp8 query" if q_dtype in FP8_FORMATS else None)
    expect_positions(tokens, n["positions"])
    n.rope_table(tokens)
    return LatentQ(heads, q_dtype, n.member("rope_style", RopeStyle), nope)


def latent_kv(n: Named, norm: bool = False) -> LatentKv:
    """kv_c, k_pe, kv_cache, slot_mapping, k_scale and scale_rule; with `norm`, kv_norm_weight and kv_norm_eps too."""
    kv_c = n.tensor("kv_c", tokens=None, latent=LATENT_DIM)
    tokens = kv_c.shape[0]
    one = {"one": 1} if expect_tensor("k_pe", n["k_pe"]).dim() == 3 else {}
    n.tensor("k_pe", tokens=tokens, **one, rope=ROPE_DIM)
    activation = activation_of(n.arguments, "kv_c", "k_pe")
    expect_positions(tokens, n["positions"])
    expect_slots("slot_mapping", n["slot_mapping"], tokens)
    n.rope_table(tokens)
    kv_cache = expect_tensor("kv_cache", n["kv_cache"])
    layout = n["kv_layout"] = _mla_layout(n["kv_layout"], kv_cache, activation)
    expect_cache("kv_cache", kv_cache, MLA_LAYOUTS[layout], activation)
    expect_fp8_dtype(n["fp8_dtype"], {"kv_cache": kv_cache.dtype})
    n["k_scale"] = _scale(n, "k_scale", "the fp8 layout" if layout == "fp8" else None)
    rule = n.member("scale_rule", ScaleRule)
    if layout != "fp8_ds_mla":  # no tiles: the name is checked and ignored, as a scale that nothing needs
        rule = n["scale_rule"] = ScaleRule.UE8M0.value
    if norm:
        expect_dtype("kv_norm_weight", n.tensor("kv_norm_weight", latent=LATENT_DIM), FLOAT_DTYPES)
        n.epsilon("kv_norm_eps")
        for name, width in (("kv_c_out", LATENT_DIM), ("k_pe_out", ROPE_DIM)):
            if n[name] is not None:
                expect_output(name, n[name], None, tokens=tokens, width=width)
                expect_dtype(name, n[name], (activation,))
    return LatentKv(layout, kv_cache.shape[1], n.member("rope_style", RopeStyle), norm, rule)


def index_q(n: Named) -> IndexQ:
    """q, weights, weights_scale and the two outputs of the indexer's query side."""
    q = n.tensor("q", tokens=None, heads=None, dim=INDEX_DIM)
    tokens, heads = q.shape[:2]
    expect_dtype(n.name("weights"), n.tensor("weights", tokens=tokens, heads=heads), FLOAT_DTYPES)
    activation_of(n.arguments, n.name("q"))
    n.number("weights_scale")
    expect_fp8_dtype(n["fp8_dtype"], {})
    if n["q_out"] is not None:
        out = expect_output(n.name("q_out"), n["q_out"], heads, tokens=tokens, heads=None, dim=INDEX_DIM)
        expect_dtype(n.name("q_out"), out, (n["fp8_dtype"],))
    if n["weights_out"] is not None:
        out = expect_output(n.name("weights_out"), n["weights_out"], heads, tokens=tokens, heads=None)
        expect_dtype(n.name("weights_out"), out, (torch.float32,))
    expect_positions(tokens, n["positions"])
    n.rope_table(tokens)
    return IndexQ(heads, n.member("rope_style", RopeStyle), n.member("scale_rule", ScaleRule))


def index_k(n: Named) -> IndexK:
    """k, its norm, its cache and slots."""
    k = n.tensor("k", tokens=None, dim=INDEX_DIM)
    activation = activation_of(n.arguments, n.name("k"))
    for key in ("norm_weight", "norm_bias"):
        expect_dtype(n.name(key), n.tensor(key, dim=INDEX_DIM), FLOAT_DTYPES)
    expect_positions(k.shape[0], n["positions"])
    expect_slots(n.name("slot_mapping"), n["slot_mapping"], k.shape[0])
    n.rope_table(k.shape[0])
    n.epsilon("eps")
    expect_layout(n.name("kv_layout"), n["kv_layout"], INDEXER_LAYOUTS)
    kv_cache = expect_tensor(n.name("kv_cache"), n["kv_cache"])
    layout = INDEXER_LAYOUTS[n["kv_layout"]]
    expect_cache(n.name("kv_cache"), kv_cache, layout, activation)
    if kv_cache.shape[1] % layout.block_multiple:
        raise ValueError(
            f"{n.name('kv_layout')}: got {layout.name!r} with block_size {kv_cache.shape[1]}, "
            f"expected a block_size that is a multiple of {layout.block_multiple}"
        )
    expect_fp8_dtype(n["fp8_dtype"], {n.name("kv_cache"): kv_cache.dtype})
    return IndexK(
        n["kv_layout"], kv_cache.shape[1], n.member("rope_style", RopeStyle), n.member("scale_rule", ScaleRule)
    )


def index_options(n: Named) -> None:
    """The indexer's names and numbers that have defaults, on a layer without an indexer."""
    n.member("rope_style", RopeStyle)
    n.member("scale_rule", ScaleRule)
    if n.name("kv_layout") in n.arguments:
        expect_layout(n.name("kv_layout"), n["kv_layout"], INDEXER_LAYOUTS)
        n.epsilon("eps")


def norm_q(n: Named) -> NormQ:
    """q_c and its norm."""
    q_c = n.tensor("q_c", tokens=None, width=None)
    tokens, width = q_c.shape
    expect_width("q_c", width)
    activation = activation_of(n.arguments, "q_c")
    expect_dtype("q_norm_weight", n.tensor("q_norm_weight", width=width), FLOAT_DTYPES)
    n.epsilon("q_norm_eps")
    if n["q_c_out"] is not None:
        expect_dtype("q_c_out", expect_output("q_c_out", n["q_c_out"], None, tokens=tokens, width=width), (activation,))
    return NormQ(width)


def clear_topk(n: Named, tokens: int) -> ClearTopk | None:
    """The top-k rows to clear, if they are given."""
    topk = n["topk_indices"]
    if topk is None:
        return None
    expect_output("topk_indices", topk, None, rows=None, topk=None)
    expect_dtype("topk_indices", topk, (torch.int32,))
    if topk.shape[0] < tokens:
        raise ValueError(f"topk_indices: got {topk.shape[0]} rows, expected at least tokens={tokens}")
    expect_width("topk_indices", topk.shape[1])
    return ClearTopk(topk.shape[1])


def _mla_layout(kv_layout: str, kv_cache: torch.Tensor, activation: torch.dtype) -> str:
    """The name of the cache's layout; `auto` tells it from dtype and width."""
    if expect_layout("kv_layout", kv_layout, ("auto", *MLA_LAYOUTS)) != "auto":
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


def _scale(n: Named, key: str, purpose: str | None) -> torch.Tensor | None:
    """The scale if something needs it; one that nothing needs is ignored, but has to be a tensor."""
    if purpose is None:
        if n[key] is not None:
            expect_tensor(key, n[key])
        return None
    scale: torch.Tensor | None = n[key]
    expect_scale(key, scale, purpose)
    return scale


def allocate(a: Arguments, shapes: Shapes, first: str) -> None:
    """Make the outputs that the caller did not give, once all tensors are seen to be on one device, that of `first`."""
    like = a[first]
    expect_same_device({first: like} | {name: value for name, value in a.items() if isinstance(value, torch.Tensor)})
    for name, (shape, dtype) in shapes.items():
        if a[name] is None:
            a[name] = like.new_empty(shape, dtype=dtype)

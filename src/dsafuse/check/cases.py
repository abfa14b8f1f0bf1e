"""Cases: frozen records of everything that shapes one call, and the named sets of them.

A case's name lists the fields that differ from the defaults, as `tokens=257,layout=fp8`, and tells the whole case:
with a seed and a device it reproduces the call byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

import torch

from dsafuse.check.covering import pairwise
from dsafuse.numerics import FP8_FORMATS
from dsafuse.target import Target

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}

CaseT = TypeVar("CaseT", bound="Case")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the ops' cases have in common. The values that each field may take stand in CHOICES."""

    op: ClassVar[str] = ""

    tokens: int = 7
    heads: int = 16
    activation: str = "bf16"
    fp8: str = "e4m3fn"
    block_size: int = 64
    rounding: str = "split"
    rope_style: str = "interleaved"
    table: str = "fp32"
    positions: str = "int64"
    slots: str = "int64"
    slot_rule: str = "permuted"
    """permuted: all live; short: fewer slots than tokens; negative: a third of them; beyond: slots beyond the
    cache and positions beyond the table, too."""
    strides: str = "engine"
    """engine: transposed and sliced as projections leave them; odd: rows off the 16-byte grid; broadcast: stride 0."""
    out: str = "given"
    """allocated: by the op; given: contiguous; wide: more heads, padded rows; odd: the same off the 16-byte grid."""
    cache: str = "bytes"
    """bytes: uint8; typed: the fp8 dtype. A plain cache has the activation dtype."""
    cache_strides: str = "dense"
    """dense; gaps: padding between blocks, and between rows where the layout admits it; odd: off the 16-byte grid."""
    values: str = "normal"
    """normal; magnitudes: 2**-12 to 2**10 by row; ties: fp8 midpoints and overflows; special: NaN, inf, -0, ..."""
    capacity: str = "snug"
    """snug: little more than the tokens need; huge: beyond 4 GiB, slots at both ends."""

    @property
    def name(self) -> str:
        """The fields that differ from the defaults; `default` if none does."""
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(parts) or "default"

    @classmethod
    def named(cls: type[CaseT], name: str) -> CaseT:
        """The case called `name`. Raises ValueError for a field or a value that does not exist."""
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for part in [] if name == "default" else name.split(","):
            key, _, value = part.partition("=")
            if key not in known:
                raise ValueError(f"case: got field {key!r}, expected one of {', '.join(known)}")
            if key in CHOICES:
                if value not in CHOICES[key]:
                    raise ValueError(f"case: got {key}={value}, expected one of {', '.join(CHOICES[key])}")
                values[key] = value
            else:
                low, high = COUNTS[key]
                if not value.isdecimal() or not low <= int(value) <= high:
                    raise ValueError(f"case: got {key}={value}, expected an integer from {low} to {high}")
                values[key] = int(value)
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaCase(Case):
    """A call of `fused_qk_rope_concat_and_cache_mla`."""

    op: ClassVar[str] = "fused_qk_rope_concat_and_cache_mla"

    layout: str = "plain"
    query: str = "activation"
    key_rank: int = 2
    """Axes of k_pe: [tokens, 64] or [tokens, 1, 64]."""
    scale: str = "ordinary"
    """ordinary; power: of two, so that ties stay ties; zero, nan, inf, negative: on a GPU only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerCase(Case):
    """A call of `indexer_qk_rope_quant_and_cache`."""

    op: ClassVar[str] = "indexer_qk_rope_quant_and_cache"

    rope_style: str = "neox"
    scale_rule: str = "ue8m0"
    weights: str = "fp32"
    norm: str = "fp32"
    """dtype of norm_weight and norm_bias."""


CASES: dict[str, type[Case]] = {case.op: case for case in (MlaCase, IndexerCase)}

CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ("bf16", "fp16", "fp32"),
    "fp8": ("e4m3fn", "e4m3fnuz"),
    "rounding": ("split", "fp32"),
    "table": ("fp32", "bf16", "fp16"),
    "positions": ("int64", "int32"),
    "slots": ("int64", "int32"),
    "slot_rule": ("permuted", "short", "negative", "beyond"),
    "strides": ("engine", "odd", "broadcast", "contiguous"),
    "out": ("given", "allocated", "wide", "odd"),
    "cache": ("bytes", "typed"),
    "cache_strides": ("dense", "gaps", "odd"),
    "values": ("normal", "magnitudes", "ties", "special"),
    "capacity": ("snug", "huge"),
    "rope_style": ("interleaved", "neox"),
    "layout": ("plain", "fp8", "fp8_ds_mla"),
    "query": ("activation", "fp8"),
    "scale": ("ordinary", "power", "zero", "nan", "inf", "negative"),
    "scale_rule": ("ue8m0", "fp32"),
    "weights": ("fp32", "bf16", "fp16", "fp64"),
    "norm": ("fp32", "bf16"),
}

COUNTS = {"tokens": (0, 2**20), "heads": (1, 256), "block_size": (1, 4096), "key_rank": (2, 3)}
"""The range of each field that is a number."""

SETS = ("quick", "full")

_TOKENS = {"quick": (0, 1, 7, 32), "full": (0, 1, 7, 32, 257, 1023, 8192)}
_HEADS = {MlaCase.op: (1, 7, 16, 96, 128), IndexerCase.op: (1, 7, 16, 32, 64, 96, 128)}
_BLOCK_SIZES = (1, 16, 64, 128)


def axes(op: str, which: str, target: Target) -> dict[str, tuple[Any, ...]]:
    """The axes whose pairs a set covers: what both ops share, what is the op's own, and what the target admits."""
    formats = tuple(name for name in CHOICES["fp8"] if DTYPES[name] in target.fp8)
    covered: dict[str, tuple[Any, ...]] = {
        "tokens": _TOKENS[which],
        "heads": _HEADS[op],
        "block_size": _BLOCK_SIZES,
        "key_rank": (2, 3),
        **CHOICES,
        "fp8": formats or ("e4m3fn",),
    }
    if not target.gpu:
        # On CPU such a scale is a ValueError, which tests of the arguments cover.
        covered["scale"] = ("ordinary", "power")
    known = {f.name for f in fields(CASES[op])} - {"capacity"}
    return {name: values for name, values in covered.items() if name in known}


def case_set(op: str, which: str, target: Target) -> list[Case]:
    """The cases of one op: a pairwise covering set, and, for `full` on a GPU, those beyond 32-bit offsets."""
    rows: list[Mapping[str, Any]] = list(pairwise(axes(op, which, target)))
    if which == "full" and target.gpu:
        rows += _BEYOND_32_BITS[op]
    return [CASES[op](**row) for row in rows]


# 32768 x 128 x 576 and 140000 x 128 x 128 elements pass 2**31.
_BEYOND_32_BITS: dict[str, tuple[Mapping[str, Any], ...]] = {
    MlaCase.op: (
        {"tokens": 32768, "heads": 128, "query": "fp8", "layout": "fp8", "capacity": "huge"},
        {"tokens": 257, "query": "fp8", "layout": "fp8_ds_mla", "capacity": "huge"},
        {"tokens": 257, "layout": "plain", "capacity": "huge", "block_size": 1, "cache_strides": "gaps"},
    ),
    IndexerCase.op: (
        {"tokens": 140000, "heads": 128, "capacity": "huge"},
        {"tokens": 257, "capacity": "huge", "block_size": 1},
    ),
}

assert {DTYPES[name] for name in CHOICES["fp8"]} == set(FP8_FORMATS)

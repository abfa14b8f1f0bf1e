"""The named sets of cases: pairwise covering sets of each op's axes, and what no pair would reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsafuse.check.cases import (
    DTYPES,
    INDEXER,
    MLA,
    PREPARE_LATENTS,
    PREPARE_QK,
    PREPARE_QUERIES,
    ROLES,
    Case,
    choices_of,
    fields_of,
    has_index_switch,
    roles_without_index,
)
from dsafuse.check.covering import pairwise
from dsafuse.target import Target

SETS = ("quick", "full")

_ORIGINAL = {
    "quick": {"tokens": (0, 1, 7, 32), "heads": (1, 7, 16), "index_heads": (1, 7, 32)},
    "full": {
        "tokens": (0, 1, 7, 32, 257, 1023, 8192),
        "heads": (1, 7, 16, 96, 128),
        "index_heads": (1, 7, 16, 32, 64, 96, 128),
    },
}
# The roles have been taken through all sizes by the two original fusions; the other ops put them together.
_COMPOSED = {
    "quick": {"tokens": (0, 1, 7), "heads": (1, 7), "index_heads": (1, 7)},
    "full": {"tokens": (0, 1, 7, 257, 8192), "heads": (1, 16, 128), "index_heads": (1, 7, 64)},
}
_BLOCK_SIZES = (1, 16, 64, 128)
_PAGES = (("flat", 1), ("flat", 16), ("flat", 64), ("flat", 128), ("tiled16", 16), ("tiled16", 64))
"""(layout, block size) of the indexer cache: not every layout has every block size."""
_ROWS = (("plain", "ue8m0"), ("fp8", "ue8m0"), ("fp8_ds_mla", "ue8m0"), ("fp8_ds_mla", "fp32"))
"""(layout, rule of its tile scales) of the MLA cache: one layout has tiles."""
JOINED = {"row": ("layout", "tile_scale_rule"), "index_page": ("index_layout", "index_block_size")}
"""Axes of several fields, whose values do not all go together."""


def axes(op: str, which: str, target: Target) -> dict[str, tuple[Any, ...]]:
    """The axes whose pairs a set covers: what the op's roles have, and what the target admits."""
    sizes = _ORIGINAL if op in (MLA, INDEXER) else _COMPOSED
    choices = choices_of(op)
    formats = tuple(name for name in choices["fp8"] if DTYPES[name] in target.fp8)
    covered: dict[str, tuple[Any, ...]] = {
        **sizes[which],
        "block_size": _BLOCK_SIZES,
        "key_rank": (2, 3),
        "q_width": (1536, 96, 2048),
        **choices,
        "fp8": formats or ("e4m3fn",),
    }
    if sizes is _COMPOSED:
        covered["scale"] = ("ordinary", "power", "zero", "nan")
    if not target.gpu:
        # On CPU such a scale is a ValueError, which tests of the arguments cover.
        covered["scale"] = ("ordinary", "power")
    known = set(fields_of(op)) - {"capacity", "index", *(name for names in JOINED.values() for name in names)}
    found = {name: values for name, values in covered.items() if name in known}
    if "latent_kv" in ROLES[op]:
        found["row"] = _ROWS
    if "index_k" in ROLES[op]:
        found["index_page"] = _PAGES if op == INDEXER else _PAGES[:1] + _PAGES[2:5:2]
    return found


def row_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a case out of one value of each axis."""
    row = dict(values)
    for axis in JOINED.keys() & row.keys():
        row |= zip(JOINED[axis], row.pop(axis))
    return row


def case_set(op: str, which: str, target: Target) -> list[Case]:
    """The cases of one op: a pairwise covering set; each value once without an indexer, where the op serves such
    layers; and, for `full` on a GPU, cases beyond 32-bit offsets.
    """
    covered = axes(op, which, target)
    rows: list[Mapping[str, Any]] = [row_of(row) for row in pairwise(covered)]
    if has_index_switch(op):
        own = fields_of(op, roles_without_index(op))
        alone = {name: values for name, values in covered.items() if JOINED.get(name, (name,))[0] in own}
        rows += [{**row_of(row), "index": "absent"} for row in each_value(alone)]
    if which == "full" and target.gpu:
        rows += _BEYOND_32_BITS[op]
    return [Case(op=op, **row) for row in rows]


def each_value(axes_: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Rows in which every value of every axis occurs; the axes start at different values, so that rows differ."""
    count = max(len(values) for values in axes_.values())
    return [
        {name: values[(row + start) % len(values)] for start, (name, values) in enumerate(axes_.items())}
        for row in range(count)
    ]


# 32768 x 128 x 576 and 140000 x 128 x 128 elements pass 2**31.
_BEYOND_32_BITS: dict[str, tuple[Mapping[str, Any], ...]] = {
    MLA: (
        {"tokens": 32768, "heads": 128, "query": "fp8", "layout": "fp8", "capacity": "huge"},
        {"tokens": 257, "query": "fp8", "layout": "fp8_ds_mla", "capacity": "huge"},
        {"tokens": 257, "layout": "plain", "capacity": "huge", "block_size": 1, "cache_strides": "gaps"},
    ),
    INDEXER: (
        {"tokens": 140000, "index_heads": 128, "capacity": "huge"},
        {"tokens": 257, "capacity": "huge", "index_block_size": 1},
    ),
    PREPARE_QK: ({"tokens": 257, "query": "fp8", "layout": "fp8", "capacity": "huge"},),
    PREPARE_LATENTS: ({"tokens": 257, "layout": "fp8_ds_mla", "capacity": "huge", "index_block_size": 1},),
    PREPARE_QUERIES: ({"tokens": 32768, "heads": 128, "query": "fp8"},),
}

"""How far a result behind a norm may be from the oracle's: the order of a sum is free, and torch's is not a kernel's.

* An element of 16 or 8 bits may differ by one code, -0 and +0 being one, and at most NORM_ELEMENT_RATE of a set may.
* Where rotation cancels, one such step of a rounded value before it is many codes of the small value behind it: a
  rotated element may instead differ by one activation step at its pair's magnitude, which rotation keeps.
* A scale that follows from a row or a tile may differ where its amax does: at most NORM_ROW_RATE of a set; such rows
  are compared dequantised. An fp32 scale may move by SCALE_ULPS without being counted.
* An element of 32 bits may differ by NORM_ULPS representable values.
* A case that broadcasts has one row for all tokens: what falls apart in it does so in each, and is counted once.

NORM_ULPS, for RMSNorm, (x * r) * w with r = 1 / sqrt(mean(x * x) + eps), u = 2**-24 being half the spacing at 1: two
orders of a sum of n <= 2048 non-negative terms, in which no term passes through more than h = 32 additions (a thread
adds up its own, a tree the threads), differ by about sqrt(h) u, 6 u, relatively, since rounding errors have either
sign. The root halves that; its rounding, the reciprocal's and those of two products add up to 3 u where they fall
apart. 6 u are at most 6 representable values, whose spacing is u to 2 u. 8 leave some room.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dsafuse.check.caches import Cache, caches_of
from dsafuse.check.cases import DTYPES, Case
from dsafuse.check.compare import Arm, Comparison, ordered
from dsafuse.check.inputs import Inputs
from dsafuse.check.reference import field_rows
from dsafuse.layouts import LATENT_TILE, ROPE_DIM

SCALE_ULPS = 4
"""How far an fp32 scale of a key or a tile may move by the order of a sum alone."""

NORM_ULPS = 8

CHUNK_ROWS = 1 << 16

Pair = tuple[torch.Tensor, torch.Tensor]


def compare_normed(case: Case, inputs: Inputs, got: Arm, expected: Arm, result: Comparison) -> None:
    """Judge everything behind a norm, and make it equal in `got`, so that the rest can be compared as bytes."""
    if case.normed:
        for name in ("q_c_out", "kv_c_out"):
            if name in expected.tensors:
                mine, theirs = got.tensors[name], expected.tensors[name]
                if mine.shape == theirs.shape:
                    _compare_elements(case, name, mine, theirs, result)
                    mine.copy_(theirs)
    for cache in caches_of(case):
        slots = inputs.slots(cache.slot_mapping)
        slots = slots[slots >= 0]
        if len(slots) and cache.role == "index_k":
            ulps = SCALE_ULPS if case.scale_rule == "fp32" else 0
            _compare_scaled(case, cache, slots, got, expected, "key", ulps, result)
        elif len(slots) and case.normed and cache.layout.name == "fp8_ds_mla":
            ulps = SCALE_ULPS if case.tile_scale_rule == "fp32" else 0
            _compare_scaled(case, cache, slots, got, expected, "latent", ulps, result)
        elif len(slots) and case.normed:
            _compare_latents(case, cache, slots, got, expected, result)


def _compare_latents(
    case: Case, cache: Cache, slots: torch.Tensor, got: Arm, expected: Arm, result: Comparison
) -> None:
    """Normed latents of a cache without scales of its own."""
    dtype = DTYPES[case.fp8 if cache.layout.has_fp8 else case.activation]
    mine, theirs = _rows(case, cache, slots, got, expected, "latent", dtype)
    _compare_elements(case, f"{cache.name}.latent of the rows written", mine, theirs, result)
    _make_equal(case, cache, slots, got, expected, ("latent",))


def _drawn(case: Case, groups: int = 1) -> slice:
    """The rows, of so many groups each, whose values were drawn apart."""
    return slice(groups) if case.strides == "broadcast" else slice(None)


def _compare_elements(case: Case, name: str, mine: torch.Tensor, theirs: torch.Tensor, result: Comparison) -> None:
    """Elements without a scale: at most a code apart, or a few ulp where they have 32 bits."""
    wide = mine.element_size() == 4
    for start, a, b in _pieces(mine, theirs):
        distance = (ordered(a) - ordered(b)).abs()
        distance = distance.masked_fill(a.float().isnan() & b.float().isnan(), 0)
        if not wide:
            counted = distance[_drawn(case)]
            result.norm_elements += counted.numel()
            result.norm_elements_off += int((counted > 0).sum())
        if distance.numel():
            result.code_distance = max(result.code_distance, int(distance.max()))
        far = distance > (NORM_ULPS if wide else 1)
        if bool(far.any()):
            row, column = (int(i) for i in far.nonzero()[0])
            result.mismatching_bytes += int(far.sum())
            result.notes.append(
                f"{name}, row {start + row}, element {column}: {float(a[row, column]):g}, "
                f"expected {float(b[row, column]):g}"
            )


def _pieces(mine: torch.Tensor, theirs: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    start = 0
    for a, b in zip(mine.split(CHUNK_ROWS), theirs.split(CHUNK_ROWS)):
        yield start, a, b
        start += len(a)


def _rows(
    case: Case, cache: Cache, slots: torch.Tensor, got: Arm, expected: Arm, name: str, dtype: torch.dtype
) -> Pair:
    """A field of the given slots in both arms, copies."""
    activation = DTYPES[case.activation]
    mine, theirs = (
        field_rows(cache.layout, arm.tensors[cache.name], name, slots, activation).view(dtype)
        for arm in (got, expected)
    )
    return mine, theirs


def _make_equal(case: Case, cache: Cache, slots: torch.Tensor, got: Arm, expected: Arm, names: tuple[str, ...]) -> None:
    activation = DTYPES[case.activation]
    for name in names:
        theirs = cache.layout.load_rows(expected.tensors[cache.name], name, activation, slots)
        cache.layout.store_rows(got.tensors[cache.name], name, activation, slots, theirs)


def _compare_scaled(
    case: Case,
    cache: Cache,
    slots: torch.Tensor,
    got: Arm,
    expected: Arm,
    name: str,
    scale_ulps: int,
    result: Comparison,
) -> None:
    """Fp8 codes with a scale for each group of 128: codes while the scales agree, dequantised values where not."""
    scales = _rows(case, cache, slots, got, expected, "scale", torch.float32)
    codes = _rows(case, cache, slots, got, expected, name, DTYPES[case.fp8])
    groups = scales[0].shape[1]
    a, b = (c.view(torch.uint8).reshape(-1, LATENT_TILE) for c in codes)
    distance = (ordered(a.view(codes[0].dtype)) - ordered(b.view(codes[0].dtype))).abs()
    moved = (ordered(scales[0]) - ordered(scales[1])).abs().flatten() > scale_ulps
    drawn = _drawn(case, groups)
    result.norm_elements += distance[drawn].numel()
    result.norm_rows += len(moved[drawn])
    result.norm_elements_off += int((distance[drawn][~moved[drawn]] > 0).sum())
    result.norm_rows_off += int(moved[drawn].sum())
    far = (distance > 1) & ~moved[:, None]
    if name == "key":
        far &= ~_cancelled(case, *(c.view(codes[0].dtype).float() for c in (a, b)))
    kept = distance.masked_fill(~far & (distance > 1), 1)[~moved]
    if kept.numel():
        result.code_distance = max(result.code_distance, int(kept.max()))
    if bool(far.any()):
        group, column = (int(i) for i in far.nonzero()[0])
        values = [float(c[group, column].view(codes[0].dtype)) for c in (a, b)]
        result.notes.append(
            f"{cache.name}.{name} of slot {int(slots[group // groups])}, "
            f"element {group % groups * LATENT_TILE + column}: {values[0]:g}, expected {values[1]:g}"
        )
        result.mismatching_bytes += int(far.sum())
    if bool(moved.any()):
        # Bytes are picked, not fp8 elements: not every torch can index those on a GPU.
        picked = [c[moved].view(codes[0].dtype).double() for c in (a, b)]
        where = slots.repeat_interleave(groups)[moved]
        _compare_dequantised(f"{cache.name}.{name}", where, picked, [s.reshape(-1, 1)[moved] for s in scales], result)
    _make_equal(case, cache, slots, got, expected, (name, "scale"))


def _cancelled(case: Case, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Where keys [rows, 128] differ by no more than one activation step at the magnitude of the rotated pair."""
    rotated = theirs[:, :ROPE_DIM]
    pairs = rotated.unflatten(1, (2, -1) if case.index_rope_style == "neox" else (-1, 2))
    axis = 1 if case.index_rope_style == "neox" else 2
    magnitude = torch.linalg.vector_norm(pairs, dim=axis, keepdim=True).expand_as(pairs).flatten(1)
    step = torch.finfo(DTYPES[case.activation] if case.rounding == "split" else torch.float32).eps * magnitude
    near = torch.zeros_like(theirs, dtype=torch.bool)
    near[:, :ROPE_DIM] = (mine[:, :ROPE_DIM] - rotated).abs() <= step
    return near


def _compare_dequantised(
    name: str, slots: torch.Tensor, codes: list[torch.Tensor], scales: list[torch.Tensor], result: Comparison
) -> None:
    """Groups whose scales differ: values at most one code of the coarser scale apart."""
    mine, theirs = (c * s.double() for c, s in zip(codes, scales))
    # A code is 1/8 of its value at most, and 2**-9 of the scale where it is subnormal.
    step = torch.maximum(torch.maximum(mine.abs(), theirs.abs()) / 8, torch.maximum(*scales).double() * 2.0**-9)
    far = ~((mine - theirs).abs() <= step) & ~(mine.isnan() & theirs.isnan())
    if bool(far.any()):
        row, column = (int(i) for i in far.nonzero()[0])
        result.mismatching_bytes += int(far.sum())
        result.notes.append(
            f"{name} of slot {int(slots[row])}, element {column} of its group, dequantised: "
            f"{float(mine[row, column]):g}, expected {float(theirs[row, column]):g}"
        )

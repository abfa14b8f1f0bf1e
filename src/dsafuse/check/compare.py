"""Bytes first: whole buffers, untouched bytes and canaries included; then what design and numerics allow.

Everything equals the oracle byte for byte, but for two things. A NaN wider than 8 bits equals any other NaN. And a key
of the indexer may differ where the order of LayerNorm's sums moves it across a rounding boundary: over a case set at
most KEY_ELEMENT_RATE of the elements, by one code; rows whose scale moved are rarer than KEY_ROW_RATE, and are compared
dequantised.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsafuse.check.cases import DTYPES, Case, MlaCase
from dsafuse.check.inputs import Inputs, layout_of
from dsafuse.check.memory import CANARY_BYTES, chunks
from dsafuse.check.reference import field_rows
from dsafuse.layouts import Store

KEY_ELEMENT_RATE = 1e-4
KEY_ROW_RATE = 1e-3

SMALL_SET = 2
"""Elements that may differ in a set too small for its rate to allow one: a rounding that flips moves a rotated pair."""

SCALE_ULPS = 4
"""How far an fp32 key scale may move by the order of a sum alone."""


@dataclass(slots=True)
class Comparison:
    """What differs, in one case or summed over a set."""

    bytes_compared: int = 0
    mismatching_bytes: int = 0
    code_distance: int = 0
    """The largest distance of an element, in representable values of its format."""
    key_elements: int = 0
    key_elements_off: int = 0
    key_rows: int = 0
    key_rows_off: int = 0
    """Rows of the indexer cache whose scale differs by more than a few ulp."""
    notes: list[str] = field(default_factory=list)
    """Each difference that is not allowed, with its place."""

    def add(self, other: Comparison) -> None:
        """Sum over a set."""
        for name in ("bytes_compared", "mismatching_bytes", "key_elements", "key_elements_off", "key_rows"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.key_rows_off += other.key_rows_off
        self.code_distance = max(self.code_distance, other.code_distance)
        self.notes += other.notes

    def over_rates(self) -> list[str]:
        """Which rates the differences of the indexer's keys exceed, over all that was added up."""
        over = []
        if self.key_elements_off > max(SMALL_SET, KEY_ELEMENT_RATE * self.key_elements):
            over.append(
                f"{self.key_elements_off} of {self.key_elements} key elements differ by a code, "
                f"allowed are {KEY_ELEMENT_RATE:g} of them"
            )
        if self.key_rows_off > max(1, KEY_ROW_RATE * self.key_rows):
            over.append(
                f"{self.key_rows_off} of {self.key_rows} key rows have another scale, allowed are {KEY_ROW_RATE:g}"
            )
        return over


@dataclass(slots=True)
class Arm:
    """What one provider, or the oracle, has left behind: tensors, and the whole buffers that they lie in."""

    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def compare(case: Case, inputs: Inputs, got: Arm, expected: Arm) -> Comparison:
    """Compare a provider's arm with the oracle's. Both are consumed: what may differ is made equal in them."""
    result = Comparison()
    if isinstance(case, MlaCase):
        _same_cache_nans(_cache_fields(case, got, expected), case, inputs)
    else:
        _compare_keys(case, inputs, got, expected, result)
    names = [name for name in ("q_out", "weights_out") if name in expected.tensors]
    heads = case.heads
    views: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
        name: (got.tensors[name][:, :heads], expected.tensors[name][:, :heads]) for name in names
    }
    for pair in views.values():
        _same_nans(*pair)
    for name, buffer in expected.buffers.items():
        _compare_bytes(name, got.buffers[name], buffer, result)
    if result.mismatching_bytes:
        views.update((name, pair) for name, pair, _ in _cache_fields(case, got, expected))
        for name, pair in views.items():
            _locate(name, *pair, result)
    return result


Fields = list[tuple[str, tuple[torch.Tensor, torch.Tensor], Store]]


def _cache_fields(case: Case, got: Arm, expected: Arm) -> Fields:
    """(name, the field in both caches in its own dtype, its store) for every field of the layout."""
    layout, activation = layout_of(case), DTYPES[case.activation]
    dtypes = {
        Store.ACTIVATION: activation,
        Store.FP8: DTYPES[case.fp8],
        Store.FP32: torch.float32,
        Store.BF16: torch.bfloat16,
    }
    found: Fields = []
    for f in layout.fields:
        mine, theirs = (
            layout.field_bytes(arm.tensors["kv_cache"], f.name, activation).view(dtypes[f.store])
            for arm in (got, expected)
        )
        found.append((f"kv_cache.{f.name}", (mine, theirs), f.store))
    return found


def _same_cache_nans(fields: Fields, case: Case, inputs: Inputs) -> None:
    """In the rows that were to be written, and nowhere else."""
    slots = inputs.slots[inputs.slots >= 0]
    where = slots // case.block_size, slots % case.block_size
    for _, (mine, theirs), store in fields:
        if store is not Store.FP8:
            rows = mine[where], theirs[where]
            _same_nans(*rows)
            mine[where], theirs[where] = rows


def _same_nans(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Where both hold a NaN wider than 8 bits, make it the same one."""
    if got.element_size() == 1 or not got.numel():
        return
    flat_got, flat_expected = _byte_pieces(got), _byte_pieces(expected)
    for mine, theirs in zip(flat_got, flat_expected):
        both = mine.isnan() & theirs.isnan()
        if bool(both.any()):
            mine.masked_fill_(both, float("nan"))
            theirs.masked_fill_(both, float("nan"))


def _byte_pieces(x: torch.Tensor) -> list[torch.Tensor]:
    """Views of some leading rows each, so that a pass needs bounded temporaries."""
    per_row = max(1, x[0].numel() * x.element_size())
    return list(x.split(max(1, (1 << 28) // per_row)))


def _compare_bytes(name: str, got: torch.Tensor, expected: torch.Tensor, result: Comparison) -> None:
    result.bytes_compared += expected.numel()
    if got.shape != expected.shape:
        result.mismatching_bytes += expected.numel()
        result.notes.append(f"{name}: {got.numel()} bytes, expected {expected.numel()}")
        return
    start = 0
    for mine, theirs in zip(chunks(got), chunks(expected)):
        if not torch.equal(mine, theirs):
            differs = mine != theirs
            count = int(differs.sum())
            first = start + int(differs.to(torch.uint8).argmax())
            result.mismatching_bytes += count
            where = first - CANARY_BYTES
            place = "before its start" if where < 0 else f"at byte {where} of {len(expected) - 2 * CANARY_BYTES}"
            result.notes.append(
                f"{name}: {count} bytes differ, the first {place}: "
                f"{int(mine[first - start]):#04x}, expected {int(theirs[first - start]):#04x}"
            )
        start += len(mine)


def ordered(x: torch.Tensor) -> torch.Tensor:
    """int64 that counts the representable values of a float format: -0 and +0 are 0, NaN is out of reach."""
    size = x.element_size()
    bits = x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).long() & (2 ** (8 * size) - 1)
    sign = 1 << (8 * size - 1)
    counted = torch.where(bits >= sign, sign - bits, bits)
    return torch.where(x.float().isnan(), 2 * sign, counted)


def _locate(name: str, got: torch.Tensor, expected: torch.Tensor, result: Comparison) -> None:
    """The largest distance in a view, and the index of the first difference."""
    if got.shape != expected.shape or not got.numel():
        return
    row = 0
    for mine, theirs in zip(_byte_pieces(got), _byte_pieces(expected)):
        distance = (ordered(mine) - ordered(theirs)).abs()
        if bool(distance.any()):
            if not any(note.startswith(f"{name}[") for note in result.notes):
                index = [int(i) for i in (distance > 0).nonzero()[0]]
                values = float(mine[tuple(index)]), float(theirs[tuple(index)])
                index[0] += row
                result.notes.append(f"{name}[{', '.join(map(str, index))}]: {values[0]:g}, expected {values[1]:g}")
            result.code_distance = max(result.code_distance, int(distance.max()))
        row += len(mine)


def _compare_keys(case: Case, inputs: Inputs, got: Arm, expected: Arm, result: Comparison) -> None:
    """Live rows of the indexer cache by the rates above; then the rows are made equal, and the rest is bytes."""
    slots = inputs.slots[inputs.slots >= 0]
    if not len(slots):
        return
    layout, activation = layout_of(case), DTYPES[case.activation]
    codes, scales = [], []
    for arm in (got, expected):
        cache = arm.tensors["kv_cache"]
        codes.append(field_rows(layout, cache, "key", slots, activation).view(DTYPES[case.fp8]))
        scales.append(field_rows(layout, cache, "scale", slots, activation).view(torch.float32))
    distance = (ordered(codes[0]) - ordered(codes[1])).abs()
    scale_distance = (ordered(scales[0]) - ordered(scales[1])).abs().squeeze(-1)
    nearby = SCALE_ULPS if getattr(case, "scale_rule", "ue8m0") == "fp32" else 0
    moved = scale_distance > nearby
    result.key_elements += distance.numel()
    result.key_rows += len(slots)
    result.key_elements_off += int((distance[~moved] > 0).sum())
    result.key_rows_off += int(moved.sum())
    kept = distance[~moved]
    if kept.numel():
        result.code_distance = max(result.code_distance, int(kept.max()))
    if bool((kept > 1).any()):
        row, column = (int(i) for i in ((distance > 1) & ~moved[:, None]).nonzero()[0])
        result.notes.append(
            f"kv_cache.key of slot {int(slots[row])}, element {column}: {float(codes[0][row, column]):g}, "
            f"expected {float(codes[1][row, column]):g}"
        )
        result.mismatching_bytes += int((kept > 1).sum())
    if bool(moved.any()):
        # Bytes are picked, not fp8 elements: not every torch can index those on a GPU.
        picked = [c.view(torch.uint8)[moved].view(c.dtype) for c in codes]
        _compare_dequantised(slots[moved], picked, [s[moved] for s in scales], result)
    for name in ("key", "scale"):
        rows = layout.field_bytes(expected.tensors["kv_cache"], name, activation)
        mine = layout.field_bytes(got.tensors["kv_cache"], name, activation)
        block, row_ = slots // case.block_size, slots % case.block_size
        mine[block, row_] = rows[block, row_]


def _compare_dequantised(
    slots: torch.Tensor, codes: list[torch.Tensor], scales: list[torch.Tensor], result: Comparison
) -> None:
    """Rows whose scales differ: values at most one code of the coarser scale apart."""
    mine, theirs = (c.double() * s.double() for c, s in zip(codes, scales))
    # A code is 1/8 of its value at most, and 2**-9 of the scale where it is subnormal.
    step = torch.maximum(torch.maximum(mine.abs(), theirs.abs()) / 8, torch.maximum(*scales).double() * 2.0**-9)
    far = ~((mine - theirs).abs() <= step) & ~(mine.isnan() & theirs.isnan())
    if bool(far.any()):
        row, column = (int(i) for i in far.nonzero()[0])
        result.mismatching_bytes += int(far.sum())
        result.notes.append(
            f"kv_cache.key of slot {int(slots[row])}, element {column}, dequantised: "
            f"{float(mine[row, column]):g}, expected {float(theirs[row, column]):g}"
        )

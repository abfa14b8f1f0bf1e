"""Bytes first: whole buffers, untouched bytes and canaries included; then what design and numerics allow.

Everything equals the oracle byte for byte, but for two things. A NaN wider than 8 bits equals any other NaN. And what
has gone through a norm may differ where the order of its sums moves it across a rounding boundary; `check.norms` says
how far.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsafuse.check.caches import Cache, caches_of
from dsafuse.check.cases import DTYPES, Case
from dsafuse.check.inputs import Inputs
from dsafuse.check.memory import CANARY_BYTES, chunks
from dsafuse.layouts import Store

NORM_ELEMENT_RATE = 1e-4
NORM_ROW_RATE = 1e-3

SMALL_SET = 2
"""Elements that may differ in a set too small for its rate to allow one: a rounding that flips moves a rotated pair."""


@dataclass(slots=True)
class Comparison:
    """What differs, in one case or summed over a set."""

    bytes_compared: int = 0
    mismatching_bytes: int = 0
    code_distance: int = 0
    """The largest distance of an element, in representable values of its format."""
    norm_elements: int = 0
    """Elements of 16 or 8 bits that a norm has gone into."""
    norm_elements_off: int = 0
    norm_rows: int = 0
    """Scales that a norm has gone into: of an indexer key, or of a tile of a normed latent."""
    norm_rows_off: int = 0
    """Scales that differ by more than a few ulp."""
    notes: list[str] = field(default_factory=list)
    """Each difference that is not allowed, with its place."""

    def add(self, other: Comparison) -> None:
        """Sum over a set."""
        for name in (
            "bytes_compared", "mismatching_bytes", "norm_elements", "norm_elements_off", "norm_rows", "norm_rows_off",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.code_distance = max(self.code_distance, other.code_distance)
        self.notes += other.notes

    def over_rates(self) -> list[str]:
        """Which rates the differences behind norms exceed, over all that was added up."""
        over = []
        if self.norm_elements_off > max(SMALL_SET, NORM_ELEMENT_RATE * self.norm_elements):
            over.append(
                f"{self.norm_elements_off} of {self.norm_elements} normed elements differ by a code, "
                f"allowed are {NORM_ELEMENT_RATE:g} of them"
            )
        if self.norm_rows_off > max(1, NORM_ROW_RATE * self.norm_rows):
            over.append(
                f"{self.norm_rows_off} of {self.norm_rows} normed rows have another scale, "
                f"allowed are {NORM_ROW_RATE:g}"
            )
        return over


@dataclass(slots=True)
class Arm:
    """What one provider, or the oracle, has left behind: tensors, and the whole buffers that they lie in."""

    tensors: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def heads_of(case: Case, name: str) -> int | None:
    """How many heads of an output a call writes; None for an output without heads, which is written in whole."""
    if name == "q_out" and "latent_q" in case.roles:
        return case.heads
    return case.index_heads if name.endswith(("q_out", "weights_out")) else None


def written(case: Case, arm: Arm) -> dict[str, torch.Tensor]:
    """The outputs of a call that has left `arm` behind, as far as the call writes them."""
    caches = {cache.name for cache in caches_of(case)}
    return {name: tensor[:, : heads_of(case, name)] for name, tensor in arm.tensors.items() if name not in caches}


def compare(case: Case, inputs: Inputs, got: Arm, expected: Arm) -> Comparison:
    """Compare a provider's arm with the oracle's. Both are consumed: what may differ is made equal in them."""
    from dsafuse.check.norms import compare_normed

    result = Comparison()
    compare_normed(case, inputs, got, expected, result)
    fields = [f for cache in caches_of(case) for f in _cache_fields(case, cache, got, expected)]
    for _, cache, pair, store in fields:
        if store is not Store.FP8:
            _same_cache_nans(cache, pair, inputs)
    theirs = written(case, expected)
    views = {name: (tensor, theirs[name]) for name, tensor in written(case, got).items()}
    for pair in views.values():
        _same_nans(*pair)
    for name, buffer in expected.buffers.items():
        _compare_bytes(name, got.buffers[name], buffer, _start(expected, name), result)
    if result.mismatching_bytes:
        views.update((name, pair) for name, _, pair, _ in fields)
        for name, pair in views.items():
            _locate(name, *pair, result)
    return result


Fields = list[tuple[str, Cache, tuple[torch.Tensor, torch.Tensor], Store]]


def _cache_fields(case: Case, cache: Cache, got: Arm, expected: Arm) -> Fields:
    """(name, cache, the field in both caches in its own dtype, its store) for every field of the layout."""
    activation = DTYPES[case.activation]
    dtypes = {
        Store.ACTIVATION: activation,
        Store.FP8: DTYPES[case.fp8],
        Store.FP32: torch.float32,
        Store.BF16: torch.bfloat16,
    }
    found: Fields = []
    for f in cache.layout.fields:
        pieces = [cache.layout.pieces(arm.tensors[cache.name], f.name, activation) for arm in (got, expected)]
        mine, theirs = (p.view(dtypes[f.store]) if f.tile else p[:, :, 0, 0].view(dtypes[f.store]) for p in pieces)
        found.append((f"{cache.name}.{f.name}", cache, (mine, theirs), f.store))
    return found


def _same_cache_nans(cache: Cache, pair: tuple[torch.Tensor, torch.Tensor], inputs: Inputs) -> None:
    """In the rows that were to be written, and nowhere else."""
    slots = inputs.slots(cache.slot_mapping)
    where = cache.where(slots[slots >= 0])
    mine, theirs = pair
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


def _start(arm: Arm, name: str) -> int:
    """Where in its buffer a tensor starts, in bytes: behind a canary, unless the op allocated it."""
    tensor = arm.tensors[name]
    return tensor.data_ptr() - arm.buffers[name].data_ptr() if tensor.numel() else CANARY_BYTES


def _compare_bytes(name: str, got: torch.Tensor, expected: torch.Tensor, lead: int, result: Comparison) -> None:
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
            where = first - lead
            place = "before its start" if where < 0 else f"at byte {where}"
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

"""Cache layouts as tables of fields: the one description that oracle, kernels, checks and docs all read.

A *row* layout stores a token's fields side by side. A *planar* layout stores, inside each block, the first
field of all its tokens, then the second; its tensor shape `[blocks, block_size, row_bytes]` hides that. A field of
a planar layout may be *tiled*: cut into pieces, so that the same piece of several tokens lies side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import torch

LATENT_DIM = 512
ROPE_DIM = 64
QUERY_DIM = LATENT_DIM + ROPE_DIM
INDEX_DIM = 128
LATENT_TILE = 128


class Store(StrEnum):
    """What the elements of a field are."""

    ACTIVATION = "activation"
    FP8 = "fp8"
    FP32 = "fp32"
    BF16 = "bf16"

    def itemsize(self, activation: torch.dtype) -> int:
        """Bytes of one element, given the activation dtype."""
        return {"activation": activation.itemsize, "fp8": 1, "fp32": 4, "bf16": 2}[self]


@dataclass(frozen=True, slots=True)
class Tile:
    """`bytes` of each of `tokens` tokens side by side; tiles follow one another along the row, then along tokens."""

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Field:
    """`count` elements of one kind that belong to one token."""

    name: str
    store: Store
    count: int
    tile: Tile | None = None
    """How the field lies inside a block of a planar layout; None: token after token."""


@dataclass(frozen=True)
class CacheLayout:
    """A named order of fields; offsets, widths and views all follow from it."""

    name: str
    fields: tuple[Field, ...]
    planar: bool = False

    def row_bytes(self, activation: torch.dtype = torch.bfloat16) -> int:
        """Bytes that one token takes."""
        return sum(f.count * f.store.itemsize(activation) for f in self.fields)

    def offset_bytes(self, name: str, activation: torch.dtype = torch.bfloat16) -> int:
        """Bytes before field `name`: from the row's start, or, when planar, per token of the block."""
        offset = 0
        for f in self.fields:
            if f.name == name:
                return offset
            offset += f.count * f.store.itemsize(activation)
        raise KeyError(f"layout {self.name} has no field {name!r}")

    @cached_property
    def has_fp8(self) -> bool:
        """Whether any field is fp8."""
        return any(f.store is Store.FP8 for f in self.fields)

    @cached_property
    def alignment_bytes(self) -> int:
        """What base address and strides of a byte cache must be multiples of."""
        return max(f.store.itemsize(torch.uint8) for f in self.fields)  # fields of the activation dtype ask for nothing

    @cached_property
    def block_multiple(self) -> int:
        """What a block size must be a multiple of."""
        return max(f.tile.tokens if f.tile else 1 for f in self.fields)

    def pieces(self, cache: torch.Tensor, name: str, activation: torch.dtype) -> torch.Tensor:
        """Field `name` of every slot as a uint8 view onto `cache`, tokens and bytes in order.

        Returns:
            [blocks, tiles of tokens, tokens of a tile, tiles of bytes, bytes of a tile]; without tiles that is
            [blocks, block_size, 1, 1, bytes].
        """
        raw = cache.view(torch.uint8)
        blocks, block_size = raw.shape[:2]
        field = next(f for f in self.fields if f.name == name)
        width = field.count * field.store.itemsize(activation)
        offset = self.offset_bytes(name, activation)
        if not self.planar:
            return raw[:, :, None, None, offset : offset + width]
        tile = field.tile or Tile(1, width)
        if block_size % tile.tokens:
            raise ValueError(f"block_size: got {block_size}, expected a multiple of {tile.tokens} for {self.name}")
        return raw.as_strided(
            (blocks, block_size // tile.tokens, tile.tokens, width // tile.bytes, tile.bytes),
            (raw.stride(0), tile.tokens * width, tile.bytes, tile.tokens * tile.bytes, 1),
            raw.storage_offset() + block_size * offset,
        )

    def field_bytes(self, cache: torch.Tensor, name: str, activation: torch.dtype) -> torch.Tensor:
        """Field `name` of every slot as a uint8 view `[blocks, block_size, bytes]` onto `cache`; no tiled field is one.

        Raises ValueError for a tiled field: `pieces` is its view, `load_rows` and `store_rows` are its access.
        """
        pieces = self.pieces(cache, name, activation)
        if pieces.shape[2:4] != (1, 1):
            raise ValueError(f"{name}: got a tiled field of {self.name}, expected one that is contiguous in each row")
        return pieces[:, :, 0, 0]

    def load_rows(self, cache: torch.Tensor, name: str, activation: torch.dtype, slots: torch.Tensor) -> torch.Tensor:
        """Field `name` of `slots`, all of them in the cache: uint8 [slots, bytes], a copy."""
        pieces = self.pieces(cache, name, activation)
        return pieces[self._place(pieces, cache, slots)].flatten(1)

    def store_rows(
        self, cache: torch.Tensor, name: str, activation: torch.dtype, slots: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write uint8 [slots, bytes] as field `name` of `slots`, all of them in the cache."""
        pieces = self.pieces(cache, name, activation)
        pieces[self._place(pieces, cache, slots)] = values.unflatten(-1, pieces.shape[3:])

    @staticmethod
    def _place(pieces: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        row = slots % cache.shape[1]
        return slots // cache.shape[1], row // pieces.shape[2], row % pieces.shape[2]


PLAIN = CacheLayout("plain", (Field("latent", Store.ACTIVATION, LATENT_DIM), Field("rope", Store.ACTIVATION, ROPE_DIM)))
FP8 = CacheLayout("fp8", (Field("latent", Store.FP8, LATENT_DIM), Field("rope", Store.FP8, ROPE_DIM)))
FP8_DS_MLA = CacheLayout(
    "fp8_ds_mla",
    (
        Field("latent", Store.FP8, LATENT_DIM),
        Field("scale", Store.FP32, LATENT_DIM // LATENT_TILE),
        Field("rope", Store.BF16, ROPE_DIM),
    ),
)
FLAT = CacheLayout("flat", (Field("key", Store.FP8, INDEX_DIM), Field("scale", Store.FP32, 1)), planar=True)

TILED16 = CacheLayout(
    "tiled16",
    (Field("key", Store.FP8, INDEX_DIM, Tile(tokens=16, bytes=16)), Field("scale", Store.FP32, 1)),
    planar=True,
)

MLA_LAYOUTS = {layout.name: layout for layout in (PLAIN, FP8, FP8_DS_MLA)}
INDEXER_LAYOUTS = {layout.name: layout for layout in (FLAT, TILED16)}


def retile(cache: torch.Tensor, source: CacheLayout, target: CacheLayout) -> torch.Tensor:
    """A copy of a planar cache with its fields arranged as `target` has them instead of `source`.

    Args:
        cache: [blocks, block_size, row]; the rows of each block adjoin. Bytes that belong to no field are kept.
        source, target: planar layouts of the same fields, such as FLAT and TILED16; either way is the other's inverse.

    Raises ValueError for layouts of different fields, and for a block size that either of them cannot have.
    """
    kinds = [[(f.name, f.store, f.count) for f in layout.fields] for layout in (source, target)]
    if kinds[0] != kinds[1] or not (source.planar and target.planar):
        raise ValueError(f"target: got {target.name}, expected a planar layout with the fields of {source.name}")
    arranged = cache.clone()
    for field in source.fields:
        to = target.pieces(arranged, field.name, torch.bfloat16)
        to.copy_(source.pieces(cache, field.name, torch.bfloat16).reshape(to.shape))
    return arranged

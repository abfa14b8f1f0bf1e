"""Cache layouts as tables of fields: the one description that oracle, kernels, checks and docs all read.

A *row* layout stores a token's fields side by side. A *planar* layout stores, inside each block, the first
field of all its tokens, then the second; its tensor shape `[blocks, block_size, row_bytes]` hides that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
class Field:
    """`count` elements of one kind that belong to one token."""

    name: str
    store: Store
    count: int


@dataclass(frozen=True, slots=True)
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

    @property
    def has_fp8(self) -> bool:
        """Whether any field is fp8."""
        return any(f.store is Store.FP8 for f in self.fields)

    @property
    def alignment_bytes(self) -> int:
        """What base address and strides of a byte cache must be multiples of."""
        return max({"activation": 1, "fp8": 1, "fp32": 4, "bf16": 2}[f.store] for f in self.fields)

    def field_bytes(self, cache: torch.Tensor, name: str, activation: torch.dtype) -> torch.Tensor:
        """Field `name` of every slot as a uint8 view `[blocks, block_size, bytes]` onto `cache`."""
        raw = cache.view(torch.uint8)
        blocks, block_size = raw.shape[:2]
        field = next(f for f in self.fields if f.name == name)
        width = field.count * field.store.itemsize(activation)
        offset = self.offset_bytes(name, activation)
        if not self.planar:
            return raw[..., offset : offset + width]
        return raw.as_strided(
            (blocks, block_size, width),
            (raw.stride(0), width, 1),
            raw.storage_offset() + block_size * offset,
        )


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

MLA_LAYOUTS = {layout.name: layout for layout in (PLAIN, FP8, FP8_DS_MLA)}
INDEXER_LAYOUTS = {layout.name: layout for layout in (FLAT,)}

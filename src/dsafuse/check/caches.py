"""The caches of a case: what each is called, how it is laid out, and how hostile its memory is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dsafuse.check.cases import DTYPES, Case
from dsafuse.check.memory import Memory
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS, CacheLayout
from dsafuse.registry import OPS

HUGE_CACHE_BYTES = 9 << 29
"""4.5 GiB: the last rows lie beyond 2**32."""


@dataclass(frozen=True, slots=True)
class Cache:
    """One of the caches that a case writes."""

    name: str
    """What the op calls it, as it calls `slot_mapping`."""
    slot_mapping: str
    role: str
    layout: CacheLayout
    block_size: int
    storage: str
    strides: str
    slots: torch.dtype
    slot_rule: str

    def where(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, row) of some slots."""
        return slots // self.block_size, slots % self.block_size


def caches_of(case: Case) -> list[Cache]:
    """The MLA cache, the indexer cache, both or none."""
    found = []
    if "latent_kv" in case.roles:
        found.append(
            Cache(
                "kv_cache",
                "slot_mapping",
                "latent_kv",
                MLA_LAYOUTS[case.layout],
                case.block_size,
                case.cache,
                case.cache_strides,
                DTYPES[case.slots],
                case.slot_rule,
            )
        )
    if "index_k" in case.roles:
        prefix = OPS[case.op].index_prefix
        found.append(
            Cache(
                prefix + "kv_cache",
                prefix + "slot_mapping",
                "index_k",
                INDEXER_LAYOUTS[case.index_layout],
                case.index_block_size,
                case.index_cache,
                case.index_cache_strides,
                DTYPES[case.index_slots],
                case.index_slot_rule,
            )
        )
    return found


def blocks_of(case: Case, cache: Cache) -> int:
    """How many blocks a cache has: some more than the tokens need, or enough to pass 4 GiB."""
    if case.capacity == "huge":
        return HUGE_CACHE_BYTES // (cache.layout.row_bytes(DTYPES[case.activation]) * cache.block_size)
    return math.ceil((case.tokens + 5) / cache.block_size) + 1


def blank_cache(memory: Memory, case: Case, cache: Cache) -> torch.Tensor:
    """[blocks, block_size, row], padded where the layout admits it; byte caches keep to 4 bytes where scales live."""
    layout, activation = cache.layout, DTYPES[case.activation]
    dtype = activation
    if layout.has_fp8:
        dtype = DTYPES[case.fp8] if cache.storage == "typed" else torch.uint8
    blocks, block_size = blocks_of(case, cache), cache.block_size
    row, grid = layout.row_bytes(activation) // dtype.itemsize, layout.alignment_bytes
    pad, skew = {"dense": (0, 0), "gaps": (16, 0), "odd": (grid, grid)}[cache.strides]
    if layout.planar:
        flat = memory.tensor(cache.name, (blocks, block_size * row + pad), dtype, skew=skew)
        return flat[:, : block_size * row].view(blocks, block_size, row)
    extra = 1 if pad else 0
    return memory.tensor(cache.name, (blocks, block_size + extra, row + pad), dtype, skew=skew)[:, :block_size, :row]

"""The tensors of a case: inputs drawn from a seed in hostile strides, and poisoned caches and outputs."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dsafuse.check.cases import DTYPES, Case, IndexerCase, MlaCase
from dsafuse.check.memory import Memory
from dsafuse.check.values import Draw
from dsafuse.layouts import (
    INDEX_DIM,
    INDEXER_LAYOUTS,
    LATENT_DIM,
    MLA_LAYOUTS,
    QUERY_DIM,
    ROPE_DIM,
    CacheLayout,
)

HUGE_CACHE_BYTES = 9 << 29
"""4.5 GiB: the last rows lie beyond 2**32."""


@dataclass(slots=True)
class Inputs:
    """Everything that a call reads, but not the cache.

    `arguments` may hold slots beyond the cache and positions beyond the table; `cleaned` holds what they mean.
    """

    arguments: dict[str, Any]
    cleaned: dict[str, Any]
    memory: Memory

    @property
    def slots(self) -> torch.Tensor:
        """The slots as int64, -1 for every one that is not to be written."""
        slots: torch.Tensor = self.cleaned["slot_mapping"]
        return slots.long()


@dataclass(slots=True)
class Outputs:
    """A poisoned cache, and poisoned outputs where the case brings its own."""

    arguments: dict[str, Any]
    memory: Memory


def case_seed(case: Case, seed: int) -> int:
    """A seed of the case's own, so that equal shapes do not get equal values."""
    return zlib.crc32(f"{case.op} {case.name} {seed}".encode())


def layout_of(case: Case) -> CacheLayout:
    """The layout of the case's cache."""
    return MLA_LAYOUTS[case.layout] if isinstance(case, MlaCase) else INDEXER_LAYOUTS["flat"]


def query_dtype(case: Case) -> torch.dtype:
    """What the case's query is stored in."""
    return DTYPES[case.activation if isinstance(case, MlaCase) and case.query == "activation" else case.fp8]


def blocks_of(case: Case) -> int:
    """How many blocks the cache has: some more than the tokens need, or enough to pass 4 GiB."""
    if case.capacity == "huge":
        row_bytes = layout_of(case).row_bytes(DTYPES[case.activation])
        return HUGE_CACHE_BYTES // (row_bytes * case.block_size)
    return math.ceil((case.tokens + 5) / case.block_size) + 1


def draw_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """Draw the inputs of a case."""
    seed = case_seed(case, seed)
    draw, memory = Draw(case, seed, device), Memory(device, seed)
    positions, slots, safe_positions, safe_slots = draw.addresses(blocks_of(case) * case.block_size)
    shared = {
        "positions": _put(memory, "positions", positions),
        "slot_mapping": _put(memory, "slot_mapping", slots),
        "cos_sin_cache": _rows(memory, case, "cos_sin_cache", draw.table(DTYPES[case.table])),
        "rope_style": case.rope_style,
        "fp8_dtype": DTYPES[case.fp8],
        "rounding": case.rounding,
    }
    if isinstance(case, MlaCase):
        own = _mla_inputs(case, draw, memory)
    else:
        assert isinstance(case, IndexerCase)
        own = _indexer_inputs(case, draw, memory)
    arguments = {**shared, **own}
    cleaned = {"positions": safe_positions, "slot_mapping": safe_slots}
    return Inputs(arguments, {**arguments, **cleaned}, memory)


def _mla_inputs(case: MlaCase, draw: Draw, memory: Memory) -> dict[str, Any]:
    tokens, heads, dtype = case.tokens, case.heads, DTYPES[case.activation]
    scale = {"power": 0.5, "ordinary": 0.0371, "zero": 0.0, "nan": math.nan, "inf": math.inf, "negative": -0.7}
    unit = 0.5 if case.scale == "power" else 1.0
    values: Callable[..., torch.Tensor] = lambda *shape: draw.activations(*shape, dtype=dtype, unit=unit)  # noqa: E731
    q_nope = _query(memory, case, "q_nope", heads, LATENT_DIM, dtype, "bmm")
    q_pe = _query(memory, case, "q_pe", heads, ROPE_DIM, dtype, "projection")
    for query in (q_nope, q_pe):
        query.copy_(values(*query.shape))
    if case.strides == "broadcast":
        q_nope, q_pe = (query.expand(tokens, heads, -1) for query in (q_nope, q_pe))
    kv_c, k_pe = _sliced(memory, case, "kv_a", {"kv_c": LATENT_DIM, "k_pe": ROPE_DIM}, dtype, before=1536)
    for key in (kv_c, k_pe):
        key.copy_(values(*key.shape))
    if case.strides == "broadcast":
        kv_c, k_pe = kv_c.expand(tokens, -1), k_pe.expand(tokens, -1)
    return {
        "q_nope": q_nope,
        "q_pe": q_pe,
        "kv_c": kv_c,
        "k_pe": k_pe if case.key_rank == 2 else k_pe[:, None],
        "q_scale": _put(memory, "q_scale", torch.tensor([scale[case.scale]], device=memory.device)),
        "k_scale": _put(memory, "k_scale", torch.tensor([2 * scale[case.scale]], device=memory.device)),
        # `auto` tells a uint8 cache by its width; the other half of the cases names the layout.
        "kv_layout": "auto" if case.cache_strides == "dense" and case.cache == "bytes" else case.layout,
    }


def _indexer_inputs(case: IndexerCase, draw: Draw, memory: Memory) -> dict[str, Any]:
    tokens, heads, dtype, wdtype = case.tokens, case.heads, DTYPES[case.activation], DTYPES[case.weights]
    q = _query(memory, case, "q", heads, INDEX_DIM, dtype, "padded")
    q.copy_(draw.activations(*q.shape, dtype=dtype))
    if wdtype == dtype and case.strides != "contiguous":
        # One projection gives both, as in the models.
        k, weights = _sliced(memory, case, "wk", {"k": INDEX_DIM, "weights": heads}, dtype, before=0)
    else:
        (k,) = _sliced(memory, case, "wk", {"k": INDEX_DIM}, dtype, before=0)
        (weights,) = _sliced(memory, case, "weights", {"weights": heads}, wdtype, before=0)
    k.copy_(draw.activations(*k.shape, dtype=dtype, normed=True))
    weights.copy_(draw.activations(*weights.shape, dtype=wdtype, normed=True))
    if case.strides == "broadcast":
        q, k, weights = q.expand(tokens, heads, -1), k.expand(tokens, -1), weights.expand(tokens, -1)
    norm = DTYPES[case.norm]
    return {
        "q": q,
        "k": k,
        "weights": weights,
        "norm_weight": _put(memory, "norm_weight", (1 + draw.normal(INDEX_DIM) / 4).to(norm)),
        "norm_bias": _put(memory, "norm_bias", (draw.normal(INDEX_DIM) / 8).to(norm)),
        "weights_scale": INDEX_DIM**-0.5 * heads**-0.5,
        "eps": 1e-6,
        "scale_rule": case.scale_rule,
        "kv_layout": "flat",
    }


def blank_outputs(case: Case, seed: int, device: torch.device) -> Outputs:
    """A poisoned cache and, unless the op is to allocate them, poisoned outputs. Equal seeds give equal poison."""
    memory = Memory(device, case_seed(case, seed) ^ 0x5EED)
    arguments: dict[str, Any] = {"kv_cache": _cache(memory, case)}
    if isinstance(case, MlaCase):
        arguments["q_out"] = _padded(memory, case, "q_out", QUERY_DIM, query_dtype(case))
        # Said twice where q_out says it, too; an op that allocates has nothing else to know it from.
        arguments["q_dtype"] = query_dtype(case)
    else:
        arguments["q_out"] = _padded(memory, case, "q_out", INDEX_DIM, query_dtype(case))
        arguments["weights_out"] = _padded(memory, case, "weights_out", None, torch.float32)
    return Outputs(arguments, memory)


def _put(memory: Memory, name: str, values: torch.Tensor) -> torch.Tensor:
    tensor = memory.tensor(name, tuple(values.shape), values.dtype)
    tensor.copy_(values)
    return tensor


def _rows(memory: Memory, case: Case, name: str, values: torch.Tensor) -> torch.Tensor:
    """A table, contiguous or with an odd row stride."""
    if case.strides != "odd":
        return _put(memory, name, values)
    rows, columns = values.shape
    tensor = memory.tensor(name, (rows, columns + 3), values.dtype, skew=1)[:, 1 : 1 + columns]
    tensor.copy_(values)
    return tensor


def _query(
    memory: Memory, case: Case, name: str, heads: int, dim: int, dtype: torch.dtype, origin: str
) -> torch.Tensor:
    """[tokens, heads, dim] in the case's strides; [tokens, 1, dim], to be expanded, where it is broadcast."""
    tokens = case.tokens
    if case.strides == "contiguous":
        return memory.tensor(name, (tokens, heads, dim), dtype)
    if case.strides == "broadcast":
        return memory.tensor(name, (tokens, 1, dim), dtype)
    if case.strides == "odd":
        return memory.tensor(name, (tokens, heads, dim + 3), dtype, skew=1)[..., 1 : 1 + dim]
    if origin == "bmm":
        return memory.tensor(name, (heads, tokens, dim), dtype).transpose(0, 1)
    if origin == "projection":
        return memory.tensor(name, (tokens, heads, 128 + dim), dtype)[..., 128:]
    padded = memory.tensor(name, (tokens, heads * dim + 64), dtype)
    return padded[:, : heads * dim].view(tokens, heads, dim)


def _sliced(
    memory: Memory, case: Case, name: str, widths: dict[str, int], dtype: torch.dtype, before: int
) -> list[torch.Tensor]:
    """Slices [tokens, width] of one wider buffer; one row, to be expanded, where the case broadcasts."""
    rows = 1 if case.strides == "broadcast" and case.tokens else case.tokens
    if case.strides == "contiguous":
        return [memory.tensor(part, (rows, width), dtype) for part, width in widths.items()]
    total = sum(widths.values())
    if case.strides == "odd":
        start, columns, skew = 1, total + 2 + total % 2, 1
    else:
        start, columns, skew = before, before + -(-total // 16) * 16 + 16, 0
    buffer = memory.tensor(name, (rows, columns), dtype, skew=skew)
    slices = []
    for width in widths.values():
        slices.append(buffer[:, start : start + width])
        start += width
    return slices


def _padded(memory: Memory, case: Case, name: str, dim: int | None, dtype: torch.dtype) -> torch.Tensor | None:
    """An output [tokens, heads, dim], or [tokens, heads]; wider in heads, and padded, as the case says."""
    if case.out == "allocated":
        return None
    more, pad, skew = {"given": (0, 0, 0), "wide": (3, 16, 0), "odd": (1, 1, 1)}[case.out]
    if dim is None:
        return memory.tensor(name, (case.tokens, case.heads + more + pad), dtype, skew=skew)[:, : case.heads + more]
    return memory.tensor(name, (case.tokens, case.heads + more, dim + pad), dtype, skew=skew)[..., :dim]


def _cache(memory: Memory, case: Case) -> torch.Tensor:
    """[blocks, block_size, row], padded where the layout admits it; byte caches keep to 4 bytes where scales live."""
    layout, activation = layout_of(case), DTYPES[case.activation]
    dtype = activation
    if layout.has_fp8:
        dtype = DTYPES[case.fp8] if case.cache == "typed" else torch.uint8
    blocks, block_size, row = blocks_of(case), case.block_size, layout.row_bytes(activation) // dtype.itemsize
    grid = layout.alignment_bytes
    pad, skew = {"dense": (0, 0), "gaps": (16, 0), "odd": (grid, grid)}[case.cache_strides]
    if layout.planar:
        flat = memory.tensor("kv_cache", (blocks, block_size * row + pad), dtype, skew=skew)
        return flat[:, : block_size * row].view(blocks, block_size, row)
    extra = 1 if pad else 0
    return memory.tensor("kv_cache", (blocks, block_size + extra, row + pad), dtype, skew=skew)[:, :block_size, :row]

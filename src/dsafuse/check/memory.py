"""Poisoned memory with canaries: nothing that a check hands out was ever zero, and nothing ends at its own edge."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

CANARY_BYTES = 512
"""Poison before and after every tensor. A multiple of 16, so that the tensor starts on the grid."""

CHUNK_BYTES = 1 << 28


class Memory:
    """Hands out tensors inside larger poisoned buffers, which it keeps under the tensors' names.

    Poison is pseudo-random from a seed, so that no value can hide in it, and two memories with one seed agree.
    """

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.buffers: dict[str, torch.Tensor] = {}
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, skew: int = 0) -> torch.Tensor:
        """A poisoned contiguous tensor that starts `skew` elements off the 16-byte grid."""
        start, size = CANARY_BYTES + skew * dtype.itemsize, math.prod(shape) * dtype.itemsize
        buffer = torch.empty(start + size + CANARY_BYTES, dtype=torch.uint8, device=self.device)
        self.buffers[name] = buffer
        for chunk in chunks(buffer):
            chunk.random_(0, 256, generator=self._generator)
        return buffer[start : start + size].view(dtype).view(shape)


def chunks(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces of a flat tensor that bound what a pass over it needs in temporaries."""
    yield from buffer.split(CHUNK_BYTES // buffer.element_size())


def poison_free_memory(device: torch.device, sizes: list[int]) -> None:
    """Fill memory that the next allocations of these sizes will get with NaN bytes, and free it."""
    filled = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for size in sizes if size]
    del filled

"""Where the tensors of a known call may lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from dsafuse.kernels.parameters import VECTOR_BYTES
from dsafuse.memory import Memory, span_bytes

MOST_ADDRESSES = 16_384
"""Sets of addresses kept, at up to 1 KB each: 78 layers at some 200 token counts."""


class Addresses:
    """What the addresses of a call's tensors must satisfy, for the variant that was compiled for it.

    Args:
        tensors: of the call that was compiled for, by name.
        places: of each among the addresses; one tensor under two names has one.
        own_memory: names of the tensors that may share no byte with another.
        caches: names of those that may interleave with each other anew, as an engine's do that keeps both caches of
            every layer in one storage; they may share no byte either.
    """

    # Those that passed, of all calls, are kept: an engine's buffers come back at every step, layer by layer.
    _passed: ClassVar[set[tuple[Addresses, tuple[int, ...]]]] = set()

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        places: dict[str, int],
        own_memory: Sequence[str],
        caches: Sequence[str],
    ) -> None:
        by_place = {places[name]: tensor for name, tensor in tensors.items()}
        self._starts = {place: tensor.data_ptr() for place, tensor in by_place.items()}
        self._sizes = {place: span_bytes(tensor) for place, tensor in by_place.items() if tensor.numel()}
        paged = [places[name] for name in caches if name in tensors]
        self._paged = {place: Memory(by_place[place]) for place in paged if len(paged) > 1}
        self._apart: list[tuple[int, list[int]]] = []
        """Places of what is written, each with those that it must be apart from."""
        for name in (*own_memory, *caches):
            if name in tensors and (own := places[name]) in self._sizes:
                self._apart.append((own, [place for place in self._sizes if place != own]))

    def fit(self, addresses: tuple[int, ...]) -> bool:
        """Whether every address is aligned as it was, and nothing that is written lies over another tensor.

        Outputs that interleave with another tensor, as two columns of a buffer do, must do so as they did. Two caches
        may do so in another way, which then is checked in full.
        """
        if (self, addresses) in self._passed:
            return True
        if any((addresses[place] ^ start) % VECTOR_BYTES for place, start in self._starts.items()):
            return False
        for own, others in self._apart:
            start, end = addresses[own], addresses[own] + self._sizes[own]
            for place in others:
                address = addresses[place]
                if address >= end or start >= address + self._sizes[place]:
                    continue
                distance = address - start
                if distance == self._starts[place] - self._starts[own]:
                    continue
                if not (own in self._paged and place in self._paged):
                    return False
                if self._paged[own].meets(self._paged[place], distance):
                    return False
        if len(self._passed) >= MOST_ADDRESSES:
            self._passed.clear()
        self._passed.add((self, addresses))
        return True

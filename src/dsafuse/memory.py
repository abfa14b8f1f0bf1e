"""Which bytes tensors hold, and whether two share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import mul

import torch

Tensors = dict[str, torch.Tensor]
AddressOf = Callable[[torch.Tensor], int]


def expect_disjoint(outputs: Tensors, others: Tensors, address_of: AddressOf = torch.Tensor.data_ptr) -> None:
    """No output shares a byte with another tensor of the call; interleaved memory, as two columns of one, is fine."""
    tensors = {**outputs, **others}
    order = [*tensors]
    for pair in _crossing(tensors, address_of):
        name, other = sorted(pair, key=order.index)
        distance = address_of(tensors[other]) - address_of(tensors[name])
        if name in outputs and Memory(tensors[name]).meets(Memory(tensors[other]), distance):
            raise ValueError(f"{name}: got memory that overlaps {other}, expected memory of its own")


def expect_disjoint_views(outputs: Tensors, others: Tensors) -> None:
    """As `expect_disjoint`, of tensors that are traced: they have no addresses, but places in their storages.

    A layout that the ops don't take is left to the call when it runs. Sizes that the data alone tell are not looked at:
    a backend that runs the op on copies of its outputs then loses what one has in another.
    """
    storages: dict[int, tuple[Tensors, Tensors]] = {}
    for which, tensors in enumerate((outputs, others)):
        for name, tensor in tensors.items():
            if tensor.layout is torch.strided:
                storages.setdefault(tensor.untyped_storage()._cdata, ({}, {}))[which][name] = tensor
    for written, read in storages.values():
        # To compare symbolic sizes guards the graph, so that it is done for none but those that share a storage.
        if written and len(written) + len(read) > 1 and not _has_unbacked([*written.values(), *read.values()]):
            expect_disjoint(written, read, _place)


def _has_unbacked(tensors: list[torch.Tensor]) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols  # it imports sympy

    return any(has_free_unbacked_symbols(tensor) for tensor in tensors)


def _place(tensor: torch.Tensor) -> int:
    """Where a tensor begins in its storage, bytes."""
    start: int = mul(tensor.storage_offset(), tensor.element_size())
    return start


def _crossing(tensors: Tensors, address_of: AddressOf) -> Iterator[tuple[str, str]]:
    """The pairs of tensors that have a byte of one between two of the other."""
    spans = sorted([(start := address_of(t), start + span_bytes(t), name) for name, t in tensors.items() if t.numel()])
    for i, (_, end, name) in enumerate(spans):
        for start, _, other in spans[i + 1 :]:
            if start >= end:
                break
            yield name, other


class Memory:
    """The bytes of a tensor, wherever it starts: axes (count, stride in bytes), the largest stride first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        axes = [(n, stride * size) for n, stride in zip(tensor.shape, tensor.stride()) if n > 1 and stride]
        self.axes: list[tuple[int, int]] = []
        for n, stride in sorted([*axes, (size, 1)], key=lambda axis: -axis[1]):
            # An axis whose steps lie end to end continues the one before it.
            if self.axes and self.axes[-1][1] == n * stride:
                self.axes[-1] = (self.axes[-1][0] * n, stride)
            else:
                self.axes.append((n, stride))

    def meets(self, other: Memory, distance: int) -> bool:
        """Whether it shares a byte with another that starts `distance` bytes behind it.

        That is told as far as equal outer strides let it be; else spans that cross count as shared.
        """
        return _meet(self.axes, other.axes, distance)


def _extent(axes: list[tuple[int, int]]) -> int:
    return 1 + sum((n - 1) * stride for n, stride in axes)


def _meet(mine: list[tuple[int, int]], others: list[tuple[int, int]], distance: int) -> bool:
    """Whether bytes at 0 along `mine` meet bytes at `distance` along `others`."""
    if distance >= _extent(mine) or -distance >= _extent(others):
        return False
    if not mine or not others or mine[0][1] != others[0][1]:
        return True
    stride = mine[0][1]
    if stride == 1 or max(_extent(mine[1:]), _extent(others[1:])) > stride:
        return True
    phase = distance % stride
    return _meet(mine[1:], others[1:], phase) or _meet(mine[1:], others[1:], phase - stride)


def span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a tensor that has some."""
    strides = tensor.stride()
    reach: int = sum(map(mul, tensor.shape, strides)) - sum(strides)
    return (reach + 1) * tensor.element_size()

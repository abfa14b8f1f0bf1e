"""Argument checks that the ops share. Each names the argument, the value it got and what was expected.

A dtype or a kind of object that is wrong is a TypeError; a shape, stride, device or value is a ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import StrEnum
from functools import cache
from typing import Any

import torch

from dsafuse.layouts import CacheLayout
from dsafuse.numerics import ACTIVATION_DTYPES, FLT_MAX, FP8_FORMATS

INTEGER_DTYPES = (torch.int32, torch.int64)
TABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT_DTYPES = (*TABLE_DTYPES, torch.float64)

MAX_WIDTH = 2**20
"""Triton's largest tile."""

MAX_SLOTS = 2**31 - 1
"""Kernels divide a slot by the block size in 32 bits; 2**31 tokens would be a cache of 276 GB or more."""

MAX_BLOCK_BYTES = 2**31 - 1
"""Kernels place a row inside a block of a planar layout in 32 bits; so large a block would be 16 million tokens."""

MAX_POSITIONS = 2**31 - 1
"""Kernels take the rows of a rope table in 32 bits; so many would be 275 GB or more."""


def expect_member(name: str, value: Any, kind: type[StrEnum]) -> str:
    """The name of a member of an enum, as the enum spells it."""
    if value.__class__ is str and value in _names(kind):
        return str(value)
    try:
        return str(kind(value))
    except ValueError:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(kind)}") from None


@cache
def _names(kind: type[StrEnum]) -> frozenset[str]:
    return frozenset(member.value for member in kind)


def expect_tensor(name: str, value: Any) -> torch.Tensor:
    """`value`, a tensor that is what its memory holds, and through which no gradient would have to flow."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        layout = "a nested tensor" if value.is_nested else value.layout
        raise TypeError(f"{name}: got {layout}, expected a strided tensor")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name}: got a tensor that requires grad, expected none (the ops have no backward)")
    if value.is_neg():  # a kernel reads memory, which has the other sign
        raise ValueError(f"{name}: got a view with the negative bit, expected memory as it is (resolve_neg makes it)")
    return value


def expect_dtype(name: str, tensor: torch.Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """One of `dtypes`."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: got {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")


def expect_shape(name: str, tensor: torch.Tensor, **shape: int | None) -> None:
    """Exactly these axes, in order; None admits any size. The last axis must be contiguous."""
    got = tuple(tensor.shape)
    fits = len(got) == len(shape)
    for want, have in zip(shape.values(), got):
        if want is not None and want != have:
            fits = False
    if not fits:
        axes = ", ".join(axis if want is None else f"{axis}={want}" for axis, want in shape.items())
        raise ValueError(f"{name}: got shape {got}, expected [{axes}]")
    if got[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name}: got strides {tensor.stride()}, expected a contiguous last axis")


def expect_same_device(tensors: dict[str, torch.Tensor | None]) -> None:
    """All on the device of the first."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise ValueError(f"{name}: got device {tensor.device}, expected {first[1]} as {first[0]}")


def expect_activations(tensors: dict[str, torch.Tensor]) -> torch.dtype:
    """All in one activation dtype, which is returned."""
    (first, lead), *rest = tensors.items()
    expect_dtype(first, lead, ACTIVATION_DTYPES)
    for name, tensor in rest:
        if tensor.dtype != lead.dtype:
            raise TypeError(f"{name}: got {tensor.dtype}, expected {lead.dtype} as {first}")
    return lead.dtype


def expect_positions(tokens: int, positions: Any) -> None:
    """A position for every token."""
    expect_dtype("positions", expect_tensor("positions", positions), INTEGER_DTYPES)
    expect_shape("positions", positions, tokens=tokens)


def expect_slots(name: str, value: Any, tokens: int) -> None:
    """A slot for every token, or for fewer."""
    slots = expect_tensor(name, value)
    expect_dtype(name, slots, INTEGER_DTYPES)
    expect_shape(name, slots, tokens=None)
    if slots.shape[0] > tokens:
        raise ValueError(f"{name}: got {slots.shape[0]} slots, expected at most tokens={tokens}")


def expect_layout(name: str, value: Any, layouts: Iterable[str]) -> str:
    """The name of one of `layouts`."""
    if not isinstance(value, str) or value not in layouts:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(layouts)}")
    return value


def expect_width(name: str, width: int) -> None:
    """A row that one program can hold."""
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"{name}: got {width} wide, expected 1 to {MAX_WIDTH}")


def expect_rope_table(name: str, value: Any, rope_dim: int, tokens: int) -> None:
    """`[max_position, rope_dim]`, with at least one row to clamp positions into."""
    table = expect_tensor(name, value)
    expect_dtype(name, table, TABLE_DTYPES)
    expect_shape(name, table, max_position=None, rope_dim=rope_dim)
    if tokens and not table.shape[0]:
        raise ValueError(f"{name}: got 0 rows, expected at least one")
    if table.shape[0] > MAX_POSITIONS:
        raise ValueError(f"{name}: got {table.shape[0]} rows, expected at most {MAX_POSITIONS}")


def expect_scale(name: str, value: Any, purpose: str) -> None:
    """One fp32 element. On CPU it must be positive and finite; on a GPU looking would synchronise."""
    if value is None:
        raise ValueError(f"{name}: got None, expected one fp32 element for {purpose}")
    scale = expect_tensor(name, value)
    expect_dtype(name, scale, (torch.float32,))
    if scale.numel() != 1:
        raise ValueError(f"{name}: got {scale.numel()} elements, expected one for {purpose}")
    if scale.device.type == "cpu" and not 0.0 < float(scale) < math.inf:
        raise ValueError(f"{name}: got {float(scale)}, expected a positive finite scale")


def expect_finite(name: str, value: Any) -> float:
    """A number that is finite in fp32, which kernels take it in."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a number")
    if not abs(value) <= FLT_MAX:
        raise ValueError(f"{name}: got {value}, expected a finite fp32 number")
    return float(value)


def expect_fp8_dtype(fp8_dtype: Any, tensors: dict[str, torch.dtype | None]) -> None:
    """A known format, and the format of every fp8 tensor of the call."""
    if not isinstance(fp8_dtype, torch.dtype) or fp8_dtype not in FP8_FORMATS:
        raise ValueError(f"fp8_dtype: got {fp8_dtype}, expected {' or '.join(map(str, FP8_FORMATS))}")
    for name, dtype in tensors.items():
        if dtype in FP8_FORMATS and dtype != fp8_dtype:
            raise ValueError(f"{name}: got {dtype}, expected fp8_dtype={fp8_dtype}")


def expect_cache(argument: str, cache: torch.Tensor, layout: CacheLayout, activation: torch.dtype) -> None:
    """`[blocks, block_size, row]` that a layout's rows fit into, aligned as its scales need."""
    name = f"{argument} ({layout.name})"
    byte_cache = layout.has_fp8
    expect_dtype(name, cache, (torch.uint8, *FP8_FORMATS) if byte_cache else (activation,))
    expect_shape(name, cache, blocks=None, block_size=None, row=None)
    blocks, block_size, row = cache.shape
    need = layout.row_bytes(activation) // cache.element_size()
    if row < need:
        raise ValueError(f"{name}: got {row} elements a row, expected at least {need}")
    if block_size < 1:
        raise ValueError(f"{name}: got block_size {block_size}, expected at least 1")
    if blocks * block_size > MAX_SLOTS:
        raise ValueError(f"{name}: got {blocks * block_size} slots, expected at most {MAX_SLOTS}")
    if layout.planar and block_size * need > MAX_BLOCK_BYTES:
        raise ValueError(f"{name}: got block_size {block_size}, expected at most {MAX_BLOCK_BYTES // need}")
    if layout.planar and block_size > 1 and cache.stride(1) != row:
        raise ValueError(f"{name}: got strides {cache.stride()}, expected each block contiguous (planar layout)")
    if block_size > 1 and cache.stride(1) < need:
        raise ValueError(f"{name}: got row stride {cache.stride(1)}, expected at least {need}")
    if blocks > 1 and cache.stride(0) < (block_size - 1) * cache.stride(1) + need:
        raise ValueError(f"{name}: got block stride {cache.stride(0)}, expected blocks one behind the other")
    if byte_cache:
        _expect_alignment(name, cache, layout)


def _expect_alignment(name: str, cache: torch.Tensor, layout: CacheLayout) -> None:
    align = layout.alignment_bytes
    axes = 1 if layout.planar else 2
    strides = [stride for size, stride in zip(cache.shape[:axes], cache.stride()) if size > 1]
    for what, value in (("address", cache.data_ptr()), *(("stride", stride) for stride in strides)):
        if value % align:
            raise ValueError(f"{name}: got {what} {value}, expected a multiple of {align} bytes")


def expect_output(name: str, value: Any, heads_at_least: int | None, **shape: int | None) -> torch.Tensor:
    """A caller's output: right axes, wide enough in heads, no element stored twice."""
    tensor = expect_tensor(name, value)
    expect_shape(name, tensor, **shape)
    if heads_at_least is not None and tensor.shape[1] < heads_at_least:
        raise ValueError(f"{name}: got {tensor.shape[1]} heads, expected at least {heads_at_least}")
    extent = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride()), key=lambda axis: axis[1]):
        if size > 1 and stride < extent:
            raise ValueError(f"{name}: got strides {tensor.stride()}, expected elements that do not overlap")
        extent = max(extent, (size - 1) * stride + extent) if size > 1 else extent
    return tensor

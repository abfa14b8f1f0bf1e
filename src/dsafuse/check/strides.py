"""Where inputs and outputs lie: as an engine's projections leave them, or as nobody would hope to find them."""

from __future__ import annotations

import torch

from dsafuse.check.cases import Case
from dsafuse.check.memory import Memory


def rows(memory: Memory, case: Case, name: str, values: torch.Tensor) -> torch.Tensor:
    """A table with the given values, contiguous or with an odd row stride."""
    count, columns = values.shape
    if case.strides == "odd":
        tensor = memory.tensor(name, (count, columns + 3), values.dtype, skew=1)[:, 1 : 1 + columns]
    else:
        tensor = memory.tensor(name, (count, columns), values.dtype)
    tensor.copy_(values)
    return tensor


def query(memory: Memory, case: Case, name: str, heads: int, dim: int, dtype: torch.dtype, origin: str) -> torch.Tensor:
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


def sliced(
    memory: Memory, case: Case, name: str, widths: dict[str, int], dtype: torch.dtype, before: int
) -> dict[str, torch.Tensor]:
    """Slices [tokens, width] of one wider buffer; one row, to be expanded, where the case broadcasts."""
    count = 1 if case.strides == "broadcast" and case.tokens else case.tokens
    if case.strides == "contiguous":
        return {part: memory.tensor(part, (count, width), dtype) for part, width in widths.items()}
    total = sum(widths.values())
    if case.strides == "odd":
        start, columns, skew = 1, total + 2 + total % 2, 1
    else:
        start, columns, skew = before, before + -(-total // 16) * 16 + 16, 0
    buffer = memory.tensor(name, (count, columns), dtype, skew=skew)
    slices = {}
    for part, width in widths.items():
        slices[part] = buffer[:, start : start + width]
        start += width
    return slices


def output(
    memory: Memory,
    case: Case,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    heads: bool = True,
    needed: bool = False,
) -> torch.Tensor | None:
    """A poisoned output as the case has it: None if the op is to allocate it, wider in heads, padded.

    Args:
        memory, case, name: where it lies, and how.
        shape: [tokens, heads, dim], [tokens, heads], or [tokens, width] without heads.
        dtype: of its elements.
        heads: whether the second axis is one of heads, of which there may be more.
        needed: given even where the op allocates its outputs, since leaving it out means that it is not wanted.
    """
    if case.out == "allocated" and not needed:
        return None
    more, pad, skew = {"given": (0, 0, 0), "allocated": (0, 0, 0), "wide": (3, 16, 0), "odd": (1, 1, 1)}[case.out]
    if not heads:
        more = 0
    tokens, second, *rest = shape
    if rest:
        return memory.tensor(name, (tokens, second + more, rest[0] + pad), dtype, skew=skew)[..., : rest[0]]
    return memory.tensor(name, (tokens, second + more + pad), dtype, skew=skew)[:, : second + more]

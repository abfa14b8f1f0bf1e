"""Input sets of a benchmark: one is drawn and proven, the others are copies of it in memory of their own."""

from __future__ import annotations

from typing import Any

import torch

from dsafuse.check.cases import Case
from dsafuse.check.inputs import Inputs, blank_outputs, draw_inputs


def alias(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> torch.Tensor:
    """A tensor of its own, no view, of the same shape, strides and offset on the same memory, or on `storage`."""
    new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    storage = tensor.untyped_storage() if storage is None else storage
    return new.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def copy_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same call on copied storages; tensors that shared one still do, and all strides and offsets stay."""
    copies: dict[int, torch.UntypedStorage] = {}

    def copied(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in copies:
            copies[storage.data_ptr()] = storage.clone()
        return alias(value, copies[storage.data_ptr()])

    return {name: copied(value) for name, value in arguments.items()}


def working_sets(case: Case, count: int, seed: int, device: torch.device) -> tuple[Inputs, list[dict[str, Any]]]:
    """The drawn inputs, and `count` sets of arguments, outputs included, of which the first is the drawn one."""
    inputs = draw_inputs(case, seed, device)
    first = {**inputs.arguments, **blank_outputs(case, seed, device).arguments}
    return inputs, [first, *(copy_of(first) for _ in range(count - 1))]

"""torch.compile of the split chain: its torch steps, mode default, static shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch

from dsafuse import split, torch_steps
from dsafuse.check.cases import ROLES, Case
from dsafuse.check.peers import Bound, Peer
from dsafuse.layouts import CacheLayout
from dsafuse.ops import roles
from dsafuse.ops.config import Config
from dsafuse.registry import OPS


def available() -> str | None:
    """It comes with torch."""
    return None


def version() -> str:
    """The version of what compiles."""
    return f"torch.compile of torch {torch.__version__}"


def write_live_rows(
    kv_cache: torch.Tensor,
    layout: CacheLayout,
    slot_mapping: torch.Tensor,
    rows: dict[str, torch.Tensor],
    activation: torch.dtype,
) -> None:
    """`roles.write_rows` for slots that are all live: a choice among rows has a size that only the data know, which
    neither a static shape nor a CUDA graph can hold.
    """
    slots, (blocks, block_size, row) = slot_mapping.long(), kv_cache.shape
    for name, values in rows.items():
        if layout.planar:
            # The same bytes as layout.field_bytes, of blocks without gaps: the compiler can't trace as_strided.
            offset = block_size * layout.offset_bytes(name, activation)
            field = next(f for f in layout.fields if f.name == name)
            width = field.count * field.store.itemsize(activation)
            flat = kv_cache.view(torch.uint8).view(blocks, block_size * row)
            target = flat[:, offset : offset + block_size * width].view(blocks, block_size, width)
        else:
            target = layout.field_bytes(kv_cache, name, activation)
        target[slots // block_size, slots % block_size] = values.contiguous().view(torch.uint8)


def _unchecked(*_: object) -> None:
    """On a GPU the check returns at once, too."""


@contextmanager
def traceable_steps() -> Iterator[None]:
    """The chain's steps write rows without a choice among them."""
    with (
        mock.patch.object(roles, "write_rows", write_live_rows),
        mock.patch.object(roles, "check_addresses", _unchecked),
    ):
        yield


@cache
def compiled_chain(case: Case, backend: str) -> Callable[[dict[str, Any], Config, dict[str, torch.Tensor]], None]:
    """The chain of a case; compiled at its first call, for all input sets at once, since they look alike."""

    def chain(constants: dict[str, Any], config: Config, tensors: dict[str, torch.Tensor]) -> None:
        split.run(case.op, {**constants, **tensors}, config, torch_steps)

    compiled: Callable[..., None] = torch.compile(chain, dynamic=False, backend=backend)
    return compiled


def bind(case: Case, arguments: dict[str, Any], backend: str = "inductor") -> Bound:
    """The compiled chain; it writes the outputs that it is given."""
    resolved, config = OPS[case.op].resolve(**arguments)
    assert isinstance(config, Config)
    tensors = {name: value for name, value in resolved.items() if isinstance(value, torch.Tensor)}
    constants = {name: value for name, value in resolved.items() if name not in tensors}
    chain = compiled_chain(case, backend)
    return Bound(lambda: chain(constants, config, tensors), lambda: tensors)


PEER = Peer(
    name="compiled",
    ops=frozenset(ROLES),
    available=available,
    version=version,
    bind=bind,
    context=traceable_steps,
    differs="the compiler may contract to fma, keep bf16 intermediates in fp32, and divide approximately",
)

"""torch.compile of the split chain: its torch steps, mode default, the token count dynamic, as vLLM has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import torch

from dsafuse import split, torch_steps
from dsafuse.check.cases import ROLES, Case
from dsafuse.check.peers import Bound, Peer
from dsafuse.check.working_sets import alias, working_sets
from dsafuse.layouts import CacheLayout
from dsafuse.ops import roles
from dsafuse.ops.config import Config
from dsafuse.registry import OPS

HINT_TOKENS = 1024
"""What the compiler is shown first: it sizes its blocks by that. One token alone is compiled once more by itself."""

GRAPHS = 10_000
"""Compiled graphs of one function that torch may keep: each op, shape and form has two. Beyond its own limit of 8 it
would go on uncompiled, and say so only in a log."""

Tensors = dict[str, torch.Tensor]
Chain = Callable[[dict[str, Any], Config, Tensors], None]


def available() -> str | None:
    """It comes with torch."""
    return None


def version() -> str:
    """The version of what compiles."""
    return f"torch.compile of torch {torch.__version__}, token count dynamic"


def write_live_rows(
    kv_cache: torch.Tensor,
    layout: CacheLayout,
    slot_mapping: torch.Tensor,
    rows: dict[str, torch.Tensor],
    activation: torch.dtype,
) -> None:
    """`roles.write_rows` for slots that are all live: a choice among rows has a size that only the data know, which
    no CUDA graph can hold.
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
        target[slots // block_size, slots % block_size] = as_bytes(values)


def as_bytes(values: torch.Tensor) -> torch.Tensor:
    """uint8 [tokens, bytes], the least significant first. A view would do, but the compiler can't tell of a width of
    one, at a token count that it does not know, that the last stride is 1, and refuses it.
    """
    size = values.element_size()
    if size == 1:
        return values.view(torch.uint8)
    words = values.view({2: torch.int16, 4: torch.int32}[size]).to(torch.int32)
    shifts = torch.arange(0, 8 * size, 8, dtype=torch.int32, device=values.device)
    return ((words[..., None] >> shifts) & 0xFF).to(torch.uint8).flatten(-2)


def _unchecked(*_: object) -> None:
    """On a GPU the check returns at once, too."""


@contextmanager
def compiling() -> Iterator[None]:
    """The chain's steps write rows without a choice among them, and every call is a compiled one or raises."""
    with (
        mock.patch.object(roles, "write_rows", write_live_rows),
        mock.patch.object(roles, "check_addresses", _unchecked),
        torch._dynamo.config.patch(
            recompile_limit=GRAPHS, accumulated_recompile_limit=GRAPHS, fail_on_recompile_limit_hit=True
        ),
    ):
        yield


@cache
def compiled_chain(case: Case, backend: str | Callable[..., Any]) -> Chain:
    """The chain of a case, whatever its token count."""

    def chain(constants: dict[str, Any], config: Config, tensors: Tensors) -> None:
        split.run(case.op, {**constants, **tensors}, config, torch_steps)

    compiled: Chain = torch.compile(chain, backend=backend)
    return compiled


def _taken_apart(op: str, arguments: dict[str, Any]) -> tuple[dict[str, Any], Config, Tensors]:
    """The chain's arguments. No tensor is a view of another, as far as torch knows: it would guard on which is."""
    resolved, config = OPS[op].resolve(**arguments)
    assert isinstance(config, Config)
    tensors = {name: alias(value) for name, value in resolved.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in resolved.items() if name not in tensors}, config, tensors


@cache
def _shown(case: Case, backend: str | Callable[..., Any], device: torch.device) -> None:
    """Compile the chain of a case for any token count above one, on a call with HINT_TOKENS."""
    other = working_sets(replace(case, tokens=HINT_TOKENS + 64), 1, 0, device)[1][0]
    constants, config, tensors = _taken_apart(case.op, working_sets(case, 1, 0, device)[1][0])
    _, _, longer = _taken_apart(case.op, other)
    for name, tensor in tensors.items():
        for axis, size in enumerate(tensor.shape):
            if size != longer[name].shape[axis]:
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
    compiled_chain(case, backend)(constants, config, tensors)


def bind(case: Case, arguments: dict[str, Any], backend: str | Callable[..., Any] = "inductor") -> Bound:
    """The compiled chain; it writes the outputs that it is given."""
    shown = replace(case, tokens=HINT_TOKENS)
    constants, config, tensors = _taken_apart(case.op, arguments)
    _shown(shown, backend, tensors["positions"].device)
    chain = compiled_chain(shown, backend)
    return Bound(lambda: chain(constants, config, tensors), lambda: tensors)


PEERS = (
    Peer(
        name="compiled",
        ops=frozenset(ROLES),
        available=available,
        version=version,
        bind=bind,
        context=compiling,
        differs="the compiler may contract to fma, keep bf16 intermediates in fp32, and divide approximately",
    ),
)

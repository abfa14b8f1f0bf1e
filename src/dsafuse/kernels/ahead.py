"""Compiling a call before it is made: for the current GPU, or for one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from triton.runtime import driver

from dsafuse import private
from dsafuse.kernels import grids, offline
from dsafuse.kernels.parameters import VECTOR_BYTES
from dsafuse.ops.config import Config
from dsafuse.registry import Arguments
from dsafuse.target import Target

ALIGNMENTS = (VECTOR_BYTES, 1)
"""The two variants of a configuration: rows that start at multiples of 16 bytes, and rows that start anywhere."""


def is_here(target: Target) -> bool:
    """Whether the current GPU is `target`."""
    return torch.cuda.is_available() and Target.of(torch.device("cuda", torch.cuda.current_device())) == target


def compile_call(
    op: str, arguments: Arguments, config: Config, target: Target, row_alignment: int, *, here: bool
) -> None:
    """Compile what a resolved call on the meta device would launch on a target, for rows so aligned.

    It goes through Triton's own launch, so that what it keeps, in memory with `here` and on disk in any case, is what
    a launch looks for.
    """
    if (reason := private.why_not("warm_up")) is not None:
        raise RuntimeError(reason)
    recorded = offline.fused_launch(op, arguments, config, target)
    parameters = {**recorded.parameters, "ALIGN": row_alignment}
    with nullcontext() if here else standing_in(target):
        compiled = grids.prepare.warmup(**parameters, grid=(recorded.programs,), **recorded.options)
    if here:
        load(compiled)


@contextmanager
def standing_in(target: Target) -> Iterator[None]:
    """In this block Triton compiles for a target that is not here. No thread may launch anything meanwhile."""
    stand_in = SimpleNamespace(
        get_current_device=lambda: target.arch,  # what Triton keeps its kernels under
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: offline.gpu_of(target),
    )
    before = driver._active
    driver.set_active(stand_in)
    try:
        yield
    finally:
        driver.set_active(before)


def load(compiled: Any) -> None:
    """Load a kernel onto the current GPU, which Triton would do at its first launch."""
    if compiled.run is None:
        raise RuntimeError(f"{compiled.name}: Triton has not loaded it")

"""Compiling a call before it is made: for the current GPU, or for one that is not there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dsafuse.kernels import grids, offline
from dsafuse.kernels.launch import VECTOR_BYTES
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

    With `here`, through Triton's own launch, which then has it; else into Triton's cache on disk.
    """
    for recorded in offline.fused_launches(op, arguments, config, target):
        wanted = replace(recorded, parameters={**recorded.parameters, "ALIGN": row_alignment})
        if here:
            load(grids.prepare.warmup(**wanted.parameters, grid=(wanted.programs,), **wanted.options))
        else:
            offline.compiled(wanted, target)


def load(compiled: Any) -> None:
    """Load a kernel onto the current GPU, which Triton would do at its first launch."""
    if compiled.run is None:
        raise RuntimeError(f"{compiled.name}: Triton has not loaded it")

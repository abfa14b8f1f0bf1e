"""Other people's implementations of what an op does, as arms of `dsafuse bench`.

Each file of this folder binds one of them to the arguments of our ops. None is a dependency: a peer says why it is not
available here before anything is called, what its numerics do differently, and how far from the exact values that may
take it. It is held to that before it is timed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from dsafuse.check.cases import Case

FP8_STEP = 2.0**-4
"""Half the distance of two e4m3 codes, relative to the value: what rounding to fp8 may cost, whoever does it."""

BF16_STEPS = 2.0**-7
"""Two roundings to bf16: products, a rope table, or a norm that are kept in it."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A peer on the tensors of one call."""

    call: Callable[[], object]
    outputs: Callable[[], dict[str, torch.Tensor]]
    """What the last call has left, under our names and in our layouts, as far as the peer makes it."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One implementation that a bench can put beside ours."""

    name: str
    ops: frozenset[str]
    available: Callable[[], str | None]
    """Why it can't be called here; None if it can."""
    version: Callable[[], str]
    bind: Callable[[Case, dict[str, Any]], Bound]
    differs: str
    """What its numerics do differently."""
    tolerance: Mapping[str, float] = field(default_factory=dict)
    """For each role the largest error against float64, relative to the largest value of its row; FP8_STEP and
    BF16_STEPS for one that is not listed."""

    context: Callable[[], AbstractContextManager[None]] = nullcontext
    """In force while it is called."""

    def allowed(self, role: str) -> float:
        """The largest error of a role."""
        return self.tolerance.get(role, FP8_STEP + BF16_STEPS)


PEER_MODULES = ("compiled", "vllm_unfused", "vllm_fused", "flashinfer_append", "aiter_triton")


def peers() -> dict[str, Peer]:
    """Every peer by its name."""
    modules = [importlib.import_module(f"{__name__}.{module}") for module in PEER_MODULES]
    return {peer.name: peer for module in modules for peer in module.PEERS}


def needs_gpu() -> str | None:
    """The first thing that most peers lack."""
    return None if torch.cuda.is_available() else "it runs on a GPU, and torch sees none here"


def why_not_importable(module: str) -> str | None:
    """Why importing a module raises, as that of a package built for another machine does; None if it doesn't."""
    try:
        importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        return f"{module} can't be imported here: {error}"
    return None


@contextmanager
def standing_in(root: str, modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """While others' files load: `modules` in place of the package `root`. What of it was imported before is back
    afterwards, and what was imported meanwhile is gone.
    """
    hidden = _of_package(root)
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in _of_package(root):
            del sys.modules[name]
        sys.modules.update(hidden)


def _of_package(root: str) -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == root}

"""Calls seen before: what has been checked once is not checked again.

A full check of a call costs about 100 us of Python, which no eager engine would forgive. So an op remembers the calls
that passed, by all that a check looks at: names and numbers in a dict key, and of every tensor its type, device,
dtype, sizes, strides and whether it requires grad. A call that matches goes straight to its launch, which looks at
the addresses alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable
from functools import cache
from operator import itemgetter
from typing import Any

import torch

Guard = Callable[..., bool]

MOST_KEYS = 4096
"""Keys kept; a key holds the token count, so an engine that sees every count once must not grow without bound."""

MOST_CALLS = 4
"""Calls kept for a key: inside and outside of inference mode, aligned or not."""


class PythonGuard:
    """Whether tensors look as they did. For a torch without `TensorGuards`; several times slower."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._seen = self._look(tensors)

    @staticmethod
    def _look(tensors: Any) -> list[Any]:
        return [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]

    def __call__(self, *tensors: torch.Tensor) -> bool:
        """Whether these look like those."""
        return self._look(tensors) == self._seen


@cache
def _native_guards() -> Any:
    """The guards that torch.compile uses, one C++ call for all tensors; None if this torch has none that fit."""
    probe = torch.empty(2, 3)
    try:
        guards_of: Any = importlib.import_module("torch._C._dynamo.guards").TensorGuards
        guards = guards_of(probe, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    except (ImportError, AttributeError, TypeError):
        return None
    fits = guards.check(probe) and not guards.check(probe.t()) and not guards.check(torch.empty(3, 3))
    return guards_of if fits else None


def guard_of(tensors: list[torch.Tensor]) -> Guard:
    """A function that says whether other tensors look like these."""
    native = _native_guards()
    if native is None:
        return PythonGuard(tensors)
    # Native guards refuse a tensor that comes twice, as a rope table does that both families share.
    once = [i for i, tensor in enumerate(tensors) if all(tensor is not other for other in tensors[:i])]
    if len(once) == len(tensors):
        check: Guard = native(
            *tensors,
            dynamic_dims_sizes=[list(t.shape) for t in tensors],
            dynamic_dims_strides=[list(t.stride()) for t in tensors],
        ).check
        return check
    rest = [i for i in range(len(tensors)) if i not in once]
    first, then = guard_of([tensors[i] for i in once]), guard_of([tensors[i] for i in rest])
    pick_first, pick_rest = _picker(once), _picker(rest)
    return lambda *others: first(*pick_first(others)) and then(*pick_rest(others))


def _picker(indices: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(indices) == 1:
        only = indices[0]
        return lambda values: (values[only],)
    return itemgetter(*indices)


class KnownCalls:
    """The launches of an op by what their calls look like."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[tuple[Guard, Callable[[dict[str, Any]], bool]]]] = {}

    def launch(self, key: Hashable, tensors: list[torch.Tensor], arguments: dict[str, Any]) -> bool:
        """Launch again if the call is known; False if it has to be checked in full."""
        try:
            calls = self._calls.get(key, ())
        except TypeError:  # an argument that can't be hashed is none that a check would pass
            return False
        return any(guard(*tensors) and again(arguments) for guard, again in calls)

    def remember(self, key: Hashable, tensors: list[torch.Tensor], again: Callable[[dict[str, Any]], bool]) -> None:
        """Keep the launch of a call that was checked."""
        if len(self._calls) >= MOST_KEYS:
            self._calls.clear()
        calls = self._calls.setdefault(key, [])
        calls.insert(0, (guard_of(tensors), again))
        del calls[MOST_CALLS:]

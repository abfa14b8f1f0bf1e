"""Calls seen before: what has been checked once is not checked again.

A full check of a call costs about 100 us of Python, which no eager engine would forgive. So an op remembers the calls
that passed, by all that a check looks at: names and numbers in a dict key, and of every tensor its type, device,
dtype, sizes, strides and whether it requires grad. A call that matches goes straight to its launch, which looks at
the addresses alone. Where torch or Triton lacks what that takes (`private`), no call is remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any

import torch

from dsafuse import private

Guard = Callable[..., bool]
Tensors = tuple[torch.Tensor | None, ...]
"""All tensor arguments of a call, absent ones included, in the order of the op's parameters."""

Launch = Callable[[tuple[int, ...]], bool]
"""Launches for tensors at these addresses; False where they need a look, and then nothing was launched."""

KnownCall = Callable[[Hashable, Tensors], Any]
"""Takes a key and tensors, launches again, and returns the op's result; None where they need a full check."""

MOST_KEYS = 4096
"""Keys kept; a key holds the token count, so an engine that sees every count once must not grow without bound."""

MOST_CALLS = 8
"""Calls kept for a key: inside and outside of inference mode, aligned or not, tensors of their own or shared."""


def is_watched() -> bool:
    """Whether torch traces, transforms or stands in for what happens, or doesn't say: then it has to see the op."""
    return (
        private.why_not("watching") is not None
        or torch._C._len_torch_dispatch_stack() > 0  # make_fx, FakeTensorMode, and any other mode
        or torch._C._functorch.peek_interpreter_stack() is not None  # torch.func
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
    )


def guard_of(tensors: Sequence[torch.Tensor]) -> Guard:
    """A function that says whether other tensors look like these, none of which may come twice."""
    guards_of: Any = torch._C._dynamo.guards.TensorGuards  # torch.compile's own: one C++ call for all tensors
    guard: Guard = guards_of(
        *tensors,
        dynamic_dims_sizes=[list(t.shape) for t in tensors],
        dynamic_dims_strides=[list(t.stride()) for t in tensors],
    ).check
    if any(tensor.requires_grad for tensor in tensors):
        # A check passes them only where no gradient is recorded.
        return lambda *others: not torch.is_grad_enabled() and guard(*others)
    return guard


def known_call(
    given: Tensors,
    settled: Tensors,
    results: Sequence[int],
    launch_of: Callable[[dict[int, int]], Launch],
) -> KnownCall:
    """Run a call that has been checked, and know it from then on, for other tensors that look the same.

    Args:
        given: its tensors, as the caller passed them.
        settled: the same after the check, with the outputs that were made for the caller.
        results: which of them the op returns, in order.
        launch_of: launches it, and makes the launch for others, from the index into the addresses that each tensor has.
    """
    owner: dict[int, int] = {}
    present = [i for i, tensor in enumerate(given) if tensor is not None]
    owners = [owner.setdefault(id(given[i]), i) for i in present]
    # A tensor that comes twice, as a rope table does that both families share, is looked at once, and has to come
    # twice again.
    twins = [(i, first) for i, first in zip(present, owners) if i != first]
    looked_at = [i for i, first in zip(present, owners) if i == first]
    made = [i for i in results if given[i] is None and settled[i] is not None]
    order = {i: place for place, i in enumerate((*looked_at, *made))}
    guard = guard_of([tensor for i in looked_at if (tensor := given[i]) is not None])
    launch = launch_of(order | {i: order[first] for i, first in twins})
    # The guard sees torch.func and torch.jit.trace in the dispatch keys, but not a mode of torch's own.
    modes = torch._C._len_torch_dispatch_stack
    tensors_of, results_of = _picker(looked_at), itemgetter(*results)
    address_of = torch.Tensor.data_ptr
    outputs = [(i, tuple(tensor.shape), tensor.dtype) for i in made if (tensor := settled[i]) is not None]

    def again(_key: Hashable, tensors: Tensors) -> Any:
        found = tensors_of(tensors)
        if modes() or not guard(*found):
            return None
        for i, first in twins:
            if tensors[i] is not tensors[first]:
                return None
        if outputs:
            fresh = {i: found[0].new_empty(shape, dtype=dtype) for i, shape, dtype in outputs}
            found = (*found, *fresh.values())
            tensors = tuple([fresh.get(i, tensor) for i, tensor in enumerate(tensors)])
        return results_of(tensors) if launch(tuple(map(address_of, found))) else None

    return again


def _picker(indices: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    if len(indices) == 1:
        only = indices[0]
        return lambda values: (values[only],)
    return itemgetter(*indices)


def spelled_alike(key: tuple[Any, ...], call: KnownCall) -> KnownCall:
    """A call that also looks at how its numbers are written: 0.0, -0.0 and False are one key, as 1 and True are."""
    spelled = repr(key)
    return lambda other, tensors: call(other, tensors) if repr(other) == spelled else None


class KnownCalls:
    """The calls that an op knows, by the names and numbers that they were made with."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, list[KnownCall]] = {}
        self.find = self._calls.get
        """The calls known for a key, the latest first."""

    def remember(self, key: tuple[Any, ...], call: KnownCall) -> None:
        """Keep a call that was checked."""
        if any(value in (0, 1) for value in key if isinstance(value, (int, float)) and not isinstance(value, bool)):
            call = spelled_alike(key, call)
        if len(self._calls) >= MOST_KEYS:
            self._calls.clear()
        # A new list each time: another thread may be walking along the old one.
        self._calls[key] = [call, *self._calls.get(key, ())][:MOST_CALLS]

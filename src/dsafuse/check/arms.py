"""Arms of a benchmark: our providers and other people's kernels, each proven before it is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dsafuse import switches
from dsafuse.check.cases import Case
from dsafuse.check.inputs import Inputs
from dsafuse.check.peers import Peer, peers
from dsafuse.check.reference import errors
from dsafuse.check.timing import Launch
from dsafuse.registry import OPS

PROVIDERS = {"fused": "triton", "split": "split"}
"""Arms that are providers of ours. They are held to the oracle's bytes by verify."""

ON_REQUEST = frozenset({"compiled"})
"""Arms that are timed only when asked for by name: compiling takes minutes."""


@dataclass(frozen=True, slots=True)
class BenchArm:
    """One arm, ready for any call of an op."""

    name: str
    what: str
    """The provider, or the peer's version."""
    context: Callable[[], AbstractContextManager[None]]
    """In force while its calls are made."""
    peer: Peer | None = None

    def launch(self, case: Case, arguments: dict[str, Any]) -> Launch:
        """A call on some arguments."""
        if self.peer is not None:
            return self.peer.bind(case, arguments).call
        op = OPS[case.op]
        # As source code has them: Python binds names that were put together at run time far slower.
        arguments = {sys.intern(name): value for name, value in arguments.items()}

        def call() -> object:
            return op(**arguments)

        return call

    def prove(self, case: Case, inputs: Inputs, arguments: dict[str, Any]) -> Iterator[str]:
        """What is wrong with a peer's result, against float64. Nothing for a provider: verify has looked at it."""
        if self.peer is None:
            return
        bound = self.peer.bind(case, arguments)
        bound.call()
        found: dict[str, float] = {}
        for role, error in errors(case, inputs, bound.outputs()):
            found[role] = max(found.get(role, 0.0), error)
        if not found:
            yield "it has left no result to look at"
        for role, error in found.items():
            if not error <= self.peer.allowed(role):
                yield f"{role}: error {error:.3g} against float64, allowed is {self.peer.allowed(role):.3g}"


def arm_names() -> tuple[str, ...]:
    """Every arm, ours first."""
    return (*PROVIDERS, *peers())


def arms_of(op: str, asked: tuple[str, ...] | None) -> tuple[list[BenchArm], dict[str, str]]:
    """The arms of an op that can run here, and why each of the others can't.

    Args:
        op: its name.
        asked: names of arms; None for all that need no asking.
    """
    found, absent = [], {}
    for name, provider in PROVIDERS.items():
        if asked is None or name in asked:
            found.append(BenchArm(name, provider, lambda provider=provider: _provider(provider)))  # type: ignore[misc]
    for name, peer in peers().items():
        if op not in peer.ops or (asked is None and name in ON_REQUEST) or (asked is not None and name not in asked):
            continue
        reason = peer.available()
        if reason is None:
            found.append(BenchArm(name, peer.version(), peer.context, peer))
        else:
            absent[name] = reason
    return found, absent


@contextmanager
def _provider(name: str) -> Iterator[None]:
    with switches.override(mode="auto", ops=frozenset(switches.FAMILIES), provider=name):
        yield


def out_form(op: str, arguments: dict[str, Any]) -> Launch:
    """The same call through torch.ops, as a compiled graph makes it."""
    call = getattr(torch.ops.dsafuse, op)
    known = {argument.name for argument in call.default._schema.arguments}
    given = {sys.intern(name): value for name, value in arguments.items() if name in known}
    return lambda: call(**given)

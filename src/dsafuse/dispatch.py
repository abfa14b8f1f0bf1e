"""Which provider runs an op, and why: a decision carries the whole trace of who declined and for what reason."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Protocol

import torch

from dsafuse.switches import Switches
from dsafuse.target import Target


@dataclass(frozen=True, slots=True)
class Accepted:
    """This provider runs the op."""

    provider: str

    def __str__(self) -> str:
        return f"{self.provider}: accepted"


@dataclass(frozen=True, slots=True)
class Rejected:
    """This provider does not; `reason` is a sentence that names the offending value."""

    provider: str
    reason: str

    def __str__(self) -> str:
        return f"{self.provider}: rejected: {self.reason}"


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome for one op: who runs it, and everyone who was asked before."""

    op: str
    target: str
    trace: tuple[Accepted | Rejected, ...]

    @property
    def provider(self) -> str | None:
        """Name of the accepting provider, None if nobody accepted."""
        return next((v.provider for v in self.trace if isinstance(v, Accepted)), None)

    def __str__(self) -> str:
        return "\n".join([f"{self.op} on {self.target}: {self.provider or 'no provider'}", *map(_line, self.trace)])


def _line(verdict: Accepted | Rejected) -> str:
    return f"  {verdict}"


class NoProviderError(RuntimeError):
    """Nobody could run the op; the message is the trace."""

    def __init__(self, decision: Decision) -> None:
        super().__init__(str(decision))
        self.decision = decision


class OpConfig(Hashable, Protocol):
    """What a gate may look at: the static facts of a call, without its tensors."""

    @property
    def fp8_formats(self) -> frozenset[torch.dtype]:
        """The fp8 formats that this call reads or writes."""

    @property
    def families(self) -> frozenset[str]:
        """Which of DSAFUSE_OPS the call belongs to."""


@dataclass(frozen=True, slots=True)
class Provider:
    """A way to run every op. Its module is imported at the first dispatch, so `ops` never imports kernels.

    The module has `why_not(config, target)`, `why_not_here()` and `run(op, arguments, config)`. One that has
    `again(op, arguments, config, places)` is run through that: it returns what launches once more for other addresses.
    """

    name: str
    module: str
    on_request: str | None = None
    """Why it runs only when DSAFUSE_PROVIDER names it; None if it may be chosen freely."""
    fused: bool = True

    def load(self) -> ModuleType:
        """The implementing module."""
        return importlib.import_module(self.module)


PROVIDERS = {
    provider.name: provider
    for provider in (
        Provider("triton", "dsafuse.kernels.launch"),
        Provider(
            "interpreter",
            "dsafuse.kernels.interpreter",
            on_request="it is slow and for proof only; DSAFUSE_PROVIDER=interpreter asks for it",
        ),
        Provider("split", "dsafuse.split", fused=False),
    )
}


def unsupported_format(config: OpConfig, target: Target) -> str | None:
    """The gate that every provider has: an fp8 format that the target can't convert to."""
    for dtype in sorted(config.fp8_formats - target.fp8, key=str):
        return f"{target.arch} has no conversion to {dtype}"
    return None


def _switched_off(provider: Provider, families: frozenset[str], switches: Switches) -> str | None:
    if switches.provider is not None and switches.provider != provider.name:
        return f"DSAFUSE_PROVIDER={switches.provider} names another"
    if provider.fused:
        if switches.mode == "off":
            return "DSAFUSE_MODE=off"
        if not families <= switches.ops:
            listed = ",".join(sorted(switches.ops))
            return f"DSAFUSE_OPS={listed} leaves out {', '.join(sorted(families - switches.ops))}"
    elif switches.mode == "strict" and switches.provider != provider.name:
        return "DSAFUSE_MODE=strict forbids the unfused chain"
    if provider.on_request and switches.provider != provider.name:
        return provider.on_request
    return None


@lru_cache(maxsize=1024)
def choose(
    op: str,
    config: OpConfig,
    target: Target,
    switches: Switches,
    *,
    here: bool,
) -> Decision:
    """Ask the providers in order; the first without an objection runs the op.

    Args:
        op: name of the op.
        config: static facts of the call.
        target: the machine, detected or named.
        switches: environment choices.
        here: whether it is to run in this process, so that what is installed counts, too.
    """
    trace: list[Accepted | Rejected] = []
    for provider in PROVIDERS.values():
        reason = _switched_off(provider, config.families, switches)
        if reason is None:
            module = provider.load()
            reason = module.why_not(config, target) or (module.why_not_here() if here else None)
        if reason is None:
            trace.append(Accepted(provider.name))
            break
        trace.append(Rejected(provider.name, reason))
    return Decision(op, target.arch, tuple(trace))

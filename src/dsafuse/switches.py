"""The environment variables: read once, in one place. They choose; they never change a result.

| variable | values | meaning |
|---|---|---|
| DSAFUSE_MODE | auto (default), off, strict | strict raises the trace where auto would fall back; off never fuses |
| DSAFUSE_OPS | mla,indexer (default: both; empty: neither) | which of the two fusions may be used |
| DSAFUSE_PROVIDER | triton, interpreter, split | use this provider and no other |
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

MODES = ("auto", "off", "strict")
FAMILIES = ("mla", "indexer")
PROVIDERS = ("triton", "interpreter", "split")


@dataclass(frozen=True, slots=True)
class Switches:
    """How fast paths are chosen in this process."""

    mode: str = "auto"
    ops: frozenset[str] = frozenset(FAMILIES)
    provider: str | None = None

    def __post_init__(self) -> None:
        _expect("DSAFUSE_MODE", self.mode, MODES)
        if not isinstance(self.ops, frozenset):
            raise TypeError(f"DSAFUSE_OPS: got {self.ops!r}, expected a frozenset of {', '.join(FAMILIES)}")
        for name in sorted(self.ops, key=repr):
            _expect("DSAFUSE_OPS", name, FAMILIES)
        if self.provider is not None:
            _expect("DSAFUSE_PROVIDER", self.provider, PROVIDERS)

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> Switches:
        """Parse the three variables. Raises ValueError that names the variable, its value and the choices."""
        families = environment.get("DSAFUSE_OPS", ",".join(FAMILIES))
        names = [name.strip() for name in families.split(",")] if families.strip() else []
        if not {*names} <= {*FAMILIES}:
            expected = f"some of {', '.join(FAMILIES)}, separated by commas"
            raise ValueError(f"DSAFUSE_OPS: got {families!r}, expected {expected}")
        return Switches(
            mode=environment.get("DSAFUSE_MODE") or "auto",
            ops=frozenset(names),
            provider=environment.get("DSAFUSE_PROVIDER") or None,
        )


def _expect(variable: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{variable}: got {value!r}, expected one of {', '.join(choices)}")


_process: Switches | None = None
_OVERRIDE: ContextVar[Switches | None] = ContextVar("overriding switches", default=None)
_OVERRIDES: dict[Switches, Switches] = {}

overriding = _OVERRIDE.get
"""The switches of an `override` around the call, None outside of one. Equal ones are one object that is never freed,
so that its id is a key: a known call has no time for more."""


def current() -> Switches:
    """The switches in force: those of an `override` around the call, else those of the environment at first use."""
    global _process
    override_here = overriding()
    if override_here is not None:
        return override_here
    if _process is None:
        _process = Switches.from_environment()
    return _process


@contextmanager
def override(**changes: Any) -> Iterator[Switches]:
    """Change switches for the length of a block, in this thread alone, as `override(provider="interpreter")`."""
    switches = replace(current(), **changes)
    switches = _OVERRIDES.setdefault(switches, switches)
    token = _OVERRIDE.set(switches)
    try:
        yield switches
    finally:
        _OVERRIDE.reset(token)

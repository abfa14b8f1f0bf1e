"""What a measured value is held to, in every table of targets: it holds, is argued or misses, or was not measured."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

STATES = {"holds": "hold", "argued": "argued", "misses": "missed", "not measured": "not measured"}
"""Of a target in a cell, and the word that follows a count of them."""

PAGE = re.compile(r"[^#\s]+\.md#[^#\s]+")
"""A heading of the docs, as `argued` names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a value has to be, at least or at most; and what it must be all the same where that can't be had."""

    at_most: float | None = None
    at_least: float | None = None
    held_to: float | None = None
    """What a value must reach all the same where the bound can't be had; between the two it is argued."""
    argued: str | None = None
    """Where it is shown by measurement that the bound can't be had: a page of docs and its heading, page.md#heading."""

    @property
    def bound(self) -> str:
        """As a sentence has it."""
        return f"at least {self.at_least:g}" if self.at_least is not None else f"at most {self.at_most:g}"

    @property
    def asked(self) -> str:
        """The bound and, in brackets, what is held all the same and why."""
        return self.bound if self.held_to is None else f"{self.bound} (held to {self.held_to:g}, {self.argued})"

    def state(self, value: float) -> str:
        """holds, argued or misses."""
        if self._within(value, self.at_most if self.at_least is None else self.at_least):
            return "holds"
        return "argued" if self._within(value, self.held_to) else "misses"

    def validate(self, where: str) -> None:
        """Raise ValueError, which begins with `where`, for bounds that can't be meant."""
        for key in ("at_most", "at_least", "held_to"):
            bound = getattr(self, key)
            if bound is not None and not (type(bound) in (int, float) and 0 < bound <= sys.float_info.max):
                raise ValueError(f"{where}: got {key}={bound!r:.60}, expected a positive number")
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError(f"{where}: expected one of at_most and at_least")
        if (self.held_to is None) != (self.argued is None):
            raise ValueError(f"{where}: expected held_to and argued together")
        if self.held_to is not None and self.state(self.held_to) == "holds":
            raise ValueError(f"{where}: got held_to={self.held_to:g}, expected what misses {self.bound}")
        if self.argued is not None and not (isinstance(self.argued, str) and PAGE.fullmatch(self.argued)):
            raise ValueError(f"{where}: got argued={self.argued!r:.60}, expected page.md#heading")

    def _within(self, value: float, bound: float | None) -> bool:
        return bound is not None and (value <= bound if self.at_least is None else value >= bound)


def counted(states: Sequence[str]) -> str:
    """How many of each of STATES, as a line says it."""
    return ", ".join(f"{states.count(state)} {word}" for state, word in STATES.items())

"""What is measured, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OFF, ON = "off", "on"
ARMS = (OFF, ON)
"""vLLM's own model code; the same with the plugin at work."""


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """One load: tokens of every prompt, tokens of every answer, requests in flight."""

    isl: int
    osl: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.isl}/{self.osl} at {self.concurrency}"


@dataclass(frozen=True, slots=True)
class Turn:
    """One call of `vllm bench serve`."""

    cell: Cell
    repeat: int
    arm: str

    def __str__(self) -> str:
        return f"{self.cell}, repeat {self.repeat + 1}, {self.arm}"


def cells(isl: Sequence[int], osl: Sequence[int], concurrency: Sequence[int]) -> list[Cell]:
    """The product, each cell once, small ones first."""
    return sorted({Cell(i, o, c) for i in isl for o in osl for c in concurrency})


def turns(measured: Sequence[Cell], repeats: int, arms: Sequence[str] = ARMS) -> list[Turn]:
    """Every cell in every arm, repeat by repeat.

    The arms of a cell follow each other at once, so that what drifts (clocks, heat) meets both; which goes first
    alternates. A whole round over the cells comes before the next, so that a run that is cut short has seen all.
    """
    found = []
    for repeat in range(repeats):
        for number, cell in enumerate(measured):
            first_on = (repeat + number) % 2
            found += [Turn(cell, repeat, arm) for arm in (tuple(reversed(arms)) if first_on else tuple(arms))]
    return found

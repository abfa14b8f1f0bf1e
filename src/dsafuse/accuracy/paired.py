"""Two arms that answered the same problems: how accurate each is, and whether they differ by more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, sqrt
from typing import Any

SIGNIFICANT = 0.01
"""A paired difference with a smaller p fails: one false alarm in a hundred comparisons of equal arms, at most."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers of one arm. Problems are drawn independently, so the standard error is the binomial one."""

    right: int
    count: int

    @property
    def value(self) -> float:
        """The fraction of right answers."""
        return self.right / self.count

    @property
    def standard_error(self) -> float:
        """sqrt(p (1 - p) / n)."""
        return sqrt(self.value * (1 - self.value) / self.count)

    def __str__(self) -> str:
        return f"{100 * self.value:.2f} +- {100 * self.standard_error:.2f} %"


@dataclass(frozen=True, slots=True)
class Paired:
    """What two arms made of the same problems.

    lost: right without fusion and wrong with it. gained: the other way round.
    differing: answers that are not the same text, right or wrong.
    """

    unfused: Accuracy
    fused: Accuracy
    lost: int
    gained: int
    differing: int

    @property
    def difference(self) -> float:
        """Accuracy of the fused arm less that of the un-fused."""
        return (self.gained - self.lost) / self.unfused.count

    @property
    def standard_error(self) -> float:
        """Of the difference: problems on which both are right or both wrong say nothing, and add no spread."""
        count = self.unfused.count
        return sqrt(self.lost + self.gained - (self.gained - self.lost) ** 2 / count) / count

    @property
    def p(self) -> float:
        """McNemar's exact test, two-sided: were the problems that one arm alone got right split by a fair coin?"""
        return mcnemar(self.lost, self.gained)

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        arms = {
            name: {**asdict(arm), "accuracy": arm.value, "standard_error": arm.standard_error}
            for name, arm in (("unfused", self.unfused), ("fused", self.fused))
        }
        return {
            **arms,
            "lost": self.lost,
            "gained": self.gained,
            "differing": self.differing,
            "difference": self.difference,
            "difference_standard_error": self.standard_error,
            "p": self.p,
        }


Answer = tuple[bool, str]
"""Whether it is right, and what it says."""


def paired(unfused: Sequence[Answer], fused: Sequence[Answer]) -> Paired:
    """Compare two arms, problem by problem. Raises ValueError if there is none, or the arms do not pair."""
    count = len(unfused)
    if not count or len(fused) != count:
        raise ValueError(f"expected answers to the same problems, and some, got {count} and {len(fused)}")
    return Paired(
        Accuracy(sum(right for right, _ in unfused), count),
        Accuracy(sum(right for right, _ in fused), count),
        lost=sum(a and not b for (a, _), (b, _) in zip(unfused, fused)),
        gained=sum(b and not a for (a, _), (b, _) in zip(unfused, fused)),
        differing=sum(a != b for (_, a), (_, b) in zip(unfused, fused)),
    )


def mcnemar(lost: int, gained: int) -> float:
    """P that a fair coin splits lost + gained throws at least as unevenly, to either side."""
    throws = lost + gained
    tail = sum(comb(throws, k) for k in range(min(lost, gained) + 1))
    return float(min(1.0, 2 * tail / 2**throws))

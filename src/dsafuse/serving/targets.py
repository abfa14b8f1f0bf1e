"""Measurements against a table of targets: which cells hold, are argued or miss, and which nobody has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from dsafuse.check import document
from dsafuse.check.bound import Bound
from dsafuse.serving.record import BY_KEY, Record, compare

AXES: Mapping[str, type] = {"heads": int, "weights": str, "kv_cache_dtype": str, "isl": int, "concurrency": int}
"""What a target may be limited to, each by a list of such values; one that is left out takes any value."""

At = tuple[int, str | None, str, int, int]
"""A value of each axis; None for weights of any kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Bound):
    """One line of the table: what the median ratio of a metric has to be in every combination of its lists.

    Ratios are above 1 where the plugin is better, for times and tokens/s alike. A combination of its lists that is not
    measured is reported, whether weights are among them or not; a target that leaves out one of the other four speaks
    of the measured cells alone.
    """

    metric: str
    """Of record.METRICS, by its key."""
    heads: tuple[int, ...] | None = None
    weights: tuple[str, ...] | None = None
    """Of serving.memory.weights: bf16, fp8."""
    kv_cache_dtype: tuple[str, ...] | None = None
    isl: tuple[int, ...] | None = None
    concurrency: tuple[int, ...] | None = None

    def covers(self, at: At) -> bool:
        """Whether it speaks of such a cell."""
        return all((allowed := getattr(self, axis)) is None or value in allowed for axis, value in zip(AXES, at))

    def expected(self) -> set[At]:
        """The combinations of its lists; none if it leaves one out that is not weights."""
        lists = [self.weights or (None,) if axis == "weights" else getattr(self, axis) for axis in AXES]
        return set() if None in lists else set(product(*lists))


@dataclass(frozen=True, slots=True)
class Finding:
    """A target in one cell; `ratio` is None where that was not measured."""

    target: Target
    at: At
    ratio: float | None

    @property
    def state(self) -> str:
        """holds, argued, misses, or not measured."""
        return "not measured" if self.ratio is None else self.target.state(self.ratio)

    def __str__(self) -> str:
        heads, weights, cache, isl, concurrency = self.at
        of = "" if weights is None else f"{weights} weights, "
        cell = f"H={heads}, {of}cache {cache}, ISL {isl}, concurrency {concurrency}"
        got = "" if self.ratio is None else f"got {self.ratio:.3f}, "
        return f"{cell}: {BY_KEY[self.target.metric].name} ratio: {got}expected {self.target.asked}"


def read_targets(path: Path) -> list[Target]:
    """The targets of a TOML file, an array of tables called `target`. Raises ValueError for what it can't mean."""
    known = [f.name for f in fields(Target)]
    return [_target(entry, where) for where, entry in document.targets(path, known)]


def _target(entry: dict[str, Any], where: str) -> Target:
    if entry.get("metric") not in list(BY_KEY):
        raise ValueError(f"{where}: got metric={entry.get('metric')!r}, expected one of {', '.join(BY_KEY)}")
    lists = {axis: entry[axis] for axis in AXES if axis in entry}
    for axis, values in lists.items():
        kind = AXES[axis]
        if not isinstance(values, list) or not values or not all(type(value) is kind for value in values):
            raise ValueError(f"{where}: got {axis}={values!r}, expected a list of {kind.__name__}")
    target = Target(**{**entry, **{axis: tuple(values) for axis, values in lists.items()}})
    target.validate(where)
    return target


def check(records: Sequence[Record], targets: Sequence[Target]) -> list[Finding]:
    """Every target in every cell that it speaks of, and in those that it asks for and no record has."""
    found = []
    for target in targets:
        seen: set[At] = set()
        for record in records:
            for cell in record.cells():
                c = record.conditions
                at = (c["heads"], c["weights"], c["kv_cache_dtype"], cell.isl, cell.concurrency)
                compared = compare(BY_KEY[target.metric], record.repeats(cell))
                if compared is not None and target.covers(at):
                    seen.add(at)
                    found.append(Finding(target, at, compared.ratio))
        of_any = {(at[0], None, *at[2:]) for at in seen}
        found += [Finding(target, at, None) for at in sorted(target.expected() - seen - of_any)]
    return found

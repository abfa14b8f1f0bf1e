"""A run against a table of targets: what holds, what misses, what is argued, and what was not measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsafuse.check import document
from dsafuse.check.arms import arm_names
from dsafuse.check.bench import FORMS, L2_STATES
from dsafuse.check.bound import Bound
from dsafuse.check.records import WRAPPER, Row, Run, named
from dsafuse.registry import OPS

METRICS = ("median_us", "fraction_of_copy", "host_of_mul", "speedup", "eager_speedup", "speedup_over_parts")
"""Of a row: microseconds; fraction of copy bandwidth; host time over a torch.mul's. Against another arm: its median, or
its eager time, over the row's. Against `parts`: the sum of their medians over the row's."""

NEAR = 0.02
"""How near to a bound, on either side, a value is too near to tell by one capture."""

HEAD_PAIR = re.compile("[1-9][0-9]*/[1-9][0-9]*")
"""Attention heads/indexer heads, as a row and a target have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target(Bound):
    """One line of the table: what a metric has to be in every cell of a range."""

    op: str
    heads: str
    tokens: tuple[int, int]
    """The first and the last token count that it speaks of."""
    l2: str
    metric: str
    form: str = WRAPPER
    """Of bench.FORMS."""
    arm: str = "fused"
    over: str | None = None
    """The other arm of a speedup."""
    parts: tuple[str, ...] = ()
    """The ops that do the same one after the other, for speedup_over_parts."""

    def is_near(self, value: float) -> bool:
        """Whether a value lies so near to a bound that it might lie on its other side the next time."""
        bounds = (self.at_most, self.at_least, self.held_to)
        return any(abs(value - bound) <= NEAR * abs(bound) for bound in bounds if bound is not None)

    def __str__(self) -> str:
        against = f" over {self.over}" if self.over else f" over {' + '.join(self.parts)}" if self.parts else ""
        first, last = self.tokens
        cells = f"{named(self.op, self.form)} {self.heads} T={first}..{last} {self.l2}, {self.arm}"
        return f"{cells}: {self.metric}{against} {self.asked}"


@dataclass(frozen=True, slots=True)
class Finding:
    """A target in one cell; `tokens` is None where the run has no such cell at all."""

    target: Target
    tokens: int | None
    value: float | None

    @property
    def state(self) -> str:
        """holds, argued, misses, or not measured."""
        return "not measured" if self.value is None else self.target.state(self.value)

    def __str__(self) -> str:
        got = "" if self.value is None else f" {self.value:.4g},"
        return f"{self.target}: got{got} at T={self.tokens}" if got else f"{self.target}: {self.state}"


def read_targets(path: Path) -> list[Target]:
    """The targets of a TOML file, an array of tables called `target`. Raises ValueError for what it can't mean."""
    known = [f.name for f in fields(Target)]
    return [_target(entry, where) for where, entry in document.targets(path, known)]


def _target(entry: dict[str, Any], where: str) -> Target:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    try:
        target = Target(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    choices = {"op": tuple(OPS), "metric": METRICS, "l2": L2_STATES, "arm": arm_names(), "form": tuple(FORMS)}
    for key, allowed in choices.items():
        if getattr(target, key) not in allowed:
            raise ValueError(f"{where}: got {key}={getattr(target, key)!r}, expected one of {', '.join(allowed)}")
    if target.op not in FORMS[target.form][0]:
        raise ValueError(f"{where}: got form={target.form!r}, expected one that {target.op} has")
    if not isinstance(target.heads, str) or not HEAD_PAIR.fullmatch(target.heads):
        raise ValueError(f"{where}: got heads={target.heads!r:.60}, expected a pair as 128/64")
    target.validate(where)
    counts = target.tokens
    if not isinstance(counts, tuple) or len(counts) != 2 or not all(type(count) is int for count in counts):
        raise ValueError(f"{where}: got tokens={counts!r:.60}, expected the first and the last")
    if not 1 <= counts[0] <= counts[1]:
        raise ValueError(f"{where}: got tokens={counts!r:.60}, expected a first of 1 or more, and a last not below it")
    _held_against(target, where)
    return target


def _held_against(target: Target, where: str) -> None:
    """Refuse a speedup over nothing or over itself, and what a metric is given that it does not look at."""
    takes = {"over": target.metric in ("speedup", "eager_speedup"), "parts": target.metric == "speedup_over_parts"}
    for key, taken in takes.items():
        if getattr(target, key) and not taken:
            raise ValueError(f"{where}: got {key}={getattr(target, key)!r:.60}, expected none with {target.metric}")
    others = [name for name in arm_names() if name != target.arm]
    if takes["over"] and target.over not in others:
        raise ValueError(f"{where}: got over={target.over!r:.60}, expected one of {', '.join(others)}")
    parts = [op for op in OPS if op != target.op]
    if takes["parts"] and not (target.parts and all(part in parts for part in target.parts)):
        raise ValueError(f"{where}: got parts={target.parts!r:.60}, expected names of ops, some of {', '.join(parts)}")


def check(run: Run, targets: Sequence[Target]) -> list[Finding]:
    """Every target in every cell that the run was asked for."""
    return [finding for target in targets for finding in _findings(run, target)]


def cells_near(findings: Sequence[Finding]) -> set[tuple[str, str, str, int]]:
    """(op, heads, form, tokens) of every cell whose value is near a bound, and of the parts it was compared with."""
    found = set()
    for finding in findings:
        target, tokens, value = finding.target, finding.tokens, finding.value
        if tokens is not None and value is not None and target.is_near(value):
            found |= {(op, target.heads, target.form, tokens) for op in (target.op, *target.parts)}
    return found


def not_measured(findings: Sequence[Finding]) -> Iterator[str]:
    """The targets that have cells without a value, a sentence each."""
    unknown: dict[Target, list[int | None]] = {}
    for finding in findings:
        if finding.value is None:
            unknown.setdefault(finding.target, []).append(finding.tokens)
    for target, counts in unknown.items():
        where = ", ".join(str(tokens) for tokens in counts if tokens is not None)
        yield f"{target} (at T={where})" if where else f"{target} (no such token count and L2 in this run)"


def _findings(run: Run, target: Target) -> Iterator[Finding]:
    first, last = target.tokens
    seen = {row.tokens for row in run.rows if row.l2 == target.l2} | {cell.tokens for cell in run.unproven}
    counts = sorted(tokens for tokens in seen if first <= tokens <= last)
    if not counts:
        yield Finding(target, None, None)
    for tokens in counts:
        row = run.row(target.op, target.heads, tokens, target.arm, target.l2, target.form)
        yield Finding(target, tokens, None if row is None else _value(run, target, row))


def _value(run: Run, target: Target, row: Row) -> float | None:
    """The metric of a row; None where something that it needs was not measured."""
    if target.metric in ("median_us", "fraction_of_copy", "host_of_mul"):
        value: float | None = getattr(row, target.metric)
        return value
    if target.metric == "speedup_over_parts":
        parts = [run.row(part, row.heads, row.tokens, row.arm, row.l2, row.form) for part in target.parts]
        times = [part.median_us for part in parts if part is not None]
        return sum(times) / row.median_us if len(times) == len(target.parts) else None
    other = run.row(row.op, row.heads, row.tokens, target.over or "", row.l2, row.form)
    if other is None:
        return None
    if target.metric == "speedup":
        return other.median_us / row.median_us
    return other.eager_us / row.eager_us if other.eager_us is not None and row.eager_us else None

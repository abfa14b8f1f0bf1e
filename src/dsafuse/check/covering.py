"""Pairwise covering sets: few rows, in which every pair of values of every two axes occurs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product

Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]


def pairs(axes: Mapping[str, Sequence[Hashable]]) -> set[Pair]:
    """Every pair of values of two different axes, axes in their given order."""
    return {
        ((first, a), (second, b))
        for first, second in combinations(axes, 2)
        for a, b in product(axes[first], axes[second])
    }


def pairwise(axes: Mapping[str, Sequence[Hashable]]) -> list[dict[str, Hashable]]:
    """Rows that cover pairs(axes), found greedily and without chance: the same axes give the same rows.

    Each row starts from the first pair still missing (so that it always makes progress), then takes, axis by axis,
    the value that covers most missing pairs with what the row holds already; the least used value breaks a tie.
    """
    order = {name: i for i, name in enumerate(axes)}
    missing = dict.fromkeys(sorted(pairs(axes), key=lambda pair: _rank(pair, axes)))
    uses = {(name, value): 0 for name, values in axes.items() for value in values}
    rows: list[dict[str, Hashable]] = []
    while missing:
        row = dict(next(iter(missing)))
        for name, values in axes.items():
            if name not in row:
                row[name] = max(
                    values,
                    key=lambda value: (_gain(name, value, row, missing, order), -uses[name, value]),
                )
        for first, second in combinations(axes, 2):
            missing.pop(((first, row[first]), (second, row[second])), None)
        for item in row.items():
            uses[item] += 1
        rows.append({name: row[name] for name in axes})
    return rows


def _rank(pair: Pair, axes: Mapping[str, Sequence[Hashable]]) -> tuple[int, ...]:
    names = list(axes)
    return tuple(n for name, value in pair for n in (names.index(name), axes[name].index(value)))


def _gain(
    name: str, value: Hashable, row: Mapping[str, Hashable], missing: Mapping[Pair, None], order: Mapping[str, int]
) -> int:
    item = name, value
    return sum(((item, other) if order[name] < order[other[0]] else (other, item)) in missing for other in row.items())

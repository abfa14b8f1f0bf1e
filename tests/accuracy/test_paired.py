"""Accuracy, its standard error, and McNemar's exact test, against closed forms and numbers from a table."""

from __future__ import annotations

from math import comb, sqrt

import pytest

from dsafuse.accuracy.paired import Accuracy, mcnemar, paired


def answers(pattern: str) -> list[tuple[bool, str]]:
    """ "r" is right, any other letter a wrong answer of that text."""
    return [(letter == "r", letter) for letter in pattern]


def test_accuracy_and_its_standard_error() -> None:
    found = Accuracy(right=950, count=1000)
    assert found.value == 0.95
    assert found.standard_error == pytest.approx(sqrt(0.95 * 0.05 / 1000))


def test_pairs_are_counted_one_by_one() -> None:
    both = paired(answers("rrrrab"), answers("rrxrra"))
    assert (both.lost, both.gained, both.differing) == (1, 1, 3)
    assert (both.unfused.right, both.fused.right) == (4, 4)
    assert both.difference == 0
    assert both.p == 1


def test_the_standard_error_of_a_difference_is_that_of_its_problems() -> None:
    before, after = answers("r" * 60 + "x" * 40), answers("r" * 50 + "x" * 10 + "r" * 4 + "x" * 36)
    both = paired(before, after)
    each = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    mean = sum(each) / 100
    assert both.difference == pytest.approx(mean)
    assert both.standard_error == pytest.approx(sqrt(sum((x - mean) ** 2 for x in each) / 100) / 10)


@pytest.mark.parametrize(
    ("lost", "gained", "p"),
    [
        (0, 0, 1.0),
        (5, 0, 2 / 2**5),
        (0, 5, 2 / 2**5),
        (8, 0, 2 / 2**8),
        (10, 2, 2 * sum(comb(12, k) for k in range(3)) / 2**12),
        (7, 7, 1.0),
    ],
)
def test_mcnemar_is_the_two_sided_binomial_test(lost: int, gained: int, p: float) -> None:
    assert mcnemar(lost, gained) == pytest.approx(p)


def test_eight_answers_lost_and_none_gained_are_significant_and_seven_are_not() -> None:
    assert mcnemar(8, 0) < 0.01 < mcnemar(7, 0)


def test_many_problems_do_not_overflow() -> None:
    assert 0 < mcnemar(4000, 3800) < 0.05


@pytest.mark.parametrize(("before", "after"), [("", ""), ("rr", "r")])
def test_arms_that_do_not_pair_are_refused(before: str, after: str) -> None:
    with pytest.raises(ValueError, match="same problems"):
        paired(answers(before), answers(after))

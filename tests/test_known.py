"""Calls seen before: what counts as the same call, and what is forgotten."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsafuse import known
from dsafuse.known import KnownCalls

GUARDS = pytest.mark.parametrize("guard_of", [known.guard_of, known.PythonGuard], ids=["native", "Python"])


def base() -> torch.Tensor:
    return torch.empty(4, 6)


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "another size": lambda: torch.empty(5, 6),
    "other strides": lambda: torch.empty(4, 8)[:, :6],
    "another dtype": lambda: torch.empty(4, 6, dtype=torch.float16),
    "another device": lambda: torch.empty(4, 6, device="meta"),
    "a gradient to compute": lambda: torch.empty(4, 6, requires_grad=True),
    "another rank": lambda: torch.empty(24),
}


@GUARDS
def test_a_call_at_other_addresses_is_the_same_call(guard_of: Callable[..., known.Guard]) -> None:
    guard = guard_of([base(), base()])
    assert guard(base(), base())
    assert guard(torch.empty(30)[6:].view(4, 6), base())


@GUARDS
@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_tensor_that_looks_different_is_another_call(
    other: Callable[[], torch.Tensor], guard_of: Callable[..., known.Guard]
) -> None:
    guard = guard_of([base(), base()])
    assert not guard(other(), base())
    assert not guard(base(), other())


def test_a_call_is_known_once_it_was_remembered_and_by_its_key_alone() -> None:
    calls, launched = KnownCalls(), []
    assert not calls.launch("key", [base()], {})
    calls.remember("key", [base()], lambda arguments: launched.append(arguments) is None)
    assert calls.launch("key", [base()], {"a": 1})
    assert not calls.launch("another", [base()], {})
    assert not calls.launch("key", [torch.empty(5, 6)], {})
    assert launched == [{"a": 1}]


def test_a_launch_that_declines_is_followed_by_a_full_check() -> None:
    calls = KnownCalls()
    calls.remember("key", [base()], lambda _: False)
    assert not calls.launch("key", [base()], {})


def test_a_key_that_can_not_be_hashed_is_not_known() -> None:
    assert not KnownCalls().launch(([],), [base()], {})


def test_only_the_latest_calls_of_a_key_and_so_many_keys_are_kept() -> None:
    calls, launched = KnownCalls(), []
    sizes = range(1, known.MOST_CALLS + 2)
    for size in sizes:
        calls.remember("key", [torch.empty(size)], lambda _, size=size: launched.append(size) is None)
    assert [calls.launch("key", [torch.empty(size)], {}) for size in sizes] == [False] + [True] * known.MOST_CALLS
    assert launched == list(sizes)[1:]
    for key in range(known.MOST_KEYS):
        calls.remember(key, [], lambda _: True)
    assert not calls.launch("key", [torch.empty(2)], {})

"""Calls seen before: what counts as the same call, and what is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsafuse import known
from dsafuse.known import KnownCalls, guard_of, known_call


def base() -> torch.Tensor:
    return torch.empty(4, 6)


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "another size": lambda: torch.empty(5, 6),
    "other strides": lambda: torch.empty(4, 8)[:, :6],
    "another dtype": lambda: torch.empty(4, 6, dtype=torch.float16),
    "another device": lambda: torch.empty(4, 6, device="meta"),
    "a gradient to compute": lambda: torch.empty(4, 6, requires_grad=True),
    "another rank": lambda: torch.empty(24),
    "another type": lambda: torch.nn.Parameter(torch.empty(4, 6), requires_grad=False),
}


def test_a_call_at_other_addresses_is_the_same_call() -> None:
    guard = guard_of([base(), base()])
    assert guard(base(), base())
    assert guard(torch.empty(30)[6:].view(4, 6), base())


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_tensor_that_looks_different_is_another_call(other: Callable[[], torch.Tensor]) -> None:
    guard = guard_of([base(), base()])
    assert not guard(other(), base())
    assert not guard(base(), other())


@pytest.mark.parametrize("mode", [TorchDispatchMode, FakeTensorMode])
def test_a_call_that_a_mode_looks_at_is_another_call(mode: Callable[[], Any]) -> None:
    """Modes of torch's own, as of fake tensors, leave the dispatch keys that guards look at as they were."""
    given, launched = (base(),), Launched()
    call = known_call(given, given, [0], launched.of)
    with mode():
        assert call((), given) is None
    assert not launched.seen
    assert call((), given) is given[0]


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.functionalize], ids=["vmap", "functionalize"])
def test_a_call_that_torch_transforms_is_another_call(transform: Callable[..., Any]) -> None:
    guard, seen = guard_of([base()]), []
    transform(lambda tensor: seen.append(guard(base())) or tensor)(base())
    assert seen == [False]


def test_a_tensor_that_requires_grad_passes_only_where_none_is_recorded() -> None:
    learnt = base().requires_grad_()
    guard = guard_of([learnt])
    assert not guard(learnt)
    with torch.no_grad():
        assert guard(learnt)


class Launched:
    """A launch that keeps the addresses that it is given, and says what it is told to."""

    def __init__(self, answer: bool = True) -> None:
        self.answer, self.seen, self.places = answer, [], {}

    def __call__(self, addresses: tuple[int, ...]) -> bool:
        self.seen.append(addresses)
        return self.answer

    def of(self, places: dict[int, int]) -> Launched:
        self.places = places
        return self

    def address(self, index: int) -> int:
        return self.seen[-1][self.places[index]]


def test_a_known_call_launches_at_the_new_addresses_and_returns_the_new_outputs() -> None:
    launched, first = Launched(), (base(), None, torch.empty(3))
    call = known_call(first, first, [2], launched.of)
    other = (base(), None, torch.empty(3))
    assert call((), other) is other[2]
    assert [launched.address(i) for i in (0, 2)] == [other[0].data_ptr(), other[2].data_ptr()]
    both = known_call(first, first, [0, 2], launched.of)
    assert both((), other) == (other[0], other[2])


def test_a_tensor_that_comes_twice_has_to_come_twice_again() -> None:
    shared, launched = base(), Launched()
    call = known_call((shared, shared, base()), (shared, shared, base()), [2], launched.of)
    again, output = base(), base()
    assert call((), (again, again, output)) is output
    assert {launched.address(0), launched.address(1)} == {again.data_ptr()}
    assert launched.address(2) == output.data_ptr()
    assert call((), (again, base(), output)) is None
    assert len(launched.seen) == 1


def test_tensors_that_were_two_may_not_become_one() -> None:
    launched = Launched()
    first = (base(), base(), base())
    call = known_call(first, first, [2], launched.of)
    one = base()
    assert call((), (one, one, base())) is None
    assert not launched.seen


def test_outputs_that_were_made_are_made_again() -> None:
    launched, shared = Launched(), base()
    settled = (shared, shared, torch.empty(2, 3, dtype=torch.float16), torch.empty(5))
    call = known_call((shared, shared, None, settled[3]), settled, [2, 3], launched.of)
    again, given = base(), torch.empty(5)
    made, returned = call((), (again, again, None, given))
    assert (made.shape, made.dtype, returned) == ((2, 3), torch.float16, given)
    assert launched.address(2) == made.data_ptr()
    assert launched.address(3) == given.data_ptr()
    assert launched.address(1) == again.data_ptr()
    assert call((), (again, base(), None, given)) is None


@pytest.mark.parametrize("made", [False, True])
def test_a_launch_that_declines_is_followed_by_a_full_check(made: bool) -> None:
    given = (base(), None if made else base())
    assert known_call(given, (base(), base()), [1], Launched(answer=False).of)((), given) is None


def answering(answer: Any) -> known.KnownCall:
    return lambda _key, _tensors: answer


def test_a_call_is_known_by_its_key_alone() -> None:
    calls = KnownCalls()
    calls.remember(("key",), answering("known"))
    assert [call(("key",), ()) for call in calls.find(("key",), ())] == ["known"]
    assert calls.find(("another",), ()) == ()


@pytest.mark.parametrize(
    ("kept", "other"), [(0.0, -0.0), (-0.0, 0.0), (1.0, True), (0.0, False), (0, 0.0), (1, 1.0), (-0.0, 0)]
)
def test_numbers_that_are_equal_and_not_the_same_are_two_calls(kept: Any, other: Any) -> None:
    assert kept == other
    calls = KnownCalls()
    calls.remember((kept,), answering("known"))
    assert [call((kept,), ()) for call in calls.find((kept,), ())] == ["known"]
    assert [call((other,), ()) for call in calls.find((other,), ())] == [None]


def test_only_the_latest_calls_of_a_key_and_so_many_keys_are_kept() -> None:
    calls, key = KnownCalls(), ("key",)
    for i in range(known.MOST_CALLS + 1):
        calls.remember(key, answering(i))
    assert [call(key, ()) for call in calls.find(key, ())] == list(range(1, known.MOST_CALLS + 1))[::-1]
    for i in range(known.MOST_KEYS):
        calls.remember((i + 2,), answering(True))
    assert calls.find(key, ()) == ()

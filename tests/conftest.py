"""What every test starts from: default switches, whatever the environment says, and reproducible properties."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from dsafuse import switches

settings.register_profile("dsafuse", derandomize=True, deadline=None, max_examples=25, print_blob=True)
settings.load_profile("dsafuse")


@pytest.fixture(autouse=True)
def default_switches() -> Iterator[None]:
    """No test depends on, or leaves behind, a DSAFUSE_* choice."""
    with switches.override(mode="auto", ops=frozenset(switches.FAMILIES), provider=None):
        yield

"""The environment variables."""

from __future__ import annotations

import pytest

from dsafuse import switches
from dsafuse.switches import Switches


def test_an_empty_environment_means_auto_and_both_fusions() -> None:
    assert Switches.from_environment({}) == Switches("auto", frozenset({"mla", "indexer"}), None)


def test_the_three_variables_are_read() -> None:
    environment = {"DSAFUSE_MODE": "strict", "DSAFUSE_OPS": " indexer ", "DSAFUSE_PROVIDER": "split"}
    assert Switches.from_environment(environment) == Switches("strict", frozenset({"indexer"}), "split")


def test_empty_values_mean_the_default_and_an_empty_list_means_no_fusion() -> None:
    environment = {"DSAFUSE_MODE": "", "DSAFUSE_OPS": "", "DSAFUSE_PROVIDER": ""}
    assert Switches.from_environment(environment) == Switches("auto", frozenset(), None)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("DSAFUSE_MODE", "fast", r"DSAFUSE_MODE: got 'fast', expected one of auto, off, strict"),
        ("DSAFUSE_MODE", "AUTO", r"DSAFUSE_MODE: got 'AUTO'"),
        ("DSAFUSE_OPS", "mla,moe", r"DSAFUSE_OPS: got 'mla,moe', expected some of mla, indexer, separated by commas"),
        ("DSAFUSE_OPS", ",", r"DSAFUSE_OPS: got ',', expected some of mla, indexer, separated by commas"),
        ("DSAFUSE_OPS", "mla,", r"DSAFUSE_OPS: got 'mla,', expected some of"),
        ("DSAFUSE_PROVIDER", "cuda", r"DSAFUSE_PROVIDER: got 'cuda', expected one of triton, interpreter, split"),
    ],
)
def test_a_bad_value_names_its_variable_and_the_choices(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Switches.from_environment({variable: value})


def test_an_override_ends_with_its_block_even_when_the_block_raises() -> None:
    before = switches.current()

    def block() -> None:
        with switches.override(mode="off"):
            assert switches.current().mode == "off"
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert switches.current() is before


def test_an_override_is_checked_like_the_environment() -> None:
    with pytest.raises(ValueError, match="DSAFUSE_MODE: got 'sometimes'"), switches.override(mode="sometimes"):
        pass


@pytest.mark.parametrize(
    ("ops", "error", "message"),
    [
        (["mla"], TypeError, r"^DSAFUSE_OPS: got \['mla'\], expected a frozenset of mla, indexer$"),
        ({"mla"}, TypeError, r"^DSAFUSE_OPS: got {'mla'}, expected a frozenset"),
        ("mla", TypeError, r"^DSAFUSE_OPS: got 'mla', expected a frozenset"),
        (None, TypeError, r"^DSAFUSE_OPS: got None, expected a frozenset"),
        (frozenset({5, "mla"}), ValueError, r"^DSAFUSE_OPS: got 5, expected one of mla, indexer$"),
    ],
)
def test_an_override_takes_a_frozenset_of_names(ops: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), switches.override(ops=ops):
        pass


def test_the_documented_table_names_every_choice() -> None:
    table = switches.__doc__ or ""
    for choice in (*switches.MODES, *switches.FAMILIES, *switches.PROVIDERS):
        assert choice in table

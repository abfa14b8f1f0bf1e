"""The covering set covers: every pair of values of every two axes, on every target."""

from itertools import combinations

import pytest

from dsafuse.check.cases import CASES, CHOICES, SETS, IndexerCase, MlaCase, axes, case_set
from dsafuse.check.covering import pairs, pairwise
from dsafuse.target import Target

TARGETS = ("cpu", "sm_90", "gfx942", "sm_80")


def covered(rows):
    """Every pair of (axis, value) that occurs in a row."""
    return {pair for row in rows for pair in combinations(row.items(), 2)}


@pytest.mark.parametrize("sizes", [(2, 2), (5, 1, 3), (4, 4, 4, 4, 2, 2, 7)])
def test_pairwise_covers_every_pair(sizes):
    axes_ = {f"axis{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    rows = pairwise(axes_)
    assert covered(rows) == pairs(axes_)
    first, second = sorted(sizes)[-2:]
    assert len(rows) <= 2 * first * second, "greedy rows should stay near the largest product of two axes"


def test_pairwise_is_deterministic():
    axes_ = axes(MlaCase.op, "quick", Target.named("cpu"))
    assert pairwise(axes_) == pairwise(axes_)


def test_a_missing_row_is_noticed():
    axes_ = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    rows = pairwise(axes_)
    assert covered(rows[1:]) != pairs(axes_)


@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", CASES)
def test_case_sets_cover_every_pair_of_their_axes(op, target, which):
    where = Target.named(target)
    wanted = axes(op, which, where)
    rows = [{name: getattr(case, name) for name in wanted} for case in case_set(op, which, where)]
    assert pairs(wanted) <= covered(rows)


@pytest.mark.parametrize("op", CASES)
def test_the_full_set_has_the_sizes_that_were_promised(op):
    wanted = axes(op, "full", Target.named("sm_90"))
    assert {0, 1, 7, 32, 257, 1023, 8192} <= set(wanted["tokens"])
    assert {1, 7, 16, 96, 128} <= set(wanted["heads"])
    assert set(wanted["block_size"]) == {1, 16, 64, 128}
    cases = case_set(op, "full", Target.named("sm_90"))
    assert any(case.capacity == "huge" for case in cases)
    assert any(case.capacity == "huge" and case.tokens * case.heads * 128 > 2**31 // 4.5 for case in cases)


def test_formats_follow_the_target():
    formats = {name: {case.fp8 for case in case_set(MlaCase.op, "quick", Target.named(name))} for name in TARGETS}
    assert formats["sm_90"] == {"e4m3fn"}
    assert formats["gfx942"] == {"e4m3fnuz"}
    assert formats["cpu"] == {"e4m3fn", "e4m3fnuz"}


def test_hostile_scales_are_for_gpus_only():
    """On CPU a scale that is not positive and finite is a ValueError."""
    on_cpu = {case.scale for case in case_set(MlaCase.op, "full", Target.named("cpu"))}
    on_gpu = {case.scale for case in case_set(MlaCase.op, "full", Target.named("sm_90"))}
    assert on_cpu == {"ordinary", "power"}
    assert on_gpu == set(CHOICES["scale"])


@pytest.mark.parametrize("op", CASES)
def test_names_tell_the_whole_case_and_are_distinct(op):
    cases = case_set(op, "full", Target.named("cpu"))
    assert [CASES[op].named(case.name) for case in cases] == cases
    assert CASES[op].named("default") == CASES[op]()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("token=3", "token"),
        ("tokens=-3", "tokens=-3"),
        ("layout=flat", "plain, fp8, fp8_ds_mla"),
        ("tokens", "integer"),
        ("heads=0", "from 1 to 256"),
        ("key_rank=4", "from 2 to 3"),
    ],
)
def test_an_unknown_name_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        MlaCase.named(name)


def test_an_mla_field_is_no_field_of_an_indexer_case():
    with pytest.raises(ValueError, match="layout"):
        IndexerCase.named("layout=plain")

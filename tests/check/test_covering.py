"""The covering sets cover: every pair of values of every two axes, on every target, for every op."""

from itertools import combinations

import pytest

from dsafuse.check.cases import (
    CHOICES,
    COUNTS,
    INDEXER,
    MLA,
    PREPARE_LATENTS,
    PREPARE_QK,
    ROLES,
    Case,
    fields_of,
    roles_without_index,
)
from dsafuse.check.covering import pairs, pairwise
from dsafuse.check.sets import JOINED, SETS, axes, case_set, each_value
from dsafuse.registry import OPS
from dsafuse.target import Target

TARGETS = ("cpu", "sm_90", "gfx942", "sm_80")


def covered(rows):
    """Every pair of (axis, value) that occurs in a row."""
    return {pair for row in rows for pair in combinations(row.items(), 2)}


def value_of(case, axis):
    return tuple(getattr(case, field) for field in JOINED[axis]) if axis in JOINED else getattr(case, axis)


def test_every_op_has_roles():
    assert set(ROLES) == set(OPS)


@pytest.mark.parametrize("sizes", [(2, 2), (5, 1, 3), (4, 4, 4, 4, 2, 2, 7)])
def test_pairwise_covers_every_pair(sizes):
    axes_ = {f"axis{i}": tuple(range(size)) for i, size in enumerate(sizes)}
    rows = pairwise(axes_)
    assert covered(rows) == pairs(axes_)
    first, second = sorted(sizes)[-2:]
    assert len(rows) <= 2 * first * second, "greedy rows should stay near the largest product of two axes"


def test_pairwise_is_deterministic():
    axes_ = axes(MLA, "quick", Target.named("cpu"))
    assert pairwise(axes_) == pairwise(axes_)


def test_a_missing_row_is_noticed():
    axes_ = {"a": (0, 1), "b": (0, 1), "c": (0, 1)}
    rows = pairwise(axes_)
    assert covered(rows[1:]) != pairs(axes_)


def test_each_value_occurs_and_axes_do_not_move_in_step():
    axes_ = {"a": (0, 1, 2), "b": (0, 1, 2), "c": ("x",)}
    rows = each_value(axes_)
    assert len(rows) == 3
    assert all({row[name] for row in rows} == set(values) for name, values in axes_.items())
    assert any(row["a"] != row["b"] for row in rows)


@pytest.mark.parametrize("which", SETS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ROLES)
def test_case_sets_cover_every_pair_of_their_axes(op, target, which):
    where = Target.named(target)
    wanted = axes(op, which, where)
    present = [case for case in case_set(op, which, where) if case.index == "present"]
    assert pairs(wanted) <= covered([{name: value_of(case, name) for name in wanted} for case in present])


@pytest.mark.parametrize("op", ROLES)
def test_every_value_also_meets_a_layer_without_an_indexer(op):
    target = Target.named("sm_90")
    absent = [case for case in case_set(op, "quick", target) if case.index == "absent"]
    own = [name for name in fields_of(op, roles_without_index(op)) if name in axes(op, "quick", target)]
    if op in (MLA, INDEXER):
        assert absent == []
        return
    assert all(not case.roles & {"index_q", "index_k"} for case in absent)
    assert {case.topk for case in absent} == ({"absent", "narrow", "wide"} if op == PREPARE_LATENTS else {"absent"})
    for name in own:
        assert {getattr(case, name) for case in absent} == set(axes(op, "quick", target)[name])


@pytest.mark.parametrize("op", [MLA, INDEXER])
def test_the_full_set_has_the_sizes_that_were_promised(op):
    wanted = axes(op, "full", Target.named("sm_90"))
    heads = "heads" if op == MLA else "index_heads"
    assert {0, 1, 7, 32, 257, 1023, 8192} <= set(wanted["tokens"])
    assert {1, 7, 16, 96, 128} <= set(wanted[heads])
    sizes = wanted["block_size"] if op == MLA else [size for layout, size in wanted["index_page"] if layout == "flat"]
    assert set(sizes) == {1, 16, 64, 128}
    cases = case_set(op, "full", Target.named("sm_90"))
    assert any(case.capacity == "huge" for case in cases)
    assert any(case.tokens * getattr(case, heads) * (576 if op == MLA else 128) > 2**31 for case in cases)


def test_the_other_ops_have_the_axes_that_are_their_own():
    latents = axes(PREPARE_LATENTS, "full", Target.named("sm_90"))
    assert {1536, 2048, 96} <= set(latents["q_width"])
    assert set(latents["topk"]) == {"absent", "narrow", "wide"}
    assert set(latents["key_outs"]) == {"given", "absent"}
    both = axes(PREPARE_QK, "quick", Target.named("cpu"))
    assert {"slot_rule", "index_slot_rule", "block_size", "index_page", "topk"} <= set(both)
    assert {layout for layout, _ in both["index_page"]} == {"flat", "tiled16"}


@pytest.mark.parametrize("op", ROLES)
def test_fields_of_roles_that_an_op_lacks_keep_their_defaults(op):
    other = [name for name in CHOICES | COUNTS if name not in fields_of(op)]
    default = Case(op=op)
    for case in case_set(op, "full", Target.named("sm_90")):
        assert all(getattr(case, name) == getattr(default, name) for name in other)


def test_formats_follow_the_target():
    formats = {name: {case.fp8 for case in case_set(MLA, "quick", Target.named(name))} for name in TARGETS}
    assert formats["sm_90"] == {"e4m3fn"}
    assert formats["gfx942"] == {"e4m3fnuz"}
    assert formats["cpu"] == {"e4m3fn", "e4m3fnuz"}


def test_hostile_scales_are_for_gpus_only():
    """On CPU a scale that is not positive and finite is a ValueError."""
    on_cpu = {case.scale for case in case_set(MLA, "full", Target.named("cpu"))}
    on_gpu = {case.scale for case in case_set(MLA, "full", Target.named("sm_90"))}
    assert on_cpu == {"ordinary", "power"}
    assert on_gpu == set(CHOICES["scale"])


@pytest.mark.parametrize("op", ROLES)
def test_names_tell_the_whole_case_and_are_distinct(op):
    cases = case_set(op, "full", Target.named("cpu"))
    assert [Case.named(op, case.name) for case in cases] == cases
    assert Case.named(op, "default") == Case(op=op)


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
        Case.named(MLA, name)


def test_a_tiled_cache_of_single_tokens_is_no_case():
    with pytest.raises(ValueError, match="multiple of 16"):
        Case.named(INDEXER, "index_layout=tiled16,index_block_size=1")


@pytest.mark.parametrize("name", ["layout=plain", "index=absent", "q_width=96"])
def test_a_field_of_another_op_is_no_field(name):
    with pytest.raises(ValueError, match=name.split("=")[0]):
        Case.named(INDEXER, name)

"""Slots, padding and positions: data from outside that must never lead a read or a write astray."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.inputs import (
    FN,
    MAX_POSITION,
    OPS,
    Call,
    assert_same_memory,
    cache_row,
    call_of,
    indexer_call,
    indexer_row,
    memory,
    mla_call,
    run,
    storage_bytes,
    twin,
)

POISON = 0x5A
CHECKED = ("oracle", "split")
"""Providers that look at the data on CPU and raise."""

ALL = (*CHECKED, "interpreter")
PROVIDERS = pytest.mark.parametrize("provider", ALL)
BOTH = pytest.mark.parametrize("op", OPS)


def slots(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def without_cache(call: Call) -> Call:
    return {name: value for name, value in call.items() if name not in ("kv_cache", "slot_mapping")}


def assert_cache_is_poison(call: Call) -> None:
    assert storage_bytes(call["kv_cache"]).unique().tolist() == [POISON]


@PROVIDERS
@BOTH
def test_negative_slots_leave_the_cache_untouched_and_queries_are_computed_all_the_same(op: str, provider: str) -> None:
    live = call_of(op, 4, slot_mapping=slots(0, 5, 17, 3))
    dead = live | {"slot_mapping": slots(-1, -2, -(2**63), -17)}
    got = run(op, provider, dead)
    assert_cache_is_poison(got)
    assert_same_memory(without_cache(got), without_cache(run(op, "oracle", live)))


@PROVIDERS
@BOTH
@pytest.mark.parametrize("count", [0, 2], ids=["no slots", "two slots"])
def test_tokens_past_the_end_of_slot_mapping_write_nothing_and_have_queries(op: str, provider: str, count: int) -> None:
    full = call_of(op, 4, slot_mapping=slots(20, 1, 17, 3))
    short = run(op, provider, full | {"slot_mapping": full["slot_mapping"][:count]})  # live slots lie behind its end
    padded = slots(*full["slot_mapping"][:count].tolist(), *[-1] * (4 - count))
    assert_same_memory(short, run(op, "oracle", full | {"slot_mapping": padded}), but=("slot_mapping",))
    assert (storage_bytes(short["kv_cache"]) != POISON).any().item() is (count > 0)


@PROVIDERS
@BOTH
def test_only_the_bytes_of_live_rows_change(op: str, provider: str) -> None:
    call = call_of(op, 3, slot_mapping=slots(18, -1, 2))
    done = run(op, provider, call)
    cache = done["kv_cache"]
    untouched = storage_bytes(cache).clone()
    page = torch.empty(0, dtype=torch.uint8).set_(untouched.untyped_storage())
    for slot in (18, 2):
        block, row = divmod(slot, 16)
        start = cache.storage_offset() + block * cache.stride(0)
        spans = (
            [(start + row * cache.stride(1), 656)]
            if op == "mla"
            else [(start + row * 128, 128), (start + 16 * 128 + 4 * row, 4)]
        )
        for first, count in spans:
            assert page[first : first + count].unique().numel() > 1 or count == 4
            page[first : first + count] = POISON
    assert page.unique().tolist() == [POISON]
    before = memory(call)
    written = {"kv_cache", "q_out", "weights_out"}
    assert all(torch.equal(memory(done)[name], before[name]) for name in before.keys() - written)


@PROVIDERS
@BOTH
def test_heads_of_a_wider_output_and_its_padding_stay_as_they_were(op: str, provider: str) -> None:
    done = run(op, provider, call_of(op, 3, heads=3))
    for name, value in done.items():
        if name in ("q_out", "weights_out"):
            written = value[:, :3].view(torch.uint8)
            assert not (written == POISON).all()
            storage = storage_bytes(value)
            written.fill_(POISON)
            assert storage.unique().tolist() == [POISON]


@pytest.mark.parametrize("provider", CHECKED)
@BOTH
@pytest.mark.parametrize("past", [0, 1, 2**31, 2**62], ids=["first", "second", "beyond 32 bits", "far"])
def test_on_cpu_a_slot_beyond_the_cache_is_an_index_error_and_nothing_is_written(
    op: str, provider: str, past: int
) -> None:
    call = call_of(op, 3)
    capacity = call["kv_cache"].shape[0] * call["kv_cache"].shape[1]
    call["slot_mapping"] = slots(1, 2, capacity + past)
    mine = twin(call)
    with pytest.raises(IndexError, match=rf"slot_mapping\[2\]: got {capacity + past}, expected .* capacity {capacity}"):
        OPS[op].with_provider(provider)(**mine)
    assert_same_memory(mine, call)


@BOTH
@pytest.mark.parametrize("past", [0, 1, 2**31, 2**62], ids=["first", "second", "beyond 32 bits", "far"])
def test_a_kernel_writes_nothing_for_a_slot_beyond_the_cache(op: str, past: int) -> None:
    call = call_of(op, 3)
    call["kv_cache"] = call["kv_cache"][:1]  # memory that is ours lies behind the cache, to see a write there
    capacity = call["kv_cache"].shape[0] * call["kv_cache"].shape[1]
    call["slot_mapping"] = slots(1, capacity + past, 2)
    want = run(op, "oracle", call | {"slot_mapping": slots(1, -1, 2)})
    assert_same_memory(run(op, "interpreter", call), want, but=("slot_mapping",))


@BOTH
def test_the_last_slot_of_the_cache_is_written(op: str) -> None:
    for provider in ALL:
        call = call_of(op, 1)
        last = call["kv_cache"].shape[0] * call["kv_cache"].shape[1] - 1
        done = run(op, provider, call | {"slot_mapping": slots(last)})
        row = cache_row(done["kv_cache"], last) if op == "mla" else indexer_row(done["kv_cache"], last)[0]
        assert (row != POISON).any()


OUTSIDE = {"-1": -1, "one past the table": MAX_POSITION, "beyond 32 bits": 2**40 + 1, "most negative": -(2**63)}


@pytest.mark.parametrize("provider", CHECKED)
@BOTH
@pytest.mark.parametrize("position", OUTSIDE.values(), ids=OUTSIDE)
def test_on_cpu_a_position_outside_the_table_is_an_index_error_where_its_row_is_written(
    op: str, provider: str, position: int
) -> None:
    call = call_of(op, 3, slot_mapping=slots(4, 9, 2), positions=slots(0, position, 1))
    mine = twin(call)
    with pytest.raises(
        IndexError, match=rf"positions\[1\]: got {position}, expected a row of cos_sin_cache, which has 37"
    ):
        OPS[op].with_provider(provider)(**mine)
    assert_same_memory(mine, call)


@PROVIDERS
@BOTH
@pytest.mark.parametrize("position", OUTSIDE.values(), ids=OUTSIDE)
def test_a_position_outside_the_table_is_clamped_where_no_key_is_written(op: str, provider: str, position: int) -> None:
    clamped = 0 if position < 0 else MAX_POSITION - 1
    call = call_of(op, 2, slot_mapping=slots(4, -1))
    got = run(op, provider, call | {"positions": slots(3, position)})
    assert_same_memory(got, run(op, "oracle", call | {"positions": slots(3, clamped)}), but=("positions",))


@BOTH
@pytest.mark.parametrize("position", OUTSIDE.values(), ids=OUTSIDE)
def test_a_kernel_clamps_the_position_of_a_written_key(op: str, position: int) -> None:
    clamped = 0 if position < 0 else MAX_POSITION - 1
    call = call_of(op, 2, slot_mapping=slots(4, 7))
    got = run(op, "interpreter", call | {"positions": slots(3, position)})
    assert_same_memory(got, run(op, "oracle", call | {"positions": slots(3, clamped)}), but=("positions",))


@BOTH
def test_a_table_of_one_row_serves_every_position(op: str) -> None:
    call = call_of(op, 3, positions=slots(0, 8, -5), slot_mapping=slots())
    call["cos_sin_cache"] = call["cos_sin_cache"][:1]
    assert_same_memory(run(op, "interpreter", call), run(op, "oracle", call))


@PROVIDERS
@BOTH
def test_no_tokens_change_nothing_and_give_empty_outputs(op: str, provider: str) -> None:
    call = call_of(op, 0)
    assert_same_memory(run(op, provider, call), call)
    outputs = {"q_out": None} | ({"weights_out": None} if op == "indexer" else {})
    result = OPS[op].with_provider(provider)(**call | outputs)
    shapes = [tuple(t.shape) for t in (result if isinstance(result, tuple) else (result,))]
    assert shapes == ([(0, 3, 576)] if op == "mla" else [(0, 3, 128), (0, 3)])


@PROVIDERS
def test_no_tokens_need_no_row_of_the_rope_table(provider: str) -> None:
    call = mla_call(0)
    call["cos_sin_cache"] = call["cos_sin_cache"][:0]
    assert_same_memory(run("mla", provider, call), call)


@PROVIDERS
@BOTH
def test_a_cache_without_blocks_takes_calls_that_write_nothing(op: str, provider: str) -> None:
    call = call_of(op, 2, slot_mapping=slots(-1, -1))
    want = run(op, "oracle", call)
    call["kv_cache"] = call["kv_cache"][:0]
    assert_same_memory(without_cache(run(op, provider, call)), without_cache(want))


# Addresses beyond 32 bits. The storage is virtual: nothing but the pages that are written exists.

GIB = 2**30


@PROVIDERS
@BOTH
def test_a_row_beyond_four_gibibytes_lands_there_and_not_at_its_32_bit_alias(op: str, provider: str) -> None:
    small = call_of(op, 2, 1, slot_mapping=slots(3, 18))
    width = small["kv_cache"].shape[2]
    blocks = 9 * GIB // 2 // (16 * width)
    far = small | {
        "kv_cache": torch.empty(blocks, 16, width, dtype=torch.uint8),
        "slot_mapping": slots(16 * (blocks - 1) + 3, 16 * (blocks - 2) + 2),
    }
    row_bytes = (blocks - 2) * 16 * width
    assert row_bytes > 2**32
    OPS[op].with_provider(provider)(**far)
    want = run(op, "oracle", small)
    cache = far["kv_cache"]
    for mine, theirs in zip(far["slot_mapping"].tolist(), (3, 18), strict=True):
        if op == "mla":
            assert torch.equal(cache_row(cache, mine)[:656], cache_row(want["kv_cache"], theirs)[:656])
        else:
            got, expected = indexer_row(cache, mine), indexer_row(want["kv_cache"], theirs)
            assert torch.equal(got[0], expected[0])
            assert got[1] == expected[1]
    alias = row_bytes % 2**32
    assert not cache.view(-1)[alias : alias + 32 * width].any()


@PROVIDERS
def test_queries_are_read_and_written_beyond_two_gibibytes(provider: str) -> None:
    small = mla_call(2, 1, query=FN, slot_mapping=slots())
    step = 2**31 + 64
    q_nope = torch.empty(step + 512, dtype=torch.bfloat16).as_strided((2, 1, 512), (step, 512, 1))
    q_out = torch.empty(step + 576, dtype=torch.uint8).view(FN).as_strided((2, 1, 576), (step, 576, 1))
    q_nope.copy_(small["q_nope"])
    OPS["mla"].with_provider(provider)(**small | {"q_nope": q_nope, "q_out": q_out})
    want = run("mla", "oracle", small)["q_out"][:, :1]
    assert torch.equal(q_out.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("layout", ["plain", "fp8", "fp8_ds_mla"])
def test_one_rotary_head_axis_more_makes_no_difference(layout: str) -> None:
    call: dict[str, Any] = mla_call(3, layout=layout)
    flat = call | {"k_pe": call["k_pe"].reshape(3, 64)}
    deep = call | {"k_pe": call["k_pe"].reshape(3, 1, 64)}
    for provider in ALL:
        assert_same_memory(run("mla", provider, flat), run("mla", provider, deep), but=("k_pe",))


@PROVIDERS
def test_a_key_that_two_mappings_own_differently_is_written_by_each_for_itself(provider: str) -> None:
    # One rank's MLA slot says nothing about its indexer slot: vLLM guards one by the other.
    latent = run("mla", provider, mla_call(2, 1, slot_mapping=slots(-1, 3)))
    keys = run("indexer", provider, indexer_call(2, 1, slot_mapping=slots(3, -1)))
    assert (cache_row(latent["kv_cache"], 3) != POISON).any()
    assert (indexer_row(keys["kv_cache"], 3)[0] != POISON).any()


def test_plain_caches_carry_nan_and_infinity_to_where_the_mathematics_puts_them() -> None:
    call = mla_call(3, 1, layout="plain", slot_mapping=slots(0, 1, 2), positions=slots(0, 0, 0))
    call["kv_c"][0, 100], call["k_pe"].view(3, 64)[1, 6], call["kv_c"][2, 9] = float("nan"), float("nan"), float("inf")
    for provider in ALL:
        cache = run("mla", provider, call)["kv_cache"]
        where = [torch.nonzero(~cache[0, slot].isfinite()).flatten().tolist() for slot in range(3)]
        assert where == [[100], [512 + 6, 512 + 7], [9]]

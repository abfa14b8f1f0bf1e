"""A comparison fails when a byte is flipped, wherever it lies, and allows what design section 4 allows."""

from dataclasses import replace

import pytest
import torch

from dsafuse.check.cases import IndexerCase, MlaCase
from dsafuse.check.compare import KEY_ELEMENT_RATE, KEY_ROW_RATE, Arm, Comparison, compare, ordered
from dsafuse.check.inputs import draw_inputs
from dsafuse.check.memory import CANARY_BYTES
from dsafuse.check.verify import run_arm
from dsafuse.registry import OPS

CPU = torch.device("cpu")
MLA = MlaCase(
    tokens=5, heads=3, layout="fp8_ds_mla", query="fp8", out="wide", cache_strides="gaps", slot_rule="negative"
)
INDEX = IndexerCase(tokens=5, heads=3, out="wide", cache_strides="gaps")


def arms(case):
    inputs = draw_inputs(case, 0, CPU)
    pair = [run_arm(OPS[case.op], case, inputs.arguments, "oracle", 0, CPU) for _ in range(2)]
    return inputs, *pair


def flipped(case, change):
    """The comparison after `change` was done to the provider's arm."""
    inputs, got, expected = arms(case)
    change(got, inputs)
    return compare(case, inputs, got, expected)


@pytest.mark.parametrize("case", [MLA, INDEX, replace(MLA, layout="plain", out="allocated"), replace(INDEX, tokens=0)])
def test_equal_arms_are_equal(case):
    result = flipped(case, lambda got, inputs: None)
    assert result.mismatching_bytes == 0
    assert result.notes == []
    assert result.bytes_compared > 0


@pytest.mark.parametrize("case", [MLA, INDEX])
@pytest.mark.parametrize("where", [0, CANARY_BYTES - 1, CANARY_BYTES, -CANARY_BYTES - 1, -CANARY_BYTES, -1])
@pytest.mark.parametrize("buffer", ["q_out", "kv_cache"])
def test_a_flipped_byte_of_a_buffer_is_found(case, buffer, where):
    """Canaries before and after, first and last byte of the tensor."""

    def flip(got: Arm, _inputs):
        got.buffers[buffer][where] ^= 0x10

    result = flipped(case, flip)
    if case is INDEX and buffer == "kv_cache" and where == CANARY_BYTES and result.mismatching_bytes == 0:
        assert result.key_elements_off == 1  # the one place where a code may differ: a live key
        return
    assert result.mismatching_bytes == 1
    assert buffer in result.notes[0]


def test_an_untouched_row_of_the_cache_is_found():
    def flip(got: Arm, inputs):
        unused = set(range(64)) - set(inputs.slots.tolist())
        got.tensors["kv_cache"][0, min(unused), 7] ^= 1

    assert flipped(MLA, flip).mismatching_bytes == 1
    assert flipped(MLA, flip).code_distance == 1


def test_padding_between_blocks_is_found():
    def flip(got: Arm, _inputs):
        cache = got.tensors["kv_cache"]
        got.buffers["kv_cache"][CANARY_BYTES + cache.stride(0) - 1] ^= 1

    assert flipped(MLA, flip).mismatching_bytes == 1


def test_a_head_beyond_the_call_is_found():
    def flip(got: Arm, _inputs):
        got.tensors["q_out"].view(torch.uint8)[0, 3, 0] ^= 1

    assert flipped(MLA, flip).mismatching_bytes == 1


def test_a_note_tells_the_element():
    def flip(got: Arm, _inputs):
        got.tensors["q_out"].view(torch.uint8)[2, 1, 500] ^= 1

    assert any("q_out[2, 1, 500]" in note for note in flipped(MLA, flip).notes)


def test_a_wrong_size_is_found():
    def swap(got: Arm, _inputs):
        got.buffers["q_out"] = got.buffers["q_out"][:-1]

    assert flipped(MLA, swap).mismatching_bytes > 0


def test_wide_nans_compare_as_nan_but_only_with_nan():
    case = replace(MLA, layout="plain", query="activation", slot_rule="permuted")

    def both(got_value, expected_value):
        inputs, got, expected = arms(case)
        got.tensors["q_out"].view(torch.int16)[0, 0, 0] = got_value
        expected.tensors["q_out"].view(torch.int16)[0, 0, 0] = expected_value
        slot = int(inputs.slots[0])
        for arm, value in ((got, got_value), (expected, expected_value)):
            arm.tensors["kv_cache"].view(torch.int16)[slot // 64, slot % 64, 3] = value
        return compare(case, inputs, got, expected).mismatching_bytes

    assert both(0x7FC0, 0x7FFF) == 0
    assert both(0x7FC0, -0x40) == 0  # a NaN with its sign set
    assert both(0x7FC0, 0x3F80) > 0


def test_a_nan_in_an_untouched_row_is_bytes():
    case = replace(MLA, layout="plain", query="activation", slot_rule="permuted")
    inputs, got, expected = arms(case)
    slot = min(set(range(64)) - set(inputs.slots.tolist()))
    for arm, value in ((got, 0x7FC0), (expected, 0x7FFF)):
        arm.tensors["kv_cache"].view(torch.int16)[0, slot, 3] = value
    assert compare(case, inputs, got, expected).mismatching_bytes > 0


def key(arm, inputs, token, case):
    """Codes of a token's key and its scale's bits, as writable views."""
    slot = int(inputs.slots[token])
    block, row = slot // case.block_size, slot % case.block_size
    flat = arm.tensors["kv_cache"][block].flatten()
    scales = flat[case.block_size * 128 : case.block_size * 132].view(torch.int32)
    return flat[row * 128 : row * 128 + 128], scales[row : row + 1]


def test_a_key_one_code_off_is_counted_and_two_codes_off_is_an_error():
    def step(by):
        def change(got: Arm, inputs):
            codes, _ = key(got, inputs, 0, INDEX)
            column = int(((codes & 0x7F) < 0x70).nonzero()[0])
            codes[column] += by

        return change

    one, two = flipped(INDEX, step(1)), flipped(INDEX, step(2))
    assert (one.mismatching_bytes, one.key_elements_off, one.code_distance) == (0, 1, 1)
    assert two.mismatching_bytes == 1
    assert two.code_distance == 2


def test_minus_zero_is_plus_zero_in_a_key_and_nowhere_else():
    def zero(value):
        def change(arm: Arm, inputs):
            key(arm, inputs, 1, INDEX)[0][5] = value

        return change

    inputs, got, expected = arms(INDEX)
    zero(0x80)(got, inputs)
    zero(0x00)(expected, inputs)
    result = compare(INDEX, inputs, got, expected)
    assert (result.mismatching_bytes, result.key_elements_off) == (0, 0)


def test_a_row_with_another_scale_is_compared_dequantised():
    def halve(got: Arm, inputs):
        codes, scale = key(got, inputs, 2, INDEX)
        values = codes.view(torch.float8_e4m3fn).float()
        scale += 1 << 23  # twice the scale, half the codes: the same values within a code
        codes.view(torch.float8_e4m3fn).copy_((values / 2).to(torch.float8_e4m3fn))

    result = flipped(INDEX, halve)
    assert (result.mismatching_bytes, result.key_rows_off) == (0, 1)

    def only_scale(got: Arm, inputs):
        key(got, inputs, 2, INDEX)[1].add_(1 << 23)

    assert flipped(INDEX, only_scale).mismatching_bytes > 0


def test_an_fp32_scale_may_move_by_some_ulp_and_a_power_of_two_may_not():
    def nudge(got: Arm, inputs):
        key(got, inputs, 0, INDEX)[1].add_(2)

    assert flipped(replace(INDEX, scale_rule="fp32"), nudge).key_rows_off == 0
    assert flipped(INDEX, nudge).key_rows_off == 1


def test_rates_hold_over_a_set():
    many = 1_000_000
    within = Comparison(key_elements=many, key_elements_off=int(many * KEY_ELEMENT_RATE))
    assert within.over_rates() == []
    within.add(Comparison(key_elements_off=1))
    assert len(within.over_rates()) == 1
    rows = Comparison(key_rows=10_000, key_rows_off=int(10_000 * KEY_ROW_RATE) + 1)
    assert "scale" in rows.over_rates()[0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.bfloat16, torch.float16])
def test_ordered_counts_representable_values(dtype):
    size = dtype.itemsize
    bits = torch.arange(2 ** (8 * size)).to({1: torch.uint8, 2: torch.int32}[size])
    values = (bits if size == 1 else bits.to(torch.int16)).view(dtype)
    numbers = values[~values.float().isnan()]
    counted = ordered(numbers)
    order = numbers.float().argsort()
    assert bool((counted[order].diff() >= 0).all())
    assert bool((counted[order].diff() <= 1).all())
    assert int(ordered(torch.zeros(1).to(dtype))) == 0

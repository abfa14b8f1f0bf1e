"""A comparison fails when a byte is flipped, wherever it lies, and allows what design section 4 allows."""

from dataclasses import replace

import pytest
import torch

from dsafuse.check.compare import NORM_ELEMENT_RATE, NORM_ROW_RATE, Arm, Comparison, compare, ordered
from dsafuse.check.inputs import draw_inputs
from dsafuse.check.memory import CANARY_BYTES
from dsafuse.check.norms import NORM_ULPS
from dsafuse.check.verify import run_arm
from dsafuse.layouts import MLA_LAYOUTS, TILED16
from dsafuse.registry import OPS
from tests.check.made import indexer, latents, mla

CPU = torch.device("cpu")
MLA = mla(tokens=5, heads=3, layout="fp8_ds_mla", query="fp8", out="wide", cache_strides="gaps", slot_rule="negative")
INDEX = indexer(tokens=5, index_heads=3, out="wide", index_cache_strides="gaps")
LATENTS = latents(tokens=5, q_width=96, topk="narrow", out="wide", layout="fp8_ds_mla", cache_strides="gaps")


def arms(case):
    inputs = draw_inputs(case, 0, CPU)
    pair = [run_arm(OPS[case.op], case, inputs.arguments, "oracle", 0, CPU) for _ in range(2)]
    return inputs, *pair


def flipped(case, change):
    """The comparison after `change` was done to the provider's arm."""
    inputs, got, expected = arms(case)
    change(got, inputs)
    return compare(case, inputs, got, expected)


@pytest.mark.parametrize(
    "case", [MLA, INDEX, replace(MLA, layout="plain", out="allocated"), replace(INDEX, tokens=0), LATENTS]
)
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
        assert result.norm_elements_off == 1  # the one place where a code may differ: a live key
        return
    assert result.mismatching_bytes == 1
    assert buffer in result.notes[0]


def test_an_untouched_row_of_the_cache_is_found():
    def flip(got: Arm, inputs):
        unused = set(range(64)) - set(inputs.slots("slot_mapping").tolist())
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


@pytest.mark.parametrize("out", ["wide", "allocated"])
@pytest.mark.parametrize("name", ["q_out", "kv_cache"])
def test_a_note_tells_the_byte_of_the_tensor_with_a_canary_before_it_or_without(out, name):
    def flip(got: Arm, _inputs):
        rows = got.tensors[name].view(torch.uint8)
        rows[*[0] * (rows.dim() - 1), 77] ^= 1

    note = flipped(replace(MLA, out=out, cache_strides="dense"), flip).notes[0]
    assert note.startswith(f"{name}: 1 bytes differ, the first at byte 77: ")


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
        slot = int(inputs.slots("slot_mapping")[0])
        for arm, value in ((got, got_value), (expected, expected_value)):
            arm.tensors["kv_cache"].view(torch.int16)[slot // 64, slot % 64, 3] = value
        return compare(case, inputs, got, expected).mismatching_bytes

    assert both(0x7FC0, 0x7FFF) == 0
    assert both(0x7FC0, -0x40) == 0  # a NaN with its sign set
    assert both(0x7FC0, 0x3F80) > 0


def test_a_nan_in_an_untouched_row_is_bytes():
    case = replace(MLA, layout="plain", query="activation", slot_rule="permuted")
    inputs, got, expected = arms(case)
    slot = min(set(range(64)) - set(inputs.slots("slot_mapping").tolist()))
    for arm, value in ((got, 0x7FC0), (expected, 0x7FFF)):
        arm.tensors["kv_cache"].view(torch.int16)[0, slot, 3] = value
    assert compare(case, inputs, got, expected).mismatching_bytes > 0


def key(arm, inputs, token, case):
    """Codes of a token's key and its scale's bits, as writable views."""
    slot = int(inputs.slots("slot_mapping")[token])
    block, row = slot // case.index_block_size, slot % case.index_block_size
    flat = arm.tensors["kv_cache"][block].flatten()
    scales = flat[case.index_block_size * 128 : case.index_block_size * 132].view(torch.int32)
    return flat[row * 128 : row * 128 + 128], scales[row : row + 1]


def test_a_key_one_code_off_is_counted_and_two_codes_off_is_an_error():
    def step(by):
        def change(got: Arm, inputs):
            codes, _ = key(got, inputs, 0, INDEX)
            column = int(((codes & 0x7F) < 0x70).nonzero()[0])
            codes[column] += by

        return change

    one, two = flipped(INDEX, step(1)), flipped(INDEX, step(2))
    assert (one.mismatching_bytes, one.norm_elements_off, one.code_distance) == (0, 1, 1)
    assert two.mismatching_bytes == 1
    assert two.code_distance == 2


def test_a_key_of_a_tiled_cache_follows_the_same_rule():
    case = replace(INDEX, index_layout="tiled16")

    def step(by):
        def change(got: Arm, inputs):
            slot = inputs.slots("slot_mapping")[:1]
            codes = TILED16.load_rows(got.tensors["kv_cache"], "key", torch.bfloat16, slot)
            codes[0, int(((codes[0] & 0x7F) < 0x70).nonzero()[0])] += by
            TILED16.store_rows(got.tensors["kv_cache"], "key", torch.bfloat16, slot, codes)

        return change

    assert (flipped(case, step(1)).mismatching_bytes, flipped(case, step(1)).norm_elements_off) == (0, 1)
    assert flipped(case, step(2)).mismatching_bytes == 1


def test_minus_zero_is_plus_zero_in_a_key_and_nowhere_else():
    def zero(value):
        def change(arm: Arm, inputs):
            key(arm, inputs, 1, INDEX)[0][5] = value

        return change

    inputs, got, expected = arms(INDEX)
    zero(0x80)(got, inputs)
    zero(0x00)(expected, inputs)
    result = compare(INDEX, inputs, got, expected)
    assert (result.mismatching_bytes, result.norm_elements_off) == (0, 0)


def test_a_row_with_another_scale_is_compared_dequantised():
    def halve(got: Arm, inputs):
        codes, scale = key(got, inputs, 2, INDEX)
        values = codes.view(torch.float8_e4m3fn).float()
        scale += 1 << 23  # twice the scale, half the codes: the same values within a code
        codes.view(torch.float8_e4m3fn).copy_((values / 2).to(torch.float8_e4m3fn))

    result = flipped(INDEX, halve)
    assert (result.mismatching_bytes, result.norm_rows_off) == (0, 1)

    def only_scale(got: Arm, inputs):
        key(got, inputs, 2, INDEX)[1].add_(1 << 23)

    assert flipped(INDEX, only_scale).mismatching_bytes > 0


def test_an_fp32_scale_may_move_by_some_ulp_and_a_power_of_two_may_not():
    def nudge(got: Arm, inputs):
        key(got, inputs, 0, INDEX)[1].add_(2)

    assert flipped(replace(INDEX, scale_rule="fp32"), nudge).norm_rows_off == 0
    assert flipped(INDEX, nudge).norm_rows_off == 1


def nudged(case, name, by):
    """The comparison after the first ordinary element of an output moved by some representable values."""

    def change(got: Arm, _inputs):
        tensor = got.tensors[name]
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
        tensor.view(bits)[0, 0] += by

    return flipped(case, change)


@pytest.mark.parametrize("name", ["q_c_out", "kv_c_out"])
def test_a_norm_may_be_one_rounding_off_and_not_two(name):
    one, two = nudged(LATENTS, name, 1), nudged(LATENTS, name, 2)
    assert (one.mismatching_bytes, one.norm_elements_off, one.code_distance) == (0, 1, 1)
    assert two.mismatching_bytes == 1
    assert name in two.notes[0]


@pytest.mark.parametrize("name", ["q_c_out", "kv_c_out"])
def test_what_falls_apart_in_a_row_that_all_tokens_share_is_counted_once(name):
    def change(got: Arm, _inputs):
        got.tensors[name].view(torch.int16)[:, 0] += 1

    shared = replace(LATENTS, strides="broadcast")
    assert flipped(LATENTS, change).norm_elements_off == LATENTS.tokens > 1
    assert flipped(shared, change).norm_elements_off == 1
    assert flipped(shared, change).norm_elements < flipped(LATENTS, change).norm_elements / 2


@pytest.mark.parametrize("name", ["q_c_out", "kv_c_out"])
def test_an_fp32_norm_may_be_some_ulp_off_and_is_not_counted(name):
    case = replace(LATENTS, activation="fp32", layout="plain")
    few, more = nudged(case, name, NORM_ULPS), nudged(case, name, NORM_ULPS + 1)
    assert (few.mismatching_bytes, few.norm_elements_off) == (0, 0)
    assert more.mismatching_bytes == 1


def test_a_rotated_key_may_not_move_at_all():
    assert nudged(LATENTS, "k_pe_out", 1).mismatching_bytes == 1


def test_a_row_to_clear_is_bytes():
    assert nudged(LATENTS, "topk_indices", 1).mismatching_bytes > 0


@pytest.mark.parametrize("layout", ["plain", "fp8", "fp8_ds_mla"])
def test_a_normed_latent_in_a_cache_may_be_one_code_off_and_its_rotary_part_not(layout):
    case = replace(LATENTS, layout=layout)

    def step(field_name, by):
        def change(got: Arm, inputs):
            slot = int(inputs.slots("slot_mapping")[0])
            cache, where = got.tensors["kv_cache"], (slot // 64, slot % 64)
            field = MLA_LAYOUTS[layout].field_bytes(cache, field_name, torch.bfloat16)
            bits = torch.uint8 if (layout != "plain" and field_name == "latent") or layout == "fp8" else torch.int16
            row = field[where].clone().view(bits)
            row[int((row.abs() & 0x7F).argmin())] += by
            field[where] = row.view(torch.uint8)

        return change

    one = flipped(case, step("latent", 1))
    assert (one.mismatching_bytes, one.norm_elements_off) == (0, 1)
    assert flipped(case, step("latent", 2)).mismatching_bytes == 1
    assert flipped(case, step("rope", 1)).mismatching_bytes == 1


def test_a_tile_with_another_scale_is_counted_and_compared_dequantised():
    def double(got: Arm, inputs):
        slot = int(inputs.slots("slot_mapping")[1])
        row = got.tensors["kv_cache"][slot // 64, slot % 64]
        tile, scale = row[128:256].view(torch.float8_e4m3fn), row[516:520].view(torch.float32)
        tile.copy_((tile.float() / 2).to(torch.float8_e4m3fn))
        scale *= 2

    result = flipped(LATENTS, double)
    assert (result.mismatching_bytes, result.norm_rows_off) == (0, 1)
    # Four tiles a latent, and the row of an indexer key.
    assert result.norm_rows == 5 * 4 + 5


def test_rates_hold_over_a_set():
    many = 1_000_000
    within = Comparison(norm_elements=many, norm_elements_off=int(many * NORM_ELEMENT_RATE))
    assert within.over_rates() == []
    within.add(Comparison(norm_elements_off=1))
    assert len(within.over_rates()) == 1
    rows = Comparison(norm_rows=10_000, norm_rows_off=int(10_000 * NORM_ROW_RATE) + 1)
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

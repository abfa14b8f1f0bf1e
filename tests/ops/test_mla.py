"""The MLA oracle against float64, closed forms and bytes worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.inputs import ACTIVATIONS, FN, FNUZ, MAX_POSITION, OPS, Call, cache_row, mla_call, rope_table, run

STYLES = pytest.mark.parametrize("style", ["interleaved", "neox"])


def rotated64(x: torch.Tensor, call: Call) -> torch.Tensor:
    """RoPE as complex multiplication in float64, from the table's own entries."""
    table = call["cos_sin_cache"][call["positions"].long()].double()
    turn = torch.complex(table[:, :32], table[:, 32:])
    if x.dim() == 3:
        turn = turn[:, None]
    first, second = (x[..., :32], x[..., 32:]) if call["rope_style"] == "neox" else (x[..., ::2], x[..., 1::2])
    turned = torch.complex(first.double(), second.double()) * turn
    return (
        torch.cat([turned.real, turned.imag], -1)
        if call["rope_style"] == "neox"
        else torch.stack([turned.real, turned.imag], -1).flatten(-2)
    )


def query64(call: Call) -> torch.Tensor:
    return torch.cat([call["q_nope"].double(), rotated64(call["q_pe"], call)], -1)


def key64(call: Call) -> torch.Tensor:
    return torch.cat([call["kv_c"].double(), rotated64(call["k_pe"].reshape(-1, 64), call)], -1)


def assert_within(got: torch.Tensor, want: torch.Tensor, relative: float, absolute: float) -> None:
    error = (got.double() - want).abs()
    assert bool((error <= relative * want.abs() + absolute).all()), float((error - relative * want.abs()).max())


@STYLES
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_a_plain_query_and_key_are_the_float64_values_rounded_once(activation: torch.dtype, style: str) -> None:
    call = mla_call(7, 5, activation=activation, layout="plain", rope_style=style, slot_mapping=torch.arange(7) * 3)
    done = run("mla", "oracle", call)
    half_ulp = torch.finfo(activation).eps / 2
    largest = float(call["q_pe"].abs().max())
    assert_within(done["q_out"][:, :5], query64(call), half_ulp * 1.01, 4e-7 * largest)
    rows = torch.stack([cache_row(done["kv_cache"], 3 * t).view(activation) for t in range(7)])
    assert_within(rows, key64(call), half_ulp * 1.01, 4e-7 * float(call["k_pe"].abs().max()))
    assert torch.equal(rows[:, :512], call["kv_c"])
    assert torch.equal(done["q_out"][:, :5, :512], call["q_nope"])


@STYLES
@pytest.mark.parametrize("rounding", ["split", "fp32"])
@pytest.mark.parametrize("fp8", [FN, FNUZ], ids=str)
def test_an_fp8_query_and_key_are_within_half_a_step_of_float64(fp8: torch.dtype, rounding: str, style: str) -> None:
    limit = {FN: 448.0, FNUZ: 224.0}[fp8]
    call = mla_call(
        7,
        5,
        layout="fp8",
        query=fp8,
        fp8=fp8,
        rope_style=style,
        rounding=rounding,
        slot_mapping=torch.arange(7),
        q_scale=torch.tensor([0.37]),
        k_scale=torch.tensor(0.11),
    )
    done = run("mla", "oracle", call)
    rows = torch.stack([cache_row(done["kv_cache"], t)[:576].view(fp8) for t in range(7)])
    once_more = 2.0**-8 if rounding == "split" else 1e-6  # bf16 after RoPE
    for got, want, scale in ((done["q_out"][:, :5], query64(call), 0.37), (rows, key64(call), 0.11)):
        want = want / scale
        inside = want.abs() < limit
        assert_within(got.float()[inside], want[inside], 2.0**-4 + once_more, 2.0**-10)
        assert bool((got.float()[~inside] == limit * want[~inside].sign()).all())
        assert bool((~inside).any())


@STYLES
def test_fp8_ds_mla_rows_read_back_as_the_float64_values(style: str) -> None:
    call = mla_call(9, 1, rope_style=style, slot_mapping=torch.arange(9))
    done = run("mla", "oracle", call)
    want = key64(call)
    for token in range(9):
        row = cache_row(done["kv_cache"], token)
        codes = row[:512].view(FN).float().view(4, 128)
        scales = row[512:528].clone().view(torch.float32)
        rope = row[528:656].clone().view(torch.bfloat16)
        for tile in range(4):
            exact = want[token, 128 * tile : 128 * tile + 128]
            assert math.frexp(float(scales[tile]))[0] == 0.5
            assert float(exact.abs().max()) <= 448 * float(scales[tile])
            assert_within(codes[tile] * scales[tile], exact, 2.0**-4, float(scales[tile]) * 2.0**-10)
        assert_within(rope, want[token, 512:], 2.0**-8 * 1.01, 1e-6 * float(call["k_pe"].abs().max()))


@pytest.mark.parametrize(
    ("value", "scale", "byte"),
    [
        (0.0, 2.0**-13, 0x00),
        (336.0, 1.0, 0x7A),  # a tie of 320 (0x7A) and 352 (0x7B)
        (448.0, 1.0, 0x7E),
        (464.0, 2.0, 0x76),  # 232 is a tie of 224 (0x76) and 240 (0x77)
    ],
)
def test_tiles_of_fp8_ds_mla_worked_out_by_hand(value: float, scale: float, byte: int) -> None:
    call = mla_call(1, 1, slot_mapping=torch.tensor([0]))
    call["kv_c"].zero_()
    call["kv_c"][0, 128] = value
    row = cache_row(run("mla", "oracle", call)["kv_cache"], 0)
    assert row[512:528].clone().view(torch.float32).tolist() == [2.0**-13, scale, 2.0**-13, 2.0**-13]
    assert int(row[128]) == byte
    assert row[:128].unique().tolist() == [0]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_fp32_tiles_are_the_bytes_of_vllm_026(activation: torch.dtype) -> None:
    """Its C++ writer: scale = max(max_abs / 448, FLT_MIN), codes = x / scale, both divisions rounded."""
    call = mla_call(9, 1, activation=activation, slot_mapping=torch.arange(9), scale_rule="fp32", seed=2)
    call["kv_c"][3, 128:256] = 0.0
    call["kv_c"][4, 128:256] *= 2.0**-10
    done, powers = run("mla", "oracle", call), run("mla", "oracle", call | {"scale_rule": "ue8m0"})
    tiles = call["kv_c"].float().view(9, 4, 128)
    scale = torch.maximum(tiles.abs().amax(-1) / torch.tensor(448.0), torch.tensor(torch.finfo(torch.float32).tiny))
    codes = (tiles / scale[..., None]).to(FN)
    for token in range(9):
        row, power = cache_row(done["kv_cache"], token), cache_row(powers["kv_cache"], token)
        assert torch.equal(row[:512], codes[token].view(torch.uint8).flatten())
        assert torch.equal(row[512:528].clone().view(torch.float32), scale[token])
        assert torch.equal(row[528:], power[528:])
        assert not torch.equal(row[:528], power[:528])
    assert float(scale[3, 1]) == 2.0**-126


@pytest.mark.parametrize("layout", ["plain", "fp8"])
def test_a_layout_without_tiles_ignores_the_rule(layout: str) -> None:
    call = mla_call(4, 1, layout=layout, query=FN)
    (ignored, asked), (_, default) = (OPS["mla"].resolve(**call | rule) for rule in ({"scale_rule": "fp32"}, {}))
    assert asked == default
    assert ignored["scale_rule"] == "ue8m0"
    assert torch.equal(
        run("mla", "oracle", call | {"scale_rule": "fp32"})["kv_cache"].view(torch.uint8),
        run("mla", "oracle", call)["kv_cache"].view(torch.uint8),
    )


def test_an_fp8_code_is_the_value_times_the_rounded_reciprocal_of_its_scale() -> None:
    call = mla_call(1, 1, layout="fp8", k_scale=torch.tensor(0.5), slot_mapping=torch.tensor([0]))
    call["kv_c"].zero_()
    call["kv_c"][0, :4] = torch.tensor([0.5, -0.5, 500.0, -500.0])
    row = cache_row(run("mla", "oracle", call)["kv_cache"], 0)
    assert row[:5].tolist() == [0x38, 0xB8, 0x7E, 0xFE, 0x00]


def test_a_value_is_multiplied_by_the_reciprocal_and_not_divided() -> None:
    # 1.40625 / 0.9 rounds to 1.5625, a tie of 1.5 and 1.625; times the rounded 1 / 0.9 it lies just above the tie.
    x, scale = torch.tensor(1.40625), torch.tensor(0.9)
    assert float(x / scale) == 1.5625
    call = mla_call(1, 1, activation=torch.float32, layout="fp8", k_scale=scale, slot_mapping=torch.tensor([0]))
    call["kv_c"][0, 0] = x
    row = cache_row(run("mla", "oracle", call)["kv_cache"], 0)
    assert int(row[0]) == 0x3D  # 1.625


@STYLES
def test_position_zero_rotates_nothing(style: str) -> None:
    call = mla_call(3, 2, layout="plain", rope_style=style, slot_mapping=torch.arange(3))
    call["positions"].zero_()
    done = run("mla", "oracle", call)
    assert torch.equal(done["q_out"][:, :2], torch.cat([call["q_nope"], call["q_pe"]], -1))
    rows = torch.stack([cache_row(done["kv_cache"], t).view(torch.bfloat16) for t in range(3)])
    assert torch.equal(rows, torch.cat([call["kv_c"], call["k_pe"].reshape(3, 64)], -1))


@pytest.mark.parametrize(("style", "second"), [("interleaved", 1), ("neox", 32)])
def test_zero_to_sixty_three_at_position_one_tells_the_styles_apart(style: str, second: int) -> None:
    call = mla_call(1, 1, activation=torch.float32, layout="plain", rope_style=style, slot_mapping=torch.tensor([0]))
    call["q_pe"][:], call["positions"] = torch.arange(64.0), torch.tensor([1])
    done = run("mla", "oracle", call)["q_out"][0, 0, 512:]
    assert float(done[0]) == pytest.approx(0 * math.cos(1) - second * math.sin(1), rel=1e-6)
    assert float(done[second]) == pytest.approx(second * math.cos(1) + 0 * math.sin(1), rel=1e-6)


def test_interleaved_is_the_default_style() -> None:
    call = mla_call(2, 1, layout="plain")
    explicit = call | {"rope_style": "interleaved"}
    assert torch.equal(run("mla", "oracle", call)["q_out"][:, :1], run("mla", "oracle", explicit)["q_out"][:, :1])
    neox = run("mla", "oracle", call | {"rope_style": "neox"})["q_out"][:, :1]
    assert not torch.equal(neox, run("mla", "oracle", explicit)["q_out"][:, :1])


def test_each_token_is_rotated_by_its_own_position() -> None:
    call = mla_call(4, 2, layout="plain", positions=torch.tensor([5, 0, 36, 5]))
    for name in ("q_nope", "q_pe"):
        call[name][:] = call[name][:1]
    out = run("mla", "oracle", call)["q_out"]
    assert torch.equal(out[0, :2], out[3, :2])
    assert not torch.equal(out[0, :2], out[1, :2])
    assert not torch.equal(out[0, :2], out[2, :2])


@pytest.mark.parametrize("rounding", ["split", "fp32"])
def test_rounding_split_passes_through_the_activation_dtype_and_fp32_does_not(rounding: str) -> None:
    # cos is a little more than the tie of 1.0 and 1.125, and bf16 rounds it to the tie, whose even side is 1.0.
    call = mla_call(
        1,
        1,
        layout="fp8",
        rounding=rounding,
        k_scale=torch.tensor(1.0),
        slot_mapping=torch.tensor([0]),
        cos_sin_cache=torch.tensor([[1.0] * 32 + [0.0] * 32]),
        positions=torch.tensor([0]),
    )
    call["cos_sin_cache"][0, 0] = 1.0625 + 2.0**-10
    call["k_pe"].zero_()
    call["k_pe"].view(-1)[0] = 1.0
    row = cache_row(run("mla", "oracle", call)["kv_cache"], 0)
    assert int(row[512]) == (0x38 if rounding == "split" else 0x39)


@pytest.mark.parametrize("activation", [torch.float16, torch.float32], ids=str)
def test_the_rotary_part_of_fp8_ds_mla_is_bf16_after_the_activation_dtype(activation: torch.dtype) -> None:
    call = mla_call(4, 1, activation=activation, slot_mapping=torch.arange(4))
    done = run("mla", "oracle", call)
    plain = run("mla", "oracle", mla_call(4, 1, activation=activation, layout="plain", slot_mapping=torch.arange(4)))
    for token in range(4):
        bf16 = cache_row(done["kv_cache"], token)[528:656].clone().view(torch.bfloat16)
        rotated = cache_row(plain["kv_cache"], token).view(activation)[512:576]
        assert torch.equal(bf16, rotated.to(torch.bfloat16))


def test_the_table_is_read_at_its_last_row() -> None:
    call = mla_call(1, 1, activation=torch.float32, layout="plain", positions=torch.tensor([MAX_POSITION - 1]))
    call["q_pe"].zero_()
    call["q_pe"][0, 0, 0] = 1.0
    out = run("mla", "oracle", call)["q_out"][0, 0, 512:514]
    assert torch.equal(out, rope_table()[-1][[0, 32]])

"""The number rules against float64, ml_dtypes, torch.nn and values worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsafuse import numerics
from dsafuse.numerics import FP8_FORMATS, RopeStyle, ScaleRule
from tests.inputs import FN, FNUZ, seeded

ML_DTYPES = {FN: ml_dtypes.float8_e4m3fn, FNUZ: ml_dtypes.float8_e4m3fnuz}
FORMATS = pytest.mark.parametrize("fmt", FP8_FORMATS.values(), ids=lambda fmt: fmt.triton_name)
STYLES = pytest.mark.parametrize("style", RopeStyle, ids=str)


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32)


# fp8 casts


@FORMATS
def test_every_bf16_value_becomes_the_fp8_code_that_ml_dtypes_gives(fmt: numerics.Fp8Format) -> None:
    x = every_bf16()
    real = x[~x.isnan()]
    want = real.numpy().clip(-fmt.max, fmt.max).astype(ML_DTYPES[fmt.dtype]).view(np.uint8)
    assert np.array_equal(numerics.to_fp8(real, fmt).view(torch.uint8).numpy(), want)


@FORMATS
def test_ties_and_their_neighbours_round_to_even(fmt: numerics.Fp8Format) -> None:
    codes = torch.arange(0x00, 0x7E, dtype=torch.uint8)
    low, high = codes.view(fmt.dtype).float(), (codes + 1).view(fmt.dtype).float()
    codes, low, high = codes[high <= fmt.max], low[high <= fmt.max], high[high <= fmt.max]
    tie = (low + high) / 2  # exact in fp32
    below, above = (torch.nextafter(tie, side) for side in (low, high))
    assert torch.equal(numerics.to_fp8(below, fmt).view(torch.uint8), codes)
    assert torch.equal(numerics.to_fp8(above, fmt).view(torch.uint8), codes + 1)
    assert torch.equal(numerics.to_fp8(tie, fmt).view(torch.uint8), codes + codes % 2)


@FORMATS
@pytest.mark.parametrize("value", [math.inf, 3e38, 465.0, 449.0], ids=str)
def test_what_is_too_large_saturates_at_the_stored_maximum(fmt: numerics.Fp8Format, value: float) -> None:
    assert numerics.to_fp8(torch.tensor([value, -value]), fmt).float().tolist() == [fmt.max, -fmt.max]


@pytest.mark.parametrize(("dtype", "byte"), [(FN, 0x7F), (FNUZ, 0x80)], ids=["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("bits", [0x7FC00000, -0x400000, 0x7F800001], ids=["quiet", "negative", "signalling"])
def test_every_nan_becomes_the_one_nan_byte(dtype: torch.dtype, byte: int, bits: int) -> None:
    nan = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    assert numerics.to_fp8(nan, FP8_FORMATS[dtype]).view(torch.uint8).tolist() == [byte]


@pytest.mark.parametrize(("dtype", "byte"), [(FN, 0x80), (FNUZ, 0x00)], ids=["e4m3fn", "e4m3fnuz"])
@pytest.mark.parametrize("value", [-0.0, -1e-9], ids=str)
def test_negative_zero_exists_in_e4m3fn_and_not_in_e4m3fnuz(dtype: torch.dtype, byte: int, value: float) -> None:
    assert numerics.to_fp8(scalar(value), FP8_FORMATS[dtype]).view(torch.uint8).tolist() == [byte]


def test_byte_0x38_is_one_in_e4m3fn_and_a_half_in_e4m3fnuz() -> None:
    assert numerics.to_fp8(scalar(1.0), FP8_FORMATS[FN]).view(torch.uint8).tolist() == [0x38]
    assert numerics.to_fp8(scalar(0.5), FP8_FORMATS[FNUZ]).view(torch.uint8).tolist() == [0x38]


@FORMATS
def test_pack_then_unpack_then_pack_is_the_first_pack(fmt: numerics.Fp8Format) -> None:
    x = every_bf16()
    packed = numerics.to_fp8(x, fmt)
    assert torch.equal(numerics.to_fp8(packed.float(), fmt).view(torch.uint8), packed.view(torch.uint8))


# scales


@pytest.mark.parametrize(
    ("amax", "floor", "dtype", "scale"),
    [
        (0.0, numerics.INDEX_K_FLOOR, FN, 2.0**-22),
        (0.0, numerics.INDEX_K_FLOOR, FNUZ, 2.0**-21),
        (0.0, numerics.INDEX_Q_FLOOR[numerics.Rounding.SPLIT], FN, 2.0**-42),
        (232.0, numerics.INDEX_K_FLOOR, FNUZ, 2.0),
        (224.0, numerics.INDEX_K_FLOOR, FNUZ, 1.0),
        (300.0, numerics.INDEX_Q_FLOOR[numerics.Rounding.SPLIT], FN, 1.0),
        (448.0, numerics.INDEX_Q_FLOOR[numerics.Rounding.SPLIT], FN, 1.0),
        (450.0, numerics.INDEX_Q_FLOOR[numerics.Rounding.SPLIT], FN, 2.0),
    ],
)
def test_group_scales_worked_out_by_hand(amax: float, floor: float, dtype: torch.dtype, scale: float) -> None:
    assert float(numerics.group_scale(scalar(amax), floor, FP8_FORMATS[dtype], ScaleRule.UE8M0)) == scale


@pytest.mark.parametrize(
    ("amax", "power", "quotient"),
    [
        (0.0, 2.0**-13, 2.0**-126),
        (2.0**-10, 2.0**-13, 2.0**-10 / 448),
        (336.0, 1.0, 0.75),
        (448.0, 1.0, 1.0),
        (449.0, 2.0, 449 / 448),
        (448 * 2.0**-126, 2.0**-13, 2.0**-126),
        (450 * 2.0**-126, 2.0**-13, 450 / 448 * 2.0**-126),
    ],
)
def test_tile_scales_worked_out_by_hand(amax: float, power: float, quotient: float) -> None:
    found = {rule: float(numerics.tile_scale(scalar(amax), FP8_FORMATS[FN], rule)) for rule in ScaleRule}
    assert found[ScaleRule.UE8M0] == power
    assert found[ScaleRule.FP32] == float(scalar(quotient))


def test_the_fp32_rule_is_one_rounded_division() -> None:
    amax = torch.rand(4096, generator=seeded(1)) * 1000 + 1e-3
    for fmt in FP8_FORMATS.values():
        want = (amax.double() / fmt.max).float()
        assert torch.equal(numerics.group_scale(amax, numerics.INDEX_K_FLOOR, fmt, ScaleRule.FP32), want)


@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_a_scale_just_above_a_power_of_two_rises_where_log2_in_fp32_does_not(steps: int) -> None:
    assert float(numerics.power_of_two_at_least(scalar(2.0**-22 * (1 + steps * 2.0**-23)))) == 2.0**-21


@given(st.integers(-126, 126))
def test_powers_of_two_pass_through_ue8m0(exponent: int) -> None:
    assert float(numerics.power_of_two_at_least(scalar(2.0**exponent))) == 2.0**exponent


@given(st.floats(min_value=2.0**-126, max_value=2.0**126, width=32))
def test_a_ue8m0_scale_is_the_smallest_power_of_two_that_is_not_below(s: float) -> None:
    mantissa, exponent = math.frexp(s)
    want = 2.0 ** (exponent - (mantissa == 0.5))
    assert float(numerics.power_of_two_at_least(scalar(s))) == want


@given(st.floats(min_value=0.0625, max_value=2.0**16, width=32), st.integers(0, 20))
def test_scaling_values_by_a_power_of_two_scales_a_ue8m0_scale_by_it(amax: float, k: int) -> None:
    fmt = FP8_FORMATS[FN]
    for floor in (numerics.INDEX_K_FLOOR, numerics.INDEX_Q_FLOOR[numerics.Rounding.SPLIT]):
        one = numerics.group_scale(scalar(amax), floor, fmt, ScaleRule.UE8M0)
        scaled = numerics.group_scale(scalar(amax * 2.0**k), floor, fmt, ScaleRule.UE8M0)
        assert float(scaled) == float(one) * 2.0**k


def test_amax_passes_over_nan_and_bounds_infinity() -> None:
    rows = torch.tensor([[1.0, -3.0, math.nan], [math.nan] * 3, [2.0, -math.inf, math.nan]])
    assert numerics.amax(rows).flatten().tolist() == [3.0, 0.0, numerics.FLT_MAX]


def test_an_infinite_amax_gives_a_finite_scale() -> None:
    for fmt in FP8_FORMATS.values():
        for rule in ScaleRule:
            scale = numerics.group_scale(numerics.amax(torch.tensor([[math.inf]])), 1e-4, fmt, rule)
            assert bool(torch.isfinite(scale).all())


def test_the_reciprocal_is_correctly_rounded() -> None:
    scale = torch.rand(4096, generator=seeded(2)) * 10 + 1e-3
    assert torch.equal(numerics.reciprocal(scale), (1.0 / scale.double()).float())


@pytest.mark.parametrize(("scale", "want"), [(0.0, numerics.FLT_MAX), (-0.0, -numerics.FLT_MAX), (math.inf, 0.0)])
def test_the_reciprocal_of_a_zero_or_infinite_scale_stays_finite(scale: float, want: float) -> None:
    assert float(numerics.reciprocal(scalar(scale))) == want


def test_the_reciprocal_of_nan_is_nan() -> None:
    assert math.isnan(float(numerics.reciprocal(scalar(math.nan))))


# rotation


@pytest.mark.parametrize(
    ("style", "first", "second"),
    [(RopeStyle.INTERLEAVED, 0, 1), (RopeStyle.NEOX, 0, 32)],
    ids=["interleaved", "neox"],
)
def test_zero_to_sixty_three_turned_by_a_right_angle_tells_who_pairs_with_whom(
    style: RopeStyle, first: int, second: int
) -> None:
    x = torch.arange(64.0)[None]
    quarter_turn = torch.cat([torch.zeros(32), torch.ones(32)])[None]
    rotated = numerics.rotate(x, quarter_turn, style)[0]
    assert (float(rotated[first]), float(rotated[second])) == (-float(second), float(first))


@STYLES
def test_a_unit_vector_turns_into_cos_and_sin_of_its_own_pair(style: RopeStyle) -> None:
    angles = torch.linspace(0.1, 3.0, 32)
    table = torch.cat([angles.cos(), angles.sin()])[None].expand(64, 64)
    rotated = numerics.rotate(torch.eye(64), table, style)
    for i in range(32):
        first, second = (2 * i, 2 * i + 1) if style is RopeStyle.INTERLEAVED else (i, i + 32)
        want = torch.zeros(2, 64)
        want[0, first], want[0, second] = angles[i].cos(), angles[i].sin()
        want[1, first], want[1, second] = -angles[i].sin(), angles[i].cos()
        assert torch.equal(rotated[[first, second]], want)


@STYLES
def test_rotation_is_complex_multiplication_in_float64(style: RopeStyle) -> None:
    g = seeded(3)
    x, angles = torch.randn(50, 4, 64, generator=g), torch.rand(50, 32, generator=g) * 100
    table = torch.cat([angles.cos(), angles.sin()], -1)
    pairs = x.unflatten(-1, (32, 2)) if style is RopeStyle.INTERLEAVED else x.unflatten(-1, (2, 32)).transpose(-1, -2)
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.polar(
        torch.ones(50, 1, 32, dtype=torch.float64), angles.double()[:, None]
    )
    want = torch.view_as_real(turned)
    want = want.flatten(-2) if style is RopeStyle.INTERLEAVED else want.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(numerics.rotate(x, table, style).double(), want, rtol=0, atol=2e-6)


def test_products_are_rounded_before_they_are_subtracted() -> None:
    # (1 + 2**-12)**2 rounds to 1 + 2**-11; a fused multiply-add would keep the 2**-24 that the rounding drops.
    x1, x2 = 1 + 2.0**-12, 1.0
    x = torch.tensor([[x1] + [0.0] * 31 + [x2] + [0.0] * 31])
    table = torch.tensor([[1 + 2.0**-12] + [0.0] * 31 + [1 + 2.0**-11] + [0.0] * 31])
    assert float(numerics.rotate(x, table, RopeStyle.NEOX)[0, 0]) == 0.0


@given(st.integers(0, 2**31), st.floats(-100, 100))
def test_rotation_keeps_the_norm_of_every_pair(seed: int, angle: float) -> None:
    x = torch.randn(3, 64, generator=seeded(seed)).double()
    table = torch.tensor([math.cos(angle)] * 32 + [math.sin(angle)] * 32).double().expand(3, 64)
    for style in RopeStyle:
        y = numerics.rotate(x, table, style)
        axis = (32, 2) if style is RopeStyle.INTERLEAVED else (2, 32)
        reduced = -1 if style is RopeStyle.INTERLEAVED else -2
        norms = [v.unflatten(-1, axis).norm(dim=reduced) for v in (x, y)]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-6, atol=0)


@given(st.integers(0, 2**31))
def test_neox_is_interleaved_on_permuted_dims(seed: int) -> None:
    g = seeded(seed)
    x, table = torch.randn(4, 2, 64, generator=g), torch.randn(4, 64, generator=g)
    interleave = torch.arange(64).reshape(2, 32).T.flatten()  # pair (i, i + 32) -> (2i, 2i + 1)
    turned = numerics.rotate(x[..., interleave], table, RopeStyle.INTERLEAVED)
    assert torch.equal(numerics.rotate(x, table, RopeStyle.NEOX)[..., interleave], turned)


# norms


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 1e-2])
def test_layer_norm_is_torch_nn_layer_norm_in_float64(eps: float) -> None:
    g = seeded(4)
    x = torch.randn(64, 128, generator=g) * 3 + 7
    norm = torch.nn.LayerNorm(128, eps=eps, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(128, generator=g))
        norm.bias.copy_(torch.randn(128, generator=g))
        got = numerics.layer_norm(x, norm.weight.float(), norm.bias.float(), eps)
        want = torch.nn.functional.layer_norm(
            x.double(), (128,), norm.weight.float().double(), norm.bias.float().double(), eps
        )
    torch.testing.assert_close(got.double(), want, rtol=2e-6, atol=2e-6)


def test_layer_norm_keeps_a_small_variance_on_a_large_mean() -> None:
    # One pass, mean(x**2) - mean**2, loses all of it in fp32: 4096**2 has an ulp of 2.
    x = 4096.0 + torch.tensor([-0.5, 0.5]).repeat(1, 64)
    got = numerics.layer_norm(x, torch.ones(128), torch.zeros(128), 0.0)
    assert torch.equal(got, torch.tensor([-1.0, 1.0]).repeat(1, 64))


def test_layer_norm_reads_its_parameters_in_their_own_precision() -> None:
    x = torch.tensor([-1.0, 1.0]).repeat(1, 64)
    fine = 1 + 2.0**-12  # 1.0 in bf16
    got = numerics.layer_norm(x, torch.full((128,), fine), torch.zeros(128), 0.0)
    assert float(got[0, 1]) == fine


def test_round_to_is_nearest_even() -> None:
    tie = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20])
    assert numerics.round_to(tie, torch.bfloat16).tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]

"""Division by a scale: a product in fp64, which has to be the oracle's rounded fp32 division bit for bit."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from dsafuse.kernels import tiles
from dsafuse.numerics import FLT_MAX, FLT_MIN, FP8_FORMATS
from tests.inputs import FN, FNUZ, assert_same_memory, cache_row, indexer_call, mla_call, run

f32 = np.float32
CODES = {FN: ml_dtypes.float8_e4m3fn, FNUZ: ml_dtypes.float8_e4m3fnuz}
MOST = {fp8: FP8_FORMATS[fp8].max for fp8 in CODES}

HARD = (
    (132, 66 * 2.0**-15, 0x04, 0x03),
    (138, 207 * 2.0**-15, 0x0A, 0x0B),
    (138, 103.5, 0x7A, 0x7B),
    (152, 7.125, 0x5A, 0x5B),
    (163, 163 * 2.0**-16, 0x03, 0x04),
    (166, 249 * 2.0**-13, 0x1A, 0x1B),
)
"""(amax, x, code of x / scale, its code if x * (1 / scale) were made of fp32 operations), in either format. All are
bf16 values; the quotient is a tie between two codes, but for 163, where it is the next fp32 number above one."""


def quotients(x_ptr, y_ptr, out_ptr, COUNT: tl.constexpr, DIVIDE: tl.constexpr):
    o = tl.arange(0, COUNT)
    tl.store(out_ptr + o, DIVIDE(tl.load(x_ptr + o), 1.0 / tl.load(y_ptr + o).to(tl.float64)))


def scales(x_ptr, out_ptr, COUNT: tl.constexpr, DIVIDE: tl.constexpr, MOST: tl.constexpr):
    o = tl.arange(0, COUNT)
    tl.store(out_ptr + o, DIVIDE(tl.load(x_ptr + o), 1.0 / MOST))


def interpreted(kernel: Any, *arrays: Any, **constants: Any) -> Any:
    """out of kernel(*arrays, out), with the device function `divide` at hand; arrays of any one length."""
    count = len(arrays[0])
    block = triton.next_power_of_2(count)
    tensors = [torch.from_numpy(np.concatenate([x, np.ones(block - count, f32)])) for x in arrays]
    out = torch.full((block,), torch.nan)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        kernel, divide = triton.jit(kernel), triton.jit(tiles.divide.fn)
    with np.errstate(all="ignore"):
        kernel[(1,)](*tensors, out, COUNT=block, DIVIDE=divide, **constants)
    return out[:count].numpy()


def assert_same_bits(got: Any, want: Any, *of: Any) -> None:
    """Every NaN counts as one."""
    assert got.dtype == want.dtype == f32
    bits = [np.where(np.isnan(x), f32(np.nan), x).view(np.uint32) for x in (got, want)]
    different = np.flatnonzero(bits[0] != bits[1])
    first = different[:1]
    assert not len(different), f"{len(different)} differ; first: {[x[first] for x in (got, want, *of)]}"


def codes(x: Any, fp8: torch.dtype) -> Any:
    return np.clip(x, -MOST[fp8], MOST[fp8]).astype(CODES[fp8]).view(np.uint8)


def ties(fp8: torch.dtype) -> Any:
    """Half way between each two neighbouring codes that are stored."""
    magnitudes = np.arange(0x80, dtype=np.uint8).view(CODES[fp8]).astype(f32)
    stored = magnitudes[magnitudes <= MOST[fp8]]
    return (stored[:-1] + stored[1:]) / 2


def moved(x: Any, steps: Any) -> Any:
    """Positive x, so many fp32 numbers further."""
    return (x.view(np.int32) + steps).astype(np.int32).view(f32)


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_hard_values_have_the_code_of_the_rounded_quotient(fp8: torch.dtype) -> None:
    amax, x, want, otherwise = (np.array(column) for column in zip(*HARD))
    amax, x = amax.astype(f32), x.astype(f32)
    assert np.array_equal(x.astype(ml_dtypes.bfloat16).astype(f32), x)
    scale = amax / f32(MOST[fp8])
    assert codes(x / scale, fp8).tolist() == want.tolist()
    assert codes(x * (f32(1) / scale), fp8).tolist() == otherwise.tolist()
    got = interpreted(quotients, x, scale)
    assert_same_bits(got, x / scale, x, scale)
    assert codes(got, fp8).tolist() == want.tolist()


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_quotients_at_ties_are_rounded_divisions(fp8: torch.dtype) -> None:
    """10**6 divisors from the smallest scale to the largest, two steps to either side of a tie."""
    rng, count = np.random.default_rng(3), 2**20
    y = rng.integers(f32(FLT_MIN).view(np.int32), f32(FLT_MAX / MOST[fp8]).view(np.int32), count).astype(np.int32)
    y = y.view(f32)
    x = rng.choice(ties(fp8), count) * y
    x = moved(x, np.where(x > FLT_MIN, rng.integers(-2, 3, count), 0)) * rng.choice([f32(1), f32(-1)], count)
    assert (codes(x * (f32(1) / y), fp8) != codes(x / y, fp8)).mean() > 0.05
    assert_same_bits(interpreted(quotients, x, y), x / y, x, y)


def test_quotients_as_near_to_a_midpoint_as_any_are_rounded_rightly() -> None:
    """x * 2**25 = n * y + s, with s = 1 or -1: the quotient is 1 / (n * y) from the midpoint n / 2**25, relatively."""
    rng = np.random.default_rng(4)
    x, y, want, nearest = [], [], [], Fraction(1)
    for divisor in [*range(2**24 - 2**13 + 1, 2**24, 2), *(2 * rng.integers(2**22, 2**23, 2**14) + 1).tolist()]:
        for s in (1, -1):
            dividend = s * pow(2, -25, divisor) % divisor
            if dividend >= 2**23:
                n, rest = divmod(2**25 * dividend - s, divisor)
                assert rest == 0
                assert n % 2 == 1
                nearest = min(nearest, Fraction(1, n * divisor))
                x, y, want = [*x, dividend], [*y, divisor], [*want, (n + s) // 2]
    assert Fraction(1, 2**49) < nearest < Fraction(1, 2**49) * Fraction(1001, 1000)
    x, y = np.array(x, f32), np.array(y, f32)
    assert_same_bits(interpreted(quotients, x, y), np.array(want, f32) * f32(2.0**-24), x, y)


def test_the_scale_of_every_amax_is_a_rounded_division() -> None:
    """Every significand; other exponents are the same operations times a power of two."""
    for start in range(0, 2**23, 2**20):
        amax = (f32(1).view(np.int32) + np.arange(start, start + 2**20, dtype=np.int32)).view(f32)
        assert_same_bits(interpreted(scales, amax, MOST=MOST[FN]), amax / f32(MOST[FN]), amax)


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_scales_at_both_ends_are_rounded_divisions(fp8: torch.dtype) -> None:
    floor, most = f32(FLT_MIN * MOST[fp8]), f32(FLT_MAX)
    amax = np.concatenate([moved(floor, np.arange(4096)), moved(most, -np.arange(4096))])
    got = interpreted(scales, amax, MOST=MOST[fp8])
    assert_same_bits(got, amax / f32(MOST[fp8]), amax)
    assert got[0] == f32(FLT_MIN)


def test_what_is_no_number_is_divided_as_ever() -> None:
    odd = np.array([0.0, 2.0**-149, 2.0**-127, FLT_MIN, 1, FLT_MAX, np.inf, np.nan], f32)
    divisors = np.array([FLT_MIN, 3 * FLT_MIN, 1, FLT_MAX / 448, FLT_MAX / 224], f32)
    x, y = (grid.ravel() for grid in np.meshgrid(np.concatenate([odd, -odd]), divisors))
    with np.errstate(all="ignore"):
        want = x / y
        keep = ~((np.abs(want) < FLT_MIN) & (want != 0))
        assert_same_bits(interpreted(quotients, x, y)[keep], want[keep], x[keep], y[keep])


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_a_subnormal_quotient_may_be_off_by_its_last_bit_which_no_code_shows(fp8: torch.dtype) -> None:
    """15.5 * 2**-149 is a tie of fp32, which a quotient of normal numbers can't be: 16 is even, the kernels have 15."""
    x, y = np.array([31 * 1195 * 2.0**-100], f32), np.array([1195 * 2.0**50], f32)
    got = interpreted(quotients, x, y)
    assert (x / y).view(np.int32) == 16
    assert got.view(np.int32) == 15
    for sign in (f32(1), f32(-1)):
        assert codes(sign * got, fp8) == codes(sign * x / y, fp8) == codes(sign * f32(FLT_MIN), fp8)


def hard_rows(fp8: torch.dtype, rows: int) -> torch.Tensor:
    """[rows, 128] fp32: a largest value, and every tie of its scale or the number before or behind it."""
    rng = np.random.default_rng(5)
    x = np.zeros((rows, 128), f32)
    x[:, 0] = rng.uniform(1, 2, rows) * np.exp2(rng.integers(-40, 40, rows))
    near = ties(fp8) * (x[:, :1] / f32(MOST[fp8]))
    x[:, 1 : 1 + near.shape[1]] = moved(near, rng.integers(-1, 2, near.shape))
    x *= rng.choice([f32(1), f32(-1)], x.shape)
    return torch.from_numpy(x)


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_tiles_of_ties_have_the_oracles_bytes(fp8: torch.dtype) -> None:
    call = mla_call(16, 1, activation=torch.float32, fp8=fp8, scale_rule="fp32", slot_mapping=torch.arange(16))
    call["kv_c"] = hard_rows(fp8, 64).reshape(16, 512)
    assert_same_memory(run("mla", "interpreter", call), run("mla", "oracle", call))


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_heads_of_ties_have_the_oracles_bytes(fp8: torch.dtype) -> None:
    call = indexer_call(32, 1, activation=torch.float32, fp8=fp8, scale_rule="fp32", rounding="fp32")
    call |= {"q": hard_rows(fp8, 32)[:, None], "positions": torch.zeros(32, dtype=torch.int64)}
    call["slot_mapping"] = torch.empty(0, dtype=torch.int64)
    assert_same_memory(run("indexer", "interpreter", call), run("indexer", "oracle", call))


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_hard_bf16_tiles_have_the_bytes_worked_out_by_hand(fp8: torch.dtype) -> None:
    call = mla_call(len(HARD), 1, fp8=fp8, scale_rule="fp32", slot_mapping=torch.arange(len(HARD)))
    call["kv_c"].zero_()
    for token, (amax, x, _, _) in enumerate(HARD):
        call["kv_c"][token, :3] = torch.tensor([amax, x, -x])
    got = run("mla", "interpreter", call)
    assert_same_memory(got, run("mla", "oracle", call))
    for token, (amax, _, code, _) in enumerate(HARD):
        row = cache_row(got["kv_cache"], token)
        assert row[512:516].clone().view(torch.float32).item() == f32(amax) / f32(MOST[fp8])
        assert row[:3].tolist() == [0x7E, code, code | 0x80]


@pytest.mark.parametrize("fp8", CODES, ids=str)
def test_tiles_of_zeros_infinities_and_nan_have_the_bytes_worked_out_by_hand(fp8: torch.dtype) -> None:
    inf, nan, most, tiny = torch.inf, torch.nan, MOST[fp8], FLT_MIN
    top, void, minus = int(codes(f32(most), fp8)), FP8_FORMATS[fp8].nan_byte, 0x80 if fp8 is FN else 0
    large = float(f32(FLT_MAX) / f32(most))
    worked_out = (
        ((0.0, -0.0, 0.0, 0.0), tiny, (0, minus, 0, 0)),
        ((inf, -inf, nan, -1.0), large, (top, top | 0x80, void, minus)),
        ((nan, nan, nan, nan), tiny, (void, void, void, void)),
        ((FLT_MAX, -FLT_MAX, 0.0, 2.0**-149), large, (top, top | 0x80, 0, 0)),
        ((nan, -0.0, most, -most), 1.0, (void, minus, top, top | 0x80)),
        ((tiny, -tiny, 2.0**-149, -0.0), tiny, (int(codes(f32(1), fp8)), int(codes(f32(-1), fp8)), 0, minus)),
        ((most * tiny, -most * tiny, nan, 0.0), tiny, (top, top | 0x80, void, 0)),
        ((-inf, -inf, -inf, -inf), large, (top | 0x80,) * 4),
    )
    call = mla_call(2, 1, activation=torch.float32, fp8=fp8, scale_rule="fp32", slot_mapping=torch.arange(2))
    call["kv_c"] = torch.tensor([x * 32 for x, _, _ in worked_out]).reshape(2, 512)
    got = run("mla", "interpreter", call)
    assert_same_memory(got, run("mla", "oracle", call))
    for tile, (_, scale, want) in enumerate(worked_out):
        row, column = cache_row(got["kv_cache"], tile // 4), tile % 4
        found = row[512 + 4 * column : 516 + 4 * column].clone().view(torch.float32).item()
        assert (found, row[128 * column : 128 * column + 128].tolist()) == (scale, [*want] * 32), tile

"""The CPU backend's cache bytes against float64 and a decoder of e4m3 written from its definition."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from dsafuse.vllm.cpu import formats

WIDTH = {"auto": 576, "fp8": 576, "fp8_ds_mla": 656}
BLOCKS, BLOCK_SIZE = 4, 16
ONE = torch.ones(())


def e4m3(byte: int) -> float:
    """One sign bit, four exponent bits with bias 7, three mantissa bits; 0x7F is NaN, there is no infinity."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = byte >> 3 & 0xF, byte & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


DECODED = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)


def decode(values: torch.Tensor) -> torch.Tensor:
    return DECODED[values.view(torch.uint8).long()]


def half_step(scale: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The largest error of a nearest e4m3: half of 2**-3 of the value's binade, or of the subnormal step."""
    return torch.maximum(values.abs().double() * 2.0**-4, scale.double() * 2.0**-10)


def empty_cache(kv_cache_dtype: str, activation: torch.dtype) -> torch.Tensor:
    """Poisoned, and with room between the blocks, as in a cache that many layers share."""
    dtype = activation if kv_cache_dtype == "auto" else torch.uint8
    storage = torch.full((BLOCKS, BLOCK_SIZE * WIDTH[kv_cache_dtype] + 64), 77, dtype=dtype)
    return storage[:, : BLOCK_SIZE * WIDTH[kv_cache_dtype]].unflatten(1, (BLOCK_SIZE, -1))


def test_every_code_is_read_as_its_definition_says() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(formats.FP8)
    torch.testing.assert_close(codes.double(), DECODED, rtol=0, atol=0, equal_nan=True)


def test_the_power_of_two_is_the_smallest_that_is_not_below() -> None:
    scale = torch.cat([torch.rand(1000) * 10.0 ** torch.randint(-8, 3, (1000,)), 2.0 ** torch.arange(-20.0, 8)])
    power = formats.power_of_two_above(scale).double()
    assert torch.equal(power, torch.exp2(torch.log2(power).round()))
    assert (power >= scale).all()
    assert (power / 2 < scale).all()


@pytest.mark.parametrize("power_of_two", [True, False])
def test_group_quantisation_stays_within_half_a_step(power_of_two: bool) -> None:
    values = torch.randn(50, 128) * 10.0 ** torch.randint(-6, 6, (50, 1))
    fp8, scale = formats.quantise_groups(values, 1e-10, power_of_two)
    back = decode(fp8) * scale.double()[:, None]
    assert ((back - values).abs() <= 1.0001 * half_step(scale[:, None], values)).all()
    largest = values.abs().amax(-1)
    assert (scale.double() * 448 >= largest.double() * (1 - 1e-6)).all()
    assert (scale * 448 <= largest * (2 if power_of_two else 1.0001)).all()


def test_a_group_of_zeros_has_the_floor_for_its_scale() -> None:
    fp8, scale = formats.quantise_groups(torch.zeros(1, 128), 1e-4, power_of_two=False)
    assert not decode(fp8).any()
    assert scale.item() == pytest.approx(1e-4 / 448)


@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_cache_dtype", list(WIDTH))
def test_mla_rows_come_back_and_nothing_else_is_touched(kv_cache_dtype: str, activation: torch.dtype) -> None:
    cache = empty_cache(kv_cache_dtype, activation)
    before = cache.clone()
    slots = torch.tensor([37, -1, 0, 63, 5])
    kv_c, k_pe = (torch.randn(6, width) * 3 for width in (512, 64))
    kv_c, k_pe = kv_c.to(activation), k_pe.to(activation)
    k_scale = torch.tensor(0.25)
    formats.write_mla(kv_c, k_pe, cache, slots, kv_cache_dtype, k_scale)

    live = slots >= 0
    blocks, rows = slots[live] // BLOCK_SIZE, slots[live] % BLOCK_SIZE
    read = formats.read_mla(cache, blocks, rows, kv_cache_dtype, k_scale).double()
    exact = torch.cat([kv_c, k_pe], -1)[:5][live].double()
    if kv_cache_dtype == "auto":
        allowed = torch.zeros_like(exact)
    elif kv_cache_dtype == "fp8":
        allowed = half_step(k_scale, exact)
    else:
        tiles = exact[:, :512].unflatten(-1, (4, 128)).abs().amax(-1).repeat_interleave(128, dim=-1)
        latent = half_step(tiles * 2 / 448, exact[:, :512])
        allowed = torch.cat([latent, exact[:, 512:].abs() * 2.0**-8], -1)
    assert ((read - exact).abs() <= allowed).all()

    untouched = torch.ones(BLOCKS, BLOCK_SIZE, dtype=torch.bool)
    untouched[blocks, rows] = False
    assert torch.equal(cache[untouched], before[untouched])


def test_a_row_of_656_bytes_is_laid_out_as_flashmla_reads_it() -> None:
    cache = empty_cache("fp8_ds_mla", torch.float32)
    kv_c, k_pe = torch.randn(1, 512), torch.randn(1, 64)
    formats.write_mla(kv_c, k_pe, cache, torch.tensor([18]), "fp8_ds_mla", ONE)
    row = bytes(cache[1, 2].tolist())
    scales = struct.unpack("<4f", row[512:528])
    for tile, scale in enumerate(scales):
        span = slice(128 * tile, 128 * (tile + 1))
        assert math.log2(scale).is_integer()
        back = torch.tensor([e4m3(byte) for byte in row[span]], dtype=torch.float64) * scale
        assert ((back - kv_c[0, span]).abs() <= half_step(torch.tensor(scale), kv_c[0, span])).all()
    assert row[528:] == k_pe.bfloat16().view(torch.uint8).numpy().tobytes()


def test_index_keys_lie_in_two_places_of_their_block() -> None:
    storage = torch.full((BLOCKS, BLOCK_SIZE * 132 + 32), 7, dtype=torch.uint8)
    cache = storage[:, : BLOCK_SIZE * 132].unflatten(1, (BLOCK_SIZE, 132))
    keys = torch.randn(3, 128)
    formats.write_index_keys(keys, cache, torch.tensor([20, -1, 63]))
    for key, slot in ((keys[0], 20), (keys[2], 63)):
        block, row = divmod(slot, BLOCK_SIZE)
        page = bytes(storage[block].tolist())
        scale = struct.unpack_from("<f", page, BLOCK_SIZE * 128 + 4 * row)[0]
        back = torch.tensor([e4m3(byte) for byte in page[128 * row : 128 * (row + 1)]], dtype=torch.float64) * scale
        assert ((back - key).abs() <= half_step(torch.tensor(scale), key)).all()
    written = (storage != 7).sum().item()
    assert written <= 2 * 132
    read = formats.read_index_keys(cache, torch.tensor([1]), 5, 128)
    assert read.shape == (5, 128)
    torch.testing.assert_close(read[4], keys[0], rtol=2**-4, atol=1e-2)


def test_cutting_a_request_into_blocks_changes_no_key() -> None:
    keys = torch.randn(40, 128)
    one = torch.zeros(1, 64, 132, dtype=torch.uint8)
    many = torch.zeros(BLOCKS, BLOCK_SIZE, 132, dtype=torch.uint8)
    order = torch.tensor([2, 0, 3])
    slots = torch.cat([block * BLOCK_SIZE + torch.arange(BLOCK_SIZE) for block in order])[:40]
    formats.write_index_keys(keys, one, torch.arange(40))
    formats.write_index_keys(keys, many, slots)
    assert torch.equal(
        formats.read_index_keys(one, torch.tensor([0]), 40, 128), formats.read_index_keys(many, order, 40, 128)
    )

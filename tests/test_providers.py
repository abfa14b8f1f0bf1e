"""Every provider gives the oracle's bytes: outputs, caches, poison and canaries alike.

The interpreter runs the real kernels, slowly: its cases are few and small, and chosen so that every value of
every axis occurs. `dsafuse verify` covers the product.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsafuse.numerics import FP8_FORMATS
from tests.inputs import (
    FN,
    FNUZ,
    OPS,
    assert_same_memory,
    cache_row,
    call_of,
    indexer_call,
    indexer_row,
    rope_table,
    run,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROVIDERS = ("interpreter", "split")

# Triton's interpreter takes a maximum over nothing but NaN through numpy, which warns.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")

MLA_CASES: dict[str, dict[str, Any]] = {
    "plain, one head, block of 1": {"heads": 1, "layout": "plain", "block_size": 1},
    "plain fp32": {"layout": "plain", "activation": FP32},
    "plain fp16, neox, 16 heads": {"heads": 16, "layout": "plain", "activation": FP16, "rope_style": "neox"},
    "plain, fp8 query, unrounded": {"layout": "plain", "query": FN, "rounding": "fp32"},
    "fp8, 7 heads, block of 64": {"heads": 7, "layout": "fp8", "block_size": 64},
    "fp8, fp8 query, 16 heads": {"heads": 16, "layout": "fp8", "query": FN},
    "fp8 fp32, fp8 query, neox, unrounded": {
        "layout": "fp8",
        "activation": FP32,
        "query": FN,
        "rope_style": "neox",
        "rounding": "fp32",
    },
    "fp8 fp16 fnuz, block of 1": {"layout": "fp8", "activation": FP16, "query": FNUZ, "fp8": FNUZ, "block_size": 1},
    "fp8 unrounded": {"layout": "fp8", "rounding": "fp32"},
    "fp8_ds_mla, one head, fp8 query": {"heads": 1, "query": FN},
    "fp8_ds_mla fp16, 17 heads": {"heads": 17, "activation": FP16, "tokens": 2},
    "fp8_ds_mla fp32, neox, block of 1": {"activation": FP32, "rope_style": "neox", "block_size": 1},
    "fp8_ds_mla fp32, unrounded, block of 64": {"activation": FP32, "rounding": "fp32", "block_size": 64},
    "fp8_ds_mla fnuz, 7 heads": {"heads": 7, "query": FNUZ, "fp8": FNUZ},
    "fp8_ds_mla, fp32 scales": {"heads": 1, "scale_rule": "fp32", "tokens": 9},
    "fp8_ds_mla fp32, fp32 scales, unrounded, block of 1": {
        "heads": 1,
        "activation": FP32,
        "scale_rule": "fp32",
        "rounding": "fp32",
        "block_size": 1,
    },
    "fp8_ds_mla fp16 fnuz, fp32 scales": {"heads": 1, "activation": FP16, "fp8": FNUZ, "scale_rule": "fp32"},
}
INDEXER_CASES: dict[str, dict[str, Any]] = {
    "one head, block of 1": {"heads": 1, "block_size": 1},
    "interleaved, 16 heads": {"heads": 16, "rope_style": "interleaved", "tokens": 3},
    "fp16, 7 heads, block of 64": {"heads": 7, "activation": FP16, "block_size": 64},
    "fp32 activations": {"activation": FP32},
    "unrounded, interleaved": {"rounding": "fp32", "rope_style": "interleaved"},
    "fp32 scales": {"scale_rule": "fp32"},
    "fp32 scales, fp32 activations, unrounded": {"scale_rule": "fp32", "activation": FP32, "rounding": "fp32"},
    "fnuz, 17 heads": {"fp8": FNUZ, "heads": 17, "tokens": 2},
    "fnuz fp16, fp32 scales, interleaved, block of 1": {
        "fp8": FNUZ,
        "activation": FP16,
        "scale_rule": "fp32",
        "rope_style": "interleaved",
        "block_size": 1,
    },
    "a large eps": {"eps": 0.5},
    "tiled16": {"kv_layout": "tiled16", "tokens": 7},
    "tiled16, interleaved, block of 64": {"kv_layout": "tiled16", "rope_style": "interleaved", "block_size": 64},
}


def cases(table: dict[str, dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", table.values(), ids=table)


def seed_of(case: dict[str, Any]) -> int:
    return sum(map(ord, repr(sorted(case.items(), key=str))))


@pytest.mark.parametrize("provider", PROVIDERS)
@cases(MLA_CASES)
def test_the_mla_fusion_gives_the_oracles_bytes(provider: str, case: dict[str, Any]) -> None:
    call = call_of("mla", **case, seed=seed_of(case))
    got = run("mla", provider, call)  # before the oracle, so that it can't find the answer in reused memory
    assert_same_memory(got, run("mla", "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
@cases(INDEXER_CASES)
def test_the_indexer_fusion_gives_the_oracles_bytes(provider: str, case: dict[str, Any]) -> None:
    call = indexer_call(**case, seed=seed_of(case))
    got = run("indexer", provider, call)
    assert_same_memory(got, run("indexer", "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_sixteen_bit_rope_table_is_read_as_it_is(op: str, dtype: torch.dtype, provider: str) -> None:
    call = call_of(op, tokens=2, heads=1, cos_sin_cache=rope_table(dtype))
    assert_same_memory(run(op, provider, call), run(op, "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64], ids=str)
def test_head_weights_and_norm_parameters_come_in_any_float_dtype(dtype: torch.dtype, provider: str) -> None:
    call = indexer_call(tokens=2)
    for name in ("weights", "norm_weight", "norm_bias"):
        call[name] = call[name].to(dtype)
    assert_same_memory(run("indexer", provider, call), run("indexer", "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("integers", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_slots_and_positions_come_in_either_integer_width(
    op: str, integers: tuple[torch.dtype, torch.dtype], provider: str
) -> None:
    call = call_of(op, tokens=3, heads=1)
    call["slot_mapping"], call["positions"] = (call["slot_mapping"].to(integers[0]), call["positions"].to(integers[1]))
    assert_same_memory(run(op, provider, call), run(op, "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("op", OPS)
def test_fresh_outputs_are_allocated_packed_and_hold_the_same_values(op: str, provider: str) -> None:
    call = call_of(op, tokens=3)
    if op == "mla":
        call |= {"q_dtype": FN, "q_out": None, "q_scale": torch.tensor(0.5)}
    else:
        call |= {"q_out": None, "weights_out": None}
    got, want = (OPS[op].with_provider(name)(**call) for name in (provider, "oracle"))
    if op == "mla":
        got, want = (got,), (want,)
    assert [(t.dtype, tuple(t.shape)) for t in got] == (
        [(FN, (3, 3, 576))] if op == "mla" else [(FN, (3, 3, 128)), (FP32, (3, 3))]
    )
    for mine, theirs in zip(got, want, strict=True):
        assert mine.is_contiguous()
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_packed_aligned_inputs_take_the_vector_path_to_the_same_bytes(provider: str) -> None:
    for op in OPS:
        call = call_of(op, tokens=2, heads=4)
        for name, value in call.items():
            if isinstance(value, torch.Tensor) and name not in ("kv_cache", "q_out", "weights_out"):
                call[name] = value.contiguous().clone()
        assert_same_memory(run(op, provider, call), run(op, "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("columns", [1, 3], ids=["odd", "three"])
def test_rows_that_start_at_odd_elements_are_read_where_they_are(columns: int, provider: str) -> None:
    def shifted(value: torch.Tensor) -> torch.Tensor:
        wide = value.new_zeros(*value.shape[:-1], value.shape[-1] + columns)
        wide[..., columns:] = value
        return wide[..., columns:]

    for op, names in (("mla", ("q_nope", "q_pe", "kv_c", "k_pe")), ("indexer", ("q", "k", "weights"))):
        call = call_of(op, tokens=2)
        call |= {name: shifted(call[name]) for name in names}
        assert_same_memory(run(op, provider, call), run(op, "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_inputs_expanded_over_tokens_or_heads_are_read_by_their_zero_strides(provider: str) -> None:
    g = torch.Generator().manual_seed(9)
    row = torch.randn(1, 1, 576, generator=g).to(BF16)
    call = call_of("mla", tokens=3)
    call |= {
        "q_nope": row[..., :512].expand(3, 3, 512),
        "q_pe": row[..., 512:].expand(3, 3, 64),
        "kv_c": row[0, :, :512].expand(3, 512),
        "k_pe": row[0, :, 512:].expand(3, 64),
    }
    assert_same_memory(run("mla", provider, call), run("mla", "oracle", call))
    call = indexer_call(tokens=3)
    call |= {
        "q": row[..., :128].expand(3, 3, 128),
        "k": row[0, :, :128].expand(3, 128),
        "weights": torch.randn(1, 3, generator=g).expand(3, 3),
    }
    assert_same_memory(run("indexer", provider, call), run("indexer", "oracle", call))


def specials(shape: tuple[int, ...], activation: torch.dtype) -> torch.Tensor:
    """Rows that hold NaN, infinities, huge, tiny and negative zero values among ordinary ones."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(*shape, generator=generator).to(activation)
    odd = (
        float("nan"),
        float("inf"),
        -float("inf"),
        -0.0,
        0.0,
        float(torch.finfo(activation).max),
        float(torch.finfo(activation).smallest_normal),
    )
    for row, value in enumerate(odd):
        x[row, ..., 5] = value
        x[row, ..., 40] = value
    x[len(odd)] = 0.0
    x[len(odd) + 1] = float("nan")
    return x


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("activation", [BF16, FP32], ids=str)
@pytest.mark.parametrize(("layout", "rule"), [("fp8", "ue8m0"), ("fp8_ds_mla", "ue8m0"), ("fp8_ds_mla", "fp32")])
def test_nan_and_infinity_in_mla_inputs_give_the_oracles_bytes(
    layout: str, rule: str, activation: torch.dtype, provider: str
) -> None:
    fp8 = FNUZ if activation is FP32 else FN
    call = call_of("mla", 9, 1, layout=layout, activation=activation, query=fp8, fp8=fp8, scale_rule=rule)
    call["slot_mapping"] = torch.arange(9)
    call |= {
        "q_nope": specials((9, 1, 512), activation),
        "q_pe": specials((9, 1, 64), activation),
        "kv_c": specials((9, 512), activation),
        "k_pe": specials((9, 64), activation),
    }
    if layout == "fp8_ds_mla":  # the rotary part is bf16 there, whose NaNs differ in their payload
        call["k_pe"] = call["k_pe"].nan_to_num(0.0)
        call["k_pe"][call["k_pe"].isinf()] = 0.0
    assert_same_memory(run("mla", provider, call), run("mla", "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("scale_rule", ["ue8m0", "fp32"])
def test_nan_and_infinity_in_indexer_queries_give_the_oracles_bytes(scale_rule: str, provider: str) -> None:
    call = indexer_call(9, 1, scale_rule=scale_rule, activation=FP32, slot_mapping=torch.empty(0, dtype=torch.int64))
    call |= {"q": specials((9, 1, 128), FP32), "weights": torch.ones(9, 1)}
    assert_same_memory(run("indexer", provider, call), run("indexer", "oracle", call))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_key_row_with_nan_or_infinity_is_nan_through_its_norm_and_harms_no_other(provider: str) -> None:
    for value in (float("nan"), float("inf")):
        call = indexer_call(3, 1, slot_mapping=torch.tensor([2, 5, 7]))
        call["k"][1, 77] = value
        got, want = run("indexer", provider, call), run("indexer", "oracle", call)
        assert_same_memory(got, want)
        codes, scale = indexer_row(got["kv_cache"], 5)
        assert codes.unique().tolist() == [0x7F]
        assert scale == 2.0**-22
        assert 0x7F not in indexer_row(got["kv_cache"], 2)[0].tolist()


@pytest.mark.parametrize("provider", PROVIDERS)
def test_an_fp32_tile_scale_is_floored_at_the_smallest_normal_number(provider: str) -> None:
    """Tiles of nothing but zeros, of subnormal numbers, of quotients around the floor, and of NaN."""
    tiny = torch.finfo(FP32).tiny
    call = call_of("mla", 3, 1, activation=FP32, scale_rule="fp32", slot_mapping=torch.arange(3))
    for tile, most in enumerate((0.0, tiny / 8, 447 * tiny, 449 * tiny)):
        call["kv_c"][0, 128 * tile : 128 * tile + 128] = most * torch.linspace(-1, 1, 128)
    call["kv_c"][1, :128] = torch.nan
    got = run("mla", provider, call)
    assert_same_memory(got, run("mla", "oracle", call))
    scales = [cache_row(got["kv_cache"], token)[512:528].clone().view(FP32).tolist() for token in range(2)]
    assert scales[0] == [tiny, tiny, tiny, float(torch.tensor(449 * tiny) / 448)]
    assert scales[1][0] == tiny


@pytest.mark.parametrize("fp8", [FN, FNUZ])
def test_the_largest_value_decides_between_two_scales_to_the_last_bit(fp8: torch.dtype) -> None:
    """The kernels take a power of two from the bits of a row's maximum, the oracle from a rounded quotient."""
    most = FP8_FORMATS[fp8].max * 2.0 ** torch.arange(-20, 20, 4)
    zero, inf = torch.zeros_like(most), torch.full_like(most, torch.inf)
    edges = torch.cat([torch.nextafter(most, zero), most, torch.nextafter(most, inf)])
    indexer = indexer_call(len(edges), 1, activation=FP32, fp8=fp8, rounding="fp32")
    indexer["q"].zero_()[..., 100] = edges[:, None]
    mla = call_of("mla", len(edges), 1, activation=FP32, fp8=fp8)
    mla["kv_c"].zero_()[:, 7] = edges
    for op, call in (("indexer", indexer), ("mla", mla)):
        assert_same_memory(run(op, "interpreter", call), run(op, "oracle", call))

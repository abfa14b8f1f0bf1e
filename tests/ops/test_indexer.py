"""The indexer oracle against float64, torch.nn and bytes worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from tests.inputs import FN, FNUZ, Call, indexer_call, indexer_row, run

STYLES = pytest.mark.parametrize("style", ["neox", "interleaved"])


def rotated64(x: torch.Tensor, call: Call, style: str) -> torch.Tensor:
    """The leading 64 of 128 dims rotated in float64, pair by pair."""
    table = call["cos_sin_cache"][call["positions"].long()].double()
    out = x.double().clone()
    for i in range(32):
        a, b = (2 * i, 2 * i + 1) if style == "interleaved" else (i, i + 32)
        cos, sin = table[:, i], table[:, 32 + i]
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        out[..., a] = x[..., a].double() * cos - x[..., b].double() * sin
        out[..., b] = x[..., b].double() * cos + x[..., a].double() * sin
    return out


def key64(call: Call, style: str) -> torch.Tensor:
    normed = torch.nn.functional.layer_norm(
        call["k"].double(), (128,), call["norm_weight"].double(), call["norm_bias"].double(), 1e-6
    )
    return rotated64(normed, call, style)


def assert_quantised(got: torch.Tensor, scale: torch.Tensor, want: torch.Tensor, once_more: float) -> None:
    """got * scale is `want` to half a step of fp8 and some intermediate roundings."""
    error = (got.double() * scale.double() - want).abs()
    allowed = want.abs() * (2.0**-4 + once_more) + scale.double() * 2.0**-10 + once_more * want.abs().amax(-1, True)
    assert bool((error <= allowed).all())


@STYLES
@pytest.mark.parametrize("rounding", ["split", "fp32"])
@pytest.mark.parametrize("scale_rule", ["ue8m0", "fp32"])
@pytest.mark.parametrize("fp8", [FN, FNUZ], ids=str)
def test_queries_and_keys_read_back_as_the_float64_values(
    fp8: torch.dtype, scale_rule: str, rounding: str, style: str
) -> None:
    limit = {FN: 448.0, FNUZ: 224.0}[fp8]
    call = indexer_call(
        9, 5, fp8=fp8, scale_rule=scale_rule, rounding=rounding, rope_style=style, slot_mapping=torch.arange(9) * 2
    )
    done = run("indexer", "oracle", call)
    once_more = 2.0**-7 if rounding == "split" else 1e-6
    q_scale = done["weights_out"][:, :5].double() / call["weights"].double() / call["weights_scale"]
    assert_quantised(done["q_out"][:, :5].float(), q_scale[..., None], rotated64(call["q"], call, style), once_more)
    keys = [indexer_row(done["kv_cache"], 2 * token) for token in range(9)]
    codes = torch.stack([codes.view(fp8).float() for codes, _ in keys])
    scales = torch.tensor([[scale] for _, scale in keys], dtype=torch.float64)
    exact = key64(call, style)
    assert_quantised(codes, scales, exact, once_more)
    largest = exact.abs().amax(-1)
    for scale, bound in zip(scales.flatten().tolist(), (largest / limit).tolist(), strict=True):
        if scale_rule == "ue8m0":
            assert math.frexp(scale)[0] == 0.5
            assert bound * 0.99 <= scale <= 2.02 * bound
        else:
            assert scale == pytest.approx(bound, rel=once_more)


def test_the_key_is_torch_nn_layer_norm_before_anything_else() -> None:
    norm = torch.nn.LayerNorm(128, eps=0.01)
    call = indexer_call(4, 1, activation=torch.float32, rounding="fp32", scale_rule="fp32", eps=0.01)
    call |= {"slot_mapping": torch.arange(4), "positions": torch.zeros(4, dtype=torch.int64)}
    with torch.no_grad():
        norm.weight.copy_(call["norm_weight"])
        norm.bias.copy_(call["norm_bias"])
        want = norm(call["k"])
    done = run("indexer", "oracle", call)
    for token in range(4):
        codes, scale = indexer_row(done["kv_cache"], token)
        assert scale == pytest.approx(float(want[token].abs().max()) / 448, rel=1e-5)
        assert torch.allclose(codes.view(FN).float() * scale, want[token], rtol=2.0**-4 + 1e-4, atol=scale * 2.0**-9)


def one_query(row: list[float], **keywords: object) -> tuple[torch.Tensor, float]:
    """(codes, scale) of a single head at position 0, its weight 1."""
    call = indexer_call(1, 1, slot_mapping=torch.empty(0, dtype=torch.int64), weights_scale=1.0, **keywords)
    call["q"][0, 0] = torch.tensor(row)
    call["positions"].zero_()
    call["weights"] = torch.ones(1, 1)
    done = run("indexer", "oracle", call)
    return done["q_out"][0, 0].view(torch.uint8), float(done["weights_out"][0, 0])


@pytest.mark.parametrize(
    ("amax", "fp8", "scale", "code"),
    [
        (0.0, FN, 2.0**-42, 0x00),
        (300.0, FN, 1.0, 0x79),  # between 288 (0x79) and 320 (0x7A)
        (448.0, FN, 1.0, 0x7E),
        (450.0, FN, 2.0, 0x76),
        (232.0, FNUZ, 2.0, 0x76),  # 116 is a tie of 112 (0x76) and 120 (0x77)
        (224.0, FNUZ, 1.0, 0x7E),
    ],
)
def test_query_scales_worked_out_by_hand(amax: float, fp8: torch.dtype, scale: float, code: int) -> None:
    codes, got = one_query([0.0] * 100 + [amax] + [0.0] * 27, fp8=fp8)
    assert got == scale
    assert int(codes[100]) == code


def test_a_zero_query_has_zero_codes_in_either_format() -> None:
    for fp8 in (FN, FNUZ):
        assert one_query([0.0] * 128, fp8=fp8)[0].unique().tolist() == [0x00]


@pytest.mark.parametrize(("fp8", "scale"), [(FN, 2.0**-22), (FNUZ, 2.0**-21)], ids=str)
def test_a_key_row_that_norms_to_zero_has_the_floor_for_a_scale(fp8: torch.dtype, scale: float) -> None:
    call = indexer_call(1, 1, fp8=fp8, slot_mapping=torch.tensor([0]))
    call["k"].fill_(3.0)
    call["norm_bias"] = torch.zeros(128)
    codes, got = indexer_row(run("indexer", "oracle", call)["kv_cache"], 0)
    assert got == scale
    assert (codes & 0x7F).unique().tolist() == [0x00]  # e4m3fn has a -0


@pytest.mark.parametrize("floor", ["query 1e-10", "key 1e-4"])
def test_fp32_scales_of_zero_rows_are_the_floor_over_the_maximum(floor: str) -> None:
    if floor == "query 1e-10":
        got, value = one_query([0.0] * 128, scale_rule="fp32")[1], 1e-10
    else:
        call = indexer_call(1, 1, scale_rule="fp32", slot_mapping=torch.tensor([0]))
        call["k"].fill_(3.0)
        call["norm_bias"] = torch.zeros(128)
        got, value = indexer_row(run("indexer", "oracle", call)["kv_cache"], 0)[1], 1e-4
    assert got == float(torch.tensor(value) / 448)


@pytest.mark.parametrize("provider", ["oracle", "split", "interpreter"])
@pytest.mark.parametrize(("rounding", "scale"), [("split", 2.0**-42), ("fp32", 2.0**-22)])
def test_the_floor_of_a_query_is_that_of_the_writers_who_round_so(rounding: str, scale: float, provider: str) -> None:
    call = indexer_call(1, 1, rounding=rounding, weights_scale=1.0)
    call["q"].zero_()
    call["weights"] = torch.ones(1, 1)
    assert float(run("indexer", provider, call)["weights_out"][0, 0]) == scale


def test_the_fold_multiplies_by_the_head_scale_first() -> None:
    call = indexer_call(6, 7, scale_rule="fp32", weights_scale=0.3)
    done = run("indexer", "oracle", call)
    ones = run("indexer", "oracle", call | {"weights": torch.ones(6, 7), "weights_scale": 1.0})["weights_out"][:, :7]
    want = (call["weights"].float() * ones) * torch.tensor(0.3)
    assert torch.equal(done["weights_out"][:, :7], want)
    other = call["weights"].float() * (ones * torch.tensor(0.3))
    assert not torch.equal(other, want)  # the order shows


@pytest.mark.parametrize(("style", "second"), [("interleaved", 1), ("neox", 32)])
def test_zero_to_sixty_three_at_position_one_tells_the_styles_apart(style: str, second: int) -> None:
    call = indexer_call(1, 1, activation=torch.float32, rope_style=style, weights_scale=1.0)
    call["q"][0, 0, :64], call["q"][0, 0, 64:] = torch.arange(64.0), 0.0
    call |= {"positions": torch.tensor([1]), "weights": torch.ones(1, 1)}
    done = run("indexer", "oracle", call)
    value = done["q_out"][0, 0].float() * done["weights_out"][0, 0]
    assert float(value[0]) == pytest.approx(-second * math.sin(1), rel=0.07)
    assert float(value[second]) == pytest.approx(second * math.cos(1), rel=0.07)


def test_neox_is_the_default_style() -> None:
    call = indexer_call(2, 2)
    bare = run("indexer", "oracle", call)["q_out"][:, :2].view(torch.uint8)
    neox, interleaved = (
        run("indexer", "oracle", call | {"rope_style": s})["q_out"][:, :2].view(torch.uint8)
        for s in ("neox", "interleaved")
    )
    assert torch.equal(bare, neox)
    assert not torch.equal(bare, interleaved)


def test_the_trailing_half_is_not_rotated() -> None:
    call = indexer_call(3, 2, slot_mapping=torch.tensor([0, 1, 2]))
    call["q"][..., :64] = 0.0
    turned = run("indexer", "oracle", call)["q_out"][:, :2, 64:]
    still = run("indexer", "oracle", call | {"positions": torch.zeros(3, dtype=torch.int64)})["q_out"][:, :2, 64:]
    assert torch.equal(turned.view(torch.uint8), still.view(torch.uint8))


def test_norm_parameters_in_fp32_are_not_read_as_bf16() -> None:
    # One plus half a bf16 step, on which the scale of a row turns: 448 fits, 448 * (1 + 2**-9) does not.
    call = indexer_call(1, 1, activation=torch.float32, slot_mapping=torch.tensor([0]), eps=0.0)
    call["k"][0] = torch.tensor([-1.0, 1.0]).repeat(64)
    call |= {"norm_bias": torch.zeros(128), "positions": torch.zeros(1, dtype=torch.int64)}
    scales = []
    for weight in (448.0, 448.0 * (1 + 2.0**-12)):
        call["norm_weight"] = torch.full((128,), weight)
        scales.append(indexer_row(run("indexer", "oracle", call)["kv_cache"], 0)[1])
    assert scales == [1.0, 2.0]


def test_eps_is_added_to_the_variance() -> None:
    call = indexer_call(1, 1, activation=torch.float32, slot_mapping=torch.tensor([0]), eps=3.0, scale_rule="fp32")
    call["k"][0] = torch.tensor([-1.0, 1.0]).repeat(64)
    call |= {"norm_bias": torch.zeros(128), "norm_weight": torch.ones(128), "positions": torch.zeros(1).long()}
    _, scale = indexer_row(run("indexer", "oracle", call)["kv_cache"], 0)
    assert scale == float(torch.tensor(0.5) / 448)


def test_rounding_split_rounds_the_normed_key_to_the_activation_dtype() -> None:
    # The largest value is 448 * (1 + 2**-10) before and 448 after rounding to bf16: one doubles the scale.
    call = indexer_call(1, 1, slot_mapping=torch.tensor([0]), eps=0.0)
    call["k"][0] = torch.tensor([-1.0, 1.0]).repeat(64)
    call |= {"norm_bias": torch.zeros(128), "positions": torch.zeros(1, dtype=torch.int64)}
    call["norm_weight"] = torch.full((128,), 448.0 * (1 + 2.0**-10))
    scales = [
        indexer_row(run("indexer", "oracle", call | {"rounding": r})["kv_cache"], 0)[1] for r in ("split", "fp32")
    ]
    assert scales == [1.0, 2.0]


def test_rounding_split_rounds_the_rotated_query_to_the_activation_dtype() -> None:
    call = indexer_call(1, 1, weights_scale=1.0, cos_sin_cache=torch.tensor([[1 + 2.0**-10] + [1.0] * 31 + [0.0] * 32]))
    call["q"][0, 0] = 0.0
    call["q"][0, 0, 0] = 448.0
    call |= {"positions": torch.zeros(1).long(), "weights": torch.ones(1, 1), "slot_mapping": torch.zeros(0).long()}
    scales = [float(run("indexer", "oracle", call | {"rounding": r})["weights_out"][0, 0]) for r in ("split", "fp32")]
    assert scales == [1.0, 2.0]


def test_numbered_tokens_of_one_block_stand_in_their_own_rows() -> None:
    call = indexer_call(2, 1, block_size=64, slot_mapping=torch.tensor([1, 0]), scale_rule="fp32")
    done = run("indexer", "oracle", call)
    for token, slot in enumerate((1, 0)):
        alone = indexer_call(2, 1, block_size=64, slot_mapping=torch.tensor([-1, -1]), scale_rule="fp32")
        alone["slot_mapping"][token] = slot
        codes, scale = indexer_row(done["kv_cache"], slot)
        want_codes, want_scale = indexer_row(run("indexer", "oracle", alone)["kv_cache"], slot)
        assert torch.equal(codes, want_codes)
        assert scale == want_scale

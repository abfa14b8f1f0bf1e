"""Both fp8 formats from end to end: the largest value, zero, NaN and its sign, and who may write which."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dsafuse.dispatch import PROVIDERS
from dsafuse.kernels import parameters, plans
from dsafuse.numerics import FP8_FORMATS
from dsafuse.target import Target
from tests.inputs import EVERY_OP, FN, FNUZ, Call, assert_same_memory, call_of, mla_call, run

HERE = ("oracle", "split", "interpreter")
WITH_QUERY = ("mla", "qk", "queries")


def fp8_call(op: str, fp8: torch.dtype, **options: object) -> Call:
    layout = {} if op in ("indexer", "queries") else {"layout": "fp8"}
    query = {"query": fp8} if op in WITH_QUERY else {}
    return call_of(op, 5, fp8=fp8, **layout, **query, **options)


@pytest.mark.parametrize("provider", ["split", "interpreter"])
@pytest.mark.parametrize("op", EVERY_OP)
def test_fnuz_bytes_are_the_oracles(op: str, provider: str) -> None:
    call = fp8_call(op, FNUZ, seed=5)
    but = ("q_c_out", "kv_c_out", "kv_cache") if op == "latents" else ()  # whose norms have an order of their own
    assert_same_memory(run(op, provider, call), run(op, "oracle", call), but=but)


def extremes(fp8: torch.dtype, nan_sign: float) -> Call:
    """A call whose first query head has, from dim 0: overflow both ways, tiny both ways, both zeros, infinity, NaN."""
    call = mla_call(1, 1, layout="fp8", query=fp8, fp8=fp8, q_scale=torch.tensor([1.0]), k_scale=torch.tensor(1.0))
    nan = torch.tensor(float("nan")).copysign(torch.tensor(nan_sign))
    row = torch.tensor([1e4, -1e4, 1e-9, -1e-9, 0.0, -0.0, float("inf"), float("-inf"), nan])
    call["q_nope"][0, 0, : len(row)] = row.bfloat16()
    call["kv_c"][0, : len(row)] = row.bfloat16()
    call["slot_mapping"][0] = 1
    return call


@pytest.mark.parametrize("nan_sign", [1.0, -1.0])
@pytest.mark.parametrize("provider", HERE)
@pytest.mark.parametrize(
    ("fp8", "want"),
    [
        (FN, [0x7E, 0xFE, 0x00, 0x80, 0x00, 0x80, 0x7E, 0xFE, 0x7F]),
        (FNUZ, [0x7E, 0xFE, 0x00, 0x00, 0x00, 0x00, 0x7E, 0xFE, 0x80]),
    ],
    ids=["e4m3fn", "e4m3fnuz"],
)
def test_extremes_are_stored_as_the_format_says(
    fp8: torch.dtype, want: list[int], provider: str, nan_sign: float
) -> None:
    done = run("mla", provider, extremes(fp8, nan_sign))
    assert done["q_out"][0, 0].view(torch.uint8)[:9].tolist() == want
    assert done["kv_cache"][0, 1].view(torch.uint8)[:9].tolist() == want


def test_the_largest_byte_is_the_formats_maximum() -> None:
    for fp8, fmt in FP8_FORMATS.items():
        assert torch.tensor(0x7E, dtype=torch.uint8).view(fp8).float() == fmt.max


# Where the conversion keeps a NaN's sign


def test_only_the_ocp_conversion_of_amd_keeps_the_sign_of_nan() -> None:
    kept = {name for name in Target.names() if Target.named(name).signed_nan}
    assert kept == {"gfx950", "gfx1200", "gfx1201"}


@pytest.mark.parametrize("name", ["gfx942", "gfx950", "sm_90"])
def test_kernels_are_told_by_the_target_alone(name: str) -> None:
    target = Target.named(name)
    fp8 = next(iter(target.fp8))
    _, config = EVERY_OP["mla"].resolve(**mla_call(1, 1, query=fp8, fp8=fp8))
    constants = parameters.constants_of(config, target, plans.plan_of(target, config))
    assert constants["SIGNED_NAN"] is target.signed_nan


@pytest.mark.parametrize("signed_nan", [False, True])
def test_either_way_of_casting_gives_the_same_bytes(signed_nan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    want = run("mla", "oracle", extremes(FN, -1.0))
    cpu = replace(Target.named("cpu"), signed_nan=signed_nan)
    monkeypatch.setattr(Target, "of", staticmethod(lambda _device: cpu))
    assert_same_memory(run("mla", "interpreter", extremes(FN, -1.0)), want)


# Who may write which


@pytest.mark.parametrize(
    ("name", "fp8", "rejected"),
    [
        ("gfx942", FNUZ, False),
        ("gfx942", FN, True),
        ("gfx950", FNUZ, True),
        ("gfx950", FN, False),
        ("sm_90", FNUZ, True),
        ("sm_100", FNUZ, True),
        ("gfx90a", FNUZ, True),
    ],
)
@pytest.mark.parametrize("op", EVERY_OP)
def test_a_format_that_a_target_lacks_is_rejected_by_name(op: str, name: str, fp8: torch.dtype, rejected: bool) -> None:
    _, config = EVERY_OP[op].resolve(**fp8_call(op, fp8))
    decision = EVERY_OP[op].choose(config, Target.named(name))
    assert (decision.provider is None) is rejected
    if rejected:
        reasons = [verdict.reason for verdict in decision.trace]
        assert len(reasons) == len(PROVIDERS)
        assert f"{name} has no conversion to {fp8}" in reasons

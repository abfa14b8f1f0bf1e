"""Who runs an op, and why not the others. Every reason is reached here, by name, without a GPU."""

from __future__ import annotations

import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import dispatch, switches
from dsafuse.dispatch import PROVIDERS, Accepted, Decision, NoProviderError, Rejected
from dsafuse.kernels import launch
from dsafuse.target import Target
from tests.inputs import FN, FNUZ, OPS, assert_same_memory, call_of, indexer_call, mla_call, twin

BOTH = pytest.mark.parametrize("op", OPS)


def decide(op: str, target: str, *, here: bool = False, **keywords: Any) -> Decision:
    _, config = OPS[op].resolve(**call_of(op, **keywords))
    return OPS[op].choose(config, Target.named(target), here=here)


def reasons(decision: Decision) -> dict[str, str]:
    return {verdict.provider: verdict.reason for verdict in decision.trace if isinstance(verdict, Rejected)}


@BOTH
@pytest.mark.parametrize("target", ["sm_89", "sm_90", "sm_100", "sm_120", "gfx950", "gfx1201"])
def test_gpus_with_e4m3fn_run_the_kernels(op: str, target: str) -> None:
    decision = decide(op, target)
    assert decision.trace == (Accepted("triton"),)
    assert decision.provider == "triton"


@BOTH
def test_gfx942_runs_fnuz_and_declines_e4m3fn(op: str) -> None:
    assert decide(op, "gfx942", fp8=FNUZ).provider == "triton"
    declined = decide(op, "gfx942", fp8=FN)
    assert declined.provider is None
    assert reasons(declined)["triton"] == "gfx942 has no conversion to torch.float8_e4m3fn"
    assert reasons(declined)["split"] == "gfx942 has no conversion to torch.float8_e4m3fn"


@pytest.mark.parametrize("target", ["sm_90", "gfx950"])
def test_a_target_without_fnuz_says_so(target: str) -> None:
    assert reasons(decide("indexer", target, fp8=FNUZ))["triton"] == (
        f"{target} has no conversion to torch.float8_e4m3fnuz"
    )


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "gfx90a"])
def test_a_gpu_without_fp8_runs_what_needs_none(target: str) -> None:
    assert decide("mla", target, layout="plain").provider == "triton"
    for declined in (
        decide("mla", target, layout="plain", query=FN),
        decide("mla", target, layout="fp8"),
        decide("indexer", target),
    ):
        assert declined.provider is None
        assert reasons(declined)["triton"] == f"{target} has no conversion to torch.float8_e4m3fn"


@BOTH
def test_on_cpu_the_unfused_chain_runs_and_the_trace_says_why(op: str) -> None:
    assert reasons(decide(op, "cpu")) == {
        "triton": "kernels are compiled for GPUs, and the tensors are on cpu",
        "interpreter": "it is slow and for proof only; DSAFUSE_PROVIDER=interpreter asks for it",
    }


def test_the_interpreter_declines_a_gpu() -> None:
    with switches.override(provider="interpreter"):
        assert reasons(decide("mla", "gfx950")) == {
            "triton": "DSAFUSE_PROVIDER=interpreter names another",
            "interpreter": "kernels are interpreted on CPU, and the target is gfx950",
            "split": "DSAFUSE_PROVIDER=interpreter names another",
        }


def test_the_interpreter_declines_a_format_that_its_target_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    _, config = OPS["indexer"].resolve(**indexer_call())
    narrow = Target("cpu", "cpu", frozenset())
    assert PROVIDERS["interpreter"].load().why_not(config, narrow) == "cpu has no conversion to torch.float8_e4m3fn"


@BOTH
def test_mode_off_never_fuses(op: str) -> None:
    with switches.override(mode="off"):
        decision = decide(op, "sm_90")
    assert decision.provider == "split"
    assert reasons(decision) == {"triton": "DSAFUSE_MODE=off", "interpreter": "DSAFUSE_MODE=off"}


@pytest.mark.parametrize(("op", "other"), [("mla", "indexer"), ("indexer", "mla")])
def test_ops_that_leave_a_fusion_out_are_named(op: str, other: str) -> None:
    with switches.override(ops=frozenset({other})):
        assert decide(op, "sm_90").provider == "split"
        assert reasons(decide(op, "sm_90"))["triton"] == f"DSAFUSE_OPS={other} leaves out {op}"
        assert decide(other, "sm_90").provider == "triton"


def test_strict_raises_the_trace_instead_of_falling_back() -> None:
    with switches.override(mode="strict"), pytest.raises(NoProviderError) as error:
        OPS["mla"](**mla_call())
    assert str(error.value).splitlines() == [
        "fused_qk_rope_concat_and_cache_mla on cpu: no provider",
        "  triton: rejected: kernels are compiled for GPUs, and the tensors are on cpu",
        "  interpreter: rejected: it is slow and for proof only; DSAFUSE_PROVIDER=interpreter asks for it",
        "  split: rejected: DSAFUSE_MODE=strict forbids the unfused chain",
    ]


def test_strict_is_content_where_a_fused_provider_runs() -> None:
    with switches.override(mode="strict"):
        assert decide("mla", "sm_90").provider == "triton"
    with switches.override(mode="strict", provider="interpreter"):
        assert decide("mla", "cpu").provider == "interpreter"


def test_split_may_be_asked_for_by_name_even_under_strict() -> None:
    with switches.override(mode="strict", provider="split"):
        assert decide("mla", "sm_90").provider == "split"


def test_a_named_provider_that_declines_raises_and_writes_nothing() -> None:
    call = mla_call()
    mine = twin(call)
    with switches.override(provider="triton"), pytest.raises(NoProviderError, match="triton: rejected: kernels are co"):
        OPS["mla"](**mine)
    assert_same_memory(mine, call)


@pytest.mark.parametrize(
    ("in_its_place", "why"),
    [
        (None, "triton is not installed"),
        (ModuleType("triton"), "triton is not there: what sys.modules has .* without a spec"),
    ],
    ids=["nothing", "a stand-in"],
)
def test_without_triton_installed_the_chain_runs_here_and_says_so(
    in_its_place: ModuleType | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", in_its_place)
    dispatch.choose.cache_clear()
    try:
        for provider, target in (("triton", "sm_90"), ("interpreter", "cpu")):
            with switches.override(provider=provider):
                assert re.match(why, reasons(decide("mla", target, here=True))[provider])
        assert decide("mla", "sm_90", here=True).provider == "split"
        assert decide("mla", "sm_90").provider == "triton"  # asked about another machine
    finally:
        dispatch.choose.cache_clear()


@pytest.mark.parametrize("target", Target.names())
def test_the_chain_declines_nothing_but_a_missing_format(target: str) -> None:
    with switches.override(provider="split"):
        for op in OPS:
            for fp8 in (FN, FNUZ):
                decision = decide(op, target, fp8=fp8)
                assert (decision.provider == "split") is (fp8 in Target.named(target).fp8)
                if decision.provider is None:
                    assert reasons(decision)["split"] == f"{target} has no conversion to {fp8}"


def test_a_decision_prints_as_its_trace() -> None:
    decision = Decision("op", "sm_90", (Rejected("triton", "the value is 3"), Accepted("split")))
    assert str(decision) == "op on sm_90: split\n  triton: rejected: the value is 3\n  split: accepted"


@BOTH
def test_a_call_runs_the_provider_that_was_chosen(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for provider in PROVIDERS.values():
        module = provider.load()
        monkeypatch.setattr(module, "run", lambda *_args, name=provider.name: calls.append(name))
    OPS[op](**call_of(op))
    with switches.override(provider="interpreter"):
        OPS[op](**call_of(op))
    OPS[op](**call_of(op))
    assert calls == ["split", "interpreter", "split"]


@BOTH
def test_switches_never_change_a_result(op: str) -> None:
    call = call_of(op, 3)
    results = []
    for choice in ({"mode": "off"}, {"ops": frozenset()}, {"provider": "interpreter"}, {"provider": "split"}, {}):
        mine = twin(call)
        with switches.override(**choice):
            OPS[op](**mine)
        results.append(mine)
    for result in results[1:]:
        assert_same_memory(result, results[0])


def test_every_provider_module_has_the_three_functions() -> None:
    for provider in PROVIDERS.values():
        module = provider.load()
        assert all(callable(getattr(module, name)) for name in ("why_not", "why_not_here", "run"))


def test_providers_and_their_switch_name_the_same_three() -> None:
    assert tuple(PROVIDERS) == switches.PROVIDERS


@pytest.mark.parametrize("layout", ["plain", "fp8", "fp8_ds_mla"])
def test_a_configuration_names_the_formats_it_writes(layout: str) -> None:
    for query, fp8 in ((torch.bfloat16, FN), (FNUZ, FNUZ)):
        _, config = OPS["mla"].resolve(**mla_call(layout=layout, query=query, fp8=fp8))
        want = {fp8} if layout != "plain" or query is fp8 else set()
        assert config.fp8_formats == want


def test_a_reason_names_the_offending_value() -> None:
    config = SimpleNamespace(fp8_formats=frozenset({FNUZ}))
    assert launch.why_not(config, Target.named("sm_100")) == "sm_100 has no conversion to torch.float8_e4m3fnuz"

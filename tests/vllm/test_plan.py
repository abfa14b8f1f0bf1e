"""A layer's plan: what is fused, with what constants, said once; and what strict makes of a refusal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.vllm import host, plan
from tests.vllm import layers


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A fresh process as far as plans go, and what it logs."""
    lines: list[str] = []
    monkeypatch.setattr(plan, "logger", SimpleNamespace(info=lambda text, *args: lines.append(text % args)))
    monkeypatch.setattr(plan, "_SAID", set())
    monkeypatch.setattr(plan, "PLANS", {})
    return lines


def test_both_ops_are_fused_with_the_layers_constants() -> None:
    with switches.override(provider="interpreter"):
        made = plan.build(layers.wrapper(), layers.config())
    assert made.fused
    assert (made.mla.provider, made.indexer.provider) == ("interpreter", "interpreter")
    assert made.mla_call == plan.MlaCall("plain", "interleaved", torch.float32, 4, "one", torch.float8_e4m3fn, "ue8m0")
    assert made.indexer_call == plan.IndexerCall("flat", "neox", "ue8m0", 1e-6, 128**-0.5 / 2, torch.float8_e4m3fn)
    assert made.together
    assert made.clears_topk
    assert str(made).endswith("; both in one launch, prepare_qk, top-k rows cleared")
    assert dict(plan.PLANS) == {"model.layers.0.self_attn.attn": made}


@pytest.mark.parametrize("changes", [{"indexer": None}, {"mla_attn__kv_cache_dtype": "fp8_e5m2"}])
def test_one_launch_needs_both(changes: dict[str, Any]) -> None:
    with switches.override(provider="interpreter"):
        made = plan.build(layers.wrapper(**changes), layers.config())
    assert made.fused
    assert not made.together


def test_a_graph_in_which_vllm_clears_is_not_taken_for_one_in_which_the_launch_does() -> None:
    keys = []
    for changes in ({}, {"indexer__indexer_op__topk_indices_buffer": torch.empty((16, 64), dtype=torch.int64)}):
        config = layers.config()
        with switches.override(provider="interpreter"):
            made = plan.build(layers.wrapper(**changes), config)
        assert made.together
        assert made.clears_topk != bool(changes)
        keys += config.additional_config["dsafuse"]
    assert len(set(keys)) == 2
    assert "vLLM clears its top-k rows (topk_indices_buffer must be torch.int32, got torch.int64)" in keys[1]


def test_a_fused_layer_joins_vllms_compilation_and_a_refused_one_does_not() -> None:
    config = layers.config()
    plan.build(layers.wrapper(), config)
    assert config.additional_config == {}
    with switches.override(provider="interpreter"):
        for number in range(2):
            plan.build(layers.wrapper(mla_attn__layer_name=f"layer {number}"), config)
        assert len(config.additional_config["dsafuse"]) == 1
        plan.build(layers.wrapper(indexer=None), config)
    assert len(config.additional_config["dsafuse"]) == 2


@pytest.mark.parametrize(
    ("word", "quant_query", "layout", "query"),
    [
        ("fp8", False, "fp8", torch.float32),
        ("fp8_e4m3", True, "fp8", torch.float8_e4m3fn),
        ("fp8_ds_mla", True, "fp8_ds_mla", torch.float32),
        ("auto", True, "plain", torch.float32),
    ],
)
def test_cache_and_query_formats_follow_vllms(word: str, quant_query: bool, layout: str, query: torch.dtype) -> None:
    wrapper = layers.wrapper(mla_attn__kv_cache_dtype=word, mla_attn__impl__supports_quant_query_input=quant_query)
    with switches.override(provider="interpreter"):
        call = plan.build(wrapper, layers.config()).mla_call
    assert call is not None
    assert (call.kv_layout, call.query_dtype) == (layout, query)


def test_tiles_are_scaled_as_this_vllm_scales_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a graph that was compiled for one rule is not taken for the other."""
    keys = []
    for version, rule in (("0.26.0", "fp32"), ("0.32.0", "ue8m0")):
        monkeypatch.setattr(host, "version", lambda version=version: version)
        config = layers.config()
        with switches.override(provider="interpreter"):
            call = plan.build(layers.wrapper(mla_attn__kv_cache_dtype="fp8_ds_mla"), config).mla_call
        assert call is not None
        assert call.scale_rule == rule
        keys.append(config.additional_config["dsafuse"])
    assert keys[0] != keys[1]


def test_the_split_chain_is_not_a_fusion() -> None:
    """On a CPU nobody asked for the interpreter: vLLM's own code runs, not our split chain."""
    made = plan.build(layers.wrapper(), layers.config())
    assert not made.fused
    for op in (made.mla, made.indexer):
        assert op.reasons == ("only provider split accepts, which fuses nothing; see the trace",)
        assert "interpreter: rejected: it is slow" in op.trace
    assert made.mla_call is None
    assert made.indexer_call is None


def test_nobody_accepting_is_a_reason() -> None:
    with switches.override(provider="triton"):
        made = plan.build(layers.wrapper(), layers.config())
    assert made.mla.reasons == ("no provider accepts; see the trace",)
    assert "triton: rejected:" in made.mla.trace


def test_a_plan_is_said_once_for_its_kind(said: list[str]) -> None:
    with switches.override(provider="interpreter"):
        for number in range(3):
            plan.build(layers.wrapper(mla_attn__layer_name=f"layer {number}"), layers.config())
        plan.build(layers.wrapper(mla_attn__layer_name="layer 3", indexer=None), layers.config())
    kinds = [line for line in said if "[first: " in line]
    assert [line.split("[first: ")[1] for line in kinds] == ["layer 0]", "layer 3]"]
    assert "this layer uses another layer's top-k and has no indexer" in kinds[1]
    assert any("interpreter: accepted" in line for line in said)


def test_strict_raises_the_reasons_and_the_trace() -> None:
    with switches.override(mode="strict"), pytest.raises(RuntimeError) as error:
        plan.build(layers.wrapper(), layers.config())
    assert "DSAFUSE_MODE=strict: model.layers.0.self_attn.attn: mla is not fused" in str(error.value)
    assert "triton: rejected:" in str(error.value)


@pytest.mark.parametrize("changes", [{"is_sparse": False}, {"indexer": None}, {}])
def test_strict_is_content_where_there_is_nothing_to_refuse(changes: dict[str, Any]) -> None:
    with switches.override(mode="strict", provider="interpreter"):
        plan.build(layers.wrapper(**changes), layers.config())


def test_strict_names_a_gate() -> None:
    wrapper = layers.wrapper(mla_attn__kv_cache_dtype="fp8_e5m2")
    with (
        switches.override(mode="strict", provider="interpreter"),
        pytest.raises(RuntimeError, match=r"kv_cache_dtype must be auto, .*, got fp8_e5m2"),
    ):
        plan.build(wrapper, layers.config())


def test_a_plan_goes_into_json() -> None:
    import json

    with switches.override(provider="interpreter"):
        made = plan.build(layers.wrapper(), layers.config())
    said = json.loads(json.dumps(made.as_dict()))
    assert [(op["op"], op["provider"]) for op in said["ops"]] == [("mla", "interpreter"), ("indexer", "interpreter")]
    assert (said["together"], said["clears_topk"]) == (True, True)

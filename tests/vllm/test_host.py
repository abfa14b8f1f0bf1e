"""The probe: what is touched exists and looks as it did; where it does not, nothing is installed."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dsafuse import switches
from dsafuse.vllm import host
from dsafuse.vllm.host import Symbol


def test_the_installed_vllm_differs_in_nothing() -> None:
    assert host.differences(host.WRAPPER_SYMBOLS + host.CPU_SYMBOLS) == []


def test_the_installed_version_is_in_the_table() -> None:
    assert host.why_not_version() is None


@pytest.mark.parametrize(("version", "minor"), [("0.32.0", "0.32"), ("0.32.1+cpu", "0.32"), ("1.0.0rc1", "1.0")])
def test_minor_versions(version: str, minor: str) -> None:
    assert host.minor(version) == minor


@pytest.mark.parametrize(
    ("symbol", "difference"),
    [
        (Symbol("vllm.no_such_module", "f"), r"vllm.no_such_module.f is missing"),
        (Symbol("vllm.config", "NoSuchClass.f"), r"vllm.config.NoSuchClass.f is missing"),
        (
            Symbol("vllm.utils.torch_utils", "_encode_layer_name", ("name",)),
            r"_encode_layer_name takes \(layer_name\), expected \(name\)",
        ),
        (
            Symbol("vllm.utils.torch_utils", "_encode_layer_name", ("layer_name",), source="0123456789abcdef"),
            r"_encode_layer_name has another body \(sha256 [0-9a-f]{16}, expected 0123456789abcdef\)",
        ),
    ],
)
def test_each_kind_of_difference_is_named(symbol: Symbol, difference: str) -> None:
    (found,) = host.differences((symbol,))
    assert re.search(difference, found)


@pytest.fixture
def hooks_free(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's table of replaced classes, without ours; restored afterwards."""
    from vllm.model_executor import custom_op

    from dsafuse.vllm import wrapper
    from dsafuse.vllm.cpu import indexer  # noqa: F401 -- their imports are not part of what is tested

    for key in (wrapper.KEY, "SparseAttnIndexer"):
        monkeypatch.delitem(custom_op.op_registry_oot, key, raising=False)
    table: dict[str, Any] = custom_op.op_registry_oot
    return table


def test_installing_twice_is_installing_once(hooks_free: dict[str, Any]) -> None:
    from dsafuse.vllm import lazy, wrapper
    from dsafuse.vllm.cpu.indexer import TorchSparseAttnIndexer

    assert lazy._install() == []
    assert lazy._install() == []
    assert hooks_free[wrapper.KEY] is wrapper.FusedMultiHeadLatentAttentionWrapper
    assert hooks_free["SparseAttnIndexer"] is TorchSparseAttnIndexer


def test_off_installs_cpu_support_and_no_hook(hooks_free: dict[str, Any]) -> None:
    from dsafuse.vllm import lazy, wrapper

    with switches.override(mode="off"):
        assert lazy._install() == []
    assert wrapper.KEY not in hooks_free
    assert "SparseAttnIndexer" in hooks_free


def test_another_holder_keeps_its_hook(hooks_free: dict[str, Any]) -> None:
    from dsafuse.vllm import lazy, wrapper

    class Theirs:
        pass

    hooks_free[wrapper.KEY] = Theirs
    hooks_free["SparseAttnIndexer"] = Theirs
    problems = lazy._install()
    assert hooks_free[wrapper.KEY] is Theirs
    assert hooks_free["SparseAttnIndexer"] is Theirs
    assert len(problems) == 2
    assert all("already held by" in problem and "Theirs, another plugin" in problem for problem in problems)
    del hooks_free[wrapper.KEY], hooks_free["SparseAttnIndexer"]


def test_a_difference_installs_nothing_and_strict_raises(
    hooks_free: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm import lazy

    changed = Symbol("vllm.config", "NoSuchClass")
    monkeypatch.setattr(host, "WRAPPER_SYMBOLS", (*host.WRAPPER_SYMBOLS, changed))
    monkeypatch.setattr(host, "CPU_SYMBOLS", (*host.CPU_SYMBOLS, changed))
    problems = lazy._install()
    assert [problem.split(":")[0] for problem in problems] == ["CPU support", "fused preparation"]
    assert all("vllm.config.NoSuchClass is missing" in problem for problem in problems)
    assert not hooks_free
    with switches.override(mode="strict"), pytest.raises(RuntimeError, match="NoSuchClass is missing"):
        lazy._install()


def test_the_model_classes_are_vllms_own() -> None:
    from vllm.model_executor.models import deepseek_v2

    from dsafuse.vllm import lazy

    assert lazy.DeepseekV32ForCausalLM is deepseek_v2.DeepseekV3ForCausalLM
    assert lazy.GlmMoeDsaForCausalLM is deepseek_v2.GlmMoeDsaForCausalLM
    with pytest.raises(AttributeError):
        lazy.LlamaForCausalLM  # noqa: B018

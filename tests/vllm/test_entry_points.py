"""What happens when vLLM loads the plugin: nothing heavy, nothing twice, nothing that raises."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import dsafuse.vllm
from dsafuse import switches
from dsafuse.vllm import host

LAZY_ROOMS = (
    "dsafuse.vllm",
    "dsafuse.vllm.checkpoints",
    "dsafuse.vllm.demo",
    "dsafuse.vllm.demo_view",
    "dsafuse.vllm.arm",
)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_entry_points_are_declared_for_both_groups() -> None:
    from importlib.metadata import entry_points

    for group, function in (("vllm.general_plugins", "register"), ("vllm.platform_plugins", "platform_plugin")):
        (entry,) = [entry for entry in entry_points(group=group) if entry.name == "dsafuse"]
        assert entry.load() is getattr(dsafuse.vllm, function)


@pytest.mark.parametrize("room", LAZY_ROOMS)
def test_importing_does_not_import_vllm(room: str) -> None:
    assert run(f"import sys, {room}; print('vllm' in sys.modules)") == "False"


def test_registering_twice_imports_no_layer_and_names_the_lazy_module() -> None:
    code = """
import sys
from vllm.platforms import current_platform
from vllm.model_executor.models.registry import ModelRegistry
before = set(sys.modules)
import dsafuse.vllm
dsafuse.vllm.register()
dsafuse.vllm.register()
layers = [name for name in set(sys.modules) - before if name.startswith("vllm.model_executor.layers")]
where = {ModelRegistry.models[name].module_name for name in dsafuse.vllm.ARCHITECTURES}
assert all(ModelRegistry.models[name].class_name.startswith(f"{name}@0.32.") for name in dsafuse.vllm.ARCHITECTURES)
print(layers, where, "dsafuse.vllm.lazy" in sys.modules, "vllm.model_executor.layers.mla" in sys.modules)
"""
    assert run(code) == "[] {'dsafuse.vllm.lazy'} False False"


class Heard(logging.Handler):
    """What is logged, each line behind its level."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the plugin logs. vLLM's logger passes nothing on to pytest's."""
    heard = Heard()
    dsafuse.vllm.say_wrong.cache_clear()
    monkeypatch.setattr(dsafuse.vllm.logger, "level", logging.INFO)
    monkeypatch.setattr(dsafuse.vllm.logger, "_cache", {})
    dsafuse.vllm.logger.addHandler(heard)
    yield heard.lines
    dsafuse.vllm.logger.removeHandler(heard)
    dsafuse.vllm.say_wrong.cache_clear()


def test_register_survives_an_error_and_logs_it(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    def fail(mode: str) -> str | None:
        raise RuntimeError("boom")

    monkeypatch.setattr(dsafuse.vllm, "_route", fail)
    dsafuse.vllm.register()
    assert said == ["ERROR dsafuse: not installed: RuntimeError: boom."]
    with switches.override(mode="strict"), pytest.raises(RuntimeError, match="boom"):
        dsafuse.vllm.register()


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that are sent elsewhere."""
    from vllm.model_executor.models.registry import ModelRegistry

    names: list[str] = []
    monkeypatch.setattr(ModelRegistry, "register_model", lambda name, where: names.append(name))
    return names


ANOTHER = "vLLM and its platform must be one of those tested"


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch, said: list[str], registered: list[str]) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.29.1")
    dsafuse.vllm.register()
    (line,) = said
    # vLLM may not have set up its log yet: less than a warning would be lost.
    assert line.startswith(f"WARNING dsafuse: not installed: {ANOTHER}")
    assert line.endswith("got 0.29.1 on cpu.")
    assert registered == []


def test_strict_stops_a_dsa_model_of_another_version_and_no_other_model(
    monkeypatch: pytest.MonkeyPatch, registered: list[str]
) -> None:
    """The architectures are sent to the module that raises when one of them is resolved."""
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.29.1")
    with switches.override(mode="strict"):
        dsafuse.vllm.register()
    assert registered == list(dsafuse.vllm.ARCHITECTURES)


@pytest.mark.parametrize(("minor", "platform"), [("0.26", "cuda"), ("0.32", "cpu")])
def test_off_leaves_a_gpu_alone_and_says_so(
    monkeypatch: pytest.MonkeyPatch, said: list[str], registered: list[str], minor: str, platform: str
) -> None:
    monkeypatch.setattr(host, "row", lambda: host.Tested(minor, platform, "wrapper", "a test"))
    with switches.override(mode="off"):
        dsafuse.vllm.register()
    if platform == "cpu":  # the models do not run there without support from here
        assert registered == list(dsafuse.vllm.ARCHITECTURES)
        assert said == []
    else:
        assert registered == []
        assert said == ["INFO dsafuse: not installed: DSAFUSE_MODE=off."]


@pytest.mark.parametrize("dense", [False, True])
def test_dense_models_are_taken_where_the_row_says_so(
    monkeypatch: pytest.MonkeyPatch, registered: list[str], dense: bool
) -> None:
    monkeypatch.setattr(host, "row", lambda: host.Tested("0.26", "cuda", "wrapper", "a test", dense=dense))
    dsafuse.vllm.register()
    assert registered == [*dsafuse.vllm.ARCHITECTURES, *(dsafuse.vllm.DENSE_ARCHITECTURES if dense else ())]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has not been read. Every test has an override around it."""
    from dsafuse.vllm import lazy  # noqa: F401 -- its import reads it

    monkeypatch.setattr(switches, "_process", None)
    monkeypatch.setattr(switches, "overriding", lambda: None)


@pytest.mark.usefixtures("unread")
def test_a_wrong_mode_is_one_line(monkeypatch: pytest.MonkeyPatch, said: list[str], registered: list[str]) -> None:
    monkeypatch.setenv("DSAFUSE_MODE", "stirct")
    dsafuse.vllm.register()
    dsafuse.vllm.register()
    assert said == [
        "ERROR dsafuse: not installed, vLLM's own code runs: "
        "DSAFUSE_MODE: got 'stirct', expected one of auto, off, strict."
    ]
    assert registered == []


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(("name", "value"), [("DSAFUSE_OPS", "mla,indexr"), ("DSAFUSE_PROVIDER", "tritn")])
@pytest.mark.parametrize("mode", ["auto", "off", "strict"])
def test_strict_with_another_wrong_switch_stops_dsa_models_and_no_other(
    monkeypatch: pytest.MonkeyPatch, said: list[str], registered: list[str], mode: str, name: str, value: str
) -> None:
    from vllm.models import deepseek_v32

    from dsafuse.vllm import lazy, model_path

    monkeypatch.setenv("DSAFUSE_MODE", mode)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(model_path, "install", lambda: pytest.fail("installed"))
    dsafuse.vllm.register()
    error = f"DSAFUSE_MODE=strict, and not installed: {name}: got '{value}'"
    with pytest.raises(RuntimeError, match=error) if mode == "strict" else nullcontext():  # which an option may name
        assert model_path.DeepseekV32ForCausalLM is deepseek_v32.DeepseekV32ForCausalLM
    (line,) = said
    then = "a DSA model does not start" if mode == "strict" else "vLLM's own code runs"
    assert line.startswith(f"ERROR dsafuse: not installed, {then}: {name}: got '{value}', expected ")
    assert registered == (list(dsafuse.vllm.ARCHITECTURES) if mode == "strict" else [])
    with pytest.raises(RuntimeError, match=error):
        lazy._install()  # as its import does


@pytest.mark.parametrize(
    ("builtin", "expected"),
    [
        ("vllm.platforms.cpu.CpuPlatform", "dsafuse.vllm.cpu.platform.DsaCpuPlatform"),
        ("vllm.platforms.zen_cpu.ZenCpuPlatform", None),
        (None, None),
    ],
)
def test_the_platform_plugin_takes_over_from_the_plain_cpu_platform_alone(
    monkeypatch: pytest.MonkeyPatch, builtin: str | None, expected: str | None
) -> None:
    import vllm.platforms

    monkeypatch.setattr(vllm.platforms, "cpu_platform_plugin", lambda: builtin)
    assert dsafuse.vllm.platform_plugin() == expected


def selector(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        **{"use_sparse": True, "use_mla": True, "kv_cache_dtype": "auto", "head_size": 576, **changes}
    )


def test_without_the_platform_vllm_refuses_sparse_attention_on_cpu() -> None:
    """When this fails, the CPU support here may have become needless."""
    from vllm.platforms.cpu import CpuPlatform

    with pytest.raises(NotImplementedError, match="Sparse Attention is not supported on CPU"):
        CpuPlatform.get_attn_backend_cls(None, selector())


def test_the_platform_serves_sparse_layers_with_the_torch_backend() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from dsafuse.vllm.cpu.platform import DsaCpuPlatform

    path = DsaCpuPlatform.get_attn_backend_cls(None, selector())
    assert resolve_obj_by_qualname(path).get_name() == "DSAFUSE_TORCH_SPARSE_MLA"
    assert "cpu_mla" in DsaCpuPlatform.get_attn_backend_cls(None, selector(use_sparse=False)).lower()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": False}, "only MLA layers are served, got a layer without MLA"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype must be one of auto, .*, got fp8_e5m2"),
        ({"head_size": 512}, "head_size must be 576 .*, got 512"),
    ],
)
def test_the_platform_says_why_not(changes: dict[str, Any], reason: str) -> None:
    from dsafuse.vllm.cpu.platform import DsaCpuPlatform

    with pytest.raises(NotImplementedError, match=reason):
        DsaCpuPlatform.get_attn_backend_cls(None, selector(**changes))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["all"], ["all", "-rotary_embedding"]),
        (["none", "-rotary_embedding"], ["none", "-rotary_embedding"]),
        (["all", "+rotary_embedding"], ["all", "+rotary_embedding"]),
    ],
)
def test_the_wrong_rotary_kernel_is_turned_off_unless_asked_for(given: list[str], expected: list[str]) -> None:
    from dsafuse.vllm.cpu.platform import _turn_off_rotary_custom_op

    _turn_off_rotary_custom_op(given)
    assert given == expected


def test_the_rotary_kernel_is_still_wrong_on_strided_input() -> None:
    """When this fails, the platform need no longer turn the kernel off."""
    code = """
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
with set_current_vllm_config(VllmConfig()):
    parameters = {"rope_type": "default", "rope_theta": 1e4}
    rope = get_rope(64, max_position=128, is_neox_style=False, rope_parameters=parameters)
    torch.manual_seed(0)
    wide = torch.randn(8, 4, 192)
    key = torch.randn(8, 1, 64)
    right, _ = rope.forward_native(torch.arange(8), wide[..., 128:].clone(), key.clone())
    kernel, _ = rope.forward_cpu(torch.arange(8), wide[..., 128:], key.clone())
print((right - kernel).abs().max().item() > 0.1)
"""
    assert run(code) == "True"

"""`dsafuse explain --vllm`: what is foreseen from config.json is what the plugin logs when the model is served."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import dsafuse.vllm
from dsafuse import switches
from dsafuse.cli.app import app
from dsafuse.vllm import checkpoints, foresee, plan
from tests.vllm.conftest import LLAMA, dense


def write(model: checkpoints.TinyModel, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config))
    return folder


def explain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {key: value for key, value in os.environ.items() if not key.startswith("DSAFUSE_")}
    return subprocess.run(
        [sys.executable, "-m", "dsafuse", "explain", *arguments],
        env={**bare, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


QUANTISED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""As DeepSeek-V3.2's published config.json has it; on a CPU without AMX vLLM has no kernel for it."""


def test_deepseek_is_foreseen_fused_without_weights_and_as_one_rank(tmp_path: Path) -> None:
    published = checkpoints.with_config(checkpoints.DEEPSEEK_V32, quantization_config=QUANTISED)
    folder = write(published, tmp_path / "model")
    done = explain(
        "--vllm", str(folder), "--kv-cache-dtype", "fp8", "--tp", "2", "--json", DSAFUSE_PROVIDER="interpreter"
    )
    found = json.loads(done.stdout)
    assert (found["platform"], found["not_installed"], found["tp"]) == ("cpu", [], 2)
    assert found["left_out"] == ["quantization_config"]
    (kind,) = found["kinds"]
    assert kind["says"].startswith("DSA layer: mla: fused, provider interpreter; indexer: fused, provider interpreter")
    assert kind["layers"] == [f"model.layers.{layer}.self_attn.attn" for layer in range(3)]
    assert [op["op"] for op in kind["ops"]] == ["mla", "indexer"]
    assert "interpreter: accepted" in kind["ops"][0]["trace"]


SETTLED_AT_48 = """
import json, sys
from vllm.platforms import current_platform
from dsafuse.vllm import foresee

def settle(config):
    if config.compilation_config.static_forward_context:  # the layers, once they are built
        config.cache_config.block_size = 48

type(current_platform).update_block_size_for_backend = staticmethod(settle)
print(json.dumps(foresee.foresee(sys.argv[1], "auto", {}, False)["block_size"]))
"""


def test_the_block_size_is_what_vllm_settles_when_the_layers_are_built(tmp_path: Path) -> None:
    folder = write(checkpoints.DEEPSEEK_V32, tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", SETTLED_AT_48, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "48"


def test_glm_is_foreseen_by_kind_of_layer_with_reasons_also_when_strict(tmp_path: Path) -> None:
    folder = write(checkpoints.GLM_5, tmp_path / "model")
    done = explain("--vllm", str(folder), DSAFUSE_MODE="strict", DSAFUSE_OPS="indexer")
    assert done.returncode == 1, done.stderr
    assert "DSAFUSE_MODE=strict: vLLM would not start with this model" in done.stdout
    assert (
        "\n2 x DSA layer: mla: vLLM's own code (DSAFUSE_OPS must contain mla, got 'indexer'); "
        "indexer: vLLM's own code (only provider split accepts, which fuses nothing; see the trace) "
        "[first: model.layers.0.self_attn.attn]\n"
    ) in done.stdout
    assert "\n1 x DSA layer with another layer's top-k: mla: vLLM's own code (DSAFUSE_OPS" in done.stdout
    assert "this layer uses another layer's top-k and has no indexer) [first: model.layers.1" in done.stdout


def test_a_draft_is_foreseen_with_its_layer(tmp_path: Path) -> None:
    drafted = checkpoints.with_config(checkpoints.DEEPSEEK_V32, num_nextn_predict_layers=1)
    found = foresee.ask(write(drafted, tmp_path / "model"), "auto", 1, mtp=True)
    assert [layer for kind in found["kinds"] for layer in kind["layers"]][-1] == "model.layers.3.self_attn.attn"


def test_a_model_without_such_layers_is_said_to_be_left_alone(tmp_path: Path) -> None:
    """Its tower for images moves weights when it is built."""
    text = dense("model", model_type="kimi_k2").config
    shell = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "torch_dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({**shell, "text_config": text}))
    found = foresee.ask(tmp_path, "auto", 1)
    assert found["kinds"] == []


@pytest.mark.parametrize("touch", ["m.to('cpu')", "m.weight.sum().item()"])
def test_a_class_that_needs_weights_is_not_said_to_be_refused_by_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, touch: str
) -> None:
    python = tmp_path / "python"
    code = f"import torch; m = torch.nn.Linear(1, 1, device='meta'); {touch}"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    python.chmod(0o755)
    folder = write(checkpoints.DEEPSEEK_V32, tmp_path / "model")
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(foresee.Unforeseen, match=r"^not foreseen: vLLM's class of this model needs weights when"):
        foresee.ask(folder, "auto", 1)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What stands for vLLM's config, built without a layer. The folder's config.json is not looked at."""
    write(checkpoints.DEEPSEEK_V32, tmp_path / "model")
    made = SimpleNamespace(
        folder=str(tmp_path / "model"),
        cache_config=SimpleNamespace(block_size=64),
        model_config=SimpleNamespace(architecture="DeepseekV32ForCausalLM", dtype="torch.bfloat16"),
    )
    monkeypatch.setattr(plan, "PLANS", {})
    monkeypatch.setattr(foresee, "_build", lambda *_: made)
    monkeypatch.setattr(dsafuse.vllm.logger, "handlers", [])
    return made


def foreseen(built: SimpleNamespace) -> tuple[list[str], bool]:
    found = foresee.foresee(built.folder, "auto", {}, False)
    return found["not_installed"], found["strict_raises"]


@pytest.mark.parametrize(
    ("value", "reasons"),
    [
        (None, []),
        ("foo,dsafuse", []),
        ("foo,bar", ["VLLM_PLUGINS is 'foo,bar', which leaves dsafuse out"]),
        ("", ["VLLM_PLUGINS is '', which leaves dsafuse out"]),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_plugin_that_vllm_leaves_out_stops_no_model(
    built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mode: str, value: str | None, reasons: list[str]
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_PLUGINS", value)
    with switches.override(mode=mode):
        assert foreseen(built) == (reasons or ["DSAFUSE_MODE=off"] * (mode == "off"), mode == "off" and not reasons)


def test_a_plugin_without_an_entry_point_is_said(built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.plugins

    monkeypatch.setattr(vllm.plugins, "load_plugins_by_group", lambda group: {})
    assert foreseen(built) == (["vLLM finds no entry point of dsafuse's, which pip install makes"], False)


def test_where_register_fails_strict_stops_every_model(built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `test_entry_points` sees `register` do."""

    def fail(mode: str) -> str | None:
        raise RuntimeError("boom")

    def build(*_: object) -> Any:
        dsafuse.vllm.register()
        return built

    built.model_config.architecture = "LlamaForCausalLM"
    monkeypatch.setattr(dsafuse.vllm, "_route", fail)
    monkeypatch.setattr(foresee, "_build", build)
    assert foreseen(built) == (["RuntimeError: boom"], True)
    with switches.override(mode="strict"), pytest.raises(RuntimeError, match="boom"):
        dsafuse.vllm.register()


def test_what_is_not_installed_is_heard_at_the_level_before_vllm_sets_its_own(
    built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> Any:
        dsafuse.vllm.register()
        return built

    monkeypatch.setattr(dsafuse.vllm.logger, "level", logging.WARNING)
    monkeypatch.setattr(dsafuse.vllm.logger, "_cache", {})
    monkeypatch.setattr(dsafuse.vllm.host, "TESTED", ())
    monkeypatch.setattr(foresee, "_build", build)
    (reason,), raises = foreseen(built)
    assert reason.startswith("vLLM and its platform must be one of those tested ")
    assert raises


UNTESTED = """
import json, sys
from dsafuse.vllm import foresee, host

host.TESTED = ()
print(json.dumps(foresee.foresee(sys.argv[1], "auto", {}, False)))
"""


@pytest.mark.parametrize("dsa", [False, True])
def test_where_nothing_is_installed_strict_stops_a_dsa_model_and_no_other(dsa: bool, tmp_path: Path) -> None:
    """What `test_entry_points` sees `register` do."""
    (tmp_path / "config.json").write_text(json.dumps(checkpoints.DEEPSEEK_V32.config if dsa else LLAMA))
    done = subprocess.run([sys.executable, "-c", UNTESTED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    (reason,) = found["not_installed"]
    assert reason.startswith("vLLM and its platform must be one of those tested")
    assert (found["kinds"], found["strict_raises"]) == ([], dsa)


def test_a_dense_model_starts_where_it_is_not_fused_also_when_strict(tmp_path: Path) -> None:
    folder = write(dense("model", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3"), tmp_path / "m")
    done = explain("--vllm", str(folder), DSAFUSE_MODE="strict")
    assert "x dense MLA layer: mla: vLLM's own code (only provider split accepts" in done.stdout
    assert (done.returncode, "would not start" in done.stdout) == (0, False), done.stderr


def test_what_vllm_refuses_is_shown(tmp_path: Path) -> None:
    """Beside it what is not installed, since that may be why: vLLM alone has no sparse attention on CPUs."""
    folder = write(checkpoints.DEEPSEEK_V32, tmp_path / "model")
    done = explain("--vllm", str(folder), VLLM_PLUGINS="foo", DSAFUSE_MODE="strict")
    assert done.returncode == 1
    assert done.stderr.startswith(
        "vLLM could not build this model (RuntimeError: not installed: VLLM_PLUGINS is 'foo', "
        "which leaves dsafuse out; then NotImplementedError: Sparse Attention is not supported on CPU.); the end "
    )


def test_what_vllm_refuses_is_shown_as_it_is(built: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(foresee, "_build", refuse)
    with pytest.raises(ValueError, match=r"^no such model$"):
        foresee.foresee(built.folder, "auto", {}, False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tp", "3"), "--tp: got 3, expected a divisor of 4 heads"),
        (("--tp", "0"), "--tp: got 0, expected a divisor of 4 heads"),
        (
            ("--block-size", "16"),
            "--block-size: got 16, but with --vllm it is what the vLLM that is installed here finds",
        ),
        (
            ("--target", "sm_90"),
            "--target: got sm_90, but with --vllm it is what the vLLM that is installed here finds",
        ),
        (("--mtp",), "--mtp: got num_nextn_predict_layers None in config.json, expected 1 or more"),
        (
            ("--kv-cache-dtype", "nonsense"),
            "--kv-cache-dtype: got 'nonsense', expected one of auto, bfloat16, fp8, fp8_e4m3, fp8_ds_mla",
        ),
    ],
)
def test_a_bad_question_is_one_line(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    folder = write(checkpoints.DEEPSEEK_V32, tmp_path / "model")
    done = explain("--vllm", str(folder), *arguments)
    assert (done.returncode, done.stderr.strip()) == (2, says)


def test_without_vllm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(checkpoints.DEEPSEEK_V32, tmp_path / "model")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["explain", "--vllm", str(folder)])
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "--vllm: vllm is not installed, and its own classes are what is asked\n"


def test_a_folder_without_a_config_is_one_line(tmp_path: Path) -> None:
    done = explain("--vllm", str(tmp_path))
    assert (done.returncode, done.stderr.strip()) == (
        2,
        f"--vllm: got {tmp_path}, expected a folder with a config.json",
    )


@pytest.mark.parametrize(
    ("text", "arguments", "says"),
    [
        ("[]", (), "--vllm: {}: got list, expected a JSON object"),
        ("{", (), "--vllm: {}: Expecting property name"),
        *(
            (json.dumps({name: value}), (), f"--vllm: {{}}: {name}: got {value!r}, expected a positive integer")
            for name in foresee.COUNTS
            for value in (0, -1, "32", 2.0, None, True)
        ),
        ("{}", ("--tp", "2"), "--tp: got 2, expected num_attention_heads in config.json, which it divides"),
        (
            '{"architectures": ["GlmMoeDsaForCausalLM"], "num_nextn_predict_layers": 0}',
            ("--mtp",),
            "--mtp: got num_nextn_predict_layers 0 in config.json, expected 1 or more",
        ),
    ],
)
def test_a_config_that_is_none_is_one_line(tmp_path: Path, text: str, arguments: tuple[str, ...], says: str) -> None:
    (tmp_path / "config.json").write_text(text)
    done = CliRunner().invoke(app, ["explain", "--vllm", str(tmp_path), *arguments])
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(says.format(tmp_path / "config.json"))

"""The command: what it refuses before any work, and what it leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsafuse.cli import serve_bench as command
from dsafuse.cli.app import app
from dsafuse.serving import memory
from dsafuse.serving.record import Record
from dsafuse.serving.run import STATE, Plan
from tests.serving.conftest import CONFIG, FAKE

RUNNER = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "servable"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


@pytest.fixture
def bench(model: Path, tmp_path: Path, facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command over fakes."""

    def faked(**values: Any) -> Plan:
        return replace(Plan(**values), vllm=FAKE, client=(*FAKE, "client"), in_turn=False)

    monkeypatch.setattr(command, "Plan", faked)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())

    def run(*arguments: str) -> Any:
        grid = ("--isl", "16", "--osl", "8", "--concurrency", "1,2")
        return RUNNER.invoke(app, ["serve-bench", str(model), *grid, "--out", str(tmp_path / "out"), *arguments])

    return run


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--isl", "0"), "--isl: got '0'"),
        (("--concurrency", "1,x"), "--concurrency: got 'x'"),
        (("--repeats", "0"), "--repeats: got 0, expected an integer from 1 to 100"),
        (("--prompts-per-slot", "0"), "--prompts-per-slot: got 0"),
        (("--kv-cache-dtype", "int4"), "--kv-cache-dtype: got 'int4'"),
        (("--servers", "both"), "--servers: got 'both', expected one of auto, together, in-turn"),
        (("--gpus", "0/1/2"), "--gpus: got '0/1/2'"),
        (("--gpus", "a"), "--gpus: got 'a'"),
        (("--extra", "'"), '--extra: got "\'": No closing quotation'),
        (("--time-limit", "0"), "--time-limit: got 0.0, expected seconds"),
        (("--time-limit", "nan"), "--time-limit: got nan, expected seconds"),
        (("--resume",), "--resume: got"),
        (
            ("--load-format", "dummy-scaled", "--extra", "--worker-extension-cls=mine"),
            "--extra: has --worker-extension-cls, which --load-format dummy-scaled needs for itself",
        ),
        (("--write-model", "glm"), "--write-model: got 'glm'"),
        (("--write-model", "deepseek-v3.2", "--heads", "3"), "--heads: got 3, expected a divisor of 128"),
        (("--write-model", "deepseek-v3.2", "--weights", "fp4"), "--weights: got fp4, expected one of bf16, fp8"),
        (
            ("--write-model", "deepseek-v3.2", "--weights", "fp8", "--heads", "4"),
            "--heads: got 4, whose gate_up_proj does not fit fp8 weights: got 576 outputs before others",
        ),
        *(
            (
                ("--extra", f"{option} fp8"),
                f"--extra: has {option}, expected none: config.json says how weights are quantised",
            )
            for option in ("--quantization", "-q", "-qfp8")
        ),
        *(
            ((option, value), f"{option}: needs --write-model; a folder's own config.json says what it has")
            for option, value in (("--weights", "fp8"), ("--heads", "7"), ("--layers", "99"))
        ),
    ],
)
def test_a_bad_value_is_one_line_and_leaves_nothing(
    bench: Callable[..., Any], tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = bench(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(says)
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_model_is_refused(bench: Callable[..., Any], model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert "has no tokenizer" in bench().stderr
    (model / "config.json").unlink()
    assert "expected a folder with a config.json" in bench().stderr


def test_a_model_without_latent_attention_is_refused(bench: Callable[..., Any], model: Path) -> None:
    (model / "config.json").write_text("{}")
    done = bench()
    assert done.exit_code == 2
    assert "no kv_lora_rank" in done.stderr


@pytest.mark.parametrize(
    ("here", "arguments", "patterns"),
    [
        ("training.json", (), "*.safetensors or *.bin or *.pt"),
        ("model.bin", ("--load-format", "safetensors"), "*.safetensors"),
        ("model.safetensors", ("--load-format", "pt"), "*.pt"),
    ],
)
def test_a_folder_without_weights_is_refused_before_anything_starts(
    bench: Callable[..., Any],
    fake: Callable[..., Path],
    model: Path,
    here: str,
    arguments: tuple[str, ...],
    patterns: str,
) -> None:
    pids = fake()
    (model / "model.safetensors").rename(model / here)
    done = bench(*arguments)
    word = arguments[-1] if arguments else "auto"
    assert (done.exit_code, done.stderr) == (
        2,
        f"MODEL_DIR: {model} has no weights ({patterns}) for --load-format {word}; "
        "--load-format dummy-scaled (or dummy) needs none\n",
    )
    assert not pids.exists()


@pytest.mark.parametrize(
    ("here", "arguments"),
    [
        *((name, ()) for name in ("pytorch_model.bin", "model.pt")),
        *((None, ("--load-format", word)) for word in ("dummy", "tensorizer")),
        *((None, ("--extra", f"--{option}")) for option in ("load-format dummy", "load_format=dummy")),
    ],
)
def test_weights_are_looked_for_where_vllm_would(
    bench: Callable[..., Any], fake: Callable[..., Path], model: Path, here: str | None, arguments: tuple[str, ...]
) -> None:
    fake(plans={})
    (model / "model.safetensors").rename(model / (here or "none"))
    assert "two equal arms are not measured" in bench(*arguments).stderr


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("quantisation", "says"),
    [
        ({**FP8, "weight_block_size": None}, "weight_block_size must be two sizes, whose scales are filled beside"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be two sizes, whose scales are filled beside"),
        ({**FP8, "fmt": "e5m2"}, "quant_method and fmt must be fp8 and e4m3, got fp8 and e5m2"),
        ({"quant_method": "gptq", "bits": 4}, "quant_method and fmt must be fp8 and e4m3, got gptq and None"),
        ({"quant_method": "compressed-tensors"}, "quant_method and fmt must be fp8 and e4m3, got compressed-tensors"),
    ],
)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
def test_scaled_weights_are_refused_where_they_would_have_no_scales(
    bench: Callable[..., Any],
    fake: Callable[..., Path],
    model: Path,
    place: str,
    quantisation: dict[str, Any],
    says: str,
) -> None:
    pids = fake()
    (model / "config.json").write_text(json.dumps({**CONFIG, place: quantisation}))
    done = bench("--load-format", "dummy-scaled")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"--load-format: dummy-scaled has no values for these quantised weights: {says}")
    assert not pids.exists()


def test_scaled_weights_of_fp8_blocks_are_served_and_recorded(
    bench: Callable[..., Any], fake: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    said = "INFO [dummy_weights.py:1] dsafuse: dummy weights scaled to 1/sqrt(fan-in): 9 tensors, 7 of them fp8"
    fused = "INFO [plan.py:1] dsafuse: DSA layer: mla: fused, provider triton [first: l.0]"
    fake(plans={"off": [said], "auto": [said, fused]})
    (model / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": FP8}))
    done = bench("--load-format", "dummy-scaled", "--repeats", "1", "--markdown")
    assert done.exit_code == 0, done.stderr
    assert "16 heads, 2 layers, fp8 weights, dummy, scaled to 1/sqrt(fan-in)" in done.stdout
    assert Record.read(tmp_path / "out" / STATE).conditions["weights"] == "fp8"


def test_scaled_weights_are_asked_of_both_servers_and_must_be_confirmed(
    bench: Callable[..., Any], fake: Callable[..., Path], tmp_path: Path
) -> None:
    fake()
    done = bench("--load-format", "dummy-scaled", "--repeats", "1")
    assert done.exit_code == 1
    assert "the server with the plugin off did not say that it scaled its dummy weights" in done.stderr
    record = Record.read(tmp_path / "out" / STATE)
    for start in record.starts:
        at = start.command.index("--load-format")
        assert start.command[at + 1 : at + 4] == [
            "dummy",
            "--worker-extension-cls",
            "dsafuse.vllm.dummy_weights.Scaled",
        ]


def test_tables_and_files_then_more_repeats_of_the_same(
    bench: Callable[..., Any], fake: Callable[..., Path], tmp_path: Path
) -> None:
    fake()
    done = bench("--repeats", "1", "--markdown")
    assert done.exit_code == 0, done.stderr
    assert "| 16/8 | 1 | 6.00 | 5.00 | 1.200 | 1.200-1.200 |" in done.stdout
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        "serve-bench.json", "serve-bench.md", "serve-bench.png", "off.log", "on.log", "client.log",
    }  # fmt: skip
    assert (out / "serve-bench.md").read_text().strip() == done.stdout.strip()
    refused = bench("--repeats", "2")
    assert refused.exit_code == 2
    assert "holds a measurement; --resume goes on with it" in refused.stderr
    refused = bench("--repeats", "2", "--resume", "--kv-cache-dtype", "fp8")
    assert refused.exit_code == 2
    assert "condition kv_cache_dtype was 'auto', is 'fp8'" in refused.stderr
    done = bench("--repeats", "2", "--resume", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((out / STATE).read_text())
    assert [cell["repeats"] for cell in json.loads(done.stdout)["summary"]] == [2, 2]


@pytest.mark.parametrize("text", ["null", "[1]", '{"format": 1, "conditions": [], "results": {}}', '{"format": "1"}'])
def test_a_state_of_odd_types_is_one_line(
    bench: Callable[..., Any], fake: Callable[..., Path], tmp_path: Path, text: str
) -> None:
    pids = fake()
    state = tmp_path / "out" / STATE
    state.parent.mkdir()
    state.write_text(text)
    done = bench("--resume")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"--resume: {state}: no measurement of this version: ")
    assert len(done.stderr.splitlines()) == 1
    assert not pids.exists()


def test_a_dead_server_is_exit_code_1_with_its_last_words(
    bench: Callable[..., Any], fake: Callable[..., Path], tmp_path: Path
) -> None:
    fake(die_after={"off": 1.0}, turn_seconds=0.3)
    done = bench("--repeats", "50")
    assert done.exit_code == 1
    assert "RuntimeError: the engine is no more" in done.stderr
    assert (tmp_path / "out" / "serve-bench.md").exists()


def test_equal_arms_are_exit_code_1_and_make_no_picture(
    bench: Callable[..., Any], fake: Callable[..., Path], tmp_path: Path
) -> None:
    fake(plans={})
    done = bench()
    assert done.exit_code == 1
    assert "two equal arms are not measured" in done.stderr
    assert done.stdout.splitlines()[-1] == f"written: {tmp_path / 'out' / STATE}, serve-bench.md; logs beside them"
    assert not (tmp_path / "out" / "serve-bench.png").exists()


@pytest.mark.parametrize("reason", [None, "matplotlib is not installed"])
def test_a_picture_that_could_not_be_drawn_is_not_said_to_be_written(
    bench: Callable[..., Any],
    fake: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reason: str | None,
) -> None:
    fake()
    monkeypatch.setattr(command.check_plot, "why_not", lambda: reason)
    monkeypatch.setattr(command.plots, "plot", lambda record, path: path.write_bytes(b""))
    done = bench("--repeats", "1")
    files = [str(tmp_path / "out" / STATE), "serve-bench.md", *(["serve-bench.png"] if reason is None else [])]
    assert done.stdout.splitlines()[-1] == f"written: {', '.join(files)}; logs beside them"
    assert (tmp_path / "out" / "serve-bench.png").exists() == (reason is None)


def test_a_rank_is_written(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = tmp_path / "rank"
    done = RUNNER.invoke(
        app,
        [
            *("serve-bench", str(folder), "--write-model", "deepseek-v3.2"),
            *("--layers", "2", "--heads", "128", "--weights", "fp8"),
        ],
    )
    assert done.exit_code == 0
    assert done.stdout.strip().endswith("for fp8 weights and without them; serve it with --load-format dummy-scaled")
    assert memory.weights(memory.read_config(folder)) == "fp8"
    assert memory.why_not_scaled(memory.read_config(folder)) is None
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}

"""`dsafuse eval`: what is asked, how answers are compared, each way in which a run fails, and real runs in vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("tokenizers", reason="tokenizers is not installed (requirements/vllm-cpu.txt)")

from dsafuse.accuracy import evaluate, oracle, report, tokenizer
from dsafuse.accuracy.evaluate import Cell, Question, Settings
from dsafuse.accuracy.model import Model, read
from dsafuse.accuracy.tasks import Problem
from dsafuse.cli.app import app
from dsafuse.vllm import arms
from dsafuse.vllm.plan import OpPlan
from tests.accuracy.conftest import LONGEST, needs_vllm, write

MODELS = Path(__file__).parents[2] / "models"
OPS = {"wrapper": ("mla", "indexer"), "model": ("latents", "queries")}
"""What the plans of vLLM's two paths name, and its counters."""


def plans(path: str = "wrapper", layers: int = 1, **changes: Any) -> list[dict[str, Any]]:
    """Of fused layers, but for the changes to the first op of each."""
    first, second = (OpPlan(name, fused=True, provider="interpreter") for name in OPS[path])
    ops = [asdict(replace(first, **changes)), asdict(second)]
    return [{"layer": f"model.layers.{layer}", "kind": "DSA layer", "ops": ops} for layer in range(layers)]


STEPS = [0.1, 0.1, 0.1]


def calls(fused: int, fallback: int = 0, path: str = "wrapper") -> dict[str, dict[str, int]]:
    return {op: {"fused": fused, "fallback": fallback} for op in OPS[path]}


def arm(answers: list[str], **changes: Any) -> arms.ArmResult:
    """An arm that said this, and was fused unless told otherwise."""
    eos = [tokenizer.IDS[tokenizer.EOS]]
    tokens = [tokenizer.encode(text, bos=False) + eos for text in answers]
    return replace(arms.ArmResult(tokens, STEPS, calls(3), plans()), **changes)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return read(write(tmp_path_factory.mktemp("models") / "m", "glm-5", num_nextn_predict_layers=1))


@pytest.fixture
def settings(model: Model) -> Settings:
    return Settings(model, (Cell("auto"),), (32,), problems=2, device="cpu", dtype="bfloat16")


ASKED = [Question("recall", 32, Problem("", str(100 + i)), []) for i in range(8)]
RIGHT = [str(100 + i) for i in range(8)]


def compared(settings: Settings, unfused: list[str], fused: list[str], **changes: Any) -> evaluate.CellResult:
    off = arm(unfused, calls=calls(0), plans=[])
    return evaluate.compare(settings, ASKED, settings.cells[0], off, arm(fused, **changes))


def test_questions_are_the_same_for_the_same_seed_and_fit_their_context(settings: Settings) -> None:
    asked = evaluate.questions(settings)
    assert asked == evaluate.questions(settings)
    assert asked != evaluate.questions(replace(settings, seed=1))
    assert [(q.task, q.context) for q in asked] == [("recall", 32)] * 2 + [("arithmetic", 32)] * 2
    assert all(q.tokens == tokenizer.encode(q.problem.prompt) and len(q.tokens) <= 32 for q in asked)


def test_a_context_that_the_model_does_not_reach_is_refused(settings: Settings) -> None:
    with pytest.raises(ValueError, match=f"reads {LONGEST - 5} at most"):
        evaluate.questions(replace(settings, contexts=(LONGEST,)))


def test_default_contexts_lie_on_both_sides_of_index_topk(model: Model) -> None:
    for short, long in (evaluate.default_contexts(model), evaluate.quick_contexts(model)):
        assert short < model.index_topk < long <= LONGEST


@pytest.mark.parametrize("path", OPS)
def test_equal_arms_are_a_success(settings: Settings, path: str) -> None:
    found = compared(settings, RIGHT, RIGHT, plans=plans(path), calls=calls(3, path=path))
    assert found.problems == []
    assert (found.paired.unfused.right, found.paired.fused.right, found.paired.differing) == (8, 8, 0)
    assert list(found.parts) == [("recall", 32)]


def test_an_answer_needs_its_end_and_nothing_behind(settings: Settings) -> None:
    found = compared(settings, RIGHT, ["1000", *RIGHT[1:]])
    assert (found.paired.lost, found.paired.differing) == (1, 1)


def test_a_significant_loss_is_a_problem_and_a_small_one_is_none(settings: Settings) -> None:
    lost = compared(settings, RIGHT, ["0"] * 8)
    assert any("8 answers were right without fusion alone" in text for text in lost.problems)
    assert compared(settings, RIGHT, ["0"] * 7 + RIGHT[7:]).problems == []


def test_in_fp32_one_other_answer_is_a_problem(settings: Settings) -> None:
    wrong = ["1", *RIGHT[1:]], ["2", *RIGHT[1:]]
    assert compared(settings, *wrong).problems == []
    exact = compared(replace(settings, dtype="float32"), *wrong)
    assert exact.problems == ["auto cache: 1 answers differ, and in float32 none may"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"plans": [], "calls": calls(0)}, "planned no layer"),
        ({"calls": calls(2)}, "mla calls in 3 steps: {'fused': 2, 'fallback': 0}, expected {'fused': 3"),
        ({"calls": calls(3, fallback=1)}, "'fallback': 1}, expected"),
        (
            {"plans": plans("model", fused=False, reasons=("too wide",)), "calls": calls(3, path="model")},
            "latents was not fused: too wide",
        ),
        ({"plans": plans(provider="triton")}, "mla ran on provider triton, not interpreter"),
    ],
)
def test_an_arm_that_was_not_fused_at_every_step_is_a_problem(
    settings: Settings, changes: dict[str, Any], problem: str
) -> None:
    assert any(problem in text for text in compared(settings, RIGHT, RIGHT, **changes).problems)


def test_a_draft_may_rest_and_the_backbone_may_not(settings: Settings) -> None:
    drafted = replace(settings, cells=(Cell("auto", drafts=1),))
    two = plans(layers=2)
    found = compared(drafted, RIGHT, RIGHT, plans=two, calls=calls(4), drafts=(10, 5))
    assert found.problems == []
    assert found.acceptance == (1.0, 1.5)
    assert compared(drafted, RIGHT, RIGHT, plans=two, calls=calls(2)).problems != []


def test_under_cuda_graphs_plans_and_fallbacks_count(settings: Settings) -> None:
    graphs = replace(settings, eager=False)
    assert compared(graphs, RIGHT, RIGHT, calls=calls(1)).problems == []
    assert compared(graphs, RIGHT, RIGHT, calls=calls(1, fallback=1)).problems != []
    assert compared(graphs, RIGHT, RIGHT, calls=calls(0)).problems != []


def test_nothing_served_is_no_success(settings: Settings) -> None:
    assert not evaluate.Evaluation(settings, []).ok


def test_tables_and_markdown_tell_the_same(settings: Settings) -> None:
    record = evaluate.Evaluation(settings, [compared(settings, RIGHT, ["0"] * 8)]).record()
    record = json.loads(json.dumps(record))
    assert not record["ok"]
    text = report.markdown(record)
    assert "| a&#124;b | auto | off | 8 | 100.00 ± 0.00 |" in report.summary([{**record, "model": "a|b"}])
    assert "| auto | off | 8 | 100.00 ± 0.00 | 0.00 ± 0.00 | -100.00 ± 0.00 | 8/0 | 0.0078 | 8 | - |" in text
    assert "FAILED: auto cache: 8 answers were right" in text


@pytest.mark.parametrize(
    ("spoil", "refusal"),
    [
        (lambda m: (m / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda m: (m / "config.json").write_text("{}"), "has no index_topk"),
        (lambda m: (m / "config.json").unlink(), "No such file"),
        (lambda m: (m / "model.safetensors").unlink(), "has no *.safetensors"),
    ],
)
def test_a_folder_that_is_no_such_model_is_refused_in_one_line(tmp_path: Path, spoil: Any, refusal: str) -> None:
    folder = write(tmp_path / "m", "glm-5")
    spoil(folder)
    done = call(folder)
    assert done.returncode == 2
    assert refusal in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--problems", "0"], "--problems: got 0, expected an integer from 1"),
        (["--mtp", "on"], "--mtp: got on, but"),
        (["--kv-cache-dtype", "fp9"], "--kv-cache-dtype: got 'fp9', expected one of auto"),
        (["--context", "5000"], "--context: got '5000', expected integers from 1 to 512"),
        (["--context", "511"], "--context: a prompt of recall has 511 tokens, and the model reads 507 at most"),
        (["--memory", "1.5"], "--memory: got 1.5, expected more than 0 and at most 1"),
        (["--lm-eval", "gsm8k", "--serve", "'"], '--serve: got "\'": No closing quotation'),
        (["--out", "/nowhere/x.json"], "--out: /nowhere/x.json: there is no directory /nowhere"),
        (["--logs", __file__], f"--logs: {__file__}: File exists"),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(seeded: dict[str, Path], options: list[str], refusal: str) -> None:
    done = call(seeded["deepseek-v3.2"], *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert refusal in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_recorded_runs_are_shown_in_one_table_and_nothing_else_is(settings: Settings, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    for path, fused in ((good, RIGHT), (bad, ["0"] * 8)):
        path.write_text(json.dumps(evaluate.Evaluation(settings, [compared(settings, RIGHT, fused)]).record()))
    done = call(None, "--read", str(good), "--read", str(bad))
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout == report.summary([json.loads(good.read_text()), json.loads(bad.read_text())]) + "\n"
    assert done.stdout.splitlines()[2:] == [
        "| m | auto | off | 8 | 100.00 ± 0.00 | 100.00 ± 0.00 | +0.00 ± 0.00 | 0 | - |",
        "| m | auto | off | 8 | 100.00 ± 0.00 | 0.00 ± 0.00 | -100.00 ± 0.00 | 8 | - |",
    ]
    assert call(None, "--read", str(good)).returncode == 0


@pytest.mark.parametrize(
    ("content", "options", "refusal"),
    [
        (None, [], "MODEL_DIR: got none, expected a folder with a model, or --read FILE"),
        (None, ["--read", "{path}"], "expected a file"),
        ("{}", ["--read", "{path}"], "no run of our tasks or of the oracle"),
        ('{"ok": true, "cells": [{}], "model": "m"}', ["--read", "{path}"], "cells[0].kv_cache_dtype is missing"),
        ("{", ["--read", "{path}"], "Expecting property name"),
        ("{}", ["models", "--read", "{path}"], "MODEL_DIR: got models, and --read shows recorded runs"),
        ("{}", ["{model}", "--oracle-in", "{path}"], "was not written by --oracle-out"),
        ('{"served_for": "oracle"}', ["{model}", "--oracle-in", "{path}"], "device is missing"),
    ],
)
def test_a_record_that_is_none_is_refused_in_one_line(
    model: Model, tmp_path: Path, content: str | None, options: list[str], refusal: str
) -> None:
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    done = call(None, *(word.replace("{path}", str(path)).replace("{model}", str(model.directory)) for word in options))
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert refusal in done.stderr


def test_arms_that_share_a_gpu_are_told_their_caches(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would measure what is free, while another arm gives memory back."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1000 * 2**20))
    two = evaluate.share_gpu(replace(settings, device="cuda", cells=(Cell("auto"), Cell("fp8"))), 2)
    options = evaluate.engine(two, Cell("auto"), 64, 8)
    assert options["gpu_memory_utilization"] == pytest.approx(0.9 / 4)
    assert options["kv_cache_memory_bytes"] == int(0.9 / 4 * 1000 * 2**20 / 2)
    alone = evaluate.engine(replace(settings, device="cuda"), Cell("auto"), 64, 8)
    assert (alone["gpu_memory_utilization"], alone["kv_cache_memory_bytes"]) == (0.9, None)


def test_arms_run_as_many_at_once_as_the_settings_say(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[list[str]] = []
    monkeypatch.setattr(evaluate, "serve", lambda arms, *_: served.append([*arms]) or ["bad"])
    assert evaluate.serve_arms(replace(settings, at_once=3), ["a", "b", "c", "d"]) == ["bad", "bad"]  # type: ignore[list-item]
    assert served == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize(("version", "fits"), [("5.19.2", True), ("5.17.0", False), ("5.190.0", False), (None, False)])
def test_the_oracle_is_the_pinned_transformers(
    version: str | None, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 5.19 its cache held other tensors, and rounding them would be no fp8 cache."""
    monkeypatch.setattr(oracle, "version_of", lambda package: version)
    reason = oracle.why_not_here()
    assert (reason is None) == fits
    assert fits or f"{version or 'not installed'}" in str(reason)


@pytest.mark.parametrize(
    ("drafts", "says"),
    [("x", "config.json: got num_nextn_predict_layers 'x', expected"), (0, "tokenizer.json: no tokenizer: ")],
)
def test_a_folder_that_can_not_be_read_is_refused_in_one_line(tmp_path: Path, drafts: object, says: str) -> None:
    config = {"index_topk": 5, "max_position_embeddings": 64, "vocab_size": 5, "num_nextn_predict_layers": drafts}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    done = call(tmp_path)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert done.stderr.startswith(f"MODEL_DIR: {tmp_path}/{says}")


def call(folder: Path | None, *options: str) -> subprocess.CompletedProcess[str]:
    """As `run_cli`, in this process: for what ends before anything is served."""
    arguments = ["eval", *([] if folder is None else [str(folder)]), *options]
    done = CliRunner().invoke(app, arguments)
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def run_cli(folder: Path | None, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsafuse", "eval", *([] if folder is None else [str(folder)]), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_vllm
def test_in_16_bit_an_arm_is_as_near_to_transformers_as_transformers_to_itself(
    seeded: dict[str, Path], tmp_path: Path
) -> None:
    """Answers may differ there; log-probabilities of covered positions may not, by more than the bound.

    Served by one command and compared by another, as on two machines.
    """
    folder, served, out = seeded["deepseek-v3.2"], tmp_path / "served.json", tmp_path / "oracle.json"
    options = ["--quick", "--dtype", "bfloat16", "--kv-cache-dtype", "auto", "--commit", "abc"]
    done = run_cli(folder, *options, "--oracle-out", str(served))
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    done = run_cli(folder, "--oracle-in", str(served), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert (record["ok"], record["device"], record["dtype"]) == (True, "cpu", "bfloat16")
    assert (record["environment"]["commit"], record["transformers"].split(".")[0]) == ("abc", "5")
    assert [(each["arm"], each["ok"]) for each in record["oracle"]] == [("un-fused", True), ("fused", True)]
    assert all(0 < each["covered"]["mean"] <= each["bound"]["mean"] for each in record["oracle"])
    assert "Both arms say what transformers says" in done.stdout
    other = run_cli(seeded["glm-5"], "--oracle-in", str(served))
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == f"--oracle-in: {served}: is of deepseek-v3.2, and MODEL_DIR is glm-5\n"


@needs_vllm
@pytest.mark.timeout(900)
def test_a_trained_model_is_as_accurate_with_fusion_as_without_within_four_minutes(tmp_path: Path) -> None:
    """What CI promises: `dsafuse eval --quick` on the shipped model with a draft, exact answers in fp32."""
    out = tmp_path / "eval.json"
    done = run_cli(MODELS / "dsa-glm-small", "--quick", "--time-limit", "240", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    cells = record["cells"]
    assert [(c["kv_cache_dtype"], c["draft_tokens"]) for c in cells] == [
        ("auto", 0),
        ("auto", 1),
        ("fp8", 0),
        ("fp8", 1),
    ]
    assert [c["differing"] for c in cells] == [0, 0, 0, 0]
    # Eight problems a cell: enough to tell a trained model from another, not to measure it.
    assert all(c[arm]["right"] >= 5 for c in cells for arm in ("unfused", "fused"))
    assert all(1 < length <= 2 for c in cells if c["draft_tokens"] for length in c["acceptance_length"].values())


@needs_vllm
def test_an_arm_that_ends_badly_fails_the_run_with_the_end_of_its_log(seeded: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(seeded["deepseek-v3.2"], folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:4096])
    done = run_cli(folder, "--quick", "--kv-cache-dtype", "auto", "--out", str(tmp_path / "eval.json"))
    assert done.returncode == 1
    says = r"^FAILED: the fused arm ended with exit code 1 \(.*SafetensorError: .*\); the end of its log:$"
    assert re.search(says, done.stdout, re.M), done.stdout
    record = json.loads((tmp_path / "eval.json").read_text())
    assert (record["ok"], record["cells"], len(record["problems"])) == (False, [], 2)


def with_in_environment(entry: str) -> list[str]:
    """The commands of processes that run with this in their environment; a zombie has none."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if entry.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append((place / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@needs_vllm
def test_a_stopped_run_leaves_no_arm_behind(seeded: dict[str, Path], tmp_path: Path) -> None:
    """Both as they start and as they import vLLM; SIGTERM as Ctrl-C. By then each and what it started has ended."""
    command = [sys.executable, "-m", "dsafuse", "eval", str(seeded["deepseek-v3.2"]), "--quick", "--mtp", "off"]
    for number, kind in enumerate((signal.SIGTERM, signal.SIGINT)):
        logs = tmp_path / str(number)
        run = subprocess.Popen(
            [*command, "--logs", str(logs)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LEFT_BEHIND_BY": str(logs)},
            # A shell that started us in the background has us ignore it.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        while not list(logs.glob("answers/*.log")):
            assert run.poll() is None
            time.sleep(0.1)
        time.sleep(number * 5)
        run.send_signal(kind)
        _, said = run.communicate(timeout=60)
        assert run.returncode == 130
        assert "Traceback" not in said
        assert with_in_environment(f"LEFT_BEHIND_BY={logs}") == []


@needs_vllm
@pytest.mark.parametrize(("family", "caches"), [("deepseek-v3.2", ["fp8"]), ("glm-5", ["auto", "fp8"])])
def test_both_arms_in_vllm_answer_the_same_and_as_transformers(
    seeded: dict[str, Path], tmp_path: Path, family: str, caches: list[str]
) -> None:
    """Seeded weights: no answer is right, all are the same, and log-probabilities are those of other people's code.

    DeepSeek's other cache is served in 16 bit above.
    """
    out, text = tmp_path / "eval.json", tmp_path / "eval.md"
    options = ["--quick", "--oracle", "--out", str(out), "--markdown", str(text)]
    if caches == ["fp8"]:
        options += ["--kv-cache-dtype", "fp8"]
    done = run_cli(seeded[family], *options)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    drafts = [0, 1] if family == "glm-5" else [0]
    assert [(c["kv_cache_dtype"], c["draft_tokens"]) for c in record["cells"]] == [
        (word, count) for word in caches for count in drafts
    ]
    for cell in record["cells"]:
        assert cell["unfused"]["count"] == 8
        assert cell["differing"] == 0
        assert cell["interpreted_or_oracle"]["interpreted"] > 0
        assert (cell["acceptance_length"] is not None) == bool(cell["draft_tokens"])
    assert [(each["kv_cache_dtype"], each["arm"], each["ok"]) for each in record["oracle"]] == [
        (word, name, True) for word in caches for name in ("un-fused", "fused")
    ]
    for each in record["oracle"]:
        # Of 47, 46, 95 and 94 tokens with 8 behind them, 64 positions at most see no more than index_topk tokens.
        assert (each["covered"]["positions"], each["beyond"]["positions"]) == (54 + 53 + 64 + 64, 38 + 37)
    assert f"| {caches[0]} | off | 8 |" in text.read_text()

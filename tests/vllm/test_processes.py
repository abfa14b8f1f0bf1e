"""vLLM's own process layout: the engine is a child, by spawn or by fork, and the switches reach it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dsafuse.vllm.arm import ENVIRONMENT

PROMPT, TOKENS = [5, 6, 7], 4

# vLLM's CPU platform sets VLLM_WORKER_MULTIPROC_METHOD to spawn, so the method is put where the engine's child is made.
SERVE = f"""
import json, multiprocessing, sys
from vllm import LLM, SamplingParams
from vllm.v1.engine import utils
if __name__ == "__main__":
    checkpoint, method, options = sys.argv[1:]
    utils.get_mp_context = lambda: multiprocessing.get_context(method)
    llm = LLM(
        checkpoint, dtype="float32", skip_tokenizer_init=True, max_model_len=256, max_num_seqs=2,
        num_gpu_blocks_override=16, worker_extension_cls="dsafuse.vllm.WorkerExtension", **json.loads(options),
    )
    greedy = SamplingParams(temperature=0.0, max_tokens={TOKENS}, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{{"prompt_token_ids": {PROMPT}}}], greedy, use_tqdm=False)
    answers = {{"tokens": list(output.outputs[0].token_ids)}}
    answers["children"] = [type(child).__name__ for child in multiprocessing.active_children()]
    for name in ("dsafuse_stats", "dsafuse_plans"):
        answers[name] = llm.collective_rpc(name)
    import dsafuse.vllm
    answers["here"] = dsafuse.vllm.stats()
    print(json.dumps(answers))
"""


EAGER: dict[str, Any] = {"enforce_eager": True}
# On a CPU only the warm-up of a traced model makes the tensors in which a rank receives.
TRACED: dict[str, Any] = {"compilation_config": {"mode": 2, "backend": "eager"}}


def serve(
    tmp_path: Path, checkpoint: Path, method: str = "spawn", options: dict[str, Any] = EAGER, **settings: str
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("DSAFUSE_")}
    environment = {**inherited, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_PLUGINS": "dsafuse"}
    command = [sys.executable, str(script), str(checkpoint), method, json.dumps(options)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**environment, **settings}, check=False, timeout=600
    )


# Each with two ranks, children of the engine's process: half of the layers, or half of the heads.
@pytest.mark.parametrize(
    ("method", "ops", "options", "layers"),
    [
        ("fork", "mla", TRACED | {"pipeline_parallel_size": 2}, [2, 1]),
        ("spawn", "mla,indexer", EAGER | {"tensor_parallel_size": 2}, [3, 3]),
    ],
)
def test_a_child_process_is_fused_as_the_switches_say(
    tmp_path: Path, checkpoint_directory: Path, method: str, ops: str, options: dict[str, Any], layers: list[int]
) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = checkpoint_directory / "v32"
    settings = {"DSAFUSE_PROVIDER": "interpreter", "DSAFUSE_OPS": ops, "DSAFUSE_MODE": "strict"}
    done = serve(tmp_path, checkpoint, method, options, VLLM_USE_BREAKABLE_CUDAGRAPH="0", **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    answers: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert answers["children"] == [{"fork": "ForkProcess", "spawn": "SpawnProcess"}[method]]
    indexer = "fused, provider" if "indexer" in ops else "vLLM's own code (DSAFUSE_OPS must contain indexer, got 'mla')"
    for plans, calls, count in zip(answers["dsafuse_plans"], answers["dsafuse_stats"], layers, strict=True):
        assert len(plans) == count
        for text in plans.values():
            assert "mla: fused, provider interpreter" in text
            assert f"indexer: {indexer}" in text
        fused = {"fused": count * TOKENS, "fallback": 0}  # a step for each token
        nothing = {"fused": 0, "fallback": 0}  # not asked for, so no refusal
        assert calls["mla"] == fused
        assert calls["indexer"] == calls["prepare_qk"] == (fused if "indexer" in ops else nothing)
    # The layers are not in the process that was asked.
    assert not any(count for calls in answers["here"].values() for count in calls.values())
    # Other people's model code, by one pass that tells the greedy choice at every position; each chooses every token.
    other = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = other(torch.tensor([PROMPT + answers["tokens"]]), use_cache=False).logits[0]
    assert logits[len(PROMPT) - 1 : -1].argmax(dim=-1).tolist() == answers["tokens"]


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        # Nobody asked for the interpreter: no fused provider accepts on a CPU.
        ({}, (": model.layers.0.self_attn.attn: mla is not fused: ", "interpreter: rejected: it is slow")),
        (  # in the process that was asked: quicker by one
            {"DSAFUSE_OPS": "mla,indexr", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
            (", and not installed: DSAFUSE_OPS: got 'mla,indexr', expected some of ",),
        ),
    ],
)
def test_strict_ends_the_start_with_the_reason(
    tmp_path: Path, checkpoint_directory: Path, settings: dict[str, str], reasons: tuple[str, ...]
) -> None:
    done = serve(tmp_path, checkpoint_directory / "v32", DSAFUSE_MODE="strict", **settings)
    assert done.returncode != 0
    said = done.stdout + done.stderr
    assert f"DSAFUSE_MODE=strict{reasons[0]}" in said
    assert all(reason in said for reason in reasons)


def test_every_variable_of_vllms_that_is_named_here_is_one() -> None:
    """One that no vLLM reads would be set for nothing."""
    from vllm.envs import environment_variables

    root = Path(__file__).parents[2]
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    files = [*pages, *(path for room in ("src", "tests", "benchmarks") for path in (root / room).rglob("*.py"))]
    named = {name for path in files for name in re.findall(r"\bVLLM_[A-Z0-9_]+\b", path.read_text())}
    assert "VLLM_PLUGINS" in named
    assert named <= set(environment_variables)

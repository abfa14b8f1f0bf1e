"""The plugin inside the real vLLM engine on CPU: same tokens fused and un-fused, and nobody else touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.vllm.conftest import MAX_TOKENS, NOT_DSA, RUNS, SERVED, Runs, prompts

Result = dict[str, Any]


def layers(result: Result) -> list[tuple[bool, bool]]:
    """(mla fused, indexer fused) of each layer."""
    fused = [{op["op"]: op["fused"] for op in layer["ops"]} for layer in result["plans"]]
    return [(ops["mla"], ops["indexer"]) for ops in fused]


@pytest.mark.parametrize("cell", [*SERVED, "v32, all, chunked"])
def test_fused_and_unfused_give_the_same_tokens(runs: Runs, cell: str) -> None:
    assert runs["fused"][cell]["tokens"] == runs["unfused"][cell]["tokens"]


@pytest.mark.parametrize("cell", list(SERVED))
def test_every_step_of_the_fused_run_was_fused(runs: Runs, cell: str) -> None:
    result = runs["fused"][cell]
    steps = len(result["step_seconds"])
    # The second layer of the GLM-shaped model takes over the first one's top-k: no indexer, MLA alone.
    shared = SERVED[cell]["model"].startswith("glm")
    assert layers(result) == [(True, True), (True, not shared), (True, True)]
    expected = {"mla": 3, "indexer": 2 if shared else 3, "prepare_qk": 2 if shared else 3}
    for op, times in expected.items():
        assert result["calls"][op] == {"fused": times * steps, "fallback": 0}
    for said in ("together", "clears_topk"):
        assert [layer[said] for layer in result["plans"]] == [True, not shared, True]


def test_a_kv_connector_finds_in_the_cache_what_vllms_own_code_writes(runs: Runs) -> None:
    """The tokens are compared above. Of a token's 576 values this connector takes 64, none of them rotated."""
    theirs, ours = (
        {path.relative_to(runs.stored[run]): load_file(path)["kv_cache"] for path in runs.stored[run].rglob("*.*")}
        for run in ("unfused", "fused")
        if runs[run]
    )
    assert theirs.keys() == ours.keys()
    assert sorted(len(values) for values in theirs.values()) == [64] * 3 + [128] * 3  # two prompts, three layers
    for path, values in theirs.items():
        assert torch.equal(values, ours[path]), path
        assert values.all(), path


def test_off_leaves_no_trace(runs: Runs) -> None:
    for result in runs["unfused"].values():
        assert result["plans"] == []
        assert not any(count for calls in result["calls"].values() for count in calls.values())


@pytest.mark.parametrize("model", ["v32", "glm"])
def test_tokens_depend_on_the_choice_of_tokens_and_on_the_cache_format(runs: Runs, model: str) -> None:
    """If not, equality above would prove little."""
    served = runs["unfused"]
    variants = [served[cell]["tokens"][1] for cell in (model, f"{model}, fp8", f"{model}, all")]
    assert len({tuple(tokens) for tokens in variants}) == 3


@pytest.mark.parametrize("cell", [cell for cell in RUNS["changed"][2] if "not" in cell or "otherwise" in cell])
def test_a_broken_preparation_changes_the_tokens(runs: Runs, cell: str) -> None:
    model = cell.split(",")[0].replace("-", ", ")
    changed, right = runs["changed"][cell]["tokens"], runs["fused"][model]["tokens"]
    assert all(a != b for a, b in zip(changed, right, strict=True))


def test_what_the_top_k_rows_held_changes_nothing(runs: Runs) -> None:
    assert runs["changed"]["v32-all, top-k stale"]["tokens"] == runs["unfused"]["v32, all"]["tokens"]


@pytest.mark.parametrize("op", ["mla", "indexer"])
def test_one_fusion_alone_gives_the_same_tokens(runs: Runs, op: str) -> None:
    result = runs["changed"][f"v32, only {op}"]
    assert layers(result) == [(op == "mla", op == "indexer")] * 3
    assert not any(result["calls"]["prepare_qk"].values())
    assert result["tokens"] == runs["unfused"]["v32"]["tokens"]


def test_bf16_is_served_fused(runs: Runs) -> None:
    """In bf16 the two arms round differently in vLLM's own rotation, so tokens are not compared."""
    result = runs["changed"]["v32, bf16"]
    assert layers(result) == [(True, True)] * 3
    assert [len(tokens) for tokens in result["tokens"]] == [MAX_TOKENS] * 3


def test_a_traced_model_gives_the_same_tokens(runs: Runs) -> None:
    assert runs["changed"]["v32, compiled"]["tokens"] == runs["unfused"]["v32"]["tokens"]
    assert "Detected eager backend, disabling AOT compile" in runs.log("changed")  # so it was traced


@pytest.mark.parametrize("run", ["unfused", "fused"])
def test_chunked_prefill_and_prefix_caching_change_nothing(runs: Runs, run: str) -> None:
    """With attention over the whole context. A smaller top-k may tip: another GEMM shape rounds otherwise."""
    chunked = runs[run]["v32, all, chunked"]
    assert chunked["tokens"] == runs[run]["v32, all"]["tokens"]
    assert chunked["cached_tokens"] == [0, 0, 128]
    assert len(chunked["step_seconds"]) > 3 * MAX_TOKENS


@pytest.mark.parametrize("model", ["v32", "glm"])
def test_mtp_drafts_are_fused_and_change_nothing(runs: Runs, model: str) -> None:
    result = runs["fused"][f"{model}, all, drafted"]
    assert result["tokens"] == runs["unfused"][f"{model}, all"]["tokens"]
    assert result["plans"][-1]["layer"].startswith("model.layers.3.")
    assert layers(result)[-1] == (True, True)
    # Two draft tokens a step: more draft calls than the three backbone layers make.
    assert result["calls"]["mla"]["fused"] > 4 * len(result["step_seconds"])
    assert result["calls"]["mla"]["fallback"] == 0
    assert result["calls"]["prepare_qk"]["fused"] == result["calls"]["indexer"]["fused"]


def test_dense_mla_decodes_fused_and_prefills_as_vllm_does(runs: Runs) -> None:
    """DeepSeek-V3: vLLM's dense attention for the prefills, everything before it by the ops."""
    result = runs["fused"]["dense-v3"]
    assert result["tokens"] == runs["no plugin"]["dense-v3"]["tokens"]
    assert layers(result) == [(True, False)] * 3
    assert result["calls"]["mla"]["fused"] >= 3 * (MAX_TOKENS - 1)
    assert result["calls"]["mla"]["fallback"] == 0
    assert result["calls"]["dense_prefill"]["fused"] >= 3
    assert not any(result["calls"]["indexer"].values())


@pytest.mark.parametrize("model", [model for model in NOT_DSA if model != "dense-v3"])
def test_other_models_are_untouched(runs: Runs, model: str) -> None:
    """Neither DSA nor with q_lora_rank: tokens as without the plugin, where the hook is installed; no op called."""
    result = runs["fused"][model]
    assert result["tokens"] == runs["no plugin"][model]["tokens"]
    assert not any(fused for layer in layers(result) for fused in layer)
    assert not any(count for calls in result["calls"].values() for count in calls.values())


def test_each_kind_of_layer_is_said_once(runs: Runs) -> None:
    log = runs.log("fused")
    for kind in (
        "DSA layer: mla: fused",
        "DSA layer with another layer's top-k: mla: fused",
        "dense MLA layer: mla: fused",
        "dense MLA layer: mla: vLLM's own code",
    ):
        assert log.count(f"dsafuse: {kind}") == 1
    assert "mla: vLLM's own code (q_lora_rank must be set, got None)" in log


@pytest.mark.parametrize("model", ["v32", "glm"])
def test_unfused_tokens_are_those_of_transformers(runs: Runs, checkpoint_directory: Path, model: str) -> None:
    """The CPU backend against other people's model code. Attention over the whole context: no fp8 indexer there."""
    from transformers import AutoModelForCausalLM

    path = checkpoint_directory / f"{model}-all"
    other = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for prompt, tokens in zip(prompts(), runs["unfused"][f"{model}, all"]["tokens"], strict=True):
        # Teacher forcing: one pass tells the greedy choice at every position.
        with torch.no_grad():
            logits = other(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == tokens


def test_checkpoints_are_written_once(runs: Runs, checkpoint_directory: Path) -> None:
    assert checkpoint_directory == runs.checkpoints.result()

"""vLLM's own fused model, both its classes, in the real engine on CPU: our functions change no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import MAX_TOKENS, MTP, RUNS, SERVED, Runs

ARM = [str(Path(__file__).with_name("model_path_arm.py"))]
# vLLM's kernels, interpreted, take seconds for a token of a layer that has many heads: few tokens, and few of these.
SHORT: dict[str, Any] = {"prompts": [[7, 91, 33, 250, 18], [401, 12, 77]], "max_tokens": 3}
FEW = 8
"""Calls with up to so many tokens run the kernels, interpreted; longer ones the oracles, which give the same bytes."""


def environment(platform: str) -> dict[str, str]:
    return {"DSAFUSE_PROVIDER": "interpreter", "TRITON_INTERPRET": "1", "MODEL_PATH": platform}


EQUAL = {
    "cuda": ("v32", "v32, fp8", "v32, fp8_ds_mla", "glm", "glm, fp8_ds_mla", "v32, all", "glm, all"),
    # With an fp8 cache AMD's class packs the query in fp8, which the generic model on a CPU does not.
    "rocm": ("v32", "glm", "v32, all"),
}
PAIRS = {
    "cuda": {"v32": {"model": "v32", "kv_cache_dtype": "fp8_ds_mla"}, "glm": {"model": "glm"}},
    "rocm": {
        "v32, fp8": {"model": "v32", "kv_cache_dtype": "fp8"},
        "glm, fp8": {"model": "glm", "kv_cache_dtype": "fp8"},
    },
}
DRAFTED = {"cuda": ("v32", "glm"), "rocm": ("v32",)}
CHANGED = ("keys not rotated", "queries not rotated", "queries paired otherwise")

for platform_, names in EQUAL.items():
    RUNS[f"model path, {platform_}"] = (
        ARM,
        environment(platform_),
        {
            **{name: SERVED[name] | ({"interpret_up_to": FEW} if name in ("v32", "glm") else {}) for name in names},
            **{f"{model}, all, drafted": {"model": f"{model}-all-mtp", **MTP} for model in DRAFTED[platform_]},
            **{f"v32, {change}": {"model": "v32", "change": change} for change in CHANGED},
            **{
                f"{name}, short, {whose}": {**cell, **SHORT, **option}
                for name, cell in PAIRS[platform_].items()
                for whose, option in (("own", {"own": True}), ("ours", {"interpret_up_to": FEW}))
            },
        },
    )

PLATFORMS = pytest.mark.parametrize("platform", EQUAL)


@pytest.mark.parametrize(("platform", "cell"), [(platform, cell) for platform in EQUAL for cell in EQUAL[platform]])
def test_tokens_are_those_of_the_generic_model_and_of_the_wrapper_path(runs: Runs, platform: str, cell: str) -> None:
    tokens = runs[f"model path, {platform}"][cell]["tokens"]
    assert tokens == runs["unfused"][cell]["tokens"]
    assert tokens == runs["fused"][cell]["tokens"]


@pytest.mark.parametrize(("platform", "name"), [(platform, name) for platform in PAIRS for name in PAIRS[platform]])
def test_tokens_are_those_of_vllms_own_kernels(runs: Runs, platform: str, name: str) -> None:
    own, ours = (runs[f"model path, {platform}"][f"{name}, short, {whose}"] for whose in ("own", "ours"))
    assert own["tokens"] == ours["tokens"]
    assert [len(tokens) for tokens in ours["tokens"]] == [SHORT["max_tokens"]] * 2
    assert not any(own["calls"]["queries"].values())
    assert ours["ways"]["oracle"] == 0


@PLATFORMS
def test_every_call_of_a_step_was_ours(runs: Runs, platform: str) -> None:
    for cell in EQUAL[platform]:
        result = runs[f"model path, {platform}"][cell]
        calls = 3 * len(result["step_seconds"])
        assert result["calls"]["latents"] == result["calls"]["queries"] == {"fused": calls, "fallback": 0}
        assert result["calls"]["mla"] == {"fused": 0, "fallback": 0}
    for cell in ("v32", "glm"):
        ways = runs[f"model path, {platform}"][cell]["ways"]
        assert ways["oracle"] == 6, "the prefill of three layers, two calls each"
        assert ways["interpreted"] == 6 * (MAX_TOKENS - 1)


@pytest.mark.parametrize(("platform", "model"), [(p, model) for p in DRAFTED for model in DRAFTED[p]])
def test_mtp_drafts_are_ours_and_change_nothing(runs: Runs, platform: str, model: str) -> None:
    result = runs[f"model path, {platform}"][f"{model}, all, drafted"]
    assert result["tokens"] == runs["unfused"][f"{model}, all"]["tokens"]
    draft = result["plans"][-1]
    assert draft["layer"].startswith("model.layers.3.")
    assert [(op["op"], op["fused"]) for op in draft["ops"]] == [("latents", True), ("queries", True)]
    assert result["calls"]["latents"]["fused"] > 4 * len(result["step_seconds"])
    assert result["calls"]["latents"]["fallback"] == result["calls"]["queries"]["fallback"] == 0


@PLATFORMS
@pytest.mark.parametrize("change", CHANGED)
def test_a_broken_function_changes_the_tokens(runs: Runs, platform: str, change: str) -> None:
    served = runs[f"model path, {platform}"]
    assert served[f"v32, {change}"]["tokens"] != served["v32"]["tokens"]


@PLATFORMS
def test_each_kind_of_layer_is_said_once(runs: Runs, platform: str) -> None:
    log = runs.log(f"model path, {platform}")
    accepted = "latents: fused, provider interpreter; queries: fused, provider interpreter"
    for kind in ("DSA layer", "DSA layer with another layer's top-k"):
        assert log.count(f"dsafuse: {kind}: {accepted} [first: model.layers.") == 1

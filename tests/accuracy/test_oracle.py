"""Transformers' indexers rotate as the DeepSeek reference does, and what an oracle says is compared as it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (requirements/vllm-cpu.txt)")

from transformers import AutoConfig
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from dsafuse.accuracy import oracle, reference
from dsafuse.accuracy.evaluate import Cell
from dsafuse.vllm.cpu import formats
from tests.accuracy.conftest import write

TOKENS, CHOSEN = 48, 8
INDEXERS = {
    "deepseek-v3.2": (deepseek.DeepseekV32Indexer, deepseek.DeepseekV32RotaryEmbedding),
    "glm-5": (glm.GlmMoeDsaIndexer, glm.GlmMoeDsaRotaryEmbedding),
}


def turned(x: torch.Tensor, theta: float, interleaved: bool) -> torch.Tensor:
    """The reference's `apply_rotary_emb`, on x [tokens, ..., 64] at positions 0, 1, ...: pairs as complex numbers.

    deepseek-ai/DeepSeek-V3.2-Exp, inference/model.py, from 2025-11-17 on: with interleaved=False, which its Indexer
    passes, dims (i, i + 32) are one number; with True, as in its MLA, dims (2i, 2i + 1).
    """
    half = x.shape[-1] // 2
    pairs = x.double().unflatten(-1, (half, 2) if interleaved else (2, half))
    if not interleaved:
        pairs = pairs.transpose(-1, -2)
    frequency = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = torch.arange(len(x), dtype=torch.float64)[:, None] * frequency
    angle = angle.reshape(len(x), *[1] * (x.dim() - 2), half)
    real = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angle))
    return (real if interleaved else real.transpose(-1, -2)).flatten(-2)


def chosen(indexer: torch.nn.Module, hidden: torch.Tensor, latent: torch.Tensor, theta: float, pairing: bool) -> list:
    """What the reference's Indexer chooses, in float64, without its Hadamard transform (it is orthogonal) and fp8."""
    q = (latent.double() @ indexer.wq_b.weight.double().T).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    k = torch.nn.functional.layer_norm(
        hidden.double() @ indexer.wk.weight.double().T,
        (indexer.head_dim,),
        indexer.k_norm.weight.double(),
        indexer.k_norm.bias.double(),
        indexer.k_norm.eps,
    )
    q = torch.cat([turned(q[..., :64], theta, pairing), q[..., 64:]], -1)
    k = torch.cat([turned(k[..., :64], theta, pairing), k[..., 64:]], -1)
    weights = hidden.double() @ indexer.weights_proj.weight.double().T * indexer.n_heads**-0.5
    score = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q, k).relu() * indexer.head_dim**-0.5, weights)
    score.masked_fill_(torch.ones_like(score).triu(1).bool(), float("-inf"))
    return [set(row.topk(min(CHOSEN, at + 1)).indices.tolist()) for at, row in enumerate(score)]


@pytest.mark.parametrize(("family", "interleaved"), [("deepseek-v3.2", False), ("glm-5", True)])
def test_transformers_indexer_rotates_as_the_reference(tmp_path: Path, family: str, interleaved: bool) -> None:
    """Half-split pairs in DeepSeek-V3.2, interleaved ones in GLM-5; with the other pairing other tokens are chosen."""
    theta = 10000.0
    rope = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
    config = AutoConfig.from_pretrained(write(tmp_path / "m", family, index_topk=CHOSEN, **rope))
    torch.manual_seed(0)
    kind, rotary = INDEXERS[family]
    indexer = kind(config, 0)
    for parameter in indexer.parameters():
        torch.nn.init.normal_(parameter)
    hidden, latent = torch.randn(TOKENS, config.hidden_size), torch.randn(TOKENS, config.q_lora_rank)
    turn = rotary(config)(hidden[None], torch.arange(TOKENS)[None])
    mask = torch.zeros(1, TOKENS, TOKENS).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf"))
    found = indexer(hidden[None], latent[None], turn, mask, None)[0]
    sets = [{s for s in row.tolist() if s <= at} for at, row in enumerate(found)]
    assert sets == chosen(indexer, hidden, latent, theta, interleaved)
    assert sets != chosen(indexer, hidden, latent, theta, not interleaved)


def test_rounded_latents_are_those_of_the_layouts() -> None:
    """Stated twice, apart: here for the oracle, in vllm/cpu for the engine; `dsafuse.layouts` knows neither."""
    torch.manual_seed(0)
    latent, rotary = torch.randn(32, 512) * torch.logspace(-5, 3, 32)[:, None], torch.randn(32, 64)
    latent[3] = 0.0
    one, slots = torch.ones(1), torch.arange(32)
    for layout, width in (("fp8", 576), ("fp8_ds_mla", 656)):
        cache = torch.zeros(1, 32, width, dtype=torch.uint8)
        formats.write_mla(latent, rotary, cache, slots, layout, one)
        stored = formats.read_mla(cache, torch.zeros(32, dtype=torch.long), slots, layout, one)
        read_latent, read_rotary = reference.ROUNDED[layout]
        assert torch.equal(stored, torch.cat([read_latent(latent), read_rotary(rotary)], -1))


def test_distance_counts_what_is_apart() -> None:
    pairs = [((-1.0, 5), (-1.0, 5)), ((-1.0, 5), (-1.5, 6)), ((-2.0, 5), (-1.9, 5))]
    found = oracle.Distance.between(pairs, largest=0.2)
    assert (found.positions, found.moved, found.other_choices) == (3, 1, 1)
    assert (found.largest, found.mean) == pytest.approx((0.5, 0.2))


@pytest.mark.parametrize(
    ("positions", "largest", "mean", "ok"),
    [(9, 1e-4, 1e-5, True), (9, 2e-3, 1e-5, False), (9, 1e-4, 2e-4, False), (0, 0.0, 0.0, False)],
)
def test_an_arm_agrees_within_both_bounds_and_where_there_is_something(
    positions: int, largest: float, mean: float, ok: bool
) -> None:
    near, far = oracle.Distance(positions, largest, mean, 0, 0), oracle.Distance(5, 9.0, 3.0, 5, 5)
    assert oracle.Agreement(Cell("auto"), "fused", "float32", "plain", oracle.FP32, near, far).ok is ok


def test_the_bound_in_16_bit_is_twice_what_transformers_loses() -> None:
    exact, rounded = [[(-1.0, 1), (-1.0, 1), (-1.0, 1)]], [[(-1.1, 1), (-1.3, 1), (-9.0, 1)]]
    bound = oracle.bound_of(exact, rounded, covered=2, dtype="bfloat16")
    assert (bound.largest, bound.mean) == pytest.approx((0.6, 0.4))


SCORES = [[[-1.0, 5], [-0.5, 6]]]
SERVED = {
    **{"served_for": "oracle", "model": "m", "index_topk": 512, "device": "cpu", "dtype": "float32", "contexts": [2]},
    **{"prompts": [[5, 6]], "environment": {}},
    "cells": [{"kv_cache_dtype": "auto", "arms": {"un-fused": {"tokens": [[7]], "logprobs": SCORES}}}],
}
SERVED["cells"][0]["arms"]["fused"] = {"tokens": [[8]], "logprobs": SCORES}


def served(tmp_path: Path, way: str = "", value: Any = None) -> oracle.Served:
    """The document read back, with what lies at `way` changed; KeyError as a value: taken away."""
    document = json.loads(json.dumps(SERVED))
    if way:
        inside: Any = document
        *path, last = (int(word) if word.isdigit() else word for word in way.split("/"))
        for word in path:
            inside = inside[word]
        if value is KeyError:
            del inside[last]
        else:
            inside[last] = value
    (tmp_path / "served.json").write_text(json.dumps(document))
    return oracle.Served.read(tmp_path / "served.json")


def test_what_was_served_reads_back(tmp_path: Path) -> None:
    found = served(tmp_path)
    assert json.loads(json.dumps(found.document())) == SERVED
    found.check(512, 9)
    for index_topk, vocabulary, words in ((1, 9, "index_topk: got 512"), (512, 8, "got token 8, expected less than")):
        with pytest.raises(ValueError, match=words):
            found.check(index_topk, vocabulary)


FUSED = "cells/0/arms/fused"


@pytest.mark.parametrize(
    ("way", "value"),
    [
        (FUSED, KeyError),
        ("cells/0/arms/banana", SERVED["cells"][0]["arms"]["fused"]),
        ("cells", []),
        ("cells", SERVED["cells"] * 2),
        ("cells/0/kv_cache_dtype", 5),
        *((name, 5) for name in ("served_for", "model", "device", "dtype", "environment", "contexts", "prompts")),
        *(("index_topk", value) for value in ("a", -3, 0)),
        ("dtype", "nn"),
        *(("prompts", value) for value in ([], [[]], [[5, -1]], [["a", "b"]], [[5.0, 6]], [[5]], [[5, 6], [5, 6]])),
        *((f"{FUSED}/tokens", value) for value in ([], [[]], [[7, 8]], [5], [[True]])),
        *((f"{FUSED}/logprobs", value) for value in ([], [[]], [[[-1.0, 5]]], [[[-1.0], [-0.5]]], [[["a", 1]] * 2])),
        *((f"{FUSED}/logprobs/0/0/0", value) for value in (None, float("nan"), float("-inf"))),
    ],
)
def test_what_no_two_arms_can_have_said_is_refused(tmp_path: Path, way: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"got|missing|was not written"):
        served(tmp_path, way, value)


def test_the_bound_in_16_bit_fails_an_arm_that_rotates_otherwise(tmp_path: Path) -> None:
    """Arms whose weights are the same, one with another base of its rotary frequencies: rounding does not hide it."""
    arms = {}
    for name, theta in (("right", 10000.0), ("wrong", 100.0)):
        rope = {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}
        folder = write(tmp_path / name, "deepseek-v3.2", **rope)
        tokens = [5 + 7 * at % 53 for at in range(96)]
        arms[name] = oracle.Said([tokens[-4:]], reference.scores(folder, [tokens], torch.bfloat16, "plain", "cpu"))
    served = oracle.Served("m", 64, "cpu", "bfloat16", (92,), [tokens[:-4]], {Cell("auto"): arms}, {})
    right, wrong = oracle.compare(served, tmp_path / "right", "cpu")
    assert (right.ok, wrong.ok) == (True, False)
    assert right.covered.mean == pytest.approx(right.bound.mean / 2)
    assert wrong.covered.mean > wrong.bound.mean
    assert wrong.covered.largest > wrong.bound.largest

"""vLLM's own unfused ops: what its wrapper path launches between the projections, each by itself."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from dsafuse import installed
from dsafuse.check.cases import INDEXER, MLA, Case
from dsafuse.check.environment import version_of
from dsafuse.check.peers import BF16_STEPS, FP8_STEP, Bound, Peer, needs_gpu, why_not_importable
from dsafuse.layouts import INDEX_DIM, QUERY_DIM, ROPE_DIM

NEEDED = ("rotary_embedding", "concat_and_cache_mla", "indexer_k_quant_and_cache", "scaled_fp8_quant")


def available() -> str | None:
    """A vLLM that was built for this GPU."""
    if reason := needs_gpu() or installed.why_not("vllm"):
        return reason
    if reason := why_not_importable("vllm._custom_ops"):
        return reason
    ops = _ops()
    missing = [name for name in NEEDED if not hasattr(ops, name)]
    if missing:
        return f"vllm {version_of('vllm')} lacks {', '.join(missing)}"
    if not hasattr(torch.ops._C_cache_ops, "concat_and_cache_mla"):
        return "the vllm installed here has no GPU build"
    return None


def _ops() -> Any:
    return importlib.import_module("vllm._custom_ops")


def version() -> str:
    """The wheel's version."""
    return f"vllm {version_of('vllm')}"


def bind(case: Case, a: dict[str, Any]) -> Bound:
    """The steps of the wrapper for the MLA op, of the indexer for the indexer op."""
    return _mla(case, a) if case.op == MLA else _indexer(case, a)


def _mla(case: Case, a: dict[str, Any]) -> Bound:
    """RoPE in place; query concat; query quantisation; key concat with the cache write."""
    ops, tokens, heads = _ops(), case.tokens, case.heads
    table = a["cos_sin_cache"].to(a["q_pe"].dtype)
    source = a["q_pe"].clone(), a["k_pe"].reshape(tokens, ROPE_DIM).clone()
    q_pe, k_pe = (part.clone() for part in source)
    query = a["q_nope"].new_empty(tokens, heads, QUERY_DIM)
    q_out = torch.empty(tokens, heads * QUERY_DIM, dtype=a["fp8_dtype"], device=query.device)

    def call() -> None:
        # In place: replays rotate further, by steps that keep every magnitude.
        ops.rotary_embedding(a["positions"], q_pe, k_pe[:, None], ROPE_DIM, table, case.rope_style == "neox")
        torch.cat([a["q_nope"], q_pe], -1, out=query)
        ops.scaled_fp8_quant(query.view(tokens, heads * QUERY_DIM), a["q_scale"], output=q_out)
        ops.concat_and_cache_mla(a["kv_c"], k_pe, a["kv_cache"], a["slot_mapping"], "fp8", a["k_scale"])

    def outputs() -> dict[str, torch.Tensor]:
        for part, fresh in zip((q_pe, k_pe), source):
            part.copy_(fresh)
        call()
        return {"q_out": q_out.view(tokens, heads, QUERY_DIM), "kv_cache": a["kv_cache"]}

    return Bound(call, outputs)


def _indexer(case: Case, a: dict[str, Any]) -> Bound:
    """LayerNorm; RoPE in place; query quantisation; weight fold; key quantisation with the cache write."""
    ops, tokens, heads = _ops(), case.tokens, case.index_heads
    group = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    table, source = a["cos_sin_cache"].to(a["q"].dtype), a["q"].contiguous().clone()
    q = source.clone()
    kept: dict[str, torch.Tensor] = {}
    weight, bias = a["norm_weight"].float(), a["norm_bias"].float()
    layer_norm = torch.nn.functional.layer_norm

    def call() -> None:
        k = layer_norm(a["k"].float(), (INDEX_DIM,), weight, bias, a["eps"]).type_as(a["k"])
        q_pe, k_pe = q[..., :ROPE_DIM], k[:, None, :ROPE_DIM]
        ops.rotary_embedding(a["positions"], q_pe, k_pe, ROPE_DIM, table, case.index_rope_style == "neox")
        codes, scales = group.per_token_group_quant_fp8(q.view(-1, INDEX_DIM), INDEX_DIM, use_ue8m0=True)
        weights = (a["weights"] * scales.view(tokens, heads)) * a["weights_scale"]
        ops.indexer_k_quant_and_cache(k, a["kv_cache"], a["slot_mapping"], INDEX_DIM, "ue8m0")
        kept.update(q_out=codes.view(tokens, heads, INDEX_DIM), weights_out=weights)

    def outputs() -> dict[str, torch.Tensor]:
        q.copy_(source)
        call()
        return {**kept, "kv_cache": a["kv_cache"]}

    return Bound(call, outputs)


PEERS = (
    Peer(
        name="vllm_unfused",
        ops=frozenset({MLA, INDEXER}),
        available=available,
        version=version,
        bind=bind,
        differs=(
            "RoPE from a table in bf16, its products rounded to bf16; index keys are quantised by what its C++ makes "
            "of ue8m0; the weight fold is torch, two launches"
        ),
        tolerance=dict.fromkeys(("latent_q", "latent_kv", "index_q", "index_k"), FP8_STEP + 3 * BF16_STEPS),
    ),
)

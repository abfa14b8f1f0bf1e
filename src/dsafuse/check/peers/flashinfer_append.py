"""FlashInfer's `rope_quantize_fp8_append_paged_kv_cache`: the MLA op in one CUDA kernel, into two split caches."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from dsafuse import installed
from dsafuse.check.cases import MLA, Case
from dsafuse.check.environment import version_of
from dsafuse.check.peers import Bound, Peer, needs_gpu, why_not_importable
from dsafuse.layouts import LATENT_DIM, QUERY_DIM, ROPE_DIM

PACKAGE = "flashinfer"


def available() -> str | None:
    """A CUDA GPU, and FlashInfer with this function."""
    if reason := needs_gpu():
        return reason
    if torch.version.hip:
        return "FlashInfer is for CUDA"
    if reason := installed.why_not(PACKAGE) or why_not_importable("flashinfer.rope"):
        return reason
    return None if hasattr(_rope(), "rope_quantize_fp8_append_paged_kv_cache") else f"{version()} lacks the function"


def _rope() -> Any:
    return importlib.import_module("flashinfer.rope")


def version() -> str:
    """The wheel's version."""
    return f"flashinfer {version_of('flashinfer-python') or version_of(PACKAGE)}"


def bind(case: Case, a: dict[str, Any]) -> Bound:
    """Slots become (page, position) pairs of one-token sequences, prepared before: an engine has them at hand."""
    blocks, block_size = a["kv_cache"].shape[:2]
    device, fp8 = a["q_nope"].device, a["fp8_dtype"]
    slots, tokens = a["slot_mapping"].long(), case.tokens
    ckv, kpe = (torch.zeros(blocks, block_size, n, dtype=fp8, device=device) for n in (LATENT_DIM, ROPE_DIM))
    q_out = torch.empty(tokens, case.heads, QUERY_DIM, dtype=fp8, device=device)
    options = {
        "q_rope": a["q_pe"],
        "k_rope": a["k_pe"].reshape(tokens, ROPE_DIM),
        "q_nope": a["q_nope"],
        "k_nope": a["kv_c"],
        "v": None,
        "cos_sin_cache": a["cos_sin_cache"],
        "pos_ids": a["positions"].int(),
        "paged_kv_cache": (ckv, kpe),
        "kv_indices": (slots // block_size).int(),
        "kv_indptr": torch.arange(tokens + 1, dtype=torch.int32, device=device),
        "batch_indices": torch.arange(tokens, dtype=torch.int32, device=device),
        "positions": (slots % block_size).int(),
        "page_size": block_size,
        "kv_layout": "NHD",
        "quantize_dtype": fp8,
        "quant_scale_q": float(1 / a["q_scale"]),
        "quant_scale_kv": float(1 / a["k_scale"]),
        "is_neox": case.rope_style == "neox",
        "q_rope_out": q_out[..., LATENT_DIM:],
        "q_nope_out": q_out[..., :LATENT_DIM],
        "enable_pdl": torch.cuda.get_device_capability(device)[0] >= 9,
    }
    function = _rope().rope_quantize_fp8_append_paged_kv_cache

    def outputs() -> dict[str, torch.Tensor]:
        return {"q_out": q_out, "kv_cache": torch.cat([ckv.view(torch.uint8), kpe.view(torch.uint8)], -1)}

    return Bound(lambda: function(**options), outputs)


PEERS = (
    Peer(
        name="flashinfer",
        ops=frozenset({MLA}),
        available=available,
        version=version,
        bind=bind,
        differs="multiplies by a scale that the host knows; nothing is rounded after RoPE; latent and RoPE parts split",
    ),
)

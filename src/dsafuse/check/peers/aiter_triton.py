"""AITER's Triton kernel `fused_qk_rope_cat_and_cache_mla`: the MLA op, into a flat cache, the query unscaled."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from dsafuse.check.cases import MLA, Case
from dsafuse.check.environment import version_of
from dsafuse.check.peers import BF16_STEPS, FP8_STEP, Bound, Peer, installed, needs_gpu, why_not_importable
from dsafuse.layouts import QUERY_DIM, ROPE_DIM

MODULES = ("aiter.ops.triton.fusions.fused_kv_cache", "aiter.ops.triton.fused_kv_cache")
FUNCTION = "fused_qk_rope_cat_and_cache_mla"


def available() -> str | None:
    """A ROCm GPU, and AITER with this function."""
    if reason := needs_gpu():
        return reason
    if not installed("aiter"):
        return "aiter is not installed"
    name = _module_name()
    return why_not_importable(name) if name else f"aiter {version_of('aiter')} has none of {', '.join(MODULES)}"


def _module_name() -> str | None:
    """The module that holds the function; it has moved once."""
    if why_not_importable("aiter.ops.triton"):
        return MODULES[0]  # whose import says why
    return next((name for name in MODULES if installed(name.rpartition(".")[0]) and installed(name)), None)


def version() -> str:
    """The package's version, which a checkout on PYTHONPATH does not tell."""
    return f"aiter {version_of('aiter') or version_of('amd-aiter') or 'of a checkout'}"


def bind(case: Case, a: dict[str, Any]) -> Bound:
    """One key head; the query is cast to fp8 without a scale, so its codes stand for other values than ours."""
    cache = a["kv_cache"].view(a["fp8_dtype"])
    blocks, block_size, _ = cache.shape
    flat = cache.view(blocks * block_size, 1, QUERY_DIM)
    cos, sin = (part.to(a["q_nope"].dtype).contiguous() for part in a["cos_sin_cache"].split(ROPE_DIM // 2, -1))
    q_out = torch.empty(case.tokens, case.heads, QUERY_DIM, dtype=a["fp8_dtype"], device=cache.device)
    function = getattr(importlib.import_module(_module_name() or MODULES[0]), FUNCTION)
    options = {
        "q_nope": a["q_nope"],
        "q_pe": a["q_pe"],
        "k_nope": a["kv_c"][:, None],
        "k_pe": a["k_pe"].reshape(case.tokens, 1, ROPE_DIM),
        "kv_cache": flat,
        "slot_mapping": a["slot_mapping"],
        "pos": a["positions"],
        "cos": cos,
        "sin": sin,
        "k_scale": a["k_scale"],
        "is_neox": case.rope_style == "neox",
        "q_out": q_out,
        "q_out_dtype": a["fp8_dtype"],
    }

    def outputs() -> dict[str, torch.Tensor]:
        # What its codes stand for, over the scale that they will be multiplied with.
        return {"q_out": q_out.double() / a["q_scale"].double(), "kv_cache": a["kv_cache"]}

    return Bound(lambda: function(**options), outputs)


PEER = Peer(
    name="aiter",
    ops=frozenset({MLA}),
    available=available,
    version=version,
    bind=bind,
    differs="rotates in bf16, with a bf16 table; no query scale; also writes rotated keys; fnuz maximum 240",
    tolerance={"latent_q": FP8_STEP + 2 * BF16_STEPS, "latent_kv": FP8_STEP + 2 * BF16_STEPS},
)

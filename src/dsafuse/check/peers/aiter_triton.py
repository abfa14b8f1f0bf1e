"""AITER's Triton kernel `fused_qk_rope_cat_and_cache_mla`: the MLA op, into a flat cache, the query unscaled.

On ROCm AITER is imported. Elsewhere its packages' own modules can't be, since they build and call HIP code: they are
stood in for while this one kernel's files load. So the wheel `amd-aiter`, without its needs, serves on NVIDIA, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch

from dsafuse import installed
from dsafuse.check.cases import MLA, Case
from dsafuse.check.environment import version_of
from dsafuse.check.peers import BF16_STEPS, FP8_STEP, Bound, Peer, needs_gpu, standing_in
from dsafuse.layouts import QUERY_DIM, ROPE_DIM

PACKAGES = ("aiter", "aiter.ops", "aiter.ops.triton")
"""Whose own modules import all of AITER."""

MODULES = ("aiter.ops.triton.fusions.fused_kv_cache", "aiter.ops.triton.fused_kv_cache")
"""Where the function lies: it has moved once."""

FUNCTION = "fused_qk_rope_cat_and_cache_mla"


def available() -> str | None:
    """A GPU, and AITER with this function."""
    if reason := needs_gpu() or installed.why_not("aiter"):
        return reason
    found = _found(bool(torch.version.hip))
    return found if isinstance(found, str) else None


@cache
def _found(whole: bool) -> Callable[..., Any] | str:
    """The function; a sentence where there is none. `whole`: AITER is imported, not its kernel's files alone."""
    with nullcontext() if whole else standing_in("aiter", _packages()):
        reasons = []
        for name in MODULES:
            try:
                function: Callable[..., Any] = getattr(importlib.import_module(name), FUNCTION)
            except (ImportError, AttributeError, OSError, RuntimeError) as error:
                reasons.append(f"{name}: {error}")
            else:
                return function
    return f"{version()} can't be imported here: {'; '.join(reasons)}"


def _packages() -> dict[str, ModuleType]:
    """AITER's packages as folders, nothing in them run."""
    spec = installed.spec_of("aiter")
    assert not isinstance(spec, str)
    roots = list(spec.submodule_search_locations or ())
    packages = {}
    for name in PACKAGES:
        packages[name] = ModuleType(name)
        packages[name].__path__ = ["/".join([root, *name.split(".")[1:]]) for root in roots]
    return packages


def version() -> str:
    """The package's version, which a checkout on PYTHONPATH does not tell."""
    return f"aiter {version_of('amd-aiter') or version_of('aiter') or 'of a checkout'}"


def bind(case: Case, a: dict[str, Any]) -> Bound:
    """One key head; the query is cast to fp8 without a scale, so its codes stand for other values than ours."""
    cache = a["kv_cache"].view(a["fp8_dtype"])
    blocks, block_size, _ = cache.shape
    flat = cache.view(blocks * block_size, 1, QUERY_DIM)
    cos, sin = (part.to(a["q_nope"].dtype).contiguous() for part in a["cos_sin_cache"].split(ROPE_DIM // 2, -1))
    q_out = torch.empty(case.tokens, case.heads, QUERY_DIM, dtype=a["fp8_dtype"], device=cache.device)
    function = _found(bool(torch.version.hip))
    if isinstance(function, str):
        raise ImportError(function)
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


PEERS = (
    Peer(
        name="aiter",
        ops=frozenset({MLA}),
        available=available,
        version=version,
        bind=bind,
        differs="rotates in bf16, with a bf16 table; no query scale; also writes rotated keys; fnuz maximum 240",
        tolerance={"latent_q": FP8_STEP + 2 * BF16_STEPS, "latent_kv": FP8_STEP + 2 * BF16_STEPS},
    ),
)

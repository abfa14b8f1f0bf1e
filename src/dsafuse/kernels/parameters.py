"""What `grids.prepare` is handed: its arguments, and the constants and options that it is compiled with.

Its parameters are grouped by role. A role that an op lacks passes None and 0, and its branch is not compiled; the
groups of the roles that it has are read off the arguments.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from dsafuse.kernels.plans import LaunchPlan, block_of, rows_of
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.numerics import FP8_FORMATS, RopeStyle, Rounding, ScaleRule
from dsafuse.ops.config import Config
from dsafuse.ops.resolve import Named
from dsafuse.registry import OPS, Arguments
from dsafuse.target import Target

VECTOR_BYTES = 16
"""The widest access of a thread; a row that starts at a multiple of it is read and written in such pieces."""


def runtime_arguments(op: str, arguments: Arguments, config: Config) -> tuple[Any, ...]:
    """What `grids.prepare` takes at run time, in the order of its parameters."""
    index = Named(arguments, OPS[op].index_prefix)
    latent, indexed = config.latent_q or config.latent_kv, config.index_q or config.index_k
    return (
        arguments["positions"],
        len(arguments["positions"]),
        *(_table(arguments["cos_sin_cache"]) if latent else _ABSENT_TABLE),
        *(_latent_q(arguments) if config.latent_q else _ABSENT_LATENT_Q),
        *(_latent_kv(arguments, config.latent_kv.norm) if config.latent_kv else _ABSENT_LATENT_KV),
        *(_norm_q(arguments) if config.norm_q else _ABSENT_NORM_Q),
        *_row(arguments["topk_indices"] if config.clear_topk else None),
        *(_table(index["cos_sin_cache"]) if indexed else _ABSENT_TABLE),
        *(_index_q(index) if config.index_q else _ABSENT_INDEX_Q),
        *(_index_k(index) if config.index_k else _ABSENT_INDEX_K),
    )


def _table(table: torch.Tensor) -> tuple[Any, ...]:
    return table, table.stride(0), table.shape[0]


_ABSENT_TABLE = (None, 0, 0)


def _latent_q(a: Arguments) -> tuple[Any, ...]:
    q_nope, q_pe, q_out = a["q_nope"], a["q_pe"], a["q_out"]
    return (
        *((None, 0, 0) if q_nope is None else (q_nope, q_nope.stride(0), q_nope.stride(1))),
        q_pe,
        q_pe.stride(0),
        q_pe.stride(1),
        q_out,
        q_out.stride(0),
        q_out.stride(1),
        a["q_scale"],
    )


_ABSENT_LATENT_Q = (None, 0, 0, None, 0, 0, None, 0, 0, None)


def _slots(cache: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
    return slots, slots.shape[0], cache.shape[0] * cache.shape[1]


def _row(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    return (None, 0) if tensor is None else (tensor, tensor.stride(0))


def _latent_kv(a: Arguments, norm: bool) -> tuple[Any, ...]:
    cache = a["kv_cache"]
    normed = (
        (a["kv_norm_weight"], a["kv_norm_eps"], *_row(a["kv_c_out"]), *_row(a["k_pe_out"])) if norm else _ABSENT_NORM
    )
    return (
        *_row(a["kv_c"]),
        *_row(a["k_pe"]),
        cache,
        cache.stride(0),
        cache.stride(1),
        *_slots(cache, a["slot_mapping"]),
        a["k_scale"],
        *normed,
    )


_ABSENT_NORM = (None, 0.0, None, 0, None, 0)
_ABSENT_LATENT_KV = (None, 0, None, 0, None, 0, 0, None, 0, 0, None, *_ABSENT_NORM)


def _norm_q(a: Arguments) -> tuple[Any, ...]:
    return *_row(a["q_c"]), a["q_norm_weight"], a["q_norm_eps"], *_row(a["q_c_out"])


_ABSENT_NORM_Q = (None, 0, None, 0.0, None, 0)


def _index_q(n: Named) -> tuple[Any, ...]:
    q, q_out = n["q"], n["q_out"]
    return (
        q,
        q.stride(0),
        q.stride(1),
        *_row(n["weights"]),
        n["weights_scale"],
        q_out,
        q_out.stride(0),
        q_out.stride(1),
        *_row(n["weights_out"]),
    )


_ABSENT_INDEX_Q = (None, 0, 0, None, 0, 0.0, None, 0, 0, None, 0)


def _index_k(n: Named) -> tuple[Any, ...]:
    cache = n["kv_cache"]
    return (
        *_row(n["k"]),
        n["norm_weight"],
        n["norm_bias"],
        n["eps"],
        *_row(cache),
        *_slots(cache, n["slot_mapping"]),
    )


_ABSENT_INDEX_K = (None, 0, None, None, 0.0, None, 0, None, 0, 0)


def format_constants(dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """What a kernel must know of the fp8 format that it writes on a target."""
    import triton.language as tl

    fmt = FP8_FORMATS[dtype]
    return {"FP8": getattr(tl, fmt.triton_name), "SIGNED_NAN": target.signed_nan}


@cache
def constants_of(config: Config, target: Target, plan: LaunchPlan) -> dict[str, Any]:
    """The compile-time constants that follow from the configuration and the plan."""
    constants: dict[str, Any] = {
        **_ABSENT_CONSTANTS,
        **format_constants(config.fp8, target),
        "ROUND": config.rounding == Rounding.SPLIT,
        "PDL": target.dependent_launch,
        "GROUP": plan.group,
        **rows_of(config, plan),
    }
    if (latent_q := config.latent_q) is not None:
        constants["HEADS"] = latent_q.heads
        constants["BLOCK_HEADS"] = block_of(latent_q, plan)
        constants["NEOX"] = latent_q.rope_style == RopeStyle.NEOX
    if (latent_kv := config.latent_kv) is not None:
        constants["LAYOUT"] = latent_kv.layout
        constants["TILE_UE8M0"] = latent_kv.scale_rule == ScaleRule.UE8M0
        constants["BLOCK_SIZE"] = latent_kv.block_size
        constants["NEOX"] = latent_kv.rope_style == RopeStyle.NEOX
    if (norm_q := config.norm_q) is not None:
        constants["Q_WIDTH"] = norm_q.width
    if (clear_topk := config.clear_topk) is not None:
        constants["TOPK"] = clear_topk.width
    if (index_q := config.index_q) is not None:
        constants["INDEX_HEADS"] = index_q.heads
        constants["INDEX_BLOCK_HEADS"] = block_of(index_q, plan)
        constants["INDEX_NEOX"] = index_q.rope_style == RopeStyle.NEOX
        constants["UE8M0"] = index_q.scale_rule == ScaleRule.UE8M0
    if (index_k := config.index_k) is not None:
        constants["INDEX_LAYOUT"] = index_k.layout
        constants["INDEX_BLOCK_SIZE"] = index_k.block_size
        constants["INDEX_NEOX"] = index_k.rope_style == RopeStyle.NEOX
        constants["UE8M0"] = index_k.scale_rule == ScaleRule.UE8M0
    return constants


_ABSENT_CONSTANTS = {
    "INDEX_HEADS": 0,
    "INDEX_BLOCK_HEADS": 1,
    "HEADS": 0,
    "BLOCK_HEADS": 1,
    "LAYOUT": None,
    "TILE_UE8M0": True,
    "BLOCK_SIZE": 1,
    "NEOX": False,
    "Q_WIDTH": 0,
    "TOPK": 0,
    "INDEX_LAYOUT": None,
    "INDEX_BLOCK_SIZE": 1,
    "INDEX_NEOX": False,
    "UE8M0": False,
}


@cache
def launch_options(target: Target, threads: int) -> dict[str, Any]:
    """Compiler and launch options. launch_pdl is unknown to ROCm's backend, False included."""
    options: dict[str, Any] = {"num_warps": threads // target.warp_size, "enable_fp_fusion": False}
    if target.dependent_launch:
        options["launch_pdl"] = True
    return options


_VECTORISED = (
    *("q_nope", "q_pe", "q_out", "kv_c", "k_pe", "cos_sin_cache", "kv_norm_weight", "kv_c_out", "k_pe_out"),
    *("q_c", "q_norm_weight", "q_c_out", "topk_indices"),
)
_INDEX_VECTORISED = ("q", "k", "q_out", "cos_sin_cache")


def alignments(op: str, a: Arguments, config: Config) -> dict[str, int]:
    """How far the rows of inputs and outputs, and those of each cache, are aligned."""
    index = Named(a, OPS[op].index_prefix)
    names = [name for name in _VECTORISED if name in a]
    if config.index_q or config.index_k:
        names += [name for name in map(index.name, _INDEX_VECTORISED) if name in a]
    rows = alignment(*(a[name] for name in names if a[name] is not None))
    cache_align = index_cache_align = 1
    if config.latent_kv:
        least = MLA_LAYOUTS[config.latent_kv.layout].alignment_bytes
        cache_align = alignment(a["kv_cache"], at_least=least)
    if config.index_k:
        least = INDEXER_LAYOUTS[config.index_k.layout].alignment_bytes
        index_cache_align = alignment(index["kv_cache"][:, 0], at_least=least)
    return {"ALIGN": rows, "CACHE_ALIGN": cache_align, "INDEX_CACHE_ALIGN": index_cache_align}


def alignment(*tensors: torch.Tensor, at_least: int = 1) -> int:
    """16 if every row (last axis) of every tensor starts at a multiple of 16 bytes, else `at_least`."""
    for tensor in tensors:
        size = tensor.element_size()
        bits = tensor.data_ptr()
        for stride in tensor.stride()[:-1]:
            bits |= stride * size
        if bits % VECTOR_BYTES:
            return at_least
    return VECTOR_BYTES

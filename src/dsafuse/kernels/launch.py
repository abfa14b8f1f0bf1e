"""Provider `triton`: turns resolved arguments into one launch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch

from dsafuse.dispatch import OpConfig, unsupported_format
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.numerics import FP8_FORMATS, RopeStyle, Rounding, ScaleRule
from dsafuse.ops.indexer import IndexerConfig
from dsafuse.ops.mla import MlaConfig
from dsafuse.registry import Arguments
from dsafuse.target import Target

VECTOR_BYTES = 16
"""The widest access of a thread; a row that starts at a multiple of it is read and written in such pieces."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How an op's grid is cut: query heads of one program, and its warps."""

    block_heads: int
    num_warps: int


PLANS: dict[tuple[str, str], LaunchPlan] = {
    ("mla", "nvidia"): LaunchPlan(block_heads=4, num_warps=2),
    ("mla", "amd"): LaunchPlan(block_heads=8, num_warps=2),
    ("mla", "cpu"): LaunchPlan(block_heads=16, num_warps=1),
    ("indexer", "nvidia"): LaunchPlan(block_heads=16, num_warps=2),
    ("indexer", "amd"): LaunchPlan(block_heads=16, num_warps=2),
    ("indexer", "cpu"): LaunchPlan(block_heads=16, num_warps=1),
}


def why_not(config: OpConfig, target: Target) -> str | None:
    """Why these kernels would not serve this configuration on this target; None if they would."""
    if not target.gpu:
        return f"kernels are compiled for GPUs, and the tensors are on {target.arch}"
    return unsupported_format(config, target)


def why_not_here() -> str | None:
    """Why nothing can be launched on this machine."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return None


def run(op: str, arguments: Arguments, config: OpConfig) -> None:
    """Launch the op's kernel on the tensors' device and current stream; no tokens, no launch."""
    from dsafuse.kernels import grids

    launch(op, arguments, config, grids)


def launch(op: str, arguments: Arguments, config: OpConfig, grids: ModuleType) -> None:
    """Launch from a module of kernels: the compiled ones, or their interpreted twins."""
    _LAUNCHERS[op](arguments, config, grids)


def _mla(a: Arguments, config: MlaConfig, grids: ModuleType) -> None:
    q_nope, q_pe, kv_c, k_pe, q_out = a["q_nope"], a["q_pe"], a["kv_c"], a["k_pe"], a["q_out"]
    kv_cache, slots, table = a["kv_cache"], a["slot_mapping"], a["cos_sin_cache"]
    tokens = q_nope.shape[0]
    if not tokens:
        return
    target = Target.of(q_nope.device)
    plan = PLANS["mla", target.vendor]
    block_heads = min(plan.block_heads, next_power_of_two(config.heads))
    grid = (tokens * (1 + -(-config.heads // block_heads)),)
    with on_device_of(q_nope):
        grids.mla[grid](
            q_nope,
            q_nope.stride(0),
            q_nope.stride(1),
            q_pe,
            q_pe.stride(0),
            q_pe.stride(1),
            kv_c,
            kv_c.stride(0),
            k_pe,
            k_pe.stride(0),
            kv_cache,
            kv_cache.stride(0),
            kv_cache.stride(1),
            slots,
            slots.shape[0],
            kv_cache.shape[0] * kv_cache.shape[1],
            a["positions"],
            table,
            table.stride(0),
            table.shape[0],
            a["q_scale"],
            a["k_scale"],
            q_out,
            q_out.stride(0),
            q_out.stride(1),
            HEADS=config.heads,
            BLOCK_HEADS=block_heads,
            BLOCK_SIZE=config.block_size,
            LAYOUT=config.layout,
            QUERY_FP8=config.query in FP8_FORMATS,
            ALIGN=alignment(q_nope, q_pe, kv_c, k_pe, q_out, table),
            CACHE_ALIGN=alignment(kv_cache, at_least=MLA_LAYOUTS[config.layout].alignment_bytes),
            **numeric_constants(config),
            **launch_options(target, plan.num_warps),
        )


def _indexer(a: Arguments, config: IndexerConfig, grids: ModuleType) -> None:
    q, k, weights, q_out, weights_out = a["q"], a["k"], a["weights"], a["q_out"], a["weights_out"]
    kv_cache, slots, table = a["kv_cache"], a["slot_mapping"], a["cos_sin_cache"]
    tokens = q.shape[0]
    if not tokens:
        return
    target = Target.of(q.device)
    plan = PLANS["indexer", target.vendor]
    block_heads = min(plan.block_heads, next_power_of_two(config.heads))
    grid = (tokens * (1 + -(-config.heads // block_heads)),)
    layout = INDEXER_LAYOUTS[config.layout]
    with on_device_of(q):
        grids.indexer[grid](
            q,
            q.stride(0),
            q.stride(1),
            weights,
            weights.stride(0),
            k,
            k.stride(0),
            kv_cache,
            kv_cache.stride(0),
            slots,
            slots.shape[0],
            kv_cache.shape[0] * kv_cache.shape[1],
            a["norm_weight"],
            a["norm_bias"],
            a["positions"],
            table,
            table.stride(0),
            table.shape[0],
            a["weights_scale"],
            a["eps"],
            q_out,
            q_out.stride(0),
            q_out.stride(1),
            weights_out,
            weights_out.stride(0),
            HEADS=config.heads,
            BLOCK_HEADS=block_heads,
            BLOCK_SIZE=config.block_size,
            UE8M0=config.scale_rule == ScaleRule.UE8M0,
            ALIGN=alignment(q, k, q_out, table),
            CACHE_ALIGN=alignment(kv_cache[:, 0], at_least=layout.alignment_bytes),
            **numeric_constants(config),
            **launch_options(target, plan.num_warps),
        )


_LAUNCHERS: dict[str, Callable[[Arguments, Any, ModuleType], None]] = {
    "fused_qk_rope_concat_and_cache_mla": _mla,
    "indexer_qk_rope_quant_and_cache": _indexer,
}


def numeric_constants(config: MlaConfig | IndexerConfig) -> dict[str, Any]:
    """The constexprs of number formats and rounding."""
    import triton.language as tl

    fmt = FP8_FORMATS[config.fp8]
    return {
        "NEOX": config.rope_style == RopeStyle.NEOX,
        "FP8": getattr(tl, fmt.triton_name),
        "FP8_MAX": fmt.max,
        "ROUND": config.rounding == Rounding.SPLIT,
    }


@cache
def launch_options(target: Target, num_warps: int) -> dict[str, Any]:
    """Compiler and launch options. launch_pdl is unknown to ROCm's backend, False included."""
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False, "PDL": target.dependent_launch}
    if target.dependent_launch:
        options["launch_pdl"] = True
    return options


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


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)

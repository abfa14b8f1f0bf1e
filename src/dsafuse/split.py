"""Provider `split`: the unfused chains, one step for each launch that an engine makes today.

The sequence of steps and their intermediates stand here once. A step itself is torch on CPU, and one Triton
kernel on a GPU, built from the same role functions as the fused kernels (`kernels.steps`). It is the library's
fallback and the baseline of every ratio.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dsafuse import torch_steps
from dsafuse.dispatch import OpConfig, unsupported_format
from dsafuse.numerics import FP8_FORMATS, Rounding
from dsafuse.ops import roles
from dsafuse.ops.indexer import IndexerConfig
from dsafuse.ops.mla import MlaConfig
from dsafuse.registry import Arguments
from dsafuse.target import Target


def why_not(config: OpConfig, target: Target) -> str | None:
    """Why the chain would not run on this target: only for an fp8 format."""
    return unsupported_format(config, target)


def why_not_here() -> str | None:
    """The chain runs wherever torch does."""
    return None


def steps_for(device: torch.device) -> ModuleType:
    """The module whose functions are the steps: Triton on a GPU that has it, else torch."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        return importlib.import_module("dsafuse.kernels.steps")
    return torch_steps


def run(op: str, arguments: Arguments, config: OpConfig) -> None:
    """Run the op's chain; no tokens, no step."""
    positions = arguments["positions"]
    if not len(positions):
        return
    table = arguments["cos_sin_cache"]
    roles.check_addresses(arguments["kv_cache"], arguments["slot_mapping"], positions, table.shape[0])
    _CHAINS[op](arguments, config, steps_for(positions.device))


def _mla(a: Arguments, config: MlaConfig, steps: ModuleType) -> None:
    """RoPE; query concat; query quantisation if it is fp8; key concat with the cache write."""
    kept = config.activation if config.rounding == Rounding.SPLIT else torch.float32
    q_pe, k_pe = a["q_pe"], a["k_pe"].reshape(len(a["k_pe"]), -1)
    q_rot, k_rot = q_pe.new_empty(q_pe.shape, dtype=kept), k_pe.new_empty(k_pe.shape, dtype=kept)
    steps.rotate_latent(q_pe, k_pe, q_rot, k_rot, a["positions"], a["cos_sin_cache"], config)
    if config.query in FP8_FORMATS:
        query = q_rot.new_empty((*q_rot.shape[:2], a["q_out"].shape[-1]))
        steps.concat_query(a["q_nope"], q_rot, query, config)
        steps.quantise_query(query, a["q_scale"], a["q_out"], config)
    else:
        steps.concat_query(a["q_nope"], q_rot, a["q_out"], config)
    steps.write_latent(a["kv_c"], k_rot, a["kv_cache"], a["slot_mapping"], a["k_scale"], config)


def _indexer(a: Arguments, config: IndexerConfig, steps: ModuleType) -> None:
    """LayerNorm; RoPE; query quantisation; weight fold; key quantisation with the cache write."""
    kept = config.activation if config.rounding == Rounding.SPLIT else torch.float32
    q, k = a["q"], a["k"]
    k_norm = k.new_empty(k.shape, dtype=kept)
    steps.norm_key(k, a["norm_weight"], a["norm_bias"], a["eps"], k_norm, config)
    rotary = a["cos_sin_cache"].shape[-1]
    q_rot = q.new_empty((*q.shape[:2], rotary), dtype=kept)
    k_rot = k.new_empty((len(k), rotary), dtype=kept)
    steps.rotate_index(q, k_norm, q_rot, k_rot, a["positions"], a["cos_sin_cache"], config)
    scales = q.new_empty(q.shape[:2], dtype=torch.float32)
    steps.quantise_index_query(q, q_rot, a["q_out"], scales, config)
    steps.fold_weights(a["weights"], scales, a["weights_scale"], a["weights_out"])
    steps.write_key(k_norm, k_rot, a["kv_cache"], a["slot_mapping"], config)


_CHAINS: dict[str, Callable[[Arguments, Any, ModuleType], None]] = {
    "fused_qk_rope_concat_and_cache_mla": _mla,
    "indexer_qk_rope_quant_and_cache": _indexer,
}

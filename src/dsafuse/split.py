"""Provider `split`: the unfused chains, one step for each launch that an engine makes today.

The sequence of steps and their intermediates stand here once. A step itself is torch on CPU, and one Triton
kernel on a GPU, built from the same role functions as the fused kernel (`kernels.steps`). It is the library's
fallback and the baseline of every ratio.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

from dsafuse import torch_steps
from dsafuse.dispatch import PROVIDERS, OpConfig, unsupported_format
from dsafuse.layouts import ROPE_DIM
from dsafuse.numerics import FP8_FORMATS, Rounding
from dsafuse.ops import roles
from dsafuse.ops.config import Config
from dsafuse.ops.resolve import Named
from dsafuse.registry import OPS, Arguments
from dsafuse.target import Target


def why_not(config: OpConfig, target: Target) -> str | None:
    """Why the chain would not run on this target: only for an fp8 format."""
    return unsupported_format(config, target)


def why_not_here() -> str | None:
    """The chain runs wherever torch does."""
    return None


def steps_for(device: torch.device) -> ModuleType:
    """The module whose functions are the steps: Triton on a GPU where it can be compiled, else torch."""
    if device.type == "cuda" and PROVIDERS["triton"].load().why_not_here() is None:
        return importlib.import_module("dsafuse.kernels.steps")
    return torch_steps


def run(op: str, arguments: Arguments, config: Config, steps: ModuleType | None = None) -> None:
    """Run the op's chain; no tokens, no step. `steps` are those of the device unless given."""
    positions = arguments["positions"]
    if not len(positions):
        return
    index = Named(arguments, OPS[op].index_prefix)
    for named, role in ((Named(arguments), config.latent_kv), (index, config.index_k)):
        if role is not None:
            table = named["cos_sin_cache"]
            roles.check_addresses(named["kv_cache"], named["slot_mapping"], positions, table, named.prefix)
    steps = steps or steps_for(positions.device)
    if config.norm_q is not None:
        steps.rms_norm(arguments["q_c"], arguments["q_norm_weight"], arguments["q_norm_eps"], arguments["q_c_out"])
    if config.clear_topk is not None:
        steps.clear_topk(arguments["topk_indices"], len(positions))
    if config.latent_q is not None or config.latent_kv is not None:
        _latent(arguments, config, steps)
    if config.index_q is not None or config.index_k is not None:
        _index(index, config, steps)


def _kept(config: Config) -> torch.dtype:
    """The dtype that intermediates have in memory."""
    return config.activation if config.rounding == Rounding.SPLIT else torch.float32


def _latent(a: Arguments, config: Config, steps: ModuleType) -> None:
    """[RMSNorm of kv_c]; RoPE; query concat; query quantisation if it is fp8; key concat with the cache write."""
    q_role, kv_role, kept = config.latent_q, config.latent_kv, _kept(config)
    q_pe: Any = None
    k_pe: Any = None
    q_rot: Any = None
    k_rot: Any = None
    if q_role is not None:
        q_pe = a["q_pe"]
        q_rot = q_pe.new_empty(q_pe.shape, dtype=kept)
        if not q_role.nope and q_rot.stride() == a["q_out"].stride() and q_rot.dtype == a["q_out"].dtype:
            # As an engine would, with nothing to concatenate; a step stores intermediates by 16 bytes.
            q_rot = q_rot if a["q_out"].data_ptr() % 16 else a["q_out"]
    if kv_role is not None:
        k_pe = a["k_pe"].reshape(len(a["k_pe"]), ROPE_DIM)
        k_rot = k_pe.new_empty(k_pe.shape, dtype=kept)
    style = (q_role or kv_role).rope_style  # type: ignore[union-attr]
    steps.rotate(q_pe, k_pe, q_rot, k_rot, a["positions"], a["cos_sin_cache"], style)
    if q_role is not None and q_role.query in FP8_FORMATS:
        query = q_rot.new_empty((*q_rot.shape[:2], a["q_out"].shape[-1]))
        steps.concat_query(a["q_nope"], q_rot, query)
        steps.quantise_query(query, a["q_scale"], a["q_out"])
    elif q_role is not None and q_role.nope:
        steps.concat_query(a["q_nope"], q_rot, a["q_out"])
    elif q_rot is not None and q_rot is not a["q_out"]:
        a["q_out"][:, : q_rot.shape[1]].copy_(q_rot)
    if kv_role is not None:
        latent = a["kv_c"]
        if kv_role.norm:
            latent = latent.new_empty(latent.shape, dtype=kept)
            steps.rms_norm(a["kv_c"], a["kv_norm_weight"], a["kv_norm_eps"], latent)
            for name, value in (("kv_c_out", latent), ("k_pe_out", k_rot)):
                if a[name] is not None:
                    a[name].copy_(value)
        steps.write_latent(latent, k_rot, a["kv_cache"], a["slot_mapping"], a["k_scale"], config)


def _index(n: Named, config: Config, steps: ModuleType) -> None:
    """LayerNorm; RoPE; query quantisation; weight fold; key quantisation with the cache write."""
    q_role, k_role, kept = config.index_q, config.index_k, _kept(config)
    q: Any = None
    q_rot: Any = None
    k_norm: Any = None
    k_rot: Any = None
    if k_role is not None:
        k = n["k"]
        k_norm = k.new_empty(k.shape, dtype=kept)
        k_rot = k.new_empty((len(k), ROPE_DIM), dtype=kept)
        steps.norm_key(k, n["norm_weight"], n["norm_bias"], n["eps"], k_norm, k_role.rope_style)
    if q_role is not None:
        q = n["q"]
        q_rot = q.new_empty((*q.shape[:2], ROPE_DIM), dtype=kept)
    style = (q_role or k_role).rope_style  # type: ignore[union-attr]
    steps.rotate(q, k_norm, q_rot, k_rot, n["positions"], n["cos_sin_cache"], style)
    if q_role is not None:
        scales = q_rot.new_empty(q_rot.shape[:2], dtype=torch.float32)
        steps.quantise_index_query(q, q_rot, n["q_out"], scales, config)
        steps.fold_weights(n["weights"], scales, n["weights_scale"], n["weights_out"])
    if k_role is not None:
        steps.write_key(k_norm, k_rot, n["kv_cache"], n["slot_mapping"], config)

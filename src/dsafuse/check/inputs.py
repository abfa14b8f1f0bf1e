"""The tensors of a case: inputs drawn from a seed in hostile strides, and poisoned caches and outputs."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from dsafuse.check.caches import blank_cache, blocks_of, caches_of
from dsafuse.check.cases import DTYPES, Case
from dsafuse.check.memory import Memory
from dsafuse.check.strides import output, query, rows, sliced
from dsafuse.check.values import Draw
from dsafuse.layouts import INDEX_DIM, LATENT_DIM, QUERY_DIM, ROPE_DIM
from dsafuse.registry import OPS

SCALES = {"power": 0.5, "ordinary": 0.0371, "zero": 0.0, "nan": math.nan, "inf": math.inf, "negative": -0.7}
TOPK_WIDTHS = {"narrow": 33, "wide": 2048}

ENGINE_EPS = 1e-6


@dataclass(slots=True)
class Inputs:
    """Everything that a call reads, but not the caches.

    `arguments` may hold slots beyond the cache and positions beyond the table; `cleaned` holds what they mean.
    """

    arguments: dict[str, Any]
    cleaned: dict[str, Any]
    memory: Memory

    def slots(self, name: str) -> torch.Tensor:
        """A slot mapping as int64, -1 for every slot that is not to be written."""
        slots: torch.Tensor = self.cleaned[name]
        return slots.long()


@dataclass(slots=True)
class Outputs:
    """Poisoned caches and clearable rows, and poisoned outputs where the case brings its own."""

    arguments: dict[str, Any]
    memory: Memory


def case_seed(case: Case, seed: int) -> int:
    """A seed of the case's own, so that equal shapes do not get equal values."""
    return zlib.crc32(f"{case.op} {case.name} {seed}".encode())


def query_dtype(case: Case) -> torch.dtype:
    """What the case's MLA query is stored in."""
    return DTYPES[case.fp8 if case.query == "fp8" else case.activation]


def query_width(case: Case) -> int:
    """Dims of a head of the case's MLA query."""
    return ROPE_DIM if case.query == "rope" else QUERY_DIM


def draw_inputs(case: Case, seed: int, device: torch.device) -> Inputs:
    """Draw the inputs of a case."""
    seed = case_seed(case, seed)
    draw, memory = Draw(case, seed, device), Memory(device, seed)
    positions, safe_positions = draw.positions()
    arguments: dict[str, Any] = {
        "positions": _put(memory, "positions", positions),
        "fp8_dtype": DTYPES[case.fp8],
        "rounding": case.rounding,
    }
    cleaned = {"positions": safe_positions}
    for cache in caches_of(case):
        slots, safe = draw.slots(cache.slot_rule, cache.slots, blocks_of(case, cache) * cache.block_size)
        arguments[cache.slot_mapping] = _put(memory, cache.slot_mapping, slots)
        cleaned[cache.slot_mapping] = safe
    if {"latent_q", "latent_kv"} & case.roles:
        arguments["rope_style"] = case.rope_style
        arguments["cos_sin_cache"] = rows(memory, case, "cos_sin_cache", draw.table(DTYPES[case.table]))
    for role, inputs in (("latent_q", _latent_q), ("latent_kv", _latent_kv), ("norm_q", _norm_q)):
        if role in case.roles:
            arguments.update(inputs(case, draw, memory))
    index = _index(case, draw, memory)
    prefix = OPS[case.op].index_prefix
    arguments.update({prefix + name: value for name, value in index.items()})
    return Inputs(arguments, {**arguments, **cleaned}, memory)


def _latent_q(case: Case, draw: Draw, memory: Memory) -> dict[str, Any]:
    tokens, heads, dtype = case.tokens, case.heads, DTYPES[case.activation]
    unit = 0.5 if case.scale == "power" else 1.0
    q_nope = query(memory, case, "q_nope", heads, LATENT_DIM, dtype, "bmm")
    q_pe = query(memory, case, "q_pe", heads, ROPE_DIM, dtype, "projection")
    for part in (q_nope, q_pe):
        part.copy_(draw.activations(*part.shape, dtype=dtype, unit=unit, beyond=True))
    if case.strides == "broadcast":
        q_nope, q_pe = (part.expand(tokens, heads, -1) for part in (q_nope, q_pe))
    scale = torch.tensor([SCALES[case.scale]], device=memory.device)
    return {"q_nope": None if case.query == "rope" else q_nope, "q_pe": q_pe, "q_scale": _put(memory, "q_scale", scale)}


def _latent_kv(case: Case, draw: Draw, memory: Memory) -> dict[str, Any]:
    """kv_c and k_pe, and q_c where it comes out of the same projection."""
    tokens, dtype = case.tokens, DTYPES[case.activation]
    unit = 0.5 if case.scale == "power" else 1.0
    widths = {"kv_c": LATENT_DIM, "k_pe": ROPE_DIM}
    if case.normed:
        widths = {"q_c": case.q_width, **widths}
    parts = sliced(memory, case, "qkv_a", widths, dtype, before=0 if case.normed else 1536)
    for name, part in parts.items():
        normed = case.normed and name != "k_pe"
        part.copy_(draw.activations(*part.shape, dtype=dtype, unit=unit, normed=normed, beyond=True))
        if case.strides == "broadcast":
            parts[name] = part.expand(tokens, -1)
    if case.key_rank == 3:
        parts["k_pe"] = parts["k_pe"][:, None]
    scale = torch.tensor([2 * SCALES[case.scale]], device=memory.device)
    return {
        **parts,
        "k_scale": _put(memory, "k_scale", scale),
        # `auto` tells a uint8 cache by its width; the other half of the cases names the layout.
        "kv_layout": "auto" if case.cache_strides == "dense" and case.cache == "bytes" else case.layout,
        "scale_rule": case.tile_scale_rule,
    }


def _norm_q(case: Case, draw: Draw, memory: Memory) -> dict[str, Any]:
    """The norms of the latent seam; q_c itself is drawn with the latents."""
    norms = {"q_norm_weight": (case.q_width, case.q_norm), "kv_norm_weight": (LATENT_DIM, case.kv_norm)}
    weights = {
        name: rows(memory, case, name, (1 + draw.normal(1, width) / 4).to(DTYPES[dtype]))[0]
        for name, (width, dtype) in norms.items()
    }
    return {**weights, "q_norm_eps": ENGINE_EPS, "kv_norm_eps": 1e-5}


def _index(case: Case, draw: Draw, memory: Memory) -> dict[str, Any]:
    """The arguments of the index roles, without the op's prefix."""
    tokens, heads, dtype, roles = case.tokens, case.index_heads, DTYPES[case.activation], case.roles
    if not {"index_q", "index_k"} & roles:
        return {}
    found: dict[str, Any] = {
        "cos_sin_cache": rows(memory, case, "index_cos_sin_cache", draw.table(DTYPES[case.index_table])),
        "rope_style": case.index_rope_style,
        "scale_rule": case.scale_rule,
    }
    if "index_q" in roles:
        q = query(memory, case, "index_q", heads, INDEX_DIM, dtype, "padded")
        q.copy_(draw.activations(*q.shape, dtype=dtype))
        found["q"] = q.expand(tokens, heads, -1) if case.strides == "broadcast" else q
        found["weights_scale"] = INDEX_DIM**-0.5 * heads**-0.5
    wk: dict[torch.dtype, dict[str, int]] = {}
    if "index_k" in roles:
        wk.setdefault(dtype, {})["k"] = INDEX_DIM
        norm = DTYPES[case.norm]
        found["norm_weight"] = _put(memory, "norm_weight", (1 + draw.normal(INDEX_DIM) / 4).to(norm))
        found["norm_bias"] = _put(memory, "norm_bias", (draw.normal(INDEX_DIM) / 8).to(norm))
        found |= {"eps": ENGINE_EPS, "kv_layout": case.index_layout}
    if "index_q" in roles:
        # Keys and head weights of one dtype come out of one projection, as in the models.
        wk.setdefault(DTYPES[case.weights], {})["weights"] = heads
    for kind, widths in wk.items():
        for name, part in sliced(memory, case, "_".join(["wk", *widths]), widths, kind, before=0).items():
            part.copy_(draw.activations(*part.shape, dtype=kind, normed=True))
            found[name] = part.expand(tokens, -1) if case.strides == "broadcast" else part
    return found


def blank_outputs(case: Case, seed: int, device: torch.device) -> Outputs:
    """Poisoned caches and, unless the op is to allocate them, poisoned outputs. Equal seeds give equal poison."""
    memory = Memory(device, case_seed(case, seed) ^ 0x5EED)
    arguments: dict[str, Any] = {cache.name: blank_cache(memory, case, cache) for cache in caches_of(case)}
    tokens, activation, prefix = case.tokens, DTYPES[case.activation], OPS[case.op].index_prefix
    if "latent_q" in case.roles:
        arguments["q_out"] = output(memory, case, "q_out", (tokens, case.heads, query_width(case)), query_dtype(case))
        # Said twice where q_out says it, too; an op that allocates has nothing else to know it from.
        arguments["q_dtype"] = query_dtype(case)
    if "index_q" in case.roles:
        shapes = {
            "q_out": ((tokens, case.index_heads, INDEX_DIM), DTYPES[case.fp8]),
            "weights_out": ((tokens, case.index_heads), torch.float32),
        }
        for name, (shape, dtype) in shapes.items():
            arguments[prefix + name] = output(memory, case, prefix + name, shape, dtype)
    if "norm_q" in case.roles:
        arguments["q_c_out"] = output(memory, case, "q_c_out", (tokens, case.q_width), activation, heads=False)
        if case.key_outs == "given":
            for name, width in (("kv_c_out", LATENT_DIM), ("k_pe_out", ROPE_DIM)):
                arguments[name] = output(memory, case, name, (tokens, width), activation, heads=False, needed=True)
    if "clear_topk" in case.roles:
        arguments["topk_indices"] = _topk(memory, case)
    return Outputs(arguments, memory)


def _topk(memory: Memory, case: Case) -> torch.Tensor:
    width = TOPK_WIDTHS[case.topk]
    if case.topk == "wide":
        return memory.tensor("topk_indices", (case.tokens, width), torch.int32)
    return memory.tensor("topk_indices", (case.tokens + 2, width + 2), torch.int32, skew=1)[:, :width]


def _put(memory: Memory, name: str, values: torch.Tensor) -> torch.Tensor:
    tensor = memory.tensor(name, tuple(values.shape), values.dtype)
    tensor.copy_(values)
    return tensor

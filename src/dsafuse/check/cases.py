"""Cases: frozen records of everything that shapes one call, as the set of roles that its op is.

A case's name lists the fields that differ from the defaults, as `tokens=257,layout=fp8`, and with its op tells the
whole case: with a seed and a device it reproduces the call byte for byte.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any

import torch

from dsafuse.layouts import INDEXER_LAYOUTS
from dsafuse.numerics import FP8_FORMATS

MLA = "fused_qk_rope_concat_and_cache_mla"
INDEXER = "indexer_qk_rope_quant_and_cache"
PREPARE_QK = "prepare_qk"
PREPARE_LATENTS = "prepare_latents"
PREPARE_QUERIES = "prepare_queries"

ROLES: dict[str, frozenset[str]] = {
    MLA: frozenset({"latent_q", "latent_kv"}),
    INDEXER: frozenset({"index_q", "index_k"}),
    PREPARE_QK: frozenset({"latent_q", "latent_kv", "index_q", "index_k", "clear_topk"}),
    PREPARE_LATENTS: frozenset({"norm_q", "latent_kv", "index_k", "clear_topk"}),
    PREPARE_QUERIES: frozenset({"latent_q", "index_q"}),
}
"""The roles of each op."""

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "e4m3fn": torch.float8_e4m3fn,
    "e4m3fnuz": torch.float8_e4m3fnuz,
}


LARGE_TOKENS = 2**14


def _of(default: Any, *roles: str) -> Any:
    """A field that only ops with one of these roles have; without roles, every op."""
    return field(default=default, metadata={"roles": frozenset(roles)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A call of `op`. Fields of roles that the op lacks keep their defaults; CHOICES and COUNTS hold the values."""

    op: str

    tokens: int = _of(7)
    activation: str = _of("bf16")
    fp8: str = _of("e4m3fn")
    rounding: str = _of("split")
    positions: str = _of("int64")
    position_rule: str = _of("inside")
    """inside the rope table; or outside: below, above, and far above it, now and then."""
    strides: str = _of("engine")
    """engine: transposed and sliced as projections leave them; odd: rows off the 16-byte grid; broadcast: stride 0."""
    out: str = _of("given")
    """allocated: by the op; given: contiguous; wide: more heads, padded rows; odd: the same off the 16-byte grid."""
    values: str = _of("normal")
    """normal; magnitudes: 2**-12 to 2**10 by row; ties: fp8 midpoints and overflows; special: NaN, inf, -0, ..."""
    capacity: str = _of("snug", "latent_kv", "index_k")
    """snug: caches little larger than the tokens need; huge: beyond 4 GiB, slots at both ends."""
    index: str = _of("present")
    """Whether the op gets the indexer's arguments. Absent: the call of a layer without an indexer."""

    heads: int = _of(16, "latent_q")
    query: str = _of("activation", "latent_q")
    """activation; fp8; rope: the rotary part alone, without q_nope."""
    key_rank: int = _of(2, "latent_kv")
    """Axes of k_pe: [tokens, 64] or [tokens, 1, 64]."""
    rope_style: str = _of("interleaved", "latent_q", "latent_kv")
    table: str = _of("fp32", "latent_q", "latent_kv")
    scale: str = _of("ordinary", "latent_q", "latent_kv")
    """ordinary; power: of two, so that ties stay ties; zero, nan, inf, negative: on a GPU only."""
    layout: str = _of("plain", "latent_kv")
    tile_scale_rule: str = _of("ue8m0", "latent_kv")
    """scale_rule of the MLA cache; it shows with fp8_ds_mla alone."""
    block_size: int = _of(64, "latent_kv")
    slots: str = _of("int64", "latent_kv")
    slot_rule: str = _of("permuted", "latent_kv")
    """permuted: all live; short: fewer slots than tokens; negative: a third; beyond: the cache, now and then."""
    cache: str = _of("bytes", "latent_kv")
    """bytes: uint8; typed: the fp8 dtype. A plain cache has the activation dtype."""
    cache_strides: str = _of("dense", "latent_kv")
    """dense; gaps: padding between blocks, and between rows where the layout admits it; odd: off the 16-byte grid."""

    q_width: int = _of(1536, "norm_q")
    """q_lora_rank."""
    q_norm: str = _of("bf16", "norm_q")
    kv_norm: str = _of("bf16", "norm_q")
    """dtypes of q_norm_weight and kv_norm_weight."""
    topk: str = _of("absent", "clear_topk")
    """absent; narrow: padded rows, off the 16-byte grid, more of them than tokens; wide: 2,048 a token."""
    key_outs: str = _of("given", "norm_q")
    """Whether kv_c_out and k_pe_out are given, or absent."""

    index_heads: int = _of(32, "index_q")
    weights: str = _of("fp32", "index_q")
    scale_rule: str = _of("ue8m0", "index_q", "index_k")
    index_rope_style: str = _of("neox", "index_q", "index_k")
    index_table: str = _of("fp32", "index_q", "index_k")
    norm: str = _of("fp32", "index_k")
    """dtype of the indexer's norm_weight and norm_bias."""
    index_layout: str = _of("flat", "index_k")
    index_block_size: int = _of(64, "index_k")
    """With tiled16 a multiple of 16."""
    index_slots: str = _of("int64", "index_k")
    index_slot_rule: str = _of("permuted", "index_k")
    index_cache: str = _of("bytes", "index_k")
    index_cache_strides: str = _of("dense", "index_k")

    @property
    def roles(self) -> frozenset[str]:
        """The roles of the call: those of its op, but for the indexer's where that is absent, and rows to clear."""
        roles = ROLES[self.op] if self.index == "present" else roles_without_index(self.op)
        return roles - {"clear_topk"} if self.topk == "absent" else roles

    @property
    def normed(self) -> bool:
        """Whether the latent key is normed in the call."""
        return "norm_q" in self.roles

    @property
    def huge(self) -> bool:
        """Whether its tensors need gigabytes."""
        return self.capacity == "huge" or self.tokens > LARGE_TOKENS

    @property
    def name(self) -> str:
        """The op's fields that differ from the defaults; `default` if none does."""
        own = fields_of(self.op)
        fields = [f for f in _named_fields() if f.name in own and getattr(self, f.name) != f.default]
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields]
        return ",".join(parts) or "default"

    @staticmethod
    def named(op: str, name: str) -> Case:
        """The case of `op` called `name`. Raises ValueError for a field or a value that the op does not have."""
        known = fields_of(op)
        values: dict[str, Any] = {}
        for part in [] if name == "default" else name.split(","):
            key, _, value = part.partition("=")
            if key not in known:
                raise ValueError(f"case: got field {key!r}, expected one of {', '.join(known)}")
            if key in CHOICES:
                choices = choices_of(op)[key]
                if value not in choices:
                    raise ValueError(f"case: got {key}={value}, expected one of {', '.join(choices)}")
                values[key] = value
            else:
                low, high = COUNTS[key]
                if not value.isdecimal() or not low <= int(value) <= high:
                    raise ValueError(f"case: got {key}={value}, expected an integer from {low} to {high}")
                values[key] = int(value)
        case = Case(op=op, **values)
        multiple = INDEXER_LAYOUTS[case.index_layout].block_multiple
        if case.index_block_size % multiple:
            raise ValueError(f"case: got index_block_size={case.index_block_size}, expected a multiple of {multiple}")
        return case


def _named_fields() -> list[Field[Any]]:
    return [f for f in fields(Case) if f.name != "op"]


def has_index_switch(op: str) -> bool:
    """Whether the op also serves layers without an indexer."""
    return bool({"latent_q", "latent_kv"} & ROLES[op]) and bool({"index_q", "index_k"} & ROLES[op])


def roles_without_index(op: str) -> frozenset[str]:
    """The roles of an op's call on a layer without an indexer. Only the op with q_c may clear top-k rows there."""
    indexers = {"index_q", "index_k"} if "norm_q" in ROLES[op] else {"index_q", "index_k", "clear_topk"}
    return ROLES[op] - indexers


def choices_of(op: str) -> dict[str, tuple[str, ...]]:
    """CHOICES, without the value that `op` does not know: only one op has a query without q_nope."""
    return CHOICES if op == PREPARE_QUERIES else {**CHOICES, "query": CHOICES["query"][:2]}


def fields_of(op: str, roles: frozenset[str] | None = None) -> tuple[str, ...]:
    """The fields that shape a call of `op`, or of some roles of it."""
    roles = ROLES[op] if roles is None else roles
    shared = [f for f in _named_fields() if not f.metadata["roles"] or f.metadata["roles"] & roles]
    return tuple(f.name for f in shared if f.name != "index" or has_index_switch(op))


CHOICES: dict[str, tuple[str, ...]] = {
    "activation": ("bf16", "fp16", "fp32"),
    "fp8": ("e4m3fn", "e4m3fnuz"),
    "rounding": ("split", "fp32"),
    "positions": ("int64", "int32"),
    "position_rule": ("inside", "outside"),
    "strides": ("engine", "odd", "broadcast", "contiguous"),
    "out": ("given", "allocated", "wide", "odd"),
    "values": ("normal", "magnitudes", "ties", "special"),
    "capacity": ("snug", "huge"),
    "index": ("present", "absent"),
    "query": ("activation", "fp8", "rope"),
    "rope_style": ("interleaved", "neox"),
    "table": ("fp32", "bf16", "fp16"),
    "scale": ("ordinary", "power", "zero", "nan", "inf", "negative"),
    "layout": ("plain", "fp8", "fp8_ds_mla"),
    "tile_scale_rule": ("ue8m0", "fp32"),
    "slots": ("int64", "int32"),
    "slot_rule": ("permuted", "short", "negative", "beyond"),
    "cache": ("bytes", "typed"),
    "cache_strides": ("dense", "gaps", "odd"),
    "q_norm": ("bf16", "fp32", "fp16"),
    "kv_norm": ("bf16", "fp32"),
    "topk": ("narrow", "absent", "wide"),
    "key_outs": ("given", "absent"),
    "weights": ("fp32", "bf16", "fp16", "fp64"),
    "scale_rule": ("ue8m0", "fp32"),
    "index_rope_style": ("neox", "interleaved"),
    "index_table": ("fp32", "bf16"),
    "norm": ("fp32", "bf16"),
    "index_layout": ("flat", "tiled16"),
    "index_slots": ("int64", "int32"),
    "index_slot_rule": ("permuted", "short", "negative", "beyond"),
    "index_cache": ("bytes", "typed"),
    "index_cache_strides": ("dense", "gaps", "odd"),
}

COUNTS = {
    "tokens": (0, 2**20),
    "heads": (1, 256),
    "index_heads": (1, 256),
    "block_size": (1, 4096),
    "index_block_size": (1, 4096),
    "key_rank": (2, 3),
    "q_width": (1, 8192),
}
"""The range of each field that is a number."""

assert {DTYPES[name] for name in CHOICES["fp8"]} == set(FP8_FORMATS)

"""Compiling ahead: all kernels that a model needs on a GPU, before the first request waits for them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any, get_type_hints

import torch

from dsafuse.dispatch import PROVIDERS
from dsafuse.layouts import INDEX_DIM, INDEXER_LAYOUTS, LATENT_DIM, MLA_LAYOUTS, QUERY_DIM, ROPE_DIM
from dsafuse.models import MODELS, ModelShape
from dsafuse.numerics import ACTIVATION_DTYPES, RopeStyle, Rounding, ScaleRule
from dsafuse.ops import resolve
from dsafuse.ops.arguments import MAX_SLOTS, expect_member
from dsafuse.ops.config import Config
from dsafuse.registry import OPS, Op
from dsafuse.target import Target

QUERIES = ("activation", "fp8")
"""What an MLA query may hold."""

LAYERS = ("indexed", "unindexed")
"""Layers with an indexer of their own, and layers that use another's top-k."""

DTYPES: dict[str, torch.dtype] = {
    "slot_mapping": torch.int64,
    "positions": torch.int64,
    "cos_sin_cache": torch.float32,
    "kv_cache": torch.uint8,
    "index_slot_mapping": torch.int64,
    "index_cos_sin_cache": torch.float32,
    "index_kv_cache": torch.uint8,
    "index_norm_weight": torch.float32,
    "index_norm_bias": torch.float32,
}
"""What an engine's tensors hold, under the names of `prepare_qk`, where that is not the activation dtype."""

ACTIVATIONS = (
    *("q_nope", "q_pe", "q_c", "kv_c", "k_pe", "q_norm_weight", "kv_norm_weight"),
    *("index_q", "index_k", "index_weights"),
)
"""The tensors that hold the activation dtype."""

_TOKENS, _BLOCKS, _MAX_POSITION = 32, 64, 4096  # nothing is compiled for these


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel: whose, for which call, for rows that start at multiples of so many bytes."""

    op: str
    config: Config
    row_alignment: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What `warm_up` did."""

    target: str
    loaded: bool
    """Whether this process has the kernels; else Triton's cache on disk alone has them."""
    compiled: tuple[Compiled, ...]
    left_out: tuple[str, ...]
    """What was not compiled, and why."""


def warm_up(
    model: str | ModelShape,
    target: str | Target,
    *,
    ops: Iterable[str] | None = None,
    tp: int = 1,
    activation: torch.dtype = torch.bfloat16,
    kv_layouts: Iterable[str] = tuple(MLA_LAYOUTS),
    queries: Iterable[str] = QUERIES,
    index_kv_layouts: Iterable[str] = ("flat",),
    layers: Iterable[str] = ("indexed",),
    block_size: int = 64,
    scale_rule: str = "ue8m0",
    index_scale_rule: str = "ue8m0",
    rounding: str = "split",
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> WarmUp:
    """Compile every kernel that a model needs on a target, for aligned rows and for others.

    Neither token counts nor strides compile anything beyond that. If the current GPU is the target, the kernels are
    loaded, too. Any other target needs no GPU: what is compiled for it goes to Triton's cache on disk
    (TRITON_CACHE_DIR), where a process on such a GPU finds it, given the same Triton and the same dsafuse; meanwhile no
    thread may launch Triton kernels.

    Args:
        model: a name of `dsafuse.models.MODELS`, as "deepseek-v3.2", or a record like those.
        target: such as "sm_90" or "gfx942", or a `Target`.
        ops: names of ops; all of them by default.
        tp: tensor parallelism, which divides the attention heads.
        activation: bf16, fp16 or fp32.
        kv_layouts: layouts of the MLA cache.
        queries: "activation" and "fp8": what the MLA query holds. fp8 goes with layout "fp8" where an op has both.
        index_kv_layouts: layouts of the indexer cache.
        layers: "indexed" and "unindexed": layers with an indexer of their own, or without.
        block_size: tokens in a block of both caches.
        scale_rule: "ue8m0" or "fp32", of the tiles of layout "fp8_ds_mla".
        index_scale_rule: "ue8m0" or "fp32", of the indexer's queries and keys.
        rounding: "split" or "fp32".
        dtypes: of tensors by argument name, where they aren't those of `DTYPES`: the names of `prepare_qk`,
            `prepare_latents` and `prepare_queries`, `index_*` for the indexer's. Those of `DTYPES` and `ACTIVATIONS`
            can be given: outputs, scales and top-k rows have one dtype.

    Returns:
        What was compiled, and what was left out and why: formats that the target has no conversion to, layouts that
        a block size does not allow.

    Errors: TypeError for an argument of another type; ValueError for an unknown name, a size that no model or cache
        has, heads that tp does not divide, or a target that nothing is compiled for; RuntimeError where Triton is not
        installed.
    """
    shape, where = _shape(model), Target.named(target) if isinstance(target, str) else target
    if not isinstance(where, Target):
        raise TypeError(f"target: got {type(where).__name__}, expected a name or a Target")
    for argument, value in (("tp", tp), ("block_size", block_size)):
        _expect_int(argument, value)
    provider = PROVIDERS["triton"].load()
    if not where.gpu:
        raise ValueError(f"target: got {where.arch!r}, expected a GPU: nothing is compiled for a CPU")
    if not 1 <= block_size <= MAX_SLOTS:
        raise ValueError(f"block_size: got {block_size}, expected 1 to {MAX_SLOTS}")
    if (reason := provider.why_not_here()) is not None:
        raise RuntimeError(f"warm_up needs Triton: {reason}")
    if activation not in ACTIVATION_DTYPES:
        raise ValueError(f"activation: got {activation}, expected one of {', '.join(map(str, ACTIVATION_DTYPES))}")
    chosen = {
        "ops": _expect("ops", OPS if ops is None else ops, OPS),
        "kv_layouts": _expect("kv_layouts", kv_layouts, MLA_LAYOUTS),
        "queries": _expect("queries", queries, QUERIES),
        "index_kv_layouts": _expect("index_kv_layouts", index_kv_layouts, INDEXER_LAYOUTS),
        "layers": _expect("layers", layers, LAYERS),
    }
    _expect("scale_rule", [scale_rule], tuple(ScaleRule))
    _expect("index_scale_rule", [index_scale_rule], tuple(ScaleRule))
    _expect("rounding", [rounding], tuple(Rounding))
    dtypes = {} if dtypes is None else dtypes
    if not isinstance(dtypes, Mapping):
        raise TypeError(f"dtypes: got {type(dtypes).__name__}, expected a mapping from names to dtypes")
    _expect("dtypes", dtypes, (*DTYPES, *ACTIVATIONS))
    for argument, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"dtypes: got {dtype!r} for {argument}, expected a torch.dtype")
    heads = shape.local_heads(tp)
    ahead: Any = importlib.import_module("dsafuse.kernels.ahead")  # kernels stand behind ops, so by name
    here = ahead.is_here(where)
    compiled: dict[Compiled, None] = {}
    left_out: dict[str, None] = {}
    for name, layout, query, index_layout, layer in product(*chosen.values()):
        op = OPS[name]
        if layer == "unindexed" and not op.index_prefix:
            continue
        if {"q_nope", "kv_c"} <= set(inspect.signature(op).parameters) and query == "fp8" and layout != "fp8":
            continue
        call = meta_call(
            op,
            shape,
            heads,
            where,
            kv_layout=layout,
            query=query,
            index_kv_layout=index_layout,
            layer=layer,
            activation=activation,
            block_size=block_size,
            scale_rule=scale_rule,
            index_scale_rule=index_scale_rule,
            rounding=rounding,
            dtypes=dtypes,
            clear_topk=layer == "indexed",  # any other uses what another layer chose
        )
        for variant in (call, *_rotary_part_alone(op, call, query), *_clearing_nothing(call)):
            try:
                arguments, config = op.resolve(**variant)
            except ValueError as error:
                left_out[f"{name}: {error}"] = None
                continue
            if (reason := provider.why_not(config, where)) is not None:
                left_out[f"{name}: {reason}"] = None
                continue
            assert isinstance(config, Config)
            wanted = [each for each in ahead.ALIGNMENTS if Compiled(name, config, each) not in compiled]
            for row_alignment in wanted:
                ahead.compile_call(name, arguments, config, where, row_alignment, here=here)
                compiled[Compiled(name, config, row_alignment)] = None
    return WarmUp(where.arch, here, tuple(compiled), tuple(left_out))


def _rotary_part_alone(op: Op[..., Any], call: dict[str, Any], query: str) -> list[dict[str, Any]]:
    """The same call without q_nope, where the op takes that: it has one kernel more, whose query is no fp8."""
    optional = get_type_hints(op.oracle).get("q_nope") == torch.Tensor | None
    return [call | {"q_nope": None}] if optional and query == "activation" else []


def _clearing_nothing(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The call of prepare_qk, which has top-k rows, but no q_c, for an engine that clears these rows itself."""
    return [call | {"topk_indices": None}] if call.get("topk_indices") is not None and "q_c" not in call else []


def _shape(model: str | ModelShape) -> ModelShape:
    if isinstance(model, str):
        _expect("model", [model], MODELS)
        return MODELS[model]
    if not isinstance(model, ModelShape):
        raise TypeError(f"model: got {type(model).__name__}, expected a name or a ModelShape")
    for field in fields(model):
        name, value = f"model.{field.name}", getattr(model, field.name)
        if field.name.endswith("rope_style"):
            expect_member(name, value, RopeStyle)
        elif field.name != "name":
            _expect_int(name, value)
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
    return model


def _expect_int(argument: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{argument}: got {type(value).__name__}, expected an int")


def _expect(argument: str, given: Iterable[str], choices: Iterable[str]) -> list[str]:
    if isinstance(given, str):
        raise TypeError(f"{argument}: got a str, expected several names, as [{given!r}]")
    if not isinstance(given, Iterable):
        raise TypeError(f"{argument}: got {type(given).__name__}, expected several names")
    names, allowed = list(given), list(choices)
    for name in names:
        if name not in allowed:
            raise ValueError(f"{argument}: got {name!r}, expected one of {', '.join(allowed)}")
    return names


def _seam_name(op: Op[..., Any]) -> Any:
    """What the seams, which have both families, call an op's argument."""
    own = set(inspect.signature(op).parameters)
    lone = own.isdisjoint({"q_nope", "kv_c"})
    return lambda name: f"index_{name}" if lone and name not in resolve.SHARED else name


def meta_call(
    op: Op[..., Any],
    shape: ModelShape,
    heads: int,
    target: Target,
    *,
    kv_layout: str = "fp8",
    query: str = "fp8",
    index_kv_layout: str = "flat",
    layer: str = "indexed",
    activation: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    scale_rule: str = "ue8m0",
    index_scale_rule: str = "ue8m0",
    rounding: str = "split",
    dtypes: Mapping[str, torch.dtype] | None = None,
    clear_topk: bool = True,
) -> dict[str, Any]:
    """A call as an engine makes it, on the meta device: the absorbed query transposed, the latents slices.

    clear_topk: whether it has top-k rows to clear, where the op takes them.
    """
    fp8 = torch.float8_e4m3fnuz if target.fp8 == {torch.float8_e4m3fnuz} else torch.float8_e4m3fn
    held = {**dict.fromkeys(ACTIVATIONS, activation), **DTYPES, **(dtypes or {})}

    def empty(name: str, *size: int) -> torch.Tensor:
        return torch.empty(size, dtype=held[name], device="meta")

    def sliced(widths: Sequence[tuple[str, int]]) -> dict[str, torch.Tensor]:
        """Neighbours in the rows of one projection."""
        wide, at = sum(width for _, width in widths), 0
        found = {}
        for name, width in widths:
            found[name] = empty(name, _TOKENS, wide)[:, at : at + width]
            at += width
        return found

    blocks = min(_BLOCKS, MAX_SLOTS // block_size)
    tokens, nope, indexes = _TOKENS, shape.qk_nope_head_dim, shape.index_heads
    row = MLA_LAYOUTS[kv_layout].row_bytes()
    cache = QUERY_DIM if kv_layout == "plain" else row
    if kv_layout == "plain":
        held["kv_cache"] = activation
    scale = torch.empty(1, dtype=torch.float32, device="meta")
    values: dict[str, Any] = {
        "q_nope": empty("q_nope", heads, tokens, LATENT_DIM).transpose(0, 1),
        "q_pe": empty("q_pe", tokens, heads, ROPE_DIM + nope)[..., nope:],
        **sliced([("q_c", shape.q_lora_rank), ("kv_c", LATENT_DIM), ("k_pe", ROPE_DIM)]),
        "kv_cache": empty("kv_cache", blocks, block_size, cache),
        "slot_mapping": empty("slot_mapping", tokens),
        "positions": empty("positions", tokens),
        "cos_sin_cache": empty("cos_sin_cache", _MAX_POSITION, ROPE_DIM),
        "q_scale": scale,
        "k_scale": scale,
        "q_dtype": fp8 if query == "fp8" else activation,
        "q_norm_weight": empty("q_norm_weight", shape.q_lora_rank),
        "q_norm_eps": 1e-6,
        "kv_norm_weight": empty("kv_norm_weight", LATENT_DIM),
        "kv_norm_eps": 1e-6,
        "topk_indices": _far(tokens, shape.index_topk) if clear_topk else None,
        "rope_style": str(shape.mla_rope_style),
        "kv_layout": kv_layout,
        "scale_rule": scale_rule,
        "fp8_dtype": fp8,
        "rounding": rounding,
    }
    if layer == "indexed":
        values |= {
            "index_q": empty("index_q", tokens, indexes, INDEX_DIM),
            **sliced([("index_k", INDEX_DIM), ("index_weights", indexes)]),
            "index_kv_cache": empty("index_kv_cache", blocks, block_size, INDEXER_LAYOUTS[index_kv_layout].row_bytes()),
            "index_slot_mapping": empty("index_slot_mapping", tokens),
            "index_norm_weight": empty("index_norm_weight", INDEX_DIM),
            "index_norm_bias": empty("index_norm_bias", INDEX_DIM),
            "index_cos_sin_cache": empty("index_cos_sin_cache", _MAX_POSITION, ROPE_DIM),
            "index_weights_scale": INDEX_DIM**-0.5 * indexes**-0.5,
            "index_kv_layout": index_kv_layout,
            "index_rope_style": str(shape.index_rope_style),
            "index_scale_rule": index_scale_rule,
        }
    names = {name: _seam_name(op)(name) for name in inspect.signature(op).parameters}
    return {name: values[known] for name, known in names.items() if known in values}


def _far(rows: int, columns: int) -> torch.Tensor:
    """An int32 output [rows, columns] away from address 0, where all other tensors of the meta device lie."""
    distance = 1 << 40
    return torch.empty(distance + rows * columns, dtype=torch.int32, device="meta")[distance:].view(rows, columns)

"""Provider `triton`: turns resolved arguments into one launch of `grids.prepare`.

The kernel's parameters are grouped by role. A role that an op lacks passes None and 0, and its branch is not
compiled; the groups of the roles that it has are read off the arguments.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, ClassVar

import torch

from dsafuse.dispatch import OpConfig, unsupported_format
from dsafuse.kernels.relaunch import relaunch_of
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.numerics import FP8_FORMATS, RopeStyle, Rounding, ScaleRule
from dsafuse.ops.arguments import span_bytes
from dsafuse.ops.config import Config, IndexQ, LatentQ
from dsafuse.ops.resolve import Named
from dsafuse.registry import OPS, Arguments
from dsafuse.target import Target

VECTOR_BYTES = 16
"""The widest access of a thread; a row that starts at a multiple of it is read and written in such pieces."""

MOST_ADDRESSES = 16_384
"""Sets of addresses kept, at up to 1 KB each: 78 layers at some 200 token counts."""

# What torch.cuda.current_device calls, once it has made sure that CUDA is initialised.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a grid is cut: query heads of one program of a query role, tokens of one of each other role, its threads."""

    block_heads: int
    rope_block_heads: int
    """Where the query is its rotary part alone."""
    index_block_heads: int
    index_rows: int
    latent_rows: int
    norm_rows: int
    group: int
    """Tokens whose programs stand together in the grid; 0: role after role, over all tokens."""
    threads: int


ANY = sys.maxsize

_ONE = LaunchPlan(
    block_heads=4,
    rope_block_heads=32,
    index_block_heads=16,
    index_rows=4,
    latent_rows=1,
    norm_rows=1,
    group=4,
    threads=64,
)
_AMD = replace(_ONE, block_heads=8)
_CPU = replace(_ONE, block_heads=16, threads=32)

Plans = tuple[tuple[int, LaunchPlan], ...]
"""Each serves up to so many tokens."""

# By vendor, and by the heads that an op has: none (prepare_latents), attention's alone, or the indexer's, too.
#
# nvidia: measured on an H200 (docs/performance.md). A program has to move 6 KB or more, since the GPU starts one in
# 1.2 ns, and 2 warps leave each thread 16-byte loads. Few tokens are fastest role after role, the longest chain, that
# of the indexer keys, first; then the tokens' programs stand together. More rows to a program pay where the start of
# programs is what takes the time: 10 % and more for prepare_latents at 512 and 1,024 tokens.
#
# amd: not measured, for want of an AMD GPU, but read in the code that is compiled for it (docs/codegen.md). One wave of
# 64 on gfx9: no barrier and no shared memory, and every query and latent access is 8 bytes or wider; with 128 threads
# indexer heads and latent rows were stored by 4 bytes. 8 heads and not 4, for the same with their 64 rotary dims.
#
# cpu: interpreted programs cost by the program, not by the element. Two plans, so that what is proven here is both.
PLANS: dict[str, dict[str, Plans]] = {
    "nvidia": {
        "none": (
            (256, replace(_ONE, group=0)),
            (512, replace(_ONE, latent_rows=2, norm_rows=2)),
            (1024, replace(_ONE, group=0, index_rows=8, latent_rows=4, norm_rows=2, threads=128)),
            (ANY, _ONE),
        ),
        "attention": ((256, replace(_ONE, group=0, threads=128)), (ANY, replace(_ONE, latent_rows=2))),
        "indexer": ((256, replace(_ONE, group=0)), (ANY, replace(_ONE, latent_rows=2))),
    },
    "amd": dict.fromkeys(("none", "attention", "indexer"), ((ANY, _AMD),)),
    "cpu": dict.fromkeys(
        ("none", "attention", "indexer"),
        ((2, replace(_CPU, group=0)), (ANY, replace(_CPU, latent_rows=4, norm_rows=2))),
    ),
}


def plans_of(target: Target, config: Config) -> Plans:
    """The plans of a target for what a call has to do."""
    return PLANS[target.vendor]["indexer" if config.index_q else "attention" if config.latent_q else "none"]


def plan_for(plans: Plans, tokens: int) -> LaunchPlan:
    """The plan that serves so many tokens."""
    return next(plan for most, plan in plans if tokens <= most)


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


def run(op: str, arguments: Arguments, config: Config) -> None:
    """Launch the op's kernel on the tensors' device and current stream; no tokens, no launch."""
    from dsafuse.kernels import grids

    launch(op, arguments, config, grids)


def launch(op: str, arguments: Arguments, config: Config, grids: ModuleType, plan: LaunchPlan | None = None) -> None:
    """Launch from a module of kernels, the compiled ones or their interpreted twins; by the tokens' plan or another."""
    positions = arguments["positions"]
    if not len(positions):
        return
    target = Target.of(positions.device)
    plan = plan or plan_for(plans_of(target, config), len(positions))
    with on_device_of(positions):
        grids.prepare[grid_of(arguments, config, plan)](
            *runtime_arguments(op, arguments, config),
            **constants_of(config, target, plan),
            **alignments(op, arguments, config),
            **launch_options(target, plan.threads),
        )


def again(op: str, arguments: Arguments, config: Config, places: dict[str, int]) -> Callable[[tuple[int, ...]], bool]:
    """A function that launches once more for tensors that differ from these in addresses alone.

    It returns False, and has launched nothing, where the addresses need a look: another alignment, memory that an
    output shares, another current device, or a profiler's hooks.

    Args:
        op, arguments, config: of a call that was checked and has run.
        places: of each tensor argument among the addresses that the function takes. Arguments that were one tensor
            have one place.
    """
    from triton.runtime import driver

    from dsafuse.kernels import grids

    positions = arguments["positions"]
    if not len(positions):
        return lambda _: True
    device, target = positions.device, Target.of(positions.device)
    runtime = runtime_arguments(op, arguments, config)
    plan = plan_for(plans_of(target, config), len(positions))
    constants = {**constants_of(config, target, plan), **alignments(op, arguments, config)}
    programs = grid_of(arguments, config, plan)[0]
    options = launch_options(target, plan.threads)
    compiled = grids.prepare.warmup(*runtime, grid=(programs,), **constants, **options)
    tensors = {name: arguments[name] for name in places if arguments[name] is not None}
    place_of = {id(tensor): places[name] for name, tensor in tensors.items()}
    values = {**dict(zip(grids.prepare.arg_names, runtime)), **constants}
    pointers = {name: place_of[id(value)] for name, value in values.items() if isinstance(value, torch.Tensor)}
    relaunch = relaunch_of(compiled, programs, values, pointers, 1 + max(places.values()))
    fit = Addresses(tensors, places, OPS[op].own_memory, OPS[op].caches).fit
    index, stream_of, hooks = device.index, driver.active.get_current_stream, launch_hooks()

    def launch_again(addresses: tuple[int, ...]) -> bool:
        if current_device() != index or hooks or not fit(addresses):
            return False
        return relaunch(addresses, stream_of(index))

    return launch_again


def launch_hooks() -> list[Any]:
    """The hooks that Triton's own launch calls, for profilers; the list is Triton's, and changes with time."""
    from triton import knobs

    hooks: list[Any] = knobs.runtime.launch_enter_hook.calls
    return hooks


class Addresses:
    """What the addresses of a call's tensors must satisfy, for the variant that was compiled for it.

    Args:
        tensors: of the call that was compiled for, by name.
        places: of each among the addresses; one tensor under two names has one.
        own_memory: names of the tensors that may share no byte with another.
        caches: names of those that may share bytes with each other alone.
    """

    # Those that passed, of all calls, are kept: an engine's buffers come back at every step, layer by layer.
    _passed: ClassVar[set[tuple[Addresses, tuple[int, ...]]]] = set()

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        places: dict[str, int],
        own_memory: Sequence[str],
        caches: Sequence[str],
    ) -> None:
        by_place = {places[name]: tensor for name, tensor in tensors.items()}
        self._starts = {place: tensor.data_ptr() for place, tensor in by_place.items()}
        self._sizes = {place: span_bytes(tensor) for place, tensor in by_place.items() if tensor.numel()}
        paged = [places[name] for name in caches if name in tensors]
        self._apart: list[tuple[int, list[int]]] = []
        """Places of what is written, each with those that it must be apart from."""
        for name in (*own_memory, *caches):
            if name in tensors and (own := places[name]) in self._sizes:
                others = [place for place in self._sizes if place != own and not (own in paged and place in paged)]
                self._apart.append((own, others))

    def fit(self, addresses: tuple[int, ...]) -> bool:
        """Whether every address is aligned as it was, and no output lies over another tensor.

        Outputs that interleave with another tensor, as two columns of a buffer do, must do so as they did.
        """
        if (self, addresses) in self._passed:
            return True
        if any((addresses[place] ^ start) % VECTOR_BYTES for place, start in self._starts.items()):
            return False
        for own, others in self._apart:
            start, end = addresses[own], addresses[own] + self._sizes[own]
            for place in others:
                address = addresses[place]
                if address >= end or start >= address + self._sizes[place]:
                    continue
                if address - start != self._starts[place] - self._starts[own]:
                    return False
        if len(self._passed) >= MOST_ADDRESSES:
            self._passed.clear()
        self._passed.add((self, addresses))
        return True


def grid_of(arguments: Arguments, config: Config, plan: LaunchPlan) -> tuple[int]:
    """Programs of the launch, as `grids.prepare` cuts the tokens' work."""
    tokens = len(arguments["positions"])
    span = plan.group or tokens
    programs = sum(-(-span // rows) for rows in rows_of(config, plan).values() if rows)
    programs += sum(span * -(-role.heads // block_of(role, plan)) for role in (config.index_q, config.latent_q) if role)
    return (-(-tokens // span) * programs,)


def rows_of(config: Config, plan: LaunchPlan) -> dict[str, int]:
    """Tokens of one program of each role that has no heads, by the constant that says so; 0 for an absent role."""
    return {
        "INDEX_ROWS": plan.index_rows if config.index_k else 0,
        "LATENT_ROWS": plan.latent_rows if config.latent_kv else 0,
        "NORM_ROWS": plan.norm_rows if config.norm_q else 0,
    }


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
    return (
        *_row(a["q_c"]),
        a["q_norm_weight"],
        a["q_norm_eps"],
        *_row(a["q_c_out"]),
        *_row(a["topk_indices"]),
    )


_ABSENT_NORM_Q = (None, 0, None, 0.0, None, 0, None, 0)


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


def block_of(role: LatentQ | IndexQ, plan: LaunchPlan) -> int:
    """Heads of one program of a query role."""
    if isinstance(role, IndexQ):
        return head_block(plan.index_block_heads, role.heads)
    return head_block(plan.block_heads if role.nope else plan.rope_block_heads, role.heads)


def head_block(most: int, heads: int) -> int:
    """Heads of one program: `most`, or the power of two that holds them all if that is less."""
    return min(most, 1 << max(heads - 1, 0).bit_length())


def format_constants(dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """What a kernel must know of the fp8 format that it writes on a target."""
    import triton.language as tl

    fmt = FP8_FORMATS[dtype]
    return {"FP8": getattr(tl, fmt.triton_name), "FP8_MAX": fmt.max, "SIGNED_NAN": target.signed_nan}


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
        constants["QUERY_FP8"] = latent_q.query in FP8_FORMATS
    if (latent_kv := config.latent_kv) is not None:
        constants["LAYOUT"] = latent_kv.layout
        constants["BLOCK_SIZE"] = latent_kv.block_size
        constants["KV_NORM"] = latent_kv.norm
        constants["NEOX"] = latent_kv.rope_style == RopeStyle.NEOX
    if (norm_q := config.norm_q) is not None:
        constants["Q_WIDTH"] = norm_q.width
        constants["TOPK"] = norm_q.topk
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
    "BLOCK_SIZE": 1,
    "KV_NORM": False,
    "NEOX": False,
    "QUERY_FP8": False,
    "Q_WIDTH": 1,
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


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)

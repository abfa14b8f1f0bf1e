"""Provider `triton`: turns resolved arguments into one launch of `grids.prepare`.

The kernel's parameters are grouped by role. A role that an op lacks passes None and 0, and its branch is not
compiled; the groups of the roles that it has are read off the arguments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch

from dsafuse.dispatch import OpConfig, unsupported_format
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.numerics import FP8_FORMATS, RopeStyle, Rounding, ScaleRule
from dsafuse.ops.arguments import span_bytes
from dsafuse.ops.config import Config
from dsafuse.ops.resolve import Named
from dsafuse.registry import OPS, Arguments
from dsafuse.target import Target

VECTOR_BYTES = 16
"""The widest access of a thread; a row that starts at a multiple of it is read and written in such pieces."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a grid is cut: query heads of one program of each query role, indexer keys of one program, its threads."""

    block_heads: int
    index_block_heads: int
    index_rows: int
    threads: int


# Measured on an H200 at 1 to 8,192 tokens (benchmarks/results): a program has to move 6 KB or more, since the GPU
# starts one in 1.2 ns, and 2 warps leave each thread 16-byte loads.
PLANS: dict[str, LaunchPlan] = {
    "nvidia": LaunchPlan(block_heads=4, index_block_heads=16, index_rows=4, threads=64),
    # Not measured, for want of an AMD GPU, but read in the code that is compiled for it (docs/codegen.md). One wave of
    # 64 on gfx9: no barrier and no shared memory, and every query and latent access is 8 bytes or wider; with 128
    # threads indexer heads and latent rows were stored by 4 bytes. 8 heads and not 4, for the same with their 64
    # rotary dims.
    "amd": LaunchPlan(block_heads=8, index_block_heads=16, index_rows=4, threads=64),
    # Interpreted programs cost by the program, not by the element.
    "cpu": LaunchPlan(block_heads=16, index_block_heads=16, index_rows=4, threads=32),
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


def run(op: str, arguments: Arguments, config: Config) -> None:
    """Launch the op's kernel on the tensors' device and current stream; no tokens, no launch."""
    from dsafuse.kernels import grids

    launch(op, arguments, config, grids)


def launch(op: str, arguments: Arguments, config: Config, grids: ModuleType) -> None:
    """Launch from a module of kernels: the compiled ones, or their interpreted twins."""
    positions = arguments["positions"]
    if not len(positions):
        return
    target = Target.of(positions.device)
    with on_device_of(positions):
        grids.prepare[grid_of(arguments, config, target)](
            *runtime_arguments(op, arguments, config),
            **constants_of(config, target),
            **alignments(op, arguments, config),
            **launch_options(target),
        )


def again(
    op: str, arguments: Arguments, config: Config, allocate: Callable[[Arguments], None] | None
) -> Callable[[Arguments], bool]:
    """A function that launches once more for arguments that differ from these in addresses alone.

    It returns False, and has launched nothing, where the addresses need a look: another alignment, memory that an
    output shares, another current device, or a profiler's hooks.

    Args:
        op, arguments, config: of a call that was checked and has run.
        allocate: makes the outputs that the caller does not give; None if they are given.
    """
    from triton.runtime import driver

    from dsafuse.kernels import grids

    positions = arguments["positions"]
    if not len(positions):
        return lambda given: allocate is None or allocate(given) is None
    device, target = positions.device, Target.of(positions.device)
    # One tensor may be two arguments today and not tomorrow: aliases tell the kernel's places apart.
    own = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    runtime = runtime_arguments(op, own, config)
    constants = {**constants_of(config, target), **alignments(op, arguments, config)}
    programs = grid_of(arguments, config, target)[0]
    compiled = grids.prepare.warmup(*runtime, grid=(programs,), **constants, **launch_options(target))
    run, function, packed = compiled.run, compiled.function, compiled.packed_metadata
    template = [*runtime, *(constants[name] for name in grids.prepare.arg_names[len(runtime) :])]
    places = [i for i, value in enumerate(runtime) if isinstance(value, torch.Tensor)]
    names = {id(value): name for name, value in own.items() if isinstance(value, torch.Tensor)}
    tensors_of = itemgetter(*(names[id(runtime[i])] for i in places))
    fit = Addresses(op, arguments, config).fit
    current_device, current_stream, hooks = torch.cuda.current_device, driver.active.get_current_stream, launch_hooks()

    def launch_again(given: Arguments) -> bool:
        if current_device() != device.index or hooks:
            return False
        if allocate is not None:
            allocate(given)
        pointers = [tensor.data_ptr() for tensor in tensors_of(given)]
        if not fit(pointers, given):
            return False
        values = template.copy()
        for place, pointer in zip(places, pointers):
            values[place] = pointer
        run(programs, 1, 1, current_stream(device.index), function, packed, None, None, None, *values)
        return True

    return launch_again


def launch_hooks() -> list[Any]:
    """The hooks that Triton's own launch calls, for profilers; the list is Triton's, and changes with time."""
    from triton import knobs

    hooks: list[Any] = knobs.runtime.launch_enter_hook.calls
    return hooks


class Addresses:
    """What the addresses of a call's tensors must satisfy, for the variant that was compiled for it.

    The last addresses that passed are kept: an engine's buffers come back at every step.
    """

    def __init__(self, op: str, arguments: Arguments, config: Config) -> None:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        self._low_bits = {name: value.data_ptr() % VECTOR_BYTES for name, value in tensors.items()}
        self._sizes = {name: span_bytes(value) for name, value in tensors.items() if value.numel()}
        self._outputs = [name for name in OPS[op].own_memory if name in self._sizes]
        self._starts = {name: value.data_ptr() for name, value in tensors.items()}
        self._passed: list[int] = []

    def fit(self, pointers: list[int], given: Arguments) -> bool:
        """Whether every address is aligned as it was, and no output lies over another tensor.

        Outputs that interleave with another tensor, as two columns of a buffer do, must do so as they did.
        """
        if pointers == self._passed:
            return True
        addresses = {name: given[name].data_ptr() for name in self._low_bits if given[name] is not None}
        if any(address % VECTOR_BYTES != self._low_bits[name] for name, address in addresses.items()):
            return False
        for output in self._outputs:
            start, end = addresses[output], addresses[output] + self._sizes[output]
            for name, size in self._sizes.items():
                if name == output or name not in addresses:
                    continue
                apart = addresses[name] >= end or start >= addresses[name] + size
                if not apart and addresses[name] - start != self._starts[name] - self._starts[output]:
                    return False
        self._passed = pointers
        return True


def grid_of(arguments: Arguments, config: Config, target: Target) -> tuple[int]:
    """Programs of the launch, as `grids.prepare` cuts the tokens' work."""
    plan, tokens = PLANS[target.vendor], len(arguments["positions"])
    parts = sum(role is not None for role in (config.latent_kv, config.norm_q))
    for role, most in ((config.index_q, plan.index_block_heads), (config.latent_q, plan.block_heads)):
        if role is not None:
            parts += -(-role.heads // head_block(most, role.heads))
    if config.index_k is None:
        return (tokens * parts,)
    return (-(-tokens // plan.index_rows) * (1 + plan.index_rows * parts),)


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
        q_nope,
        q_nope.stride(0),
        q_nope.stride(1),
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


def head_block(most: int, heads: int) -> int:
    """Heads of one program: `most`, or the power of two that holds them all if that is less."""
    return min(most, 1 << max(heads - 1, 0).bit_length())


def format_constants(dtype: torch.dtype, target: Target) -> dict[str, Any]:
    """What a kernel must know of the fp8 format that it writes on a target."""
    import triton.language as tl

    fmt = FP8_FORMATS[dtype]
    return {"FP8": getattr(tl, fmt.triton_name), "FP8_MAX": fmt.max, "SIGNED_NAN": target.signed_nan}


@cache
def constants_of(config: Config, target: Target) -> dict[str, Any]:
    """The compile-time constants that follow from the configuration alone."""
    plan = PLANS[target.vendor]
    constants: dict[str, Any] = {
        **_ABSENT_CONSTANTS,
        **format_constants(config.fp8, target),
        "ROUND": config.rounding == Rounding.SPLIT,
        "PDL": target.dependent_launch,
    }
    if (latent_q := config.latent_q) is not None:
        constants["HEADS"] = latent_q.heads
        constants["BLOCK_HEADS"] = head_block(plan.block_heads, latent_q.heads)
        constants["NEOX"] = latent_q.rope_style == RopeStyle.NEOX
        constants["QUERY_FP8"] = latent_q.query in FP8_FORMATS
    if (latent_kv := config.latent_kv) is not None:
        constants["LATENT_KV"] = 1
        constants["LAYOUT"] = latent_kv.layout
        constants["BLOCK_SIZE"] = latent_kv.block_size
        constants["KV_NORM"] = latent_kv.norm
        constants["NEOX"] = latent_kv.rope_style == RopeStyle.NEOX
    if (norm_q := config.norm_q) is not None:
        constants["NORM_Q"] = 1
        constants["Q_WIDTH"] = norm_q.width
        constants["TOPK"] = norm_q.topk
    if (index_q := config.index_q) is not None:
        constants["INDEX_HEADS"] = index_q.heads
        constants["INDEX_BLOCK_HEADS"] = head_block(plan.index_block_heads, index_q.heads)
        constants["INDEX_NEOX"] = index_q.rope_style == RopeStyle.NEOX
        constants["UE8M0"] = index_q.scale_rule == ScaleRule.UE8M0
    if (index_k := config.index_k) is not None:
        constants["INDEX_ROWS"] = plan.index_rows
        constants["INDEX_LAYOUT"] = index_k.layout
        constants["INDEX_BLOCK_SIZE"] = index_k.block_size
        constants["INDEX_NEOX"] = index_k.rope_style == RopeStyle.NEOX
        constants["UE8M0"] = index_k.scale_rule == ScaleRule.UE8M0
    return constants


_ABSENT_CONSTANTS = {
    "INDEX_ROWS": 0,
    "LATENT_KV": 0,
    "NORM_Q": 0,
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
def launch_options(target: Target) -> dict[str, Any]:
    """Compiler and launch options. launch_pdl is unknown to ROCm's backend, False included."""
    num_warps = PLANS[target.vendor].threads // target.warp_size
    options: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": False}
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

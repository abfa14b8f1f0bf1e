"""What the compiler makes of every kernel, for GPUs that need not be there: registers, spills, access widths.

Kernels are compiled at production shapes from launches that are taken down on the meta device
(`kernels.offline`), and their assembly is counted: SASS for NVIDIA, where Triton's disassembler is installed, else
PTX; amdgcn for AMD. docs/codegen.md says how to read a report.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from dsafuse.check import assembly
from dsafuse.check.cases import ROLES
from dsafuse.dispatch import PROVIDERS
from dsafuse.layouts import INDEX_DIM, QUERY_DIM
from dsafuse.models import MODELS
from dsafuse.registry import OPS, Op
from dsafuse.target import Target
from dsafuse.warming import meta_call

TARGETS = ("gfx942", "gfx950", "sm_90", "sm_100")
HEADS = ((128, 64), (16, 32))
"""(attention heads, indexer heads): DeepSeek-V3.2 whole, and GLM-5.2 on four GPUs."""

_MODELS = {shape.index_heads: shape for shape in MODELS.values()}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to call the ops: what the query and the caches hold, and whether the layer has an indexer."""

    name: str
    layout: str = "fp8"
    scale_rule: str = "ue8m0"
    query_fp8: bool = True
    index_layout: str = "flat"
    index_scale_rule: str = "ue8m0"
    indexer: bool = True
    vendors: tuple[str, ...] = ("nvidia", "amd")
    chain: bool = False
    """The unfused chain's kernels in place of the fused one."""
    clear_topk: bool = False
    """Top-k rows to clear, where that is no matter of course as it is with q_c."""


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("fp8"),
        Variant("plain", layout="plain", query_fp8=False),
        Variant("fp8_ds_mla", layout="fp8_ds_mla", query_fp8=False),
        Variant("fp8_ds_mla fp32", layout="fp8_ds_mla", scale_rule="fp32", query_fp8=False),
        Variant("bf16 query", query_fp8=False),
        Variant("indexer fp32", index_scale_rule="fp32"),
        Variant("tiled16", index_layout="tiled16", vendors=("amd",)),
        Variant("no indexer", indexer=False),
        Variant("top-k rows", clear_topk=True),
        Variant("chain", chain=True),
    )
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel to compile: the launches of one op on one target, in one variant, at one shape."""

    target: str
    op: str
    variant: str
    heads: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found in the code of one kernel. Loads and stores are of global memory, by bytes of one thread."""

    target: str
    op: str
    variant: str
    kernel: str
    heads: int
    index_heads: int
    threads: int
    registers: int | None
    """Of one thread; None where NVIDIA's code can't be taken apart."""
    scalar_registers: int | None
    """SGPRs on AMD; NVIDIA has no such file that a compiler allots."""
    spills: int
    """Vector registers (AMD), or bytes of local memory (NVIDIA), that did not fit."""
    scalar_spills: int
    shared_bytes: int
    loads: dict[int, int]
    stores: dict[int, int]
    fp8_conversions: int
    """Hardware conversions to fp8, of two values each."""
    fused_multiply_adds: int
    """fp32 multiply-adds that are no part of a division or a square root: none, or RoPE is not the oracle's."""
    instructions: int
    assembly: str
    """sass, ptx or amdgcn: what `instructions`, `loads` and `stores` are counted in."""
    elements: int
    """Values that one program of each role prepares."""

    @property
    def instructions_per_element(self) -> float:
        """Instructions of all threads, each counted once, for one value."""
        return self.instructions * self.threads / self.elements

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "instructions_per_element": round(self.instructions_per_element, 2)}


def kernels(targets: Iterable[str] = TARGETS, ops: Iterable[str] | None = None) -> list[Kernel]:
    """Everything there is to compile; a variant that an op does not know differs in nothing and is left out."""
    found = []
    for target in targets:
        for name in ops or ROLES:
            for variant in VARIANTS.values():
                if Target.named(target).vendor in variant.vendors and _concerns(variant, name):
                    found += [Kernel(target, name, variant.name, heads) for heads in HEADS]
    return found


def _has_mla(op: str) -> bool:
    return not {"q_nope", "kv_c"}.isdisjoint(inspect.signature(OPS[op]).parameters)


def _concerns(variant: Variant, op: str) -> bool:
    parameters = inspect.signature(OPS[op]).parameters
    mla, both = _has_mla(op), bool(OPS[op].index_prefix)
    default = VARIANTS["fp8"]
    if not variant.indexer and not both:
        return False
    if variant.clear_topk:
        return "topk_indices" in parameters and "q_c" not in parameters
    if variant.chain:
        return not both or "q_c" in parameters  # the other ops' chains have no kernel of their own
    if variant.index_layout != default.index_layout:
        return any(name.endswith("norm_bias") for name in parameters)
    if variant.index_scale_rule != default.index_scale_rule:
        return not {"index_q", "index_k"}.isdisjoint(ROLES[op])
    if variant.layout != default.layout:
        return mla and "kv_c" in parameters
    return variant.query_fp8 or "q_nope" in parameters


def reports(wanted: Sequence[Kernel]) -> Iterator[tuple[Kernel, list[Report]]]:
    """Compile, and count what came out: one report for each kernel that a call launches."""
    offline = importlib.import_module("dsafuse.kernels.offline")  # check stands before kernels, so by name
    for kernel in wanted:
        target, variant = Target.named(kernel.target), VARIANTS[kernel.variant]
        op = OPS[kernel.op]
        arguments, config = op.resolve(**arguments_of(op, variant, kernel.heads, target))
        if variant.chain:
            split = PROVIDERS["split"].load()
            launches = offline.chain_launches(lambda steps: split.run(op.name, arguments, config, steps), target)  # noqa: B023
        else:
            launches = [offline.fused_launch(op.name, arguments, config, target)]
        yield (
            kernel,
            [
                _report(kernel, name, launch, offline.compiled(launch, target), target)
                for name, launch in zip(_names(launches), launches)
            ],
        )


def _names(launches: Sequence[Any]) -> list[str]:
    """The launches' names; one that comes again carries its number."""
    names = [launch.name for launch in launches]
    before = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name} {times + 1}" if times else name for name, times in zip(names, before)]


def arguments_of(op: Op[..., Any], variant: Variant, heads: tuple[int, int], target: Target) -> dict[str, Any]:
    """A call as an engine makes it, on the meta device."""
    return meta_call(
        op,
        _MODELS[heads[1]],
        heads[0],
        target,
        kv_layout=variant.layout,
        scale_rule=variant.scale_rule,
        query="fp8" if variant.query_fp8 else "activation",
        index_kv_layout=variant.index_layout,
        index_scale_rule=variant.index_scale_rule,
        layer="indexed" if variant.indexer else "unindexed",
        clear_topk=variant.clear_topk or "q_c" in inspect.signature(op).parameters,
    )


def _report(kernel: Kernel, name: str, launch: Any, compiled: Any, target: Target) -> Report:
    threads = launch.options["num_warps"] * target.warp_size
    count = assembly.amd if target.vendor == "amd" else assembly.nvidia
    return Report(
        target=kernel.target,
        op=kernel.op,
        variant=kernel.variant,
        kernel=name,
        heads=kernel.heads[0],
        index_heads=kernel.heads[1],
        threads=threads,
        shared_bytes=compiled.metadata.shared,
        elements=_elements(launch),
        **count(compiled.asm),
    )


def _elements(launch: Any) -> int:
    """Of the fused kernel by its roles; of a step by its largest tensor, tables and caches aside."""
    p = launch.parameters
    if "Q_WIDTH" in p:
        return int(
            QUERY_DIM * (p["LATENT_ROWS"] + (p["BLOCK_HEADS"] if p["HEADS"] else 0))
            + INDEX_DIM * (p["INDEX_ROWS"] + (p["INDEX_BLOCK_HEADS"] if p["INDEX_HEADS"] else 0))
            + p["NORM_ROWS"] * (p["Q_WIDTH"] + p["TOPK"])
        )
    sizes: list[int] = [
        value.numel()
        for name, value in p.items()
        if isinstance(value, torch.Tensor) and not name.startswith(("table", "cache"))
    ]
    return math.ceil(max(sizes) / int(launch.programs))

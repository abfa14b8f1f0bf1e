"""The kernels compile, without a GPU, for GPUs of both vendors; and the code has what the numerics ask for."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsafuse.dispatch import PROVIDERS
from dsafuse.kernels import grids, launch, offline
from dsafuse.target import Target
from tests.inputs import EVERY_OP, FN, FNUZ, Call, call_of, indexer_call, mla_call, queries_call

TARGETS = ("sm_90", "sm_100", "gfx942", "gfx950")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    FN: "*fp8e4nv",
    FNUZ: "*fp8e4b8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = {"num_warps", "enable_fp_fusion", "launch_pdl"}


class Recorder:
    """Stands where a kernel would, and keeps what it is launched with."""

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        return self.keep

    def keep(self, *args: Any, **kwargs: Any) -> None:
        self.args, self.kwargs = args, kwargs


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an earlier version compiled proves nothing."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(op: str, call: Call, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernel of a call, compiled as a launch on target `name` would."""
    recorder, target = Recorder(), Target.named(name)
    arguments, config = EVERY_OP[op].resolve(**call)
    monkeypatch.setattr(Target, "of", staticmethod(lambda _device: target))
    launch.launch(EVERY_OP[op].name, arguments, config, SimpleNamespace(prepare=recorder))
    options = {option: recorder.kwargs.pop(option) for option in OPTIONS & recorder.kwargs.keys()}
    kernel = grids.prepare
    bound = inspect.signature(kernel.fn).bind(*recorder.args, **recorder.kwargs).arguments
    constants = {p.name: bound[p.name] for p in kernel.params if p.is_constexpr or bound[p.name] is None}
    signature = {
        p.name: "constexpr"
        if p.name in constants
        else POINTERS[bound[p.name].dtype]
        if isinstance(bound[p.name], torch.Tensor)
        else p.annotation_type
        for p in kernel.params
    }
    gpu = (
        GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
        if target.vendor == "nvidia"
        else GPUTarget("hip", name, target.warp_size)
    )
    return triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=gpu, options=options)


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("op", EVERY_OP)
def test_a_kernel_compiles_for(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = FNUZ if name == "gfx942" else FN
    call = call_of(op, 2, 7, fp8=fp8, **({"query": fp8} if op in ("mla", "qk", "queries") else {}))
    kernel = compiled(op, call, name, monkeypatch)
    binary, text = ("hsaco", "amdgcn") if name.startswith("gfx") else ("cubin", "ptx")
    assert len(kernel.asm[binary]) > 1000
    assert not re.search(r"\batom|\bred\.|_atomic_", kernel.asm[text])


@pytest.mark.parametrize(
    ("name", "text", "fused"), [("sm_90", "ptx", r"\bfma\.|\bmad\."), ("gfx950", "amdgcn", r"v_\w*fma")]
)
def test_rotation_is_not_contracted_to_fma(name: str, text: str, fused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def floating(kernel: Any) -> list[str]:
        return [line for line in kernel.asm[text].splitlines() if re.search(fused, line) and re.search(r"f32", line)]

    call = mla_call(2, 4, layout="plain")
    assert floating(compiled("mla", call, name, monkeypatch)) == []
    real = launch.launch_options
    monkeypatch.setattr(launch, "launch_options", lambda *a: real(*a) | {"enable_fp_fusion": True})
    assert floating(compiled("mla", call, name, monkeypatch)) != []  # the test would see it


IN_FP64 = {
    "nvidia": (r"\bdiv\.rn\.f64\b", r"\bcvt\.rn\.f32\.f64\b", r"\bdiv\.\S*f32|\brcp\.\S*f32|\.ftz\b"),
    "amd": (r"\bv_div_fixup_f64\b", r"\bv_cvt_f32_f64", r"\bv_div_fixup_f32\b|\bv_rcp_\S*f32|denorm_mode_\w+ [012]\b"),
}
"""(a reciprocal, a rounded quotient, what may not be there: fp32 divisions, and subnormal numbers taken for zeros)."""

ONE_OVER_MOST = {FN: "3F62492492492492", FNUZ: "3F72492492492492"}
"""1 / 448 and 1 / 224, nearest even, as fp64 bits: an fp32 number would end in zeros."""


@pytest.mark.parametrize("op", ["mla", "queries"])
@pytest.mark.parametrize("name", TARGETS)
def test_fp32_scales_divide_in_fp64(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tile of the MLA cache, and in a head of the indexer's query."""
    fp8, target = FNUZ if name == "gfx942" else FN, Target.named(name)
    tiles = mla_call(4, 8, fp8=fp8, scale_rule="fp32")
    call = tiles if op == "mla" else queries_call(4, 8, fp8=fp8) | {"index_scale_rule": "fp32"}
    asm = compiled(op, call, name, monkeypatch).asm
    text = asm["ptx" if target.vendor == "nvidia" else "amdgcn"]
    reciprocal, quotient, absent = IN_FP64[target.vendor]
    assert len(re.findall(reciprocal, text)) == 1
    assert len(re.findall(quotient, text)) > 1
    assert not re.findall(absent, text)
    bits = ONE_OVER_MOST[fp8]
    for part in [f"0d{bits}"] if target.vendor == "nvidia" else [f"0x{bits[:8].lower()}", f"0x{bits[8:].lower()}"]:
        assert part in text


def order_of_key_sums(ttgir: str) -> list[list[int]]:
    """Of each sum over the 16 neighbour sums of a key: columns of a thread, lanes and warps that a row lies in."""
    layouts = dict(re.findall(r"^#(\w+) = #ttg\.blocked<(.*)>$", ttgir, re.MULTILINE))
    bodies_and_types = re.findall(r'"tt\.reduce"(.*?)}\) : \(tensor<(\S+), #(\w+)>', ttgir, re.DOTALL)
    sums = [name for body, type_, name in bodies_and_types if "arith.addf" in body and type_.endswith("x16xf32")]
    fields = ("sizePerThread", "threadsPerWarp", "warpsPerCTA")
    return [[int(re.findall(rf"{field} = \[\d+, (\d+)\]", layouts[name])[0]) for field in fields] for name in sums]


KEYS = [
    (op, name, style)
    for name in TARGETS
    for op in ("indexer", "qk", "latents", "chain")
    for style in ("neox", *(["interleaved"] if op in ("indexer", "chain") else []))
]


@pytest.mark.parametrize(("op", "name", "rope_style"), KEYS)
def test_a_keys_sums_have_one_order_whatever_the_plan(
    op: str, name: str, rope_style: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane has one column, and adds those 8, 4, 2 and 1 lanes away. Another order may show in a last bit."""
    fp8 = FNUZ if name == "gfx942" else FN
    if op == "chain":
        resolved = EVERY_OP["indexer"].resolve(**indexer_call(fp8=fp8, rope_style=rope_style))
        run, target = PROVIDERS["split"].load().run, Target.named(name)
        monkeypatch.setattr(Target, "of", staticmethod(lambda _device: target))
        launches = offline.chain_launches(lambda steps: run(EVERY_OP["indexer"].name, *resolved, steps), target)
        (norm,) = (each for each in launches if each.name == "norm_key")
        kernel = offline.compiled(norm, target)
    else:
        style = {"rope_style" if op == "indexer" else "index_rope_style": rope_style}
        kernel = compiled(op, call_of(op, 5, 32, fp8=fp8, **style), name, monkeypatch)
    orders = order_of_key_sums(kernel.asm["ttgir"])
    assert len(orders) == 2
    for columns, lanes, warps in orders:
        assert (columns, warps) == (1, 1)
        assert lanes >= 16

"""Compiling without a GPU: what a call would launch on a target, and the code of each launch.

A launch is taken down where it would happen, with tensors on the meta device for arguments. So kernels, signatures,
constants and options are those of a real call, and no list of parameters is kept here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsafuse.kernels import chain, grids, launch, steps
from dsafuse.ops.config import Config
from dsafuse.registry import Arguments
from dsafuse.target import Target, assumed

_POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch that would have happened: of which kernel, how many programs, with which parameters and options."""

    name: str
    kernel: Any
    programs: int
    parameters: dict[str, Any]
    options: dict[str, Any]


class Recorder:
    """Stands where a module of kernels does, and keeps what each of them is launched with."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels
        self.launches: list[Launch] = []

    def __getattr__(self, name: str) -> Any:
        return _Recorded(name, getattr(self._kernels, name), self.launches)


class _Recorded:
    def __init__(self, name: str, kernel: Any, launches: list[Launch]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def keep(*args: Any, **kwargs: Any) -> None:
            known = {p.name for p in self._kernel.params}
            # In order: it is part of the key under which Triton's launch keeps a kernel.
            options = {name: kwargs.pop(name) for name in [*kwargs] if name not in known}
            bound = inspect.signature(self._kernel.fn).bind(*args, **kwargs).arguments
            self._launches.append(Launch(self._name, self._kernel, grid[0], dict(bound), options))

        return keep


def fused_launch(op: str, arguments: Arguments, config: Config, target: Target) -> Launch:
    """What provider `triton` would launch on a target for a resolved call on the meta device."""
    recorder = Recorder(grids)
    with assumed(target):
        launch.launch(op, arguments, config, recorder)  # type: ignore[arg-type]
    (found,) = recorder.launches
    return found


def chain_launches(run: Callable[[ModuleType], None], target: Target) -> list[Launch]:
    """What `run` launches on a target through the steps of the unfused chain, which it is given."""
    recorder, launching = Recorder(chain), cast(Any, steps)
    launching.chain = recorder
    try:
        with assumed(target):
            run(steps)
    finally:
        launching.chain = chain
    return recorder.launches


def compiled(recorded: Launch, target: Target) -> Any:
    """The kernel of a launch, compiled for a target as the launch there would compile it."""
    constants = {
        p.name: recorded.parameters[p.name]
        for p in recorded.kernel.params
        if p.is_constexpr or recorded.parameters[p.name] is None
    }
    signature = {
        p.name: "constexpr" if p.name in constants else _type(recorded.parameters[p.name], p)
        for p in recorded.kernel.params
    }
    source = ASTSource(fn=recorded.kernel, signature=signature, constexprs=constants)
    return compile_kernel(source, target=gpu_of(target), options=recorded.options)


def _type(value: Any, parameter: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    annotated: str = parameter.annotation_type
    return annotated


def gpu_of(target: Target) -> GPUTarget:
    """The target as Triton names it."""
    if target.vendor == "nvidia":
        return GPUTarget("cuda", int(target.arch.removeprefix("sm_")), target.warp_size)
    return GPUTarget("hip", target.arch, target.warp_size)

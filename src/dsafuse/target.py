"""What the GPU is: the one place that asks, and the one place that knows what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

_E4M3FN = frozenset({torch.float8_e4m3fn})
_E4M3FNUZ = frozenset({torch.float8_e4m3fnuz})
_NONE: frozenset[torch.dtype] = frozenset()


@dataclass(frozen=True, slots=True)
class Target:
    """A machine to run on: `nvidia` sm_*, `amd` gfx*, or `cpu`.

    `fp8` holds the formats that the hardware converts to (CPU casts in software, so both).
    """

    vendor: str
    arch: str
    fp8: frozenset[torch.dtype]
    warp_size: int = 32
    dependent_launch: bool = False
    """Programmatic dependent launch: a grid may start before its predecessor has drained (sm_90 on)."""
    signed_nan: bool = False
    """Its fp8 conversion keeps a NaN's sign: 0x7F or 0xFF (AMD in e4m3fn; e4m3fnuz has one NaN, NVIDIA writes one)."""

    @property
    def gpu(self) -> bool:
        """Whether kernels are compiled for it."""
        return self.vendor != "cpu"

    @staticmethod
    def named(name: str) -> Target:
        """The target called `name`, on any machine. Raises ValueError for an unknown one."""
        if name in _TARGETS:
            return _TARGETS[name]
        raise ValueError(f"target: got {name!r}, expected one of {', '.join(_TARGETS)}")

    @staticmethod
    def of(device: torch.device) -> Target:
        """The target that `device` is. Raises ValueError for one that this table does not hold."""
        if device.type == "meta" and (target := _ASSUMED.get()) is not None:
            return target
        return _of(device.type, device.index)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Every known target."""
        return tuple(_TARGETS)


_ASSUMED: ContextVar[Target | None] = ContextVar("assumed target", default=None)


@contextmanager
def assumed(target: Target) -> Iterator[None]:
    """In this block the meta device is `target`: to compile for a GPU that is not there."""
    token = _ASSUMED.set(target)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def _nvidia(arch: str, fp8: frozenset[torch.dtype], *, dependent_launch: bool = False) -> Target:
    return Target("nvidia", arch, fp8, dependent_launch=dependent_launch)


def _amd(arch: str, fp8: frozenset[torch.dtype], warp_size: int = 64) -> Target:
    return Target("amd", arch, fp8, warp_size=warp_size, signed_nan=torch.float8_e4m3fn in fp8)


_TARGETS = {
    target.arch: target
    for target in (
        Target("cpu", "cpu", _E4M3FN | _E4M3FNUZ),
        _nvidia("sm_80", _NONE),
        _nvidia("sm_86", _NONE),
        _nvidia("sm_89", _E4M3FN),
        _nvidia("sm_90", _E4M3FN, dependent_launch=True),
        _nvidia("sm_100", _E4M3FN, dependent_launch=True),
        _nvidia("sm_103", _E4M3FN, dependent_launch=True),
        _nvidia("sm_120", _E4M3FN, dependent_launch=True),
        _nvidia("sm_121", _E4M3FN, dependent_launch=True),
        _amd("gfx90a", _NONE),
        _amd("gfx942", _E4M3FNUZ),
        _amd("gfx950", _E4M3FN),
        _amd("gfx1200", _E4M3FN, warp_size=32),
        _amd("gfx1201", _E4M3FN, warp_size=32),
    )
}


@cache
def _of(kind: str, index: int | None) -> Target:
    if kind == "cpu":
        return _TARGETS["cpu"]
    if kind != "cuda":
        raise ValueError(f"device: got {kind!r}, expected cuda (CUDA or ROCm) or cpu")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    return Target.named(name)

"""Provider `interpreter`: the same kernels on CPU, through Triton's interpreter with its casts corrected.

Whether a Triton function is interpreted is decided when it is decorated, helper functions included. So the kernel
modules are imported a second time with interpretation on, beside the compiled ones and out of sys.modules.
"""

from __future__ import annotations

import importlib
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from dsafuse import private
from dsafuse.dispatch import OpConfig, unsupported_format
from dsafuse.kernels import launch
from dsafuse.ops.config import Config
from dsafuse.registry import Arguments
from dsafuse.target import Target

_ONE_AT_A_TIME = threading.RLock()
"""Triton's interpreter keeps its state, and its replacements, in modules: one launch at a time in a process."""

_MODULES = ("tiles", "roles", "grids")


def why_not(config: OpConfig, target: Target) -> str | None:
    """Why interpreted kernels would not serve this configuration on this target; None if they would."""
    if target.gpu:
        return f"kernels are interpreted on CPU, and the target is {target.arch}"
    return unsupported_format(config, target)


def why_not_here() -> str | None:
    """Why nothing can be interpreted on this machine."""
    return launch.why_not_here() or private.why_not("interpreter")


def run(op: str, arguments: Arguments, config: Config) -> None:
    """Interpret the op's kernel, program after program."""
    with _ONE_AT_A_TIME, corrected_casts(), patched_once(), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN", RuntimeWarning)  # a row of NaN has no maximum, by design
        launch.launch(op, arguments, config, interpreted_kernels())


@cache
def interpreted_kernels() -> ModuleType:
    """`dsafuse.kernels.grids`, imported with interpretation on."""
    import triton

    package = sys.modules["dsafuse.kernels"]
    names = [f"dsafuse.kernels.{name}" for name in _MODULES]
    compiled = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = True
            return importlib.import_module("dsafuse.kernels.grids")
    finally:
        for name, short in zip(names, _MODULES):
            sys.modules.pop(name, None)
            package.__dict__.pop(short, None)
            if name in compiled:
                sys.modules[name] = compiled[name]
                setattr(package, short, compiled[name])


@contextmanager
def corrected_casts() -> Iterator[None]:
    """Replace the interpreter's float conversion by torch's for the length of a block.

    Triton 3.6 to 3.9 truncate fp32 -> bf16, and lose the carry into the exponent of fp32 -> fp8: 7.95 becomes 4.0.
    tests/kernels/test_interpreter.py tells when this is no longer needed. 3.7 does not know the type e4m3fnuz, and its
    maximum of a number and NaN is NaN, where a GPU's is the number.
    """
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    replaced = [
        (interpreter, "_convert_float", _convert_float),
        (interpreter, "_patch_lang", _with_fnuz_after(interpreter._patch_lang)),
        (builder, "create_maxnumf", lambda self, one, other: self.binary_op(one, other, np.fmax)),
        (builder, "create_minnumf", lambda self, one, other: self.binary_op(one, other, np.fmin)),
    ]
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, corrected in replaced:
        setattr(owner, name, corrected)
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _with_fnuz_after(patch: Any) -> Any:
    return lambda function: _with_fnuz(patch(function))


def _with_fnuz(scope: Any) -> Any:
    """The scope of functions that are now replaced, and will be restored together, one of them with a type more."""
    import triton.language as tl

    known = tl.dtype.to_ir
    tl.dtype.to_ir = lambda self, builder: builder.get_fp8e4b8_ty() if self.name == "fp8e4b8" else known(self, builder)
    return scope


@contextmanager
def patched_once() -> Iterator[None]:
    """Let a kernel replace Triton's functions once, not again at every call of a device function.

    All our kernels see the same `tl`, so the inner replacements change nothing, and they take 40 % of the time.
    """
    from triton.runtime import interpreter

    original = interpreter._patch_lang
    outer: list[Any] = []

    def patch(function: Any) -> Any:
        if outer:
            return _NOTHING_TO_RESTORE
        scope = original(function)
        outer.append(scope)
        return SimpleNamespace(restore=lambda: outer.pop().restore())

    interpreter._patch_lang = patch
    try:
        yield
    finally:
        interpreter._patch_lang = original


_NOTHING_TO_RESTORE = SimpleNamespace(restore=lambda: None)


@cache
def _torch_dtypes() -> dict[Any, torch.dtype]:
    import triton.language as tl

    return {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float64: torch.float64,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e4b8: torch.float8_e4m3fnuz,
    }


def _convert_float(data: Any, source: Any, target: Any, _rounding_mode: Any) -> Any:
    """Nearest-even conversion of a numpy array; bits in, bits out, NaN in the format's canonical code."""
    kinds = _torch_dtypes()
    bits = torch.from_numpy(np.ascontiguousarray(data))
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values = bits.view(integer[bits.element_size()]).view(kinds[source])
    wanted = kinds[target]
    if wanted.itemsize == 1:
        from dsafuse.numerics import FP8_FORMATS

        converted = values.float().to(wanted).view(torch.uint8)
        converted = converted.masked_fill(values.isnan(), FP8_FORMATS[wanted].nan_byte)
    else:
        converted = values.to(wanted).view(integer[wanted.itemsize])
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
    return converted.numpy().view(unsigned[wanted.itemsize]).reshape(data.shape)

"""What is used of torch and Triton that neither promises: each name, what uses it, and what becomes of that without it.

A use is asked about once, when it is first made, and a warning then says what it lacks; `dsafuse env` says it, too.
"""

from __future__ import annotations

import inspect
import logging
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dsafuse import installed

TESTED = ("torch 2.11 with Triton 3.6", "torch 2.13 with Triton 3.9")
"""The versions that the names were read in, and that the tests ran with."""

WITHOUT = {
    "watching": "torch's dispatcher gets every call, as torch.ops.dsafuse, and sees for itself what it has to do",
    "known calls": "every call is checked in full, 100 us of Python, and launched by Triton's own launch",
    "current device": "torch.cuda.current_device is asked at every known call, and takes longer",
    "kernels": "no kernel is compiled, and provider triton declines",
    "interpreter": "provider interpreter declines",
    "warm_up": "warm_up compiles nothing, and raises RuntimeError",
}
"""What uses private names, and what happens where one of them is missing."""


@dataclass(frozen=True, slots=True)
class Name:
    """A private name, its uses, and whether what it is the name of is still what was read there."""

    name: str
    uses: tuple[str, ...]
    fits: Callable[[Any], bool] = callable

    def is_here(self) -> bool:
        """Whether it is there and fits; what can't be imported, called or read as it was does not."""
        try:
            return self.fits(pkgutil.resolve_name(self.name))
        except Exception:  # noqa: BLE001  in whatever way a probe fails, it is not what was read
            return False


def _answers(function: Callable[[], object]) -> bool:
    function()
    return True


def _guards_tell(guards_of: Any) -> bool:
    """Whether torch.compile's guards, one C++ call for all tensors, tell sizes and strides."""
    probe, other = torch.empty(2, 3, device="cpu"), torch.empty(3, 3, device="cpu")
    guards = guards_of(probe, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    return bool(guards.check(probe) and not guards.check(probe.t()) and not guards.check(other))


def _runs(call: Any) -> bool:
    """Whether Triton's own launch hands a kernel's `run` what `kernels.relaunch` does, in that order."""
    return (
        "self.run(grid[0],grid[1],grid[2],stream,self.function,self.packed_metadata,launch_metadata,"
        "knobs.runtime.launch_enter_hook,knobs.runtime.launch_exit_hook,*args)"
    ) in "".join(inspect.getsource(call).split())


NAMES = (
    Name("torch._C._len_torch_dispatch_stack", ("watching", "known calls"), _answers),  # make_fx, FakeTensorMode
    Name("torch._C._functorch.peek_interpreter_stack", ("watching",), _answers),  # torch.func
    Name("torch._C._get_tracing_state", ("watching",), _answers),  # torch.jit.trace
    Name("torch._C._dynamo.guards.TensorGuards", ("known calls",), _guards_tell),
    # A torch without CUDA and ROCm has no such name, and no use for it.
    *([Name("torch._C._cuda_getDevice", ("current device",))] if torch.backends.cuda.is_built() else []),
    Name("triton.compiler.CompiledKernel.__getitem__", ("known calls",), _runs),
    Name("triton.compiler.CompiledKernel.run", ("known calls", "warm_up"), lambda run: isinstance(run, property)),
    Name("triton.JITFunction.warmup", ("known calls", "warm_up")),
    Name("triton.knobs.runtime.launch_enter_hook.calls", ("known calls",), lambda calls: isinstance(calls, list)),
    Name(
        "triton.backends.driver.GPUDriver.__init__",
        ("known calls",),
        lambda init: "get_current_stream" in init.__code__.co_names,
    ),
    Name("triton.runtime.driver:driver._active", ("warm_up",), lambda _: True),  # None without a GPU
    Name("triton.language.standard._sum_combine", ("kernels", "interpreter")),
    Name("triton.language.standard._elementwise_max", ("kernels", "interpreter")),
    Name("triton.runtime.interpreter._convert_float", ("interpreter",)),
    Name("triton.runtime.interpreter._patch_lang", ("interpreter",)),
    Name("triton.runtime.interpreter.InterpreterBuilder.create_maxnumf", ("interpreter",)),
    Name("triton.runtime.interpreter.InterpreterBuilder.create_minnumf", ("interpreter",)),
)


def lack(use: str) -> str | None:
    """What a use lacks here, in which versions, and what happens instead. Without Triton, its names are not missed."""
    triton = installed.why_not("triton") is None
    asked = (name for name in NAMES if use in name.uses and (triton or not name.name.startswith("triton.")))
    missing = [name.name for name in asked if not name.is_here()]
    if not missing:
        return None
    modules = {name.split(".")[0]: sys.modules.get(name.split(".")[0]) for name in missing}
    versions = " and ".join(
        f"{name} {getattr(module, '__version__', '(import failed)')}" for name, module in modules.items()
    )
    names, tested = ", ".join(missing), ", ".join(TESTED)
    return f"{use}: missing, or not what it was, in {versions}: {names} (tested: {tested}); so {WITHOUT[use]}"


@cache
def why_not(use: str) -> str | None:
    """What a use lacks here; looked for once, and then logged as a warning."""
    reason = lack(use)
    if reason is not None:
        logging.getLogger("dsafuse").warning("%s", reason)
    return reason


def lacks() -> list[str]:
    """What every use lacks here."""
    return [reason for use in WITHOUT if (reason := lack(use)) is not None]

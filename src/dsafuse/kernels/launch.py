"""Provider `triton`: turns resolved arguments into one launch of `grids.prepare`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch

from dsafuse import installed, private
from dsafuse.dispatch import OpConfig, unsupported_format
from dsafuse.kernels.addresses import Addresses
from dsafuse.kernels.parameters import alignments, constants_of, launch_options, runtime_arguments
from dsafuse.kernels.plans import LaunchPlan, grid_of, plan_of
from dsafuse.kernels.relaunch import Kernel, cuda_driver
from dsafuse.ops.config import Config
from dsafuse.registry import OPS, Arguments
from dsafuse.target import Target

# What torch.cuda.current_device calls, once it has made sure that CUDA is initialised.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def why_not(config: OpConfig, target: Target) -> str | None:
    """Why these kernels would not serve this configuration on this target; None if they would."""
    if not target.gpu:
        return f"kernels are compiled for GPUs, and the tensors are on {target.arch}"
    return unsupported_format(config, target)


def why_not_here() -> str | None:
    """Why nothing can be launched on this machine."""
    return installed.why_not("triton") or private.why_not("kernels")


def run(op: str, arguments: Arguments, config: Config) -> None:
    """Launch the op's kernel on the tensors' device and current stream; no tokens, no launch."""
    from dsafuse.kernels import grids

    launch(op, arguments, config, grids)


def launch(op: str, arguments: Arguments, config: Config, grids: ModuleType) -> None:
    """Launch from a module of kernels, the compiled ones or their interpreted twins."""
    positions = arguments["positions"]
    if not len(positions):
        return
    target = Target.of(positions.device)
    plan = plan_of(target, config)
    with on_device_of(positions):
        grids.prepare[grid_of(arguments, config, plan)](
            *runtime_arguments(op, arguments, config),
            **constants_of(config, target, plan),
            **alignments(op, arguments, config),
            **launch_options(target, plan.threads),
        )


def again(op: str, arguments: Arguments, config: Config, places: dict[str, int]) -> Callable[[tuple[int, ...]], bool]:
    """Run a call, as `run` does, and return a function that runs it for tensors that differ in addresses alone.

    The function returns False, and has launched nothing, where the addresses need a look: another alignment, memory
    that an output shares, another current device, or a profiler's hooks.

    Args:
        op, arguments, config: of a call that was checked.
        places: of each tensor argument among the addresses that the function takes. Arguments that were one tensor
            have one place.
    """
    from triton.runtime import driver

    positions = arguments["positions"]
    tensors = {name: tensor for name in places if (tensor := arguments[name]) is not None}
    fit = Addresses(tensors, places, OPS[op].own_memory, OPS[op].caches).fit
    if not len(positions):
        return fit
    device, target = positions.device, Target.of(positions.device)
    plan = plan_of(target, config)
    runtime = runtime_arguments(op, arguments, config)
    kernel, constants = _kernel_of(op, arguments, config, target, plan, tensors, runtime)
    place_of, first = {}, [0] * (1 + max(places.values()))
    for name, tensor in tensors.items():
        place = place_of[id(tensor)] = places[name]
        first[place] = tensor.data_ptr()
    relaunch = kernel.launch(grid_of(arguments, config, plan)[0], (*runtime, *constants), place_of, len(first))
    index, stream_of, hooks = device.index, driver.active.get_current_stream, launch_hooks()

    def launch_again(addresses: tuple[int, ...]) -> bool:
        if current_device() != index or hooks or not fit(addresses):
            return False
        return relaunch(addresses, stream_of(index))

    if current_device() != index or hooks or not relaunch(tuple(first), stream_of(index)):
        run(op, arguments, config)
    return launch_again


_KERNELS: dict[tuple[Any, ...], tuple[Kernel, tuple[Any, ...]]] = {}
"""Compiled kernels by all that they are compiled for, and their constants: Triton's own look takes 40 us."""


def _kernel_of(
    op: str,
    arguments: Arguments,
    config: Config,
    target: Target,
    plan: LaunchPlan,
    tensors: dict[str, torch.Tensor],
    runtime: tuple[Any, ...],
) -> tuple[Kernel, tuple[Any, ...]]:
    aligned = alignments(op, arguments, config)
    dtypes = [tensor.dtype for tensor in tensors.values()]
    positions = arguments["positions"]
    key = (op, positions.device, target, config, plan, *aligned.values(), *tensors, *dtypes)
    known = _KERNELS.get(key)
    if known is None:
        from dsafuse.kernels import grids

        constants = {**constants_of(config, target, plan), **aligned}
        grid, options = grid_of(arguments, config, plan), launch_options(target, plan.threads)
        with on_device_of(positions):
            compiled = grids.prepare.warmup(*runtime, grid=grid, **constants, **options)
            known = _KERNELS[key] = Kernel(compiled, cuda_driver()), tuple(constants.values())
    return known


def launch_hooks() -> list[Any]:
    """The hooks that Triton's own launch calls, for profilers; the list is Triton's, and changes with time."""
    from triton import knobs

    hooks: list[Any] = knobs.runtime.launch_enter_hook.calls
    return hooks


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)

"""Launching a compiled kernel again, with other addresses and nothing else.

Triton's launcher takes every parameter from Python at every launch, and parses it. Where nothing changes but addresses
and stream, `driver_launch` has them written into a block of parameters that was laid out once, and hands that to
cuLaunchKernelEx. It does so only if the driver lists, for this very kernel, the parameters that the block holds;
`why_not_driver` says what else it needs. Elsewhere, and on ROCm, Triton's launcher is called.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Relaunch = Callable[[tuple[int, ...], int], bool]
"""Takes addresses and a raw stream; False if the driver refused, and then nothing was launched."""

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}
"""Of a scalar parameter by Triton's name of its type; a pointer is an address."""

_SCRATCH = 2
"""Pointers that Triton appends to a kernel's parameters: global and profile scratch, null where it asks for none."""

_MOST_SHARED_BYTES = 48 * 1024
"""More takes attributes that are set when a kernel is loaded, or launched."""

# cuda.h: CUlaunchConfig {grid x y z, block x y z, shared bytes, stream, attributes, how many}; CUlaunchAttribute {id,
# 64 bytes of value}; CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_CONFIG = struct.Struct("@7I4xPPI4x")
_STREAM = 32
_ATTRIBUTE = struct.Struct("@I4xi60x")
_DEPENDENT_LAUNCH = 6


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a compiled kernel: Triton's name of its type, and its value or its place among the addresses."""

    kind: str
    value: Any = None
    place: int | None = None

    @property
    def pointer(self) -> bool:
        """Whether it is an address."""
        return self.kind.startswith("*")

    @property
    def format(self) -> str:
        """How it lies in memory."""
        return "P" if self.pointer else _FORMATS[self.kind]


def relaunch_of(
    compiled: Any, programs: int, values: Mapping[str, Any], pointers: Mapping[str, int], addresses: int
) -> Relaunch:
    """A function that launches a compiled kernel, through the driver where that can be.

    Args:
        compiled: what Triton compiled, and has loaded.
        programs: of the grid.
        values: of all parameters of the kernel's Python function, in order, constants included.
        pointers: the places of those that are tensors among the addresses.
        addresses: how many there are.
    """
    parameters = parameters_of(compiled, values, pointers)
    cuda = cuda_driver()
    if why_not_driver(compiled, parameters, cuda) is None:
        return driver_launch(compiled, programs, parameters, addresses, cuda)
    return triton_launch(compiled, programs, values, pointers)


def parameters_of(compiled: Any, values: Mapping[str, Any], pointers: Mapping[str, int]) -> list[Parameter]:
    """The parameters that a compiled kernel has at run time, in order."""
    live = {name: kind for name, kind in compiled.src.signature.items() if kind != "constexpr"}
    return [Parameter(kind, values[name], pointers.get(name)) for name, kind in live.items()]


def why_not_driver(compiled: Any, parameters: Sequence[Parameter], cuda: Any) -> str | None:
    """Why a kernel is launched through Triton; None if it is launched through the driver."""
    if cuda is None:
        return "there is no CUDA driver"
    metadata = compiled.metadata
    for name, plain in (
        ("num_ctas", 1),
        ("launch_cooperative_grid", False),
        ("global_scratch_size", 0),
        ("profile_scratch_size", 0),
    ):
        if (value := getattr(metadata, name, plain)) != plain:
            return f"{name} is {value}"
    if metadata.shared > _MOST_SHARED_BYTES:
        return f"it takes {metadata.shared} bytes of shared memory"
    for parameter in parameters:
        if not parameter.pointer and parameter.kind not in _FORMATS:
            return f"it has a parameter of type {parameter.kind}"
        if parameter.pointer and parameter.place is None:
            return "it has a pointer that is no tensor of the call"
    if not hasattr(cuda, "cuFuncGetParamInfo"):
        return "the driver lists no parameters (it does from CUDA 12.4 on)"
    sizes = [struct.calcsize(parameter.format) for parameter in parameters] + [struct.calcsize("P")] * _SCRATCH
    listed = _listed_sizes(cuda, compiled.function, len(sizes) + 1)
    return None if listed == sizes else f"the driver lists parameters of {listed} bytes, expected {sizes}"


def _listed_sizes(cuda: Any, function: int, most: int) -> list[int]:
    """Bytes of each parameter of a kernel, as the driver lists them."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    for i in range(most):
        found = ctypes.byref(offset), ctypes.byref(size)
        if cuda.cuFuncGetParamInfo(ctypes.c_void_p(function), ctypes.c_size_t(i), *found):
            break
        sizes.append(size.value)
    return sizes


@cache
def cuda_driver() -> Any:
    """The CUDA driver's library; None where there is none. A call releases the GIL, since a full queue blocks it."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    cuda.cuLaunchKernelEx.argtypes = (ctypes.c_void_p,) * 4
    cuda.cuLaunchKernelEx.restype = ctypes.c_int
    return cuda


class _Block:
    """What cuLaunchKernelEx takes, in one piece of memory: configuration, addresses, scalars, their table, attribute.

    Stream, attributes and addresses lie side by side: they are what `write` has to write for a launch.
    """

    def __init__(self, compiled: Any, programs: int, parameters: Sequence[Parameter], addresses: int) -> None:
        metadata, count = compiled.metadata, len(parameters) + _SCRATCH
        pointers = _CONFIG.size
        scalars = pointers + 8 * addresses
        table = scalars + 8 * count
        attribute = table + 8 * count
        self.memory = ctypes.create_string_buffer(attribute + _ATTRIBUTE.size)
        base = ctypes.addressof(self.memory)
        self.config, self.table = base, base + table
        self.attributes = base + attribute, int(bool(getattr(metadata, "launch_pdl", False)))
        threads = metadata.num_warps * metadata.target.warp_size
        _CONFIG.pack_into(self.memory, 0, programs, 1, 1, threads, 1, 1, metadata.shared, 0, *self.attributes)
        _ATTRIBUTE.pack_into(self.memory, attribute, _DEPENDENT_LAUNCH, 1)
        for i, parameter in enumerate(parameters):
            if parameter.place is None:
                struct.pack_into(f"@{parameter.format}", self.memory, scalars + 8 * i, parameter.value)
        places = [parameter.place for parameter in parameters] + [None] * _SCRATCH  # scratch is null, as memory is
        at = [scalars + 8 * i if place is None else pointers + 8 * place for i, place in enumerate(places)]
        struct.pack_into(f"@{count}P", self.memory, table, *(base + each for each in at))


def driver_launch(compiled: Any, programs: int, parameters: Sequence[Parameter], addresses: int, cuda: Any) -> Relaunch:
    """Launch through cuLaunchKernelEx. Blocks are taken and given back, so that threads don't share one."""
    launch, function = cuda.cuLaunchKernelEx, compiled.function
    # The stream, the attributes and their number, the addresses: words of the machine, which "N" packs fastest.
    write = struct.Struct(f"@{3 + addresses}N").pack_into
    blocks = [_Block(compiled, programs, parameters, addresses)]

    def relaunch(pointers: tuple[int, ...], stream: int) -> bool:
        try:
            block = blocks.pop()
        except IndexError:
            block = _Block(compiled, programs, parameters, addresses)
        write(block.memory, _STREAM, stream, *block.attributes, *pointers)
        refused = launch(block.config, function, block.table, None)
        blocks.append(block)
        return not refused

    return relaunch


def triton_launch(compiled: Any, programs: int, parameters: Mapping[str, Any], places: Mapping[str, int]) -> Relaunch:
    """Launch through Triton, which is given every parameter of the kernel's Python function, constants included."""
    run, packed = compiled.run, compiled.packed_metadata
    template = list(parameters.values())
    written = [(i, places[name]) for i, name in enumerate(parameters) if name in places]

    def relaunch(pointers: tuple[int, ...], stream: int) -> bool:
        values = template.copy()
        for i, place in written:
            values[i] = pointers[place]
        run(programs, 1, 1, stream, compiled.function, packed, None, None, None, *values)
        return True

    return relaunch

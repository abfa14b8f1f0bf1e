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
from functools import cache
from operator import attrgetter
from typing import Any

Relaunch = Callable[[tuple[int, ...], int], bool]
"""Takes addresses and a raw stream; False if the driver refused, and then nothing was launched."""

_FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}
"""Of a scalar parameter by Triton's name of its type; a pointer is an address."""

_SCRATCH = 2
"""Pointers that Triton appends to a kernel's parameters: global and profile scratch, null where it asks for none."""

_MOST_SHARED_BYTES = 48 * 1024
"""More takes attributes that are set when a kernel is loaded, or launched."""

_WORD = 8

# cuda.h: CUlaunchConfig {grid x y z, block x y z, shared bytes, stream, attributes, how many}; CUlaunchAttribute {id,
# 64 bytes of value}; CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
_CONFIG = "7I4xPPI4x"
_STREAM = 32
_ATTRIBUTE = "I4xi60x"
_DEPENDENT_LAUNCH = 6


class Kernel:
    """A compiled kernel, and what is the same at all of its launches.

    Args:
        compiled: what Triton compiled.
        cuda: the CUDA driver, None where there is none.
    """

    def __init__(self, compiled: Any, cuda: Any) -> None:
        self._run = compiled.run  # Triton loads a kernel when it is asked for this
        self._compiled, self._cuda = compiled, cuda
        self._blocks: dict[int, _Blocks] = {}
        self.launch = self.triton_launch if why_not_driver(compiled, cuda) else self.driver_launch
        """Makes a function that launches the kernel, through the driver where that can be."""

    def driver_launch(
        self, programs: int, values: Sequence[Any], place_of: Mapping[int, int], addresses: int
    ) -> Relaunch:
        """Launch through cuLaunchKernelEx.

        Args:
            programs: of the grid.
            values: of all parameters of the kernel's Python function, in order, constants included.
            place_of: of each tensor among them, by its id, the place among the addresses.
            addresses: how many there are.
        """
        blocks = self._blocks.get(addresses)
        if blocks is None:
            blocks = self._blocks[addresses] = _Blocks(self._compiled, addresses)
        launch, function, write = self._cuda.cuLaunchKernelEx, self._compiled.function, blocks.write
        make = blocks.maker(programs, values, place_of)
        free = [make()]  # taken and given back, so that threads don't share one

        def relaunch(pointers: tuple[int, ...], stream: int) -> bool:
            try:
                block = free.pop()
            except IndexError:
                block = make()
            memory, config, table, attributes, count = block
            write(memory, _STREAM, stream, attributes, count, *pointers)
            refused = launch(config, function, table, None)
            free.append(block)
            return not refused

        return relaunch

    def triton_launch(
        self, programs: int, values: Sequence[Any], place_of: Mapping[int, int], _addresses: int
    ) -> Relaunch:
        """Launch through Triton, which is given every parameter of the kernel's Python function, constants included."""
        run, function, packed = self._run, self._compiled.function, self._compiled.packed_metadata
        places = [place_of.get(id(value)) for value in values]
        written = [(i, place) for i, place in enumerate(places) if place is not None]
        template = [value if place is None else None for value, place in zip(values, places)]  # keeps no tensor alive

        def relaunch(pointers: tuple[int, ...], stream: int) -> bool:
            given = template.copy()
            for i, place in written:
                given[i] = pointers[place]
            run(programs, 1, 1, stream, function, packed, None, None, None, *given)
            return True

        return relaunch


def _live(compiled: Any) -> list[tuple[int, str]]:
    """The parameters that a compiled kernel has at run time: index among those of its Python function, and type."""
    return [(i, kind) for i, kind in enumerate(compiled.src.signature.values()) if kind != "constexpr"]


def _is_pointer(kind: str) -> bool:
    return kind.startswith("*")


def why_not_driver(compiled: Any, cuda: Any) -> str | None:
    """Why a kernel is launched through Triton; None if it is launched through the driver."""
    if cuda is None:
        return "there is no CUDA driver"
    for path in ("src.signature", "metadata.shared", "metadata.num_warps", "metadata.target.warp_size"):
        try:
            attrgetter(path)(compiled)
        except AttributeError:
            return f"a compiled kernel has no {path}"
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
    kinds = [kind for _, kind in _live(compiled)]
    for kind in kinds:
        if not _is_pointer(kind) and kind not in _FORMATS:
            return f"it has a parameter of type {kind}"
    if not hasattr(cuda, "cuFuncGetParamInfo"):
        return "the driver lists no parameters (it does from CUDA 12.4 on)"
    sizes = [_WORD if _is_pointer(kind) else struct.calcsize(_FORMATS[kind]) for kind in kinds] + [_WORD] * _SCRATCH
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


Block = tuple[Any, int, int, int, int]
"""What cuLaunchKernelEx takes, in one piece of memory; then where in it are configuration, table of parameters and
attributes, and how many attributes there are."""


class _Blocks:
    """How the blocks of a kernel are laid out: configuration, addresses, scalars, a null, table, attribute.

    Stream, attributes and addresses lie side by side: they are what `write` has to write for a launch.
    """

    def __init__(self, compiled: Any, addresses: int) -> None:
        metadata, live = compiled.metadata, _live(compiled)
        self._shape = metadata.num_warps * metadata.target.warp_size, 1, 1, metadata.shared
        self._attributes = int(bool(getattr(metadata, "launch_pdl", False)))
        scalars = [(i, _FORMATS[kind]) for i, kind in live if not _is_pointer(kind)]
        self._scalars = [i for i, _ in scalars]
        self._pointers = struct.calcsize(f"@{_CONFIG}")
        first = self._pointers + _WORD * addresses
        at = {i: first + _WORD * n for n, i in enumerate(self._scalars)}
        null = first + _WORD * len(scalars)
        self._parameters = [(i, at.get(i)) for i, _ in live]
        self._scratch = [null] * _SCRATCH
        self._table = null + _WORD
        self._attribute = self._table + _WORD * (len(live) + _SCRATCH)
        # "0q" rounds up to the next word.
        values = "".join(f"{form}0q" for _, form in scalars)
        whole = struct.Struct(f"@{_CONFIG}{_WORD * addresses}x{values}{_WORD}x{len(live) + _SCRATCH}P{_ATTRIBUTE}")
        self._pack, self._memory = whole.pack_into, ctypes.c_char * whole.size
        # The stream, the attributes and their number, the addresses: words of the machine, which "N" packs fastest.
        self.write = struct.Struct(f"@{3 + addresses}N").pack_into

    def maker(self, programs: int, values: Sequence[Any], place_of: Mapping[int, int]) -> Callable[[], Block]:
        """A function that makes blocks of a launch."""
        scalars = [values[i] for i in self._scalars]
        pointers = self._pointers
        table = [pointers + _WORD * place_of[id(values[i])] if at is None else at for i, at in self._parameters]
        table += self._scratch

        def make() -> Block:
            memory = self._memory()
            base = ctypes.addressof(memory)
            attributes, count = base + self._attribute, self._attributes
            config = programs, 1, 1, *self._shape, 0, attributes, count
            self._pack(memory, 0, *config, *scalars, *[base + at for at in table], _DEPENDENT_LAUNCH, 1)
            return memory, base, base + self._table, attributes, count

        return make

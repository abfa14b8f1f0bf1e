"""What a known call hands to the CUDA driver: read back from memory as the driver reads it."""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse.kernels import offline, relaunch
from dsafuse.target import Target, assumed
from tests.inputs import EVERY_OP, FN, Call, indexer_call, latents_call, mla_call, qk_call, queries_call

CALLS: dict[str, Callable[[], Call]] = {
    "mla": lambda: mla_call(layout="fp8", query=FN),
    "indexer": lambda: indexer_call(eps=0.25),
    "qk": lambda: qk_call(layout="fp8", query=FN, topk=40),
    "latents": lambda: latents_call(layout="fp8"),
    "queries": lambda: queries_call(query=FN),
}
FUNCTION, STREAM = 0x7F00_0000_1000, 0x7F00_0000_2000


class Kernel:
    """An op's kernel as Triton compiles it for a target, with a handle that nobody has loaded."""

    def __init__(self, op: str, target: str = "sm_90") -> None:
        self.target = Target.named(target)
        meta = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in CALLS[op]().items()}
        with assumed(self.target):
            arguments, config = EVERY_OP[op].resolve(**meta)
        self.recorded = offline.fused_launch(EVERY_OP[op].name, arguments, config, self.target)
        made = offline.compiled(self.recorded, self.target)
        self.run_with: list[tuple[Any, ...]] = []
        self.compiled = SimpleNamespace(
            src=made.src,
            metadata=made.metadata,
            packed_metadata=made.packed_metadata,
            function=FUNCTION,
            run=lambda *args: self.run_with.append(args),
        )
        self.values = self.recorded.parameters
        tensors = [name for name, value in self.values.items() if isinstance(value, torch.Tensor)]
        # Backwards, so that no address lies where its parameter does.
        self.places = {name: place for place, name in enumerate(reversed(tensors))}

    def launch(self, cuda: Any, programs: int = 7) -> relaunch.Relaunch:
        place_of = {id(self.values[name]): place for name, place in self.places.items()}
        kernel = relaunch.Kernel(self.compiled, cuda)
        return kernel.launch(programs, tuple(self.values.values()), place_of, len(self.places))

    def addresses(self, first: int = 0x7F00_1234_0000) -> tuple[int, ...]:
        return tuple(first + 4096 * i for i in range(len(self.places)))


class Driver:
    """What a launch needs of the CUDA driver. Lists a kernel's parameters, and reads what it is to launch."""

    def __init__(self, sizes: list[int], status: int = 0) -> None:
        self.sizes, self.status = sizes, status
        self.launches: list[SimpleNamespace] = []
        self.before_reading: Callable[[], object] = lambda: None

    def cuFuncGetParamInfo(self, function: Any, index: Any, _offset: Any, size: Any) -> int:
        assert function.value == FUNCTION
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuLaunchKernelEx(self, config: int, function: int, table: int, extra: None) -> int:
        assert (function, extra) == (FUNCTION, None)
        self.before_reading()
        # cuda.h's CUlaunchConfig, whose stream follows seven ints and a gap, and CUlaunchAttribute.
        *shape, stream, attributes, count = struct.unpack("@7I4xPPI4x", ctypes.string_at(config, 56))
        words = struct.unpack(f"@{len(self.sizes)}P", ctypes.string_at(table, 8 * len(self.sizes)))
        self.launches.append(
            SimpleNamespace(
                shape=shape,
                stream=stream,
                attributes=[struct.unpack("@I4xi60x", ctypes.string_at(attributes + 72 * i, 72)) for i in range(count)],
                parameters=[ctypes.string_at(at, size) for at, size in zip(words, self.sizes)],
            )
        )
        return self.status


@pytest.fixture(scope="module")
def kernels() -> Callable[[str], Kernel]:
    made: dict[str, Kernel] = {}
    return lambda op: made.get(op) or made.setdefault(op, Kernel(op))


def sizes_of(kernel: Kernel) -> list[int]:
    """Bytes of each parameter in the kernel's own code: its PTX."""
    header = offline.compiled(kernel.recorded, kernel.target).asm["ptx"].split(".entry", 1)[1].split("{", 1)[0]
    bytes_of = {"u64": 8, "u32": 4, "f32": 4, "b64": 8, "b32": 4}
    return [bytes_of[line.split(".param .", 1)[1][:3]] for line in header.splitlines() if ".param ." in line]


@pytest.mark.parametrize("op", EVERY_OP)
def test_the_driver_gets_every_parameter_that_the_kernel_has(op: str, kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels(op)
    driver = Driver(sizes_of(kernel))
    assert relaunch.why_not_driver(kernel.compiled, driver) is None
    addresses = kernel.addresses()
    assert kernel.launch(driver)(addresses, STREAM)
    (launched,) = driver.launches
    threads = kernel.compiled.metadata.num_warps * 32
    assert launched.shape == [7, 1, 1, threads, 1, 1, kernel.compiled.metadata.shared]
    assert launched.stream == STREAM
    assert launched.attributes == [(6, 1)]  # programmatic stream serialisation: dependent launch
    live = [name for name, kind in kernel.compiled.src.signature.items() if kind != "constexpr"]
    *got, global_scratch, profile_scratch = launched.parameters
    assert (global_scratch, profile_scratch) == (bytes(8), bytes(8))
    for name, raw in zip(live, got, strict=True):
        kind = kernel.compiled.src.signature[name]
        if kind.startswith("*"):
            assert raw == struct.pack("@P", addresses[kernel.places[name]]), name
        else:
            assert raw == struct.pack({"i32": "@i", "i64": "@q", "fp32": "@f"}[kind], kernel.values[name]), name


@pytest.mark.parametrize("op", ["mla"])
def test_without_dependent_launch_there_is_no_attribute(op: str) -> None:
    kernel = Kernel(op, "sm_89")
    driver = Driver(sizes_of(kernel))
    kernel.launch(driver)(kernel.addresses(), STREAM)
    assert driver.launches[0].attributes == []


def test_a_launch_inside_a_launch_has_memory_of_its_own(kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels("mla")
    driver = Driver(sizes_of(kernel))
    again = kernel.launch(driver)
    outer, inner = kernel.addresses(0x7F00_0000_0000), kernel.addresses(0x7F01_0000_0000)

    def other_thread() -> None:
        driver.before_reading = lambda: None
        again(inner, STREAM + 1)

    driver.before_reading = other_thread
    again(outer, STREAM)
    second, first = driver.launches
    place = kernel.places["positions_ptr"]
    assert first.parameters[0] == struct.pack("@P", outer[place])
    assert second.parameters[0] == struct.pack("@P", inner[place])
    assert (first.stream, second.stream) == (STREAM, STREAM + 1)


def test_a_launch_that_the_driver_refuses_has_not_been(kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels("mla")
    assert not kernel.launch(Driver(sizes_of(kernel), status=201))(kernel.addresses(), STREAM)


def with_metadata(kernel: Kernel, **values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(kernel.compiled), "metadata": kernel.compiled.metadata._replace(**values)})


def with_parameter(kernel: Kernel, kind: str) -> SimpleNamespace:
    signature = {**kernel.compiled.src.signature, "another": kind}
    return SimpleNamespace(**{**vars(kernel.compiled), "src": SimpleNamespace(signature=signature)})


def without(kernel: Kernel, name: str) -> SimpleNamespace:
    fields = {other: value for other, value in kernel.compiled.metadata._asdict().items() if other != name}
    return SimpleNamespace(**{**vars(kernel.compiled), "metadata": SimpleNamespace(**fields)})


REASONS: dict[str, Callable[[Kernel], tuple[Any, Any]]] = {
    "there is no CUDA driver": lambda k: (k.compiled, None),
    "a compiled kernel has no src.signature": lambda k: (
        SimpleNamespace(**vars(k.compiled) | {"src": None}),
        Driver([]),
    ),
    "a compiled kernel has no metadata.shared": lambda k: (without(k, "shared"), Driver([])),
    "a compiled kernel has no metadata.num_warps": lambda k: (without(k, "num_warps"), Driver([])),
    "a compiled kernel has no metadata.target.warp_size": lambda k: (without(k, "target"), Driver([])),
    "num_ctas is 2": lambda k: (with_metadata(k, num_ctas=2), Driver([])),
    "launch_cooperative_grid is True": lambda k: (with_metadata(k, launch_cooperative_grid=True), Driver([])),
    "global_scratch_size is 128": lambda k: (with_metadata(k, global_scratch_size=128), Driver([])),
    "profile_scratch_size is 64": lambda k: (with_metadata(k, profile_scratch_size=64), Driver([])),
    "it takes 65536 bytes of shared memory": lambda k: (with_metadata(k, shared=65536), Driver([])),
    "it has a parameter of type fp64": lambda k: (with_parameter(k, "fp64"), Driver([])),
    "the driver lists parameters of": lambda k: (k.compiled, Driver([*sizes_of(k), 8])),
    "the driver lists no parameters": lambda k: (k.compiled, SimpleNamespace()),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_kernel_that_the_driver_can_not_be_given_says_why(reason: str, kernels: Callable[[str], Kernel]) -> None:
    said = relaunch.why_not_driver(*REASONS[reason](kernels("mla")))
    assert said is not None
    assert said.startswith(reason)


def test_triton_gets_every_parameter_of_the_python_function(kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels("qk")
    addresses = kernel.addresses()
    assert kernel.launch(None)(addresses, STREAM)
    ((*head, function, packed, _, enter, leave), values) = (
        kernel.run_with[-1][:9],
        dict(zip(kernel.values, kernel.run_with[-1][9:], strict=True)),
    )
    assert (head, function, packed) == ([7, 1, 1, STREAM], FUNCTION, kernel.compiled.packed_metadata)
    assert (enter, leave) == (None, None)
    for name, value in values.items():
        expected = addresses[kernel.places[name]] if name in kernel.places else kernel.values[name]
        assert value == expected, name


@pytest.mark.parametrize("there", [True, False])
def test_a_kernel_is_launched_through_the_driver_where_that_can_be(
    there: bool, kernels: Callable[[str], Kernel]
) -> None:
    kernel = kernels("mla")
    kernel.run_with.clear()
    driver = Driver(sizes_of(kernel))
    kernel.launch(driver if there else None)(kernel.addresses(), STREAM)
    assert (len(driver.launches), len(kernel.run_with)) == ((1, 0) if there else (0, 1))


@pytest.mark.parametrize("there", [True, False])
def test_what_is_kept_for_later_launches_keeps_no_tensor_alive(there: bool, kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels("mla")
    tensor = torch.empty(4, device="meta")
    values = tuple(tensor if name == "q_nope_ptr" else value for name, value in kernel.values.items())
    place_of = {id(value): place for place, value in enumerate(values) if isinstance(value, torch.Tensor)}
    made = relaunch.Kernel(kernel.compiled, Driver(sizes_of(kernel)) if there else None)
    again = made.launch(7, values, place_of, len(values))
    alive = weakref.ref(tensor)
    del tensor, values
    assert again
    assert alive() is None

"""What a known call hands to the CUDA driver: read back from memory as the driver reads it."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse.kernels import launch, offline, relaunch
from dsafuse.target import Target, assumed
from tests.inputs import EVERY_OP, FN, Call, indexer_call, latents_call, mla_call, qk_call, queries_call

CALLS: dict[str, Callable[[], Call]] = {
    "mla": lambda: mla_call(layout="fp8", query=FN),
    "indexer": lambda: indexer_call(eps=0.25),
    "qk": lambda: qk_call(layout="fp8", query=FN),
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
        self.recorded = offline.fused_launches(EVERY_OP[op].name, arguments, config, self.target)[0]
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

    @property
    def parameters(self) -> list[relaunch.Parameter]:
        return relaunch.parameters_of(self.compiled, self.values, self.places)

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


def relaunched(kernel: Kernel, driver: Driver) -> relaunch.Relaunch:
    return relaunch.driver_launch(kernel.compiled, 7, kernel.parameters, len(kernel.places), driver)


@pytest.mark.parametrize("op", EVERY_OP)
def test_the_driver_gets_every_parameter_that_the_kernel_has(op: str, kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels(op)
    driver = Driver(sizes_of(kernel))
    assert relaunch.why_not_driver(kernel.compiled, kernel.parameters, driver) is None
    addresses = kernel.addresses()
    assert relaunched(kernel, driver)(addresses, STREAM)
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
    relaunched(kernel, driver)(kernel.addresses(), STREAM)
    assert driver.launches[0].attributes == []


def test_a_launch_inside_a_launch_has_memory_of_its_own(kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels("mla")
    driver = Driver(sizes_of(kernel))
    again = relaunched(kernel, driver)
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
    assert not relaunched(kernel, Driver(sizes_of(kernel), status=201))(kernel.addresses(), STREAM)


def with_metadata(kernel: Kernel, **values: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(kernel.compiled), "metadata": kernel.compiled.metadata._replace(**values)})


REASONS: dict[str, Callable[[Kernel], str | None]] = {
    "there is no CUDA driver": lambda k: relaunch.why_not_driver(k.compiled, k.parameters, None),
    "num_ctas is 2": lambda k: relaunch.why_not_driver(with_metadata(k, num_ctas=2), k.parameters, Driver([])),
    "launch_cooperative_grid is True": lambda k: relaunch.why_not_driver(
        with_metadata(k, launch_cooperative_grid=True), k.parameters, Driver([])
    ),
    "global_scratch_size is 128": lambda k: relaunch.why_not_driver(
        with_metadata(k, global_scratch_size=128), k.parameters, Driver([])
    ),
    "profile_scratch_size is 64": lambda k: relaunch.why_not_driver(
        with_metadata(k, profile_scratch_size=64), k.parameters, Driver([])
    ),
    "it takes 65536 bytes of shared memory": lambda k: relaunch.why_not_driver(
        with_metadata(k, shared=65536), k.parameters, Driver([])
    ),
    "it has a parameter of type fp64": lambda k: relaunch.why_not_driver(
        k.compiled, [*k.parameters, relaunch.Parameter("fp64", 1.0)], Driver([])
    ),
    "it has a pointer that is no tensor of the call": lambda k: relaunch.why_not_driver(
        k.compiled, [*k.parameters, relaunch.Parameter("*fp32")], Driver([])
    ),
    "the driver lists parameters of": lambda k: relaunch.why_not_driver(
        k.compiled, k.parameters, Driver([*sizes_of(k), 8])
    ),
    "the driver lists no parameters": lambda k: relaunch.why_not_driver(k.compiled, k.parameters, SimpleNamespace()),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_kernel_that_the_driver_can_not_be_given_says_why(reason: str, kernels: Callable[[str], Kernel]) -> None:
    said = REASONS[reason](kernels("mla"))
    assert said is not None
    assert said.startswith(reason)


def test_triton_gets_every_parameter_of_the_python_function(kernels: Callable[[str], Kernel]) -> None:
    kernel = kernels("qk")
    again = relaunch.triton_launch(kernel.compiled, 7, kernel.values, kernel.places)
    addresses = kernel.addresses()
    assert again(addresses, STREAM)
    ((*head, function, packed, _, enter, leave), values) = (
        kernel.run_with[-1][:9],
        dict(zip(kernel.values, kernel.run_with[-1][9:], strict=True)),
    )
    assert (head, function, packed) == ([7, 1, 1, STREAM], FUNCTION, kernel.compiled.packed_metadata)
    assert (enter, leave) == (None, None)
    for name, value in values.items():
        expected = addresses[kernel.places[name]] if name in kernel.places else kernel.values[name]
        assert value == expected, name


@pytest.mark.parametrize(("driver", "through"), [(True, "driver"), (False, "triton")])
def test_a_kernel_is_launched_through_the_driver_where_that_can_be(
    driver: bool, through: str, kernels: Callable[[str], Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = kernels("mla")
    cuda = Driver(sizes_of(kernel)) if driver else None
    monkeypatch.setattr(relaunch, "cuda_driver", lambda: cuda)
    kernel.run_with.clear()
    relaunch.relaunch_of(kernel.compiled, 7, kernel.values, kernel.places, len(kernel.places))(
        kernel.addresses(), STREAM
    )
    assert (len(cuda.launches) if cuda else 0, len(kernel.run_with)) == ((1, 0) if through == "driver" else (0, 1))


def test_launch_relaunches_through_this_module() -> None:
    assert launch.relaunch_of is relaunch.relaunch_of

"""What is handed to a kernel: plan, options, alignment, and each argument under its own name."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse.kernels import grids, launch
from dsafuse.target import Target
from tests.inputs import FN, OPS, call_of, guarded, indexer_call, mla_call

POINTERS = {
    "mla": {
        "q_nope_ptr": "q_nope",
        "q_pe_ptr": "q_pe",
        "kv_c_ptr": "kv_c",
        "k_pe_ptr": "k_pe",
        "cache_ptr": "kv_cache",
        "slots_ptr": "slot_mapping",
        "positions_ptr": "positions",
        "table_ptr": "cos_sin_cache",
        "q_scale_ptr": "q_scale",
        "k_scale_ptr": "k_scale",
        "q_out_ptr": "q_out",
    },
    "indexer": {
        "q_ptr": "q",
        "weights_ptr": "weights",
        "k_ptr": "k",
        "cache_ptr": "kv_cache",
        "slots_ptr": "slot_mapping",
        "norm_weight_ptr": "norm_weight",
        "norm_bias_ptr": "norm_bias",
        "positions_ptr": "positions",
        "table_ptr": "cos_sin_cache",
        "q_out_ptr": "q_out",
        "weights_out_ptr": "weights_out",
        "weights_scale": "weights_scale",
        "eps": "eps",
    },
}
OPTIONS = {"num_warps", "enable_fp_fusion", "launch_pdl"}


class Recorder:
    """Stands where a kernel would, and keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


def recorded(op: str, call: dict[str, Any], *, gpu: str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """(grid, bound arguments, options, resolved call) of one launch, as on a named target."""
    recorder = Recorder()
    arguments, config = OPS[op].resolve(**call)
    if gpu:
        monkeypatch.setattr(Target, "of", staticmethod(lambda _device: Target.named(gpu)))
    launch.launch(OPS[op].name, arguments, config, SimpleNamespace(mla=recorder, indexer=recorder))
    ((grid, args, kwargs),) = recorder.launches
    options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
    bound = inspect.signature(getattr(grids, op).fn).bind(*args, **kwargs)
    return grid, bound.arguments, options, arguments


@pytest.mark.parametrize("op", OPS)
def test_every_kernel_argument_is_bound_under_its_own_name(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = mla_call(layout="fp8", query=FN) if op == "mla" else indexer_call(eps=0.25)
    _, bound, _, arguments = recorded(op, call, gpu="sm_90", monkeypatch=monkeypatch)
    assert bound.keys() == inspect.signature(getattr(grids, op).fn).parameters.keys()
    for parameter, name in POINTERS[op].items():
        assert bound[parameter] is arguments[name] or bound[parameter] == arguments[name], parameter
    for parameter, value in bound.items():
        name, _, axis = parameter.partition("_stride")
        if axis or parameter.endswith("_stride"):
            tensor = arguments[{"cache": "kv_cache", "table": "cos_sin_cache"}.get(name, name)]
            assert value == tensor.stride({"": 0, "_token": 0, "_block": 0, "_head": 1, "_row": 1}[axis]), parameter
    cache = arguments["kv_cache"]
    assert bound["slot_count"] == len(arguments["slot_mapping"])
    assert bound["capacity"] == cache.shape[0] * cache.shape[1]
    assert bound["max_position"] == arguments["cos_sin_cache"].shape[0]
    assert bound["BLOCK_SIZE"] == cache.shape[1]
    assert bound["HEADS"] == 3


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", [1, 3, 7, 8, 9, 16, 96, 128, 256])
def test_the_grid_has_one_program_for_each_key_and_each_block_of_heads(
    op: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, bound, _, _ = recorded(op, call_of(op, 2, heads), gpu="sm_90", monkeypatch=monkeypatch)
    block = bound["BLOCK_HEADS"]
    assert block & (block - 1) == 0
    assert grid == (2 * (1 + -(-heads // block)),)
    assert block < 2 * heads


@pytest.mark.parametrize("op", OPS)
def test_a_launch_copies_and_allocates_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = mla_call(layout="fp8", query=FN) if op == "mla" else indexer_call()
    _, bound, _, arguments = recorded(op, call, gpu="sm_90", monkeypatch=monkeypatch)
    given = {value.data_ptr() for value in arguments.values() if isinstance(value, torch.Tensor)}
    assert {value.data_ptr() for value in bound.values() if isinstance(value, torch.Tensor)} <= given


@pytest.mark.parametrize("target", [name for name in Target.names() if name != "cpu"])
def test_dependent_launch_is_asked_for_only_where_the_backend_knows_the_word(target: str) -> None:
    options = launch.launch_options(Target.named(target), 4)
    assert options["enable_fp_fusion"] is False
    assert options["PDL"] is Target.named(target).dependent_launch
    assert ("launch_pdl" in options) is Target.named(target).dependent_launch


def test_there_is_a_plan_for_each_family_and_vendor() -> None:
    vendors = {Target.named(name).vendor for name in Target.names()}
    assert launch.PLANS.keys() == {(family, vendor) for family in OPS for vendor in vendors}
    for plan in launch.PLANS.values():
        assert plan.block_heads & (plan.block_heads - 1) == 0
        assert plan.num_warps in (1, 2, 4, 8)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 9, 255, 256])
def test_next_power_of_two_is_the_smallest_one_not_below(n: int) -> None:
    assert launch.next_power_of_two(n) == min(2**k for k in range(10) if 2**k >= n)


@pytest.mark.parametrize(
    ("shape", "stride", "shift", "want"),
    [
        ((4, 128), (128, 1), 0, 16),
        ((4, 128), (136, 1), 0, 16),
        ((4, 128), (132, 1), 0, 1),
        ((4, 128), (128, 1), 4, 1),
        ((4, 3, 128), (384, 128, 1), 0, 16),
        ((4, 3, 128), (384, 130, 1), 0, 1),
    ],
)
def test_rows_are_aligned_only_if_address_and_every_stride_are(
    shape: tuple[int, ...], stride: tuple[int, ...], shift: int, want: int
) -> None:
    base = guarded((4096,), torch.bfloat16)
    base = base[(-base.data_ptr() % 16) // 2 :]
    tensor = base.as_strided(shape, stride, base.storage_offset() + shift)
    assert launch.alignment(tensor) == want
    assert launch.alignment(base.as_strided((1, 8), (8, 1)), tensor) == want


def test_a_kernel_specialises_on_nothing_that_changes_from_step_to_step() -> None:
    for op in OPS:
        kernel = getattr(grids, op)
        for parameter in kernel.params:
            if not parameter.is_constexpr:
                assert parameter.do_not_specialize, parameter.name
                assert parameter.do_not_specialize_on_alignment, parameter.name

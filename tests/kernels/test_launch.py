"""What is handed to a kernel: plan, options, alignment, and each argument under its own name."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime import driver

from dsafuse.kernels import grids, launch
from dsafuse.target import Target
from tests.inputs import (
    EVERY_OP,
    FN,
    FNUZ,
    OPS,
    call_of,
    guarded,
    indexer_call,
    latents_call,
    mla_call,
    qk_call,
    queries_call,
)

NAMES = {
    "table": "cos_sin_cache",
    "cache": "kv_cache",
    "slots": "slot_mapping",
    "topk": "topk_indices",
    "index_table": "index_cos_sin_cache",
    "index_cache": "index_kv_cache",
    "index_slots": "index_slot_mapping",
    "weights": "index_weights",
    "weights_scale": "index_weights_scale",
    "weights_out": "index_weights_out",
}
"""Kernel parameters that are not called after their argument of `prepare_qk` and `prepare_latents`."""

OPTIONS = {"num_warps", "enable_fp_fusion", "launch_pdl"}


class Recorder:
    """Stands where a kernel would, and keeps what it is launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.launches.append((grid, args, kwargs))


def recorded(op: str, call: dict[str, Any], *, gpu: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """(grid, bound arguments, options, resolved call) of one launch, as on a named target."""
    recorder = Recorder()
    arguments, config = EVERY_OP[op].resolve(**call)
    monkeypatch.setattr(Target, "of", staticmethod(lambda _device: Target.named(gpu)))
    launch.launch(EVERY_OP[op].name, arguments, config, SimpleNamespace(prepare=recorder))
    ((grid, args, kwargs),) = recorder.launches
    options = {name: kwargs.pop(name) for name in OPTIONS & kwargs.keys()}
    bound = inspect.signature(grids.prepare.fn).bind(*args, **kwargs)
    return grid, bound.arguments, options, arguments


FULL_CALLS = {
    "mla": lambda: mla_call(layout="fp8", query=FN),
    "indexer": lambda: indexer_call(eps=0.25),
    "qk": lambda: qk_call(layout="fp8", query=FN, index_heads=4) | {"index_eps": 0.25},
    "latents": lambda: latents_call(layout="fp8") | {"index_eps": 0.25},
    "queries": lambda: queries_call(query=FN),
}
STRIDES = {"": 0, "_token": 0, "_block": 0, "_head": 1, "_row": 1}


@pytest.mark.parametrize("op", EVERY_OP)
def test_every_kernel_argument_is_bound_under_its_own_name(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, bound, _, arguments = recorded(op, FULL_CALLS[op](), gpu="sm_90", monkeypatch=monkeypatch)
    parameters = inspect.signature(grids.prepare.fn).parameters
    assert bound.keys() == parameters.keys()

    if op == "indexer":
        arguments = {n if n == "positions" else f"index_{n}": value for n, value in arguments.items()}

    def argument(parameter: str) -> Any:
        return arguments.get(NAMES.get(parameter, parameter))

    checked = set()
    for parameter, value in bound.items():
        tensor, stride, axis = parameter.partition("_stride")
        if stride:
            expected = argument(tensor)
            assert value == (0 if expected is None else expected.stride(STRIDES[axis])), parameter
        elif parameter.endswith("_ptr"):
            assert value is argument(parameter.removesuffix("_ptr")), parameter
        elif parameter.endswith(("_eps", "_scale")):
            assert value == (argument(parameter) or 0.0), parameter
        else:
            continue
        checked.add(parameter)
    for prefix in ("", "index_"):
        cache, slots, table = (arguments.get(f"{prefix}{n}") for n in ("kv_cache", "slot_mapping", "cos_sin_cache"))
        counts = {
            f"{prefix}slot_count": 0 if slots is None else len(slots),
            f"{prefix}capacity": 0 if cache is None else cache.shape[0] * cache.shape[1],
            f"{prefix}max_position": 0 if table is None else table.shape[0],
        }
        assert {name: bound[name] for name in counts} == counts
        checked |= counts.keys()
    assert bound["tokens"] == len(arguments["positions"])
    checked.add("tokens")
    assert all(name.isupper() for name in parameters.keys() - checked)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", [1, 3, 7, 8, 9, 16, 96, 128, 256])
def test_the_grid_has_a_program_for_the_keys_and_for_each_block_of_heads(
    op: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, bound, _, _ = recorded(op, call_of(op, 2, heads), gpu="sm_90", monkeypatch=monkeypatch)
    prefix = "INDEX_" if op == "indexer" else ""
    block = bound[f"{prefix}BLOCK_HEADS"]
    assert bound[f"{prefix}HEADS"] == heads
    assert block & (block - 1) == 0
    blocks = -(-heads // block)
    # A latent row has a program of its own; four indexer keys share one, and their tokens' programs follow it.
    assert grid == (2 * (1 + blocks) if op == "mla" else 1 + 4 * blocks,)
    assert block < 2 * heads


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_launch_copies_and_allocates_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, bound, _, arguments = recorded(op, FULL_CALLS[op](), gpu="sm_90", monkeypatch=monkeypatch)
    given = {value.data_ptr() for value in arguments.values() if isinstance(value, torch.Tensor)}
    assert {value.data_ptr() for value in bound.values() if isinstance(value, torch.Tensor)} <= given


@pytest.mark.parametrize("target", [name for name in Target.names() if name != "cpu"])
def test_dependent_launch_is_asked_for_only_where_the_backend_knows_the_word(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8 = FNUZ if target == "gfx942" else FN
    _, bound, options, _ = recorded("indexer", indexer_call(fp8=fp8), gpu=target, monkeypatch=monkeypatch)
    assert options["enable_fp_fusion"] is False
    assert bound["PDL"] is Target.named(target).dependent_launch
    assert ("launch_pdl" in options) is Target.named(target).dependent_launch


def test_there_is_a_plan_for_each_vendor() -> None:
    assert launch.PLANS.keys() == {Target.named(name).vendor for name in Target.names()}
    for plan in launch.PLANS.values():
        for heads in (plan.block_heads, plan.index_block_heads):
            assert heads & (heads - 1) == 0
        assert plan.threads in (32, 64, 128, 256)


@pytest.mark.parametrize(
    ("most", "heads", "want"), [(8, 1, 1), (8, 3, 4), (8, 7, 8), (8, 9, 8), (4, 128, 4), (8, 0, 1)]
)
def test_a_block_of_heads_is_a_power_of_two_no_larger_than_it_must_be(most: int, heads: int, want: int) -> None:
    assert launch.head_block(most, heads) == want


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


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "kv_c", "k_pe", "q_out", "cos_sin_cache"])
def test_one_row_off_its_alignment_takes_the_vector_path_from_all(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = mla_call(2)
    assert recorded("mla", call, gpu="sm_90", monkeypatch=monkeypatch)[1]["ALIGN"] == 16
    wide = torch.zeros(*call[name].shape[:-1], call[name].shape[-1] + 1, dtype=call[name].dtype)
    call[name] = wide[..., 1:]
    assert recorded("mla", call, gpu="sm_90", monkeypatch=monkeypatch)[1]["ALIGN"] == 1


def test_a_kernel_specialises_on_nothing_that_changes_from_step_to_step() -> None:
    for parameter in grids.prepare.params:
        if not parameter.is_constexpr:
            assert parameter.do_not_specialize, parameter.name
            assert parameter.do_not_specialize_on_alignment, parameter.name


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[tuple[Any, ...]]]:
    """`launch.again` as on a GPU, and what it hands to the compiled kernel instead of launching it."""
    handed: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(run=lambda *args: handed.append(args), function=None, packed_metadata=None)
    monkeypatch.setattr(Target, "of", staticmethod(lambda _device: Target.named("sm_90")))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of torch.device("cpu")
    monkeypatch.setattr(grids.prepare, "warmup", lambda *_args, **_kwargs: compiled)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda _index: 0))
    return launch.again, handed


def test_a_known_launch_takes_each_address_from_its_own_argument_though_once_two_were_one(again: Any) -> None:
    launch_again_of, handed = again
    apart = qk_call(3, index_heads=3)
    apart |= {name: apart[name].long() for name in ("slot_mapping", "index_slot_mapping")}
    shared = apart | {
        name: apart[name.removeprefix("index_")] for name in ("index_slot_mapping", "index_cos_sin_cache")
    }
    arguments, config = EVERY_OP["qk"].resolve(**shared)
    launch_again = launch_again_of(EVERY_OP["qk"].name, arguments, config, None)
    other, _ = EVERY_OP["qk"].resolve(**apart)
    names = [p.name for p in grids.prepare.params]
    if launch_again(other):  # or it declines, and the call is checked in full
        values = dict(zip(names, handed[0][-len(names) :], strict=True))
        for name in ("slots", "table", "index_slots", "index_table"):
            assert values[f"{name}_ptr"] == other[NAMES[name]].data_ptr(), name


def test_a_known_call_of_no_tokens_still_makes_its_outputs(again: Any) -> None:
    launch_again_of, handed = again
    call = mla_call(0) | {"q_out": None}
    arguments, config = EVERY_OP["mla"].resolve(**call)
    known = dict(call, q_dtype=None)
    assert launch_again_of(EVERY_OP["mla"].name, arguments, config, EVERY_OP["mla"]._allocate)(known)
    assert known["q_out"].shape == arguments["q_out"].shape
    assert not handed


def test_outputs_that_interleave_with_an_input_must_do_so_as_they_did(again: Any) -> None:
    launch_again_of, handed = again
    call = mla_call(3)
    buffer = torch.zeros(3, call["q_nope"].shape[1], 2048, dtype=torch.bfloat16)
    apart = call | {"q_nope": buffer[..., :512], "q_out": buffer[..., 1024:1600]}
    arguments, config = EVERY_OP["mla"].resolve(**apart)
    launch_again = launch_again_of(EVERY_OP["mla"].name, arguments, config, None)
    elsewhere = buffer.clone()
    same = arguments | {"q_nope": elsewhere[..., :512], "q_out": elsewhere[..., 1024:1600]}
    assert launch_again(same)
    assert not launch_again(arguments | {"q_nope": elsewhere[..., :512], "q_out": elsewhere[..., 256:832]})
    assert len(handed) == 1


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, so that calls are remembered."""

    is_cuda = True


def test_a_first_argument_without_axes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    call = mla_call(2)
    with pytest.raises(ValueError, match=r"^q_nope: got shape"):
        EVERY_OP["mla"](**call | {"q_nope": torch.zeros((), dtype=torch.bfloat16).as_subclass(OnGpu)})


def test_a_call_known_without_gradients_is_checked_again_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    again_of = SimpleNamespace(run=lambda *_: None, again=lambda *_: lambda _: True)
    monkeypatch.setattr(EVERY_OP["mla"], "_provider", lambda *_: again_of)
    call = mla_call(2)
    call["q_nope"] = call["q_nope"].as_subclass(OnGpu).requires_grad_()
    with torch.no_grad():
        EVERY_OP["mla"](**call)
    with pytest.raises(ValueError, match=r"^q_nope: got a tensor that requires grad"):
        EVERY_OP["mla"](**call)

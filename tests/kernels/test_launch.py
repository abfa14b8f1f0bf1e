"""What is handed to a kernel: plan, options, alignment, and each argument under its own name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from triton.runtime import driver

from dsafuse import switches
from dsafuse.kernels import addresses, grids, launch, parameters, plans
from dsafuse.target import Target
from tests.inputs import (
    EVERY_OP,
    FN,
    FNUZ,
    OPS,
    assert_same_memory,
    call_of,
    guarded,
    indexer_call,
    latents_call,
    mla_call,
    qk_call,
    queries_call,
    run,
    twin,
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
    "qk": lambda: qk_call(layout="fp8", query=FN, index_heads=4, topk=40) | {"index_eps": 0.25},
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


@pytest.mark.parametrize("tokens", [2, 5, 257])
@pytest.mark.parametrize(("gpu", "group"), [("sm_90", 0), ("gfx950", 4)])
def test_rows_that_no_norm_clears_have_programs_of_their_own(
    gpu: str, group: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared, kept = (qk_call(tokens, topk=topk) for topk in (40, 0))
    (more, bound, _, _), (fewer, other, _, _) = (
        recorded("qk", c, gpu=gpu, monkeypatch=monkeypatch) for c in (cleared, kept)
    )
    assert (bound["TOPK"], bound["NORM_ROWS"], other["NORM_ROWS"]) == (40, 1, 0)
    assert more[0] - fewer[0] == (-(-tokens // group) * group if group else tokens)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("heads", [1, 3, 7, 8, 9, 16, 96, 128, 256])
@pytest.mark.parametrize("tokens", [2, 5, 257])
@pytest.mark.parametrize("gpu", ["sm_90", "gfx950"])
def test_the_grid_has_a_program_for_the_keys_and_for_each_block_of_heads(
    op: str, heads: int, tokens: int, gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, bound, _, _ = recorded(op, call_of(op, tokens, heads), gpu=gpu, monkeypatch=monkeypatch)
    prefix = "INDEX_" if op == "indexer" else ""
    block = bound[f"{prefix}BLOCK_HEADS"]
    assert bound[f"{prefix}HEADS"] == heads
    assert block & (block - 1) == 0
    assert block < 2 * heads
    blocks = -(-heads // block)
    if gpu == "sm_90":  # role after role: four latent rows, or four indexer keys, have a program
        assert grid == (-(-tokens // 4) + tokens * blocks,)
    else:  # groups of four tokens, the last perhaps of fewer: four programs of a latent row, one of four keys
        assert grid == (-(-tokens // 4) * ({"mla": 4, "indexer": 1}[op] + 4 * blocks),)


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


def test_there_is_a_plan_for_each_vendor_and_work() -> None:
    assert plans.PLANS.keys() == {Target.named(name).vendor for name in Target.names()}
    for by_work in plans.PLANS.values():
        assert by_work.keys() == set(plans.WORK.values())
        for plan in by_work.values():
            rows = (plan.index_rows, plan.latent_rows, plan.norm_rows)
            for count in (plan.block_heads, plan.rope_block_heads, plan.index_block_heads, *rows):
                assert count & (count - 1) == 0
            assert plan.group % max(rows) == 0
            assert plan.threads in (32, 64, 128, 256)


@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
@pytest.mark.parametrize("op", EVERY_OP)
def test_the_plans_of_gpus_give_the_same_bytes(
    op: str, vendor: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted here; 19 tokens are no multiple of any plan's rows or group."""
    call = call_of(op, tokens, 20)
    want = run(op, "interpreter", call)
    monkeypatch.setitem(plans.PLANS, "cpu", plans.PLANS[vendor])
    assert_same_memory(run(op, "interpreter", call), want)


WORK = {
    "mla": ("attention", "attention"),
    "indexer": ("indexer", "indexer"),
    "qk": ("queries and keys", "attention"),
    "latents": ("latents", "latents"),
    "queries": ("queries", "attention"),
}
"""The work of an op, and of its call on a layer without an indexer, where it takes that."""


@pytest.mark.parametrize("op", EVERY_OP)
def test_plans_are_told_by_the_work_of_a_call(op: str) -> None:
    given = FULL_CALLS[op]()
    without = {name: value for name, value in given.items() if not name.startswith(("index_", "topk_"))}
    for call, work in zip((given, without), WORK[op]):
        _, config = EVERY_OP[op].resolve(**call)
        assert plans.plan_of(Target.named("sm_90"), config) is plans.PLANS["nvidia"][work]


@pytest.mark.parametrize(
    ("most", "heads", "want"), [(8, 1, 1), (8, 3, 4), (8, 7, 8), (8, 9, 8), (4, 128, 4), (8, 0, 1)]
)
def test_a_block_of_heads_is_a_power_of_two_no_larger_than_it_must_be(most: int, heads: int, want: int) -> None:
    assert plans.head_block(most, heads) == want


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
    assert parameters.alignment(tensor) == want
    assert parameters.alignment(base.as_strided((1, 8), (8, 1)), tensor) == want


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


class Gpu:
    """What known calls find on a GPU; keeps what a compiled kernel would be launched with, and what was checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[tuple[int, ...], int]] = []
        self.checked = self.through_triton = self.compiled = 0
        self.refuses = False
        self.device: int | None = None  # the index of torch.device("cpu")
        self.hooks: list[Any] = []
        self.parameters: dict[str, int] = {}
        monkeypatch.setattr(Target, "of", staticmethod(lambda _device: Target.named("sm_90")))
        monkeypatch.setattr(launch, "current_device", lambda: self.device)
        monkeypatch.setattr(launch, "launch_hooks", lambda: self.hooks)
        monkeypatch.setattr(launch, "Kernel", lambda *_: SimpleNamespace(launch=self._launch))
        monkeypatch.setattr(launch, "_KERNELS", {})
        monkeypatch.setattr(launch, "run", self._run)
        monkeypatch.setattr(grids.prepare, "warmup", self._compile)
        monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda _index: 77))
        provider = SimpleNamespace(run=self._run, again=launch.again)
        forget()
        for op in EVERY_OP.values():
            monkeypatch.setattr(op, "_provider", lambda *_: provider)
            monkeypatch.setattr(op, "_resolve", lambda arguments, resolve=op._resolve: self._check(resolve, arguments))

    def _check(self, resolve: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        self.checked += 1
        return resolve(arguments)

    def _compile(self, *_args: Any, **_kwargs: Any) -> None:
        self.compiled += 1

    def _run(self, *_: Any) -> None:
        self.through_triton += 1

    def _launch(self, _programs: int, values: tuple[Any, ...], place_of: dict[int, int], _addresses: int) -> Any:
        named = zip(grids.prepare.arg_names, values)
        self.parameters = {name: place_of[id(value)] for name, value in named if id(value) in place_of}

        def relaunch(addresses: tuple[int, ...], stream: int) -> bool:
            if not self.refuses:
                self.launches.append((addresses, stream))
            return not self.refuses

        return relaunch

    def address(self, parameter: str) -> int:
        """What a kernel's parameter got at the latest launch."""
        return self.launches[-1][0][self.parameters[parameter]]

    def knows(self, call: Callable[[], object]) -> bool:
        """Whether a call was launched again, rather than checked."""
        before = self.checked, len(self.launches) + self.through_triton
        call()
        assert len(self.launches) + self.through_triton == before[1] + 1
        return self.checked == before[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    yield Gpu(monkeypatch)
    forget()


def forget() -> None:
    """Forget the known calls of all ops, those of the out-forms included."""
    for op in EVERY_OP.values():
        for entry in (op._entry, op._out_entry):
            entry._known._calls.clear()


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_known_call_takes_every_address_from_its_own_argument(op: str, gpu: Gpu) -> None:
    call = FULL_CALLS[op]()
    assert not gpu.knows(lambda: EVERY_OP[op](**call))
    # Copies of all tensors, each shared by the arguments that shared it.
    copies = {id(value): twin({"": value})[""] for value in call.values()}
    other = {name: copies[id(value)] for name, value in call.items()}
    assert gpu.knows(lambda: EVERY_OP[op](**other))
    arguments, _ = EVERY_OP[op].resolve(**other)
    if op == "indexer":
        arguments = {name if name == "positions" else f"index_{name}": value for name, value in arguments.items()}
    tensors = {name.removesuffix("_ptr") for name in gpu.parameters}
    assert {name for name in arguments if isinstance(arguments[name], torch.Tensor)} == {
        NAMES.get(tensor, tensor) for tensor in tensors
    }
    for tensor in tensors:
        assert gpu.address(f"{tensor}_ptr") == arguments[NAMES.get(tensor, tensor)].data_ptr(), tensor
    assert gpu.launches[-1][1] == 77


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_known_call_returns_what_a_checked_one_does(op: str, gpu: Gpu) -> None:
    call = FULL_CALLS[op]()
    first, second = EVERY_OP[op](**call), EVERY_OP[op](**call)
    assert gpu.checked == 1
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (first, second)), strict=True):
        assert a is b


def test_arguments_that_once_were_one_tensor_are_checked_again_when_they_are_two(gpu: Gpu) -> None:
    apart = qk_call(3, index_heads=3)
    apart |= {name: apart[name].long() for name in ("slot_mapping", "index_slot_mapping")}
    pairs = {name: name.removeprefix("index_") for name in ("index_slot_mapping", "index_cos_sin_cache")}
    shared = apart | {name: apart[other] for name, other in pairs.items()}
    assert not gpu.knows(lambda: EVERY_OP["qk"](**shared))
    assert gpu.knows(lambda: EVERY_OP["qk"](**shared))
    assert not gpu.knows(lambda: EVERY_OP["qk"](**apart))
    assert gpu.knows(lambda: EVERY_OP["qk"](**apart))
    for name in ("slots", "table", "index_slots", "index_table"):
        assert gpu.address(f"{name}_ptr") == apart[NAMES[name]].data_ptr(), name
    assert gpu.knows(lambda: EVERY_OP["qk"](**shared))


def test_another_number_of_tokens_is_checked_and_launched_without_asking_triton(gpu: Gpu) -> None:
    for tokens in (3, 4, 5):
        call = mla_call(tokens)
        assert not gpu.knows(lambda: EVERY_OP["mla"](**call))  # noqa: B023
        assert gpu.address("q_nope_ptr") == call["q_nope"].data_ptr()
    assert (gpu.compiled, len(gpu.launches)) == (1, 3)
    for tokens in (1, 512, 513):  # another op
        EVERY_OP["latents"](**latents_call(tokens))
        assert gpu.compiled == 2


OTHER_KERNELS: dict[str, dict[str, Any]] = {
    "another dtype of a weight": {"index_norm_weight": torch.ones(128, dtype=torch.float64)},
    "another dtype of the slots": {"slot_mapping": torch.arange(3, dtype=torch.int32)},
    "rows that are not aligned": {"q_c": torch.zeros(3, 193, dtype=torch.bfloat16)[:, 1:]},
    "one optional output": {"kv_c_out": torch.zeros(3, 512, dtype=torch.bfloat16)},
    "the other optional output": {"k_pe_out": torch.zeros(3, 64, dtype=torch.bfloat16)},
    "no tokens to choose": {"topk_indices": None},
    "another name": {"rounding": "fp32"},
}


@pytest.mark.parametrize("others", OTHER_KERNELS.values(), ids=OTHER_KERNELS)
def test_what_a_kernel_is_compiled_for_makes_it_another(others: dict[str, Any], gpu: Gpu) -> None:
    call = latents_call(3) | {"q_c_out": None, "kv_c_out": None, "k_pe_out": None}
    call |= {"slot_mapping": torch.arange(3), "topk_indices": torch.zeros(3, 40, dtype=torch.int32)}
    call |= {name: torch.zeros(3, call[name].shape[-1], dtype=torch.bfloat16) for name in ("q_c", "kv_c", "k_pe")}
    call |= {"index_k": torch.zeros(3, 128, dtype=torch.bfloat16)}
    for compiled, each in enumerate((call, call | others, call), start=1):
        EVERY_OP["latents"](**each)
        assert gpu.compiled == min(compiled, 2)


def test_a_call_that_clears_is_another_kernel_and_another_known_call(gpu: Gpu) -> None:
    clears, leaves = qk_call(3, topk=40), qk_call(3)
    moved = clears | {"topk_indices": qk_call(3, topk=40)["topk_indices"]}
    assert not gpu.knows(lambda: EVERY_OP["qk"](**clears))
    for call in (clears, moved):
        assert gpu.knows(lambda: EVERY_OP["qk"](**call))  # noqa: B023
        assert gpu.address("topk_ptr") == call["topk_indices"].data_ptr()
    assert not gpu.knows(lambda: EVERY_OP["qk"](**leaves))
    assert all(gpu.knows(lambda: EVERY_OP["qk"](**call)) for call in (clears, leaves))  # noqa: B023
    assert gpu.compiled == 2


def test_a_checked_call_that_the_driver_refuses_is_launched_through_triton(gpu: Gpu) -> None:
    gpu.refuses = True
    for _ in range(2):
        assert not gpu.knows(lambda: EVERY_OP["mla"](**mla_call(3)))
    assert gpu.through_triton == 2
    gpu.refuses = False
    assert gpu.knows(lambda: EVERY_OP["mla"](**mla_call(3)))


def test_a_known_call_of_no_tokens_still_makes_its_outputs(gpu: Gpu) -> None:
    call = mla_call(0) | {"q_out": None}
    first, second = (EVERY_OP["mla"](**call) for _ in range(2))
    assert (gpu.checked, gpu.launches) == (1, [])
    assert second.shape == first.shape
    assert second is not first


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_known_call_makes_the_outputs_that_a_checked_one_makes(op: str, gpu: Gpu) -> None:
    call = FULL_CALLS[op]()
    call |= dict.fromkeys(EVERY_OP[op].output_names)
    first, second = (EVERY_OP[op](**call) for _ in range(2))
    assert (gpu.checked, len(gpu.launches)) == (1, 2)
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (first, second)), strict=True):
        assert a.data_ptr() != b.data_ptr()
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another dtype": lambda call: {"k_scale": call["k_scale"].double()},
    "another shape": lambda call: {"positions": call["positions"][:2]},
    "other strides": lambda call: {"kv_c": torch.zeros(3, 1024, dtype=call["kv_c"].dtype)[:, :512]},
    "another alignment": lambda call: {"kv_c": torch.zeros(3, 521, dtype=call["kv_c"].dtype)[:, 1:513]},
    "another device": lambda call: {"positions": call["positions"].to("meta")},
    "another name": lambda _call: {"rounding": "fp32"},
    "an argument less": lambda _call: {"q_out": None},
    "an unhashable name": lambda _call: {"rope_style": ["interleaved"]},
    "a gradient": lambda call: {"q_nope": call["q_nope"].clone().requires_grad_()},
    "an input over an output": lambda call: {"q_nope": call["q_out"].as_strided(*_axes(call["q_nope"]))},
    "an input over a cache": lambda call: {
        "kv_c": call["kv_c"].new_empty(0).set_(call["kv_cache"].untyped_storage(), 0, *_axes(call["kv_c"]))
    },
    "no tensor": lambda _call: {"q_nope": None},
}


def _axes(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(tensor.shape), tuple(tensor.stride())


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_call_that_looks_different_is_checked(
    change: Callable[[dict[str, Any]], dict[str, Any]], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, call = EVERY_OP["mla"], mla_call(3, layout="fp8")
    whole(**call)
    assert gpu.knows(lambda: whole(**call))
    resolved: list[object] = []
    monkeypatch.setattr(whole, "_resolve", lambda arguments: resolved.append(arguments) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        whole(**call | change(call))
    assert (len(resolved), len(gpu.launches)) == (1, 2)


@pytest.mark.parametrize("names", [("with", "without"), ("without", "with")])
def test_a_query_of_the_rotary_part_alone_is_another_call(names: tuple[str, ...], gpu: Gpu) -> None:
    whole = queries_call(layout="plain") | {"q_out": None, "index_q_out": None, "index_weights_out": None}
    calls = {"with": whole, "without": whole | {"q_nope": None}}
    queries = EVERY_OP["queries"]
    widths = [queries(**calls[name])[0].shape[-1] for name in (*names, *names)]
    assert (gpu.checked, len(gpu.launches)) == (2, 4)
    assert widths == [{"with": 576, "without": 64}[name] for name in (*names, *names)]


def test_a_call_under_other_switches_is_checked(gpu: Gpu) -> None:
    call = mla_call(3)
    assert not gpu.knows(lambda: EVERY_OP["mla"](**call))
    for known in (False, True):
        with switches.override(provider="triton"):
            assert gpu.knows(lambda: EVERY_OP["mla"](**call)) is known
    assert gpu.knows(lambda: EVERY_OP["mla"](**call))
    assert gpu.checked == 2


def test_a_call_in_inference_mode_is_checked_once(gpu: Gpu) -> None:
    call = mla_call(3)
    EVERY_OP["mla"](**call)
    with torch.inference_mode():
        fresh = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in call.items()}
        assert not gpu.knows(lambda: EVERY_OP["mla"](**fresh))
        assert gpu.knows(lambda: EVERY_OP["mla"](**fresh))
    assert gpu.knows(lambda: EVERY_OP["mla"](**call))


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_known_call_is_traced_as_an_unknown_one_is(op: str, gpu: Gpu) -> None:
    call = FULL_CALLS[op]()
    tensors = {name: value for name, value in call.items() if isinstance(value, torch.Tensor)}

    def traced() -> int:
        graph = make_fx(lambda *values: EVERY_OP[op](**call | dict(zip(tensors, values))))(*tensors.values()).graph
        return sum(EVERY_OP[op].name in str(node.target) for node in graph.nodes)

    assert traced() == 1
    EVERY_OP[op](**call)
    launches = len(gpu.launches)
    assert traced() == 1
    assert len(gpu.launches) == launches + 1  # torch runs what it traces, once


def test_a_known_call_is_checked_on_another_current_device_and_under_a_profiler(gpu: Gpu) -> None:
    call = mla_call(3)
    EVERY_OP["mla"](**call)
    assert gpu.knows(lambda: EVERY_OP["mla"](**call))
    gpu.device = 1
    assert not gpu.knows(lambda: EVERY_OP["mla"](**call))
    gpu.device = None
    gpu.hooks.append(print)
    assert not gpu.knows(lambda: EVERY_OP["mla"](**call))
    gpu.hooks.clear()
    assert gpu.knows(lambda: EVERY_OP["mla"](**call))


def test_outputs_that_interleave_with_an_input_must_do_so_as_they_did(gpu: Gpu) -> None:
    call = mla_call(3)
    buffer = torch.zeros(3, call["q_nope"].shape[1], 2048, dtype=torch.bfloat16)
    EVERY_OP["mla"](**call | {"q_nope": buffer[..., :512], "q_out": buffer[..., 1024:1600]})
    elsewhere = buffer.clone()
    same = call | {"q_nope": elsewhere[..., :512], "q_out": elsewhere[..., 1024:1600]}
    assert gpu.knows(lambda: EVERY_OP["mla"](**same))
    moved = call | {"q_nope": elsewhere[..., :512], "q_out": elsewhere[..., 512:1088]}
    assert not gpu.knows(lambda: EVERY_OP["mla"](**moved))


def latents_in(tokens: int, pages: torch.Tensor, mla: int, index: int) -> dict[str, Any]:
    """A call whose caches begin at these bytes of each page."""
    cache, index_cache = pages[:, mla : mla + 16 * 656], pages[:, index : index + 16 * 132]
    caches = {"kv_cache": cache.view(-1, 16, 656), "index_kv_cache": index_cache.view(-1, 16, 132)}
    return latents_call(tokens, layout="fp8_ds_mla") | caches


def test_caches_of_one_storage_may_interleave_anew_and_share_no_byte(gpu: Gpu) -> None:
    block = 16 * 656
    laid = partial(latents_in, 3, torch.zeros(2, 4 * block, dtype=torch.uint8))
    assert not gpu.knows(lambda: EVERY_OP["latents"](**laid(0, block)))
    assert gpu.knows(lambda: EVERY_OP["latents"](**laid(block, 2 * block)))
    assert gpu.knows(lambda: EVERY_OP["latents"](**laid(block, 3 * block)))
    assert gpu.knows(lambda: EVERY_OP["latents"](**laid(block, 0)))
    with pytest.raises(ValueError, match=r"^kv_cache: got memory that overlaps index_kv_cache"):
        EVERY_OP["latents"](**laid(block, block))


def test_a_known_call_of_no_tokens_refuses_the_memory_that_a_checked_one_refuses(gpu: Gpu) -> None:
    """It writes no cache, and yet is wrong whatever the number of tokens."""
    block = 16 * 656
    laid = partial(latents_in, 0, torch.zeros(2, 2 * block, dtype=torch.uint8))
    for _ in range(2):
        EVERY_OP["latents"](**laid(0, block))
    assert (gpu.checked, gpu.launches) == (1, [])
    with pytest.raises(ValueError, match=r"^kv_cache: got memory that overlaps index_kv_cache"):
        EVERY_OP["latents"](**laid(block, block))


def test_a_scale_that_nothing_needs_may_lie_anywhere(gpu: Gpu) -> None:
    call = mla_call(3, layout="plain") | {"q_scale": torch.ones(1)}
    EVERY_OP["mla"](**call)
    assert gpu.knows(lambda: EVERY_OP["mla"](**call | {"q_scale": torch.ones(3)[1:2]}))


def test_addresses_that_passed_are_not_kept_without_bound(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "MOST_ADDRESSES", 2)
    monkeypatch.setattr(addresses.Addresses, "_passed", passed := set())
    calls = [mla_call(3) for _ in range(5)]
    for call in calls:
        EVERY_OP["mla"](**call)
        assert len(passed) <= 2
    assert gpu.checked == 1


def test_the_out_form_knows_calls_of_its_own(gpu: Gpu) -> None:
    call = mla_call(3)
    call.pop("q_dtype", None)
    out_form = torch.ops.dsafuse.fused_qk_rope_concat_and_cache_mla
    out_form(**call)
    assert gpu.knows(lambda: out_form(**call))
    with pytest.raises(ValueError, match=r"^q_out: got None, expected a tensor to write to"):
        out_form(**call | {"q_out": None})


def test_a_first_argument_without_axes_is_named() -> None:
    with pytest.raises(ValueError, match=r"^q_nope: got shape"):
        EVERY_OP["mla"](**mla_call(2) | {"q_nope": torch.zeros((), dtype=torch.bfloat16)})


def test_a_call_known_without_gradients_is_checked_again_with_them(gpu: Gpu) -> None:
    call = mla_call(2)
    call["q_nope"] = call["q_nope"].clone().requires_grad_()
    with torch.no_grad():
        assert not gpu.knows(lambda: EVERY_OP["mla"](**call))
        assert gpu.knows(lambda: EVERY_OP["mla"](**call))
    with pytest.raises(ValueError, match=r"^q_nope: got a tensor that requires grad"):
        EVERY_OP["mla"](**call)

"""An op's faces: the Python function, `torch.ops.dsafuse`, torch.compile; and how it is called wrongly."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dsafuse
from dsafuse import switches
from dsafuse.registry import OPS as REGISTERED
from tests.inputs import (
    EVERY_OP,
    FN,
    FNUZ,
    OPS,
    SEAMS,
    Call,
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

BOTH = pytest.mark.parametrize("op", OPS)


def out_form(op: str) -> Callable[..., None]:
    return getattr(torch.ops.dsafuse, EVERY_OP[op].name).default


def without_derived(call: Call) -> Call:
    return {name: value for name, value in call.items() if name != "q_dtype"}


def test_the_public_names_are_the_registered_ops_and_what_compiles_them_ahead() -> None:
    assert set(dsafuse.__all__) == {"__version__", "warm_up", *REGISTERED}
    for name, op in REGISTERED.items():
        assert getattr(dsafuse, name) is op


@pytest.mark.parametrize("name", REGISTERED)
def test_a_public_docstring_documents_every_argument(name: str) -> None:
    op = getattr(dsafuse, name)
    documented = op.__doc__.split("Args:")[1].split("Returns:")[0]
    for parameter in inspect.signature(op).parameters:
        assert re.search(rf"\b{parameter}[,:]", documented), parameter
    for section in ("Returns:", "Invariants:", "Errors:"):
        assert section in op.__doc__
    assert "Numerics:" in op.__doc__ or "numerics" in op.__doc__  # stated, or referred to


@pytest.mark.parametrize("name", [name for name in dsafuse.__all__ if name != "__version__"])
def test_no_public_argument_is_a_bool(name: str) -> None:
    for parameter in inspect.signature(getattr(dsafuse, name)).parameters.values():
        assert "bool" not in str(parameter.annotation)
        assert "neox" not in parameter.name


# called wrongly


@BOTH
def test_a_missing_argument_is_named(op: str) -> None:
    call = call_of(op)
    del call["positions"]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'positions'"):
        OPS[op](**call)


@BOTH
def test_an_unexpected_keyword_is_named(op: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'is_neox'"):
        OPS[op](**call_of(op), is_neox=True)


def test_a_misspelt_required_keyword_is_a_type_error() -> None:
    call = indexer_call()
    call["weight_scale"] = call.pop("weights_scale")
    with pytest.raises(TypeError, match="unexpected keyword argument 'weight_scale'"):
        OPS["indexer"](**call)


def test_a_misspelt_optional_keyword_is_named() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'roundings'"):
        OPS["mla"](**mla_call(), roundings="fp32")


@BOTH
def test_an_argument_given_twice_is_named(op: str) -> None:
    call = call_of(op)
    first = next(iter(call))
    with pytest.raises(TypeError, match=f"multiple values for argument '{first}'"):
        OPS[op](call[first], **call)


@BOTH
def test_keyword_only_arguments_are_not_taken_by_position(op: str) -> None:
    call = call_of(op)
    positional = [p.name for p in inspect.signature(OPS[op]).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    with pytest.raises(TypeError, match=r"takes \d+ positional arguments but \d+"):
        OPS[op](*(call[name] for name in positional), 1.0)


@BOTH
def test_positional_and_keyword_calls_are_the_same_call(op: str) -> None:
    call = call_of(op)
    names = [p.name for p in inspect.signature(OPS[op]).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    by_position, by_keyword = twin(call), twin(call)
    OPS[op](*(by_position[name] for name in names), **{k: v for k, v in by_position.items() if k not in names})
    OPS[op](**by_keyword)
    assert_same_memory(by_position, by_keyword)


# the out-form


@BOTH
def test_the_out_form_requires_outputs_and_returns_nothing(op: str) -> None:
    schema = out_form(op)._schema
    outputs = {"q_out", "weights_out"} if op == "indexer" else {"q_out"}
    mutated = {argument.name for argument in schema.arguments if argument.is_write}
    assert mutated == {"kv_cache", *outputs}
    assert len(schema.returns) == 0
    assert "q_dtype" not in {argument.name for argument in schema.arguments}
    for argument in schema.arguments:
        if argument.name in outputs:
            assert not argument.has_default_value()


@BOTH
@pytest.mark.parametrize("provider", ["split", "interpreter"])
def test_the_out_form_does_what_the_function_does(op: str, provider: str) -> None:
    call = call_of(op, 3)
    mine = twin(call)
    with switches.override(provider=provider):
        assert out_form(op)(**without_derived(mine)) is None
    assert_same_memory(mine, run(op, "oracle", call))


@BOTH
def test_the_function_returns_the_outputs_it_was_given(op: str) -> None:
    call = call_of(op, 3)
    result = OPS[op](**call)
    if op == "mla":
        assert result is call["q_out"]
    else:
        assert result[0] is call["q_out"]
        assert result[1] is call["weights_out"]


OPCHECKS: dict[str, tuple[str, Call]] = {
    "mla plain bf16": ("mla", mla_call(3, layout="plain")),
    "mla fp8_ds_mla bf16": ("mla", mla_call(3)),
    "mla plain fp32, k_pe with three axes": ("mla", mla_call(3, layout="plain", activation=torch.float32, seed=2)),
    "mla fp8 fp16, k_pe with two axes": ("mla", mla_call(3, layout="fp8", activation=torch.float16, seed=1)),
    "mla fp8_ds_mla, fp8 query": ("mla", mla_call(3, query=FN)),
    "prepare_qk": ("qk", qk_call(3)),
    "prepare_qk that clears top-k rows": ("qk", qk_call(3, topk=40)),
    "prepare_qk without an indexer, fp8 query": ("qk", qk_call(3, index=False, query=FN)),
    "prepare_latents": ("latents", latents_call(3)),
    "prepare_latents without an indexer": ("latents", latents_call(3, index=False, seed=1)),
    "prepare_queries": ("queries", queries_call(3)),
    "prepare_queries without q_nope": (
        "queries",
        queries_call(3) | {"q_nope": None, "q_out": guarded((3, 3, 64), torch.bfloat16)},
    ),
    "prepare_queries fp32, without an indexer": ("queries", queries_call(3, index=False, activation=torch.float32)),
    "indexer bf16": ("indexer", indexer_call(3)),
    "indexer fp32, fp32 scales": ("indexer", indexer_call(3, activation=torch.float32, scale_rule="fp32")),
}


def opchecks(call: Call) -> tuple[str, ...]:
    """The checks that torch 2.13 can do: its test_schema multiplies every tensor, and fp8 has no product on CPU."""
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    tensors = [value for value in call.values() if isinstance(value, torch.Tensor)]
    multiplied = all(tensor.dtype not in (FN, FNUZ) for tensor in tensors)
    return ("test_schema", *rest) if multiplied else rest


@pytest.mark.parametrize(("op", "call"), OPCHECKS.values(), ids=OPCHECKS)
def test_opcheck_accepts_the_out_form(op: str, call: Call) -> None:
    # Packed twins: opcheck clones its arguments, and clones of tensors with holes would still hold the holes.
    packed = {n: v.contiguous().clone() if isinstance(v, torch.Tensor) else v for n, v in without_derived(call).items()}
    torch.library.opcheck(out_form(op), (), packed, test_utils=opchecks(packed))


# torch.compile


def compiled(op: str, backend: str, **options: Any) -> Callable[..., Any]:
    def layer(call: Call) -> Any:
        return EVERY_OP[op](**call)

    torch._dynamo.reset()
    return torch.compile(layer, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("allocated", [False, True], ids=["given outputs", "fresh outputs"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@BOTH
def test_a_compiled_graph_has_no_break_and_the_same_bytes(op: str, backend: str, allocated: bool) -> None:
    call = call_of(op, 3)
    if allocated:
        call |= {"q_out": None} | ({"weights_out": None} if op == "indexer" else {"q_dtype": torch.bfloat16})
    mine, theirs = twin(call), twin(call)
    got, want = compiled(op, backend)(mine), OPS[op](**theirs)
    assert_same_memory(mine, theirs)
    for a, b in zip(*((r,) if op == "mla" else r for r in (got, want)), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@BOTH
def test_one_compiled_graph_serves_any_number_of_tokens(op: str) -> None:
    outputs = {"q_out": None} | ({"weights_out": None} if op == "indexer" else {})
    graphs = []

    def counting(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    layer = torch.compile(lambda call: OPS[op](**call), backend=counting, fullgraph=True, dynamic=True)
    for tokens in (5, 9, 3):
        call = call_of(op, tokens, block_size=64) | outputs
        mine, theirs = twin(call), twin(call)
        got, want = layer(mine), OPS[op](**theirs)
        assert_same_memory(mine, theirs)
        for a, b in zip(*((r,) if op == "mla" else r for r in (got, want)), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert len(graphs) == 1


@pytest.mark.parametrize("index", [True, False], ids=["with an indexer", "without"])
@pytest.mark.parametrize("op", SEAMS)
def test_a_compiled_seam_has_no_break_and_the_same_bytes(op: str, index: bool) -> None:
    call = call_of(op, 3, index=index)
    call |= {name: None for name in ("q_out", "index_q_out", "index_weights_out", "q_c_out") if name in call}
    mine, theirs = twin(call), twin(call)
    got, want = compiled(op, "aot_eager")(mine), EVERY_OP[op](**theirs)
    assert_same_memory(mine, theirs)
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@BOTH
def test_a_compiled_graph_takes_no_tokens(op: str) -> None:
    call = call_of(op, 0)
    mine = twin(call)
    compiled(op, "aot_eager")(mine)
    assert_same_memory(mine, call)


@BOTH
def test_a_compiled_call_checks_its_arguments_when_it_runs(op: str) -> None:
    call = call_of(op, 3)
    call["rope_style"] = "gptj"
    with pytest.raises(Exception, match="rope_style: got 'gptj', expected one of interleaved, neox"):
        compiled(op, "eager")(call)


# proof by name


def test_with_provider_raises_the_trace_where_that_provider_declines() -> None:
    with pytest.raises(
        RuntimeError, match="triton: rejected: kernels are compiled for GPUs, and the tensors are on cpu"
    ):
        OPS["mla"].with_provider("triton")(**mla_call())


def test_with_provider_heeds_no_switch() -> None:
    call = mla_call(2, 1)
    with switches.override(mode="off", ops=frozenset(), provider="split"):
        got = run("mla", "interpreter", call)
    assert_same_memory(got, run("mla", "oracle", call))


def required(op: str) -> str:
    """The first tensor that the op always has."""
    return {"mla": "kv_c", "indexer": "k", "qk": "kv_c", "latents": "q_c", "queries": "q_pe"}[op]


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_traced_graph_has_the_op(op: str) -> None:
    call, first = call_of(op, 2, 2), required(op)
    graph = make_fx(lambda x: EVERY_OP[op](**call | {first: x}))(call[first])
    assert out_form(op) in [node.target for node in graph.graph.nodes]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
@pytest.mark.parametrize("op", EVERY_OP)
def test_a_jit_trace_has_the_op(op: str) -> None:
    call, first = call_of(op, 2, 2), required(op)
    traced = torch.jit.trace(lambda x: EVERY_OP[op](**call | {first: x}), (call[first],), check_trace=False)
    assert f"dsafuse::{EVERY_OP[op].name}" in str(traced.graph)


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("op", EVERY_OP)
def test_fake_tensors_get_fake_outputs(op: str, inside: bool) -> None:
    call = call_of(op, 2, 2) | dict.fromkeys(EVERY_OP[op].output_names)
    mode = FakeTensorMode()
    fake = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in call.items()}
    with mode if inside else nullcontext():
        got = EVERY_OP[op](**fake)
    want = EVERY_OP[op](**call)
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True):
        assert isinstance(a, FakeTensor)
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


@pytest.mark.parametrize("op", EVERY_OP)
def test_a_transformation_that_the_ops_have_no_rule_for_says_so(op: str) -> None:
    call, first = call_of(op, 2, 2), required(op)
    with pytest.raises(RuntimeError, match=f"Batching rule not implemented for dsafuse::{EVERY_OP[op].name}"):
        torch.func.vmap(lambda x: EVERY_OP[op](**call | {first: x}))(torch.stack([call[first]] * 2))


@pytest.mark.parametrize("op", EVERY_OP)
def test_an_op_is_pickled_and_copied_as_itself(op: str) -> None:
    whole = EVERY_OP[op]
    assert pickle.loads(pickle.dumps(whole)) is whole
    assert copy.deepcopy(whole) is whole


def test_compiled_code_refuses_a_gradient_that_eager_code_refuses() -> None:
    call = mla_call(2)
    call["q_nope"] = call["q_nope"].clone().requires_grad_()
    compiled = torch.compile(lambda **k: EVERY_OP["mla"](**k), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="q_nope: got a tensor that requires grad"):
        compiled(**call)


def test_compiled_code_refuses_a_query_of_another_dtype_than_asked_for() -> None:
    call = mla_call(2) | {"q_out": torch.zeros(2, 3, 576, dtype=torch.bfloat16), "q_dtype": torch.float8_e4m3fn}
    compiled = torch.compile(lambda **k: EVERY_OP["mla"](**k), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"q_out: got torch.bfloat16, expected torch.float8_e4m3fn"):
        compiled(**call)


def test_threads_override_switches_each_for_itself() -> None:
    before = switches.current()
    barrier = threading.Barrier(2)

    def provider(name: str) -> str | None:
        with switches.override(provider=name):
            barrier.wait()
            return switches.current().provider

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(provider, ("split", "interpreter"))) == ["split", "interpreter"]
    assert switches.current() == before


def test_threads_may_interpret_side_by_side() -> None:
    call = mla_call(2)
    want = run("mla", "split", call)
    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(lambda _: run("mla", "interpreter", call), range(6)):
            assert_same_memory(got, want)


@pytest.mark.parametrize("op", EVERY_OP)
def test_compiled_code_may_pass_arguments_by_position(op: str) -> None:
    whole, call = EVERY_OP[op], call_of(op, 3)
    parameters = inspect.signature(whole).parameters.values()
    positional = [call[p.name] for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name in call]
    named = {p.name: call[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in call}
    for name in whole.output_names:
        named.pop(name, None)
    compiled = torch.compile(lambda: whole(*positional, **named), fullgraph=True, backend="aot_eager")
    got, want = compiled(), whole(*positional, **named)
    for a, b in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, want)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))

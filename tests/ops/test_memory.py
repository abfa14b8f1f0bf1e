"""Whose memory an output may share: nobody's bytes, but the gaps of anybody's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.inputs import EVERY_OP, Call, assert_same_memory, call_of, latents_call, mla_call, qk_call, run, twin

BF16 = torch.bfloat16


def test_two_outputs_may_be_columns_of_one_buffer() -> None:
    call = latents_call(4, layout="plain")
    rows = torch.zeros(4, 576, dtype=BF16)
    together = call | {"kv_c_out": rows[:, :512], "k_pe_out": rows[:, 512:]}
    apart = call | {"kv_c_out": torch.zeros(4, 512, dtype=BF16), "k_pe_out": torch.zeros(4, 64, dtype=BF16)}
    got, want = run("latents", "split", together), run("latents", "split", apart)
    for name in ("kv_c_out", "k_pe_out", "kv_cache"):
        assert torch.equal(got[name], want[name])


def test_a_query_may_lie_in_the_gaps_of_its_input() -> None:
    call = mla_call(3)
    buffer = torch.zeros(3, call["q_nope"].shape[1], 512 + 576, dtype=BF16)
    buffer[..., :512] = call["q_nope"]
    EVERY_OP["mla"].resolve(**call | {"q_nope": buffer[..., :512], "q_out": buffer[..., 512:]})


@pytest.mark.parametrize("shift", [0, 511, 512 - 576])
def test_columns_that_share_a_byte_are_refused(shift: int) -> None:
    call = mla_call(3)
    buffer = torch.zeros(3, call["q_nope"].shape[1], 2048, dtype=BF16)
    q_nope, q_out = buffer[..., 600:1112], buffer[..., 600 + shift : 600 + shift + 576]
    with pytest.raises(ValueError, match=r"^q_out: got memory that overlaps q_nope"):
        EVERY_OP["mla"].resolve(**call | {"q_nope": q_nope, "q_out": q_out})


def test_an_input_inside_the_cache_is_refused() -> None:
    call = mla_call(3, layout="plain")
    rows = call["kv_cache"][0, :3]
    with pytest.raises(ValueError, match=r"^kv_cache: got memory that overlaps kv_c"):
        EVERY_OP["mla"].resolve(**call | {"kv_c": rows[:, :512]})


def test_one_cache_for_both_families_is_refused_but_two_may_interleave() -> None:
    call = qk_call(3, layout="fp8_ds_mla", index_heads=2)
    storage = torch.zeros(4, 16 * (656 + 132), dtype=torch.uint8)
    mla = storage[:, : 16 * 656].unflatten(1, (16, 656))
    indexer = storage[:, 16 * 656 :].unflatten(1, (16, 132))
    EVERY_OP["qk"].resolve(**call | {"kv_cache": mla, "index_kv_cache": indexer})
    with pytest.raises(ValueError, match=r"kv_cache: got memory that overlaps (index_)?kv_cache"):
        EVERY_OP["qk"].resolve(**call | {"kv_cache": mla, "index_kv_cache": mla})


@pytest.mark.parametrize("rows", [1, 4])
def test_a_stride_of_an_axis_of_one_does_not_matter(rows: int) -> None:
    call = mla_call(1, layout="fp8_ds_mla", slot_mapping=torch.tensor([0]))
    cache = torch.zeros(rows, 656, dtype=torch.uint8).as_strided((1, rows, 656), (7, 656, 1))
    dense = torch.zeros(1, rows, 656, dtype=torch.uint8)
    got, want = (run("mla", "split", call | {"kv_cache": each})["kv_cache"] for each in (cache, dense))
    assert torch.equal(got, want)


@pytest.mark.parametrize("provider", ["oracle", "split", "interpreter"])
@pytest.mark.parametrize("op", EVERY_OP)
def test_tensors_made_in_inference_mode_are_written_outside_of_it(op: str, provider: str) -> None:
    """As an engine's caches are made; torch itself would refuse, and only when it had written a part."""
    call = call_of(op)
    with torch.inference_mode():
        made = twin(call)
    assert all(value.is_inference() for value in made.values() if isinstance(value, torch.Tensor))
    EVERY_OP[op].with_provider(provider)(**made)
    assert_same_memory(made, run(op, provider, call))


# torch.compile, whose backends may hand the op a copy of each output


def topk_over_query(call: Call) -> torch.Tensor:
    """Both made in the graph, of two dtypes: the backend's copies have nothing in common, and one of them is lost."""
    rows = torch.zeros(3, 5 * 576 // 2, dtype=torch.int32)
    q_out = rows.view(BF16).view(3, 5, 576)
    EVERY_OP["qk"](**call | {"q_out": q_out, "topk_indices": rows[:, :40]})
    return q_out


def query_over_input(call: Call) -> torch.Tensor:
    rows = torch.zeros(3, 3, 576, dtype=BF16)
    EVERY_OP["qk"](**call | {"q_out": rows, "q_nope": rows[..., :512]})
    return rows


def latents_of_one(call: Call) -> torch.Tensor:
    rows = call["kv_c"].new_zeros(call["kv_c"].shape[0], 576)
    EVERY_OP["latents"](**call | {"kv_c_out": rows[:, :512], "k_pe_out": rows[:, 512:]})
    return rows


def graph_of(layer: Callable[[Call], torch.Tensor], dynamic: bool | None = None) -> Callable[[Call], torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=dynamic)


def scale_in_query(call: Call) -> torch.Tensor:
    """Nothing needs the scale, where the query is not fp8."""
    rows = torch.zeros(3, 864)
    q_out = rows.view(BF16).view(3, 3, 576)
    EVERY_OP["mla"](**call | {"q_out": q_out, "q_scale": rows[0, :1]})
    return q_out


def test_a_scale_that_nothing_needs_may_lie_anywhere() -> None:
    call = mla_call(3, layout="plain")
    want = scale_in_query(twin(call))
    assert torch.equal(graph_of(scale_in_query)(twin(call)), want)
    assert want.any()


@pytest.mark.parametrize(("op", "name"), [("mla", "q_pe"), ("indexer", "q"), ("latents", "q_c"), ("queries", "q_pe")])
def test_a_tensor_that_is_needed_is_missed_by_name(op: str, name: str) -> None:
    given = call_of(op) | {name: None}
    out_form = getattr(torch.ops.dsafuse, EVERY_OP[op].name)
    for call in (EVERY_OP[op], out_form):
        with pytest.raises(TypeError, match=f"^{name}: got NoneType, expected a torch.Tensor"):
            call(**{key: value for key, value in given.items() if call is not out_form or key != "q_dtype"})


@pytest.mark.parametrize(
    ("layer", "other"), [(topk_over_query, "topk_indices"), (query_over_input, "q_nope")], ids=["output", "input"]
)
def test_a_compiled_call_refuses_the_memory_that_an_eager_call_refuses(
    layer: Callable[[Call], torch.Tensor], other: str
) -> None:
    call = qk_call(3, topk=40)
    for one in (layer, graph_of(layer)):
        with pytest.raises(Exception, match=rf"q_out: got memory that overlaps {other}, expected memory of its own"):
            one(twin(call))


def test_a_compiled_call_may_have_outputs_in_one_buffer_for_any_number_of_tokens() -> None:
    compiled = graph_of(latents_of_one, dynamic=True)
    for tokens in (5, 9):
        call = latents_call(tokens, layout="plain", block_size=64)
        with torch.compiler.set_stance("default" if tokens == 5 else "fail_on_recompile"):
            assert torch.equal(compiled(twin(call)), latents_of_one(twin(call)))


def test_a_compiled_call_may_have_a_token_count_that_the_data_alone_tell() -> None:
    call = latents_call(5, layout="plain")
    mine = twin(call)
    for value in mine.values():
        if isinstance(value, torch.Tensor) and len(value) == 5:
            torch._dynamo.decorators.mark_unbacked(value, 0)
    assert torch.equal(graph_of(latents_of_one)(mine), latents_of_one(twin(call)))


def test_a_fake_tensor_that_has_no_storage_is_left_to_the_call() -> None:
    mode = FakeTensorMode()
    call = mla_call(2)
    call |= {"positions": call["positions"].to_sparse()}
    call |= {name: mode.from_tensor(value) for name, value in call.items() if isinstance(value, torch.Tensor)}
    assert isinstance(EVERY_OP["mla"](**call), FakeTensor)

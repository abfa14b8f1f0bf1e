"""Whose memory an output may share: nobody's bytes, but the gaps of anybody's."""

from __future__ import annotations

import pytest
import torch

from tests.inputs import EVERY_OP, assert_same_memory, call_of, latents_call, mla_call, qk_call, run, twin

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

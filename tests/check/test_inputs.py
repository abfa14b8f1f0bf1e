"""Inputs are as hostile as their names say, and the same for the same name, seed and device."""

import pytest
import torch

from dsafuse.check.caches import blocks_of, caches_of
from dsafuse.check.cases import ROLES
from dsafuse.check.inputs import blank_outputs, draw_inputs
from dsafuse.check.memory import CANARY_BYTES, Memory
from dsafuse.check.sets import case_set
from dsafuse.check.values import special_values
from dsafuse.registry import OPS
from dsafuse.target import Target
from tests.check.made import indexer, latents, mla, qk

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", [mla(values="special"), latents(values="magnitudes", index_slot_rule="negative")])
def test_name_and_seed_reproduce_every_byte(case):
    first, second, other = (draw_inputs(case, seed, CPU).memory.buffers for seed in (3, 3, 4))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    blank, again = (blank_outputs(case, 3, CPU).memory.buffers for _ in range(2))
    assert all(torch.equal(blank[name], again[name]) for name in blank)


@pytest.mark.parametrize("op", ROLES)
def test_every_case_resolves_as_it_says(op):
    for case in case_set(op, "quick", Target.named("cpu")):
        arguments = {**draw_inputs(case, 0, CPU).cleaned, **blank_outputs(case, 0, CPU).arguments}
        _, config = OPS[op].resolve(**arguments)
        known = ("latent_q", "latent_kv", "index_q", "index_k", "norm_q", "clear_topk")
        roles = {name for name in known if getattr(config, name)}
        assert roles == case.roles
        if config.latent_q:
            assert (config.latent_q.heads, config.latent_q.rope_style) == (case.heads, case.rope_style)
        if config.latent_kv:
            assert (config.latent_kv.layout, config.latent_kv.block_size) == (case.layout, case.block_size)
            assert config.latent_kv.norm == case.normed
        if config.index_q:
            assert (config.index_q.heads, config.index_q.rope_style) == (case.index_heads, case.index_rope_style)
        if config.index_k:
            assert (config.index_k.block_size, config.index_k.scale_rule) == (case.index_block_size, case.scale_rule)
        if config.norm_q:
            assert config.norm_q.width == case.q_width


def test_engine_strides_are_those_of_projections():
    a = draw_inputs(mla(tokens=5, heads=3), 0, CPU).arguments
    assert a["q_nope"].stride() == (512, 5 * 512, 1)
    assert a["q_pe"].stride() == (3 * 192, 192, 1)
    assert a["kv_c"].stride(0) == a["k_pe"].stride(0) > 576
    a = draw_inputs(latents(tokens=5, q_width=96), 0, CPU).arguments
    assert a["q_c"].untyped_storage().data_ptr() == a["kv_c"].untyped_storage().data_ptr()
    index = draw_inputs(indexer(activation="bf16", weights="bf16"), 0, CPU).arguments
    assert index["k"].untyped_storage().data_ptr() == index["weights"].untyped_storage().data_ptr()


@pytest.mark.parametrize("name", ["q_nope", "q_pe", "kv_c", "k_pe"])
def test_odd_rows_are_off_the_16_byte_grid(name):
    a = draw_inputs(mla(strides="odd", tokens=3, heads=2), 0, CPU).arguments
    assert a[name].data_ptr() % 16
    assert a[name].stride(0) * a[name].element_size() % 16


def test_wide_outputs_have_more_heads_and_padded_rows():
    outputs = blank_outputs(mla(out="wide", heads=7), 0, CPU).arguments
    assert outputs["q_out"].shape == (7, 10, 576)
    assert outputs["q_out"].stride(1) > 576


def test_gaps_lie_between_blocks_and_rows():
    plain = blank_outputs(mla(cache_strides="gaps"), 0, CPU).arguments["kv_cache"]
    assert plain.stride(1) > 576
    assert plain.stride(0) > 64 * plain.stride(1)
    planar = blank_outputs(indexer(index_cache_strides="gaps"), 0, CPU).arguments["kv_cache"]
    assert planar.stride(1) == 132
    assert planar.stride(0) > 64 * 132


@pytest.mark.parametrize("rule", ["permuted", "short", "negative", "beyond"])
def test_slot_rules_of_each_cache(rule):
    case = qk(tokens=32, heads=1, index_heads=1, slot_rule="permuted", index_slot_rule=rule, position_rule="outside")
    inputs = draw_inputs(case, 0, CPU)
    for cache, expected in zip(caches_of(case), ("permuted", rule)):
        slots, cleaned = inputs.arguments[cache.slot_mapping], inputs.slots(cache.slot_mapping)
        live = cleaned[cleaned >= 0]
        capacity = blocks_of(case, cache) * cache.block_size
        assert len(live.unique()) == len(live) > 0
        assert int(live.max()) < capacity
        assert (len(slots) < 32) == (expected == "short")
        assert bool((slots < 0).any()) == (expected == "negative")
        assert bool((slots >= capacity).any()) == (expected == "beyond")
    assert inputs.arguments["slot_mapping"].tolist() != inputs.arguments["index_slot_mapping"].tolist()
    positions = inputs.arguments["positions"]
    assert bool((positions < 0).any())
    assert bool((positions >= 300).any())
    assert bool(((inputs.cleaned["positions"] >= 0) & (inputs.cleaned["positions"] < 300)).all())


@pytest.mark.parametrize("of", [latents, qk])
def test_rows_to_clear_are_more_than_the_tokens_and_padded(of):
    topk = blank_outputs(of(topk="narrow"), 0, CPU).arguments["topk_indices"]
    assert topk.shape == (9, 33)
    assert topk.stride(0) > 33
    assert "topk_indices" not in blank_outputs(of(topk="absent"), 0, CPU).arguments


def test_ties_lie_between_two_codes():
    a = draw_inputs(mla(values="ties", scale="power", tokens=32), 0, CPU).arguments
    scaled = a["q_nope"].float() / 0.5
    inside = scaled[scaled.abs() < 448]
    down, up = inside * (1 - 2**-7), inside * (1 + 2**-7)
    assert bool((down.to(torch.float8_e4m3fn).float() != up.to(torch.float8_e4m3fn).float()).all())
    assert bool((scaled.abs() > 448).any())


def test_special_values_reach_the_inputs():
    q = draw_inputs(mla(values="special", tokens=32), 0, CPU).arguments["q_nope"]
    assert bool(q.isnan().any())
    assert bool(q.isinf().any())
    assert bool(((q == 0) & q.signbit()).any())
    tiny = torch.finfo(torch.bfloat16).smallest_normal
    assert bool(((q != 0) & (q.abs() < tiny)).any())
    assert not bool((special_values(torch.bfloat16, overflowing=False).abs() == torch.finfo(torch.bfloat16).max).any())


def test_memory_is_poisoned_and_has_canaries():
    memory = Memory(CPU, 7)
    tensor = memory.tensor("x", (4, 64), torch.float32, skew=1)
    buffer = memory.buffers["x"]
    assert len(buffer) == 2 * CANARY_BYTES + 4 * 64 * 4 + 4
    assert tensor.data_ptr() - buffer.data_ptr() == CANARY_BYTES + 4
    assert len(buffer[:CANARY_BYTES].unique()) > 100
    assert torch.equal(
        Memory(CPU, 7).tensor("x", (4, 64), torch.uint8), Memory(CPU, 7).tensor("y", (4, 64), torch.uint8)
    )

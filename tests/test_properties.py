"""What holds for every input: the invariants that the docstrings promise, over generated calls.

Most run on the oracle and the unfused chain, which are fast; each is also tried on a few interpreted kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.inputs import (
    FN,
    FNUZ,
    MAX_POSITION,
    OPS,
    Call,
    assert_same_memory,
    call_of,
    indexer_call,
    indexer_row,
    live_slots,
    mla_call,
    run,
    seeded,
)

PROVIDERS = pytest.mark.parametrize("provider", ["oracle", "split", "interpreter"])
BOTH = pytest.mark.parametrize("op", OPS)
PER_TOKEN = {
    "mla": ("q_nope", "q_pe", "kv_c", "k_pe", "slot_mapping", "positions"),
    "indexer": ("q", "weights", "k", "slot_mapping", "positions"),
}
OUTPUTS = {"mla": ("q_out",), "indexer": ("q_out", "weights_out")}

shapes = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 6),
        "heads": st.integers(1, 9),
        "activation": st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
        "block_size": st.sampled_from([1, 2, 7, 16, 64]),
        "fp8": st.sampled_from([FN, FNUZ]),
        "rope_style": st.sampled_from(["interleaved", "neox"]),
        "rounding": st.sampled_from(["split", "fp32"]),
        "seed": st.integers(0, 2**31),
    }
)
layouts = st.sampled_from(["plain", "fp8", "fp8_ds_mla"])


def generated(op: str, shape: dict[str, Any], layout: str) -> Call:
    shape = dict(shape)
    if op == "indexer":
        return indexer_call(**shape, scale_rule="fp32" if layout == "plain" else "ue8m0")
    return mla_call(**shape, layout=layout, query=shape["fp8"] if shape["seed"] % 2 else None)


def examples(provider: str) -> settings:
    return settings(max_examples=4 if provider == "interpreter" else 25)


@PROVIDERS
@BOTH
def test_every_provider_gives_what_the_oracle_gives(op: str, provider: str) -> None:
    @examples(provider)
    @given(shapes, layouts)
    def holds(shape: dict[str, Any], layout: str) -> None:
        call = generated(op, shape, layout)
        assert_same_memory(run(op, provider, call), run(op, "oracle", call))

    holds()


@PROVIDERS
@BOTH
def test_permuting_tokens_permutes_rows_and_leaves_the_cache_as_it_is(op: str, provider: str) -> None:
    @examples(provider)
    @given(shapes, layouts, st.integers(0, 2**31))
    def holds(shape: dict[str, Any], layout: str, seed: int) -> None:
        call = generated(op, shape, layout)
        order = torch.randperm(shape["tokens"], generator=seeded(seed))
        shuffled = call | {name: call[name][order] for name in PER_TOKEN[op]}
        got, want = run(op, provider, shuffled), run(op, provider, call)
        for name in OUTPUTS[op]:
            heads = slice(shape["heads"])
            rows = [t[name][:, heads].contiguous().view(torch.uint8) for t in (got, want)]
            assert torch.equal(rows[0], rows[1][order])
        assert_same_memory(got, want, but=(*PER_TOKEN[op], *OUTPUTS[op]))

    holds()


@PROVIDERS
@BOTH
def test_a_token_with_a_negative_slot_changes_no_byte_of_any_other(op: str, provider: str) -> None:
    @examples(provider)
    @given(shapes, layouts, st.integers(0, 5), st.integers(-(2**63), -1))
    def holds(shape: dict[str, Any], layout: str, token: int, slot: int) -> None:
        call = generated(op, shape, layout)
        token %= shape["tokens"]
        slots = call["slot_mapping"].long()
        slots[token] = slot
        kept = [other for other in range(shape["tokens"]) if other != token]
        got = run(op, provider, call | {"slot_mapping": slots})
        fewer = call | {name: (slots if name == "slot_mapping" else call[name])[kept] for name in PER_TOKEN[op]}
        fewer |= {name: call[name][kept] for name in OUTPUTS[op]}
        assert_same_memory(got, run(op, provider, fewer), but=(*PER_TOKEN[op], *OUTPUTS[op]))

    holds()


@PROVIDERS
@BOTH
def test_neox_is_interleaved_on_permuted_dims(op: str, provider: str) -> None:
    pairs = torch.arange(64).reshape(2, 32).T.flatten()  # pair (i, i + 32) -> (2i, 2i + 1)
    dims = torch.cat([pairs, torch.arange(64, 128)])
    outside = torch.cat([torch.arange(512), 512 + pairs])

    @examples(provider)
    @given(shapes, layouts)
    def holds(shape: dict[str, Any], layout: str) -> None:
        call = generated(op, shape | {"rope_style": "neox"}, layout)
        turned = call | {"rope_style": "interleaved"}
        if op == "mla":
            turned |= {"q_pe": call["q_pe"][..., pairs], "k_pe": call["k_pe"][..., pairs]}
        else:
            turned |= {name: call[name][..., dims] for name in ("q", "k", "norm_weight", "norm_bias")}
        neox, interleaved = run(op, provider, call), run(op, provider, turned)
        where = outside if op == "mla" else dims
        heads = slice(shape["heads"])
        rows = [t["q_out"][:, heads].view(torch.uint8) for t in (neox, interleaved)]
        item = call["q_out"].element_size()
        rows = [row.unflatten(-1, (-1, item)) for row in rows]
        assert torch.equal(rows[0][:, :, where], rows[1])
        if op == "indexer":  # a permuted sum may round differently, so keys are compared as numbers
            for slot in live_slots(call):
                (a, scale), (b, other) = (indexer_row(t["kv_cache"], slot) for t in (neox, interleaved))
                assert scale == pytest.approx(other, rel=1e-6)
                a, b = (codes.view(shape["fp8"]).float() for codes in (a[dims], b))
                assert torch.allclose(a, b, rtol=0.13, atol=2.0**-9)

    holds()


@PROVIDERS
def test_scaling_a_query_by_a_power_of_two_scales_its_weight_and_keeps_its_codes(provider: str) -> None:
    @examples(provider)
    @given(shapes, st.integers(0, 6))
    def holds(shape: dict[str, Any], k: int) -> None:
        shape = shape | {"activation": torch.float32}
        call = indexer_call(**shape, slot_mapping=torch.empty(0, dtype=torch.int64))
        got = run("indexer", provider, call | {"q": call["q"] * 2.0**k})
        want = run("indexer", provider, call)
        heads = slice(shape["heads"])
        assert torch.equal(got["q_out"][:, heads].view(torch.uint8), want["q_out"][:, heads].view(torch.uint8))
        assert torch.equal(got["weights_out"][:, heads], want["weights_out"][:, heads] * 2.0**k)

    holds()


@PROVIDERS
def test_scaling_a_query_and_its_scale_by_a_power_of_two_keeps_its_codes(provider: str) -> None:
    @examples(provider)
    @given(shapes, st.integers(-8, 8))
    def holds(shape: dict[str, Any], k: int) -> None:
        shape = shape | {"activation": torch.float32}
        call = mla_call(**shape, query=shape["fp8"])
        scaled = call | {name: call[name] * 2.0**k for name in ("q_nope", "q_pe", "q_scale")}
        heads = slice(shape["heads"])
        codes = [run("mla", provider, c)["q_out"][:, heads].view(torch.uint8) for c in (call, scaled)]
        assert torch.equal(*codes)

    holds()


@PROVIDERS
@BOTH
def test_a_head_depends_on_no_other_head(op: str, provider: str) -> None:
    @examples(provider)
    @given(shapes, layouts, st.integers(0, 8))
    def holds(shape: dict[str, Any], layout: str, head: int) -> None:
        call = generated(op, shape, layout)
        head %= shape["heads"]
        per_head = ("q_nope", "q_pe") if op == "mla" else ("q", "weights")
        alone = call | {name: call[name][:, head : head + 1] for name in per_head}
        got, want = run(op, provider, alone), run(op, provider, call)
        for name in OUTPUTS[op]:
            mine, theirs = got[name][:, :1], want[name][:, head : head + 1]
            assert torch.equal(mine.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
        assert_same_memory(got, want, but=(*per_head, *OUTPUTS[op]))

    holds()


@PROVIDERS
@BOTH
def test_one_launch_is_the_composition_of_its_roles(op: str, provider: str) -> None:
    """The query alone, then the key alone, give what the fused call gives."""

    @examples(provider)
    @given(shapes, layouts)
    def holds(shape: dict[str, Any], layout: str) -> None:
        call = generated(op, shape, layout)
        whole = run(op, provider, call)
        query = run(op, provider, call | {"slot_mapping": torch.empty(0, dtype=torch.int64)})
        headless = {name: call[name][:, :0] for name in (("q_nope", "q_pe") if op == "mla" else ("q", "weights"))}
        key = run(op, provider, call | headless)
        assert_same_memory(query, whole, but=("kv_cache", "slot_mapping"))
        assert_same_memory(key, whole, but=(*headless, *OUTPUTS[op]))

    holds()


@PROVIDERS
@BOTH
def test_running_twice_changes_nothing(op: str, provider: str) -> None:
    call = call_of(op, 3, positions=torch.tensor([0, 5, MAX_POSITION - 1]))
    once = run(op, provider, call)
    assert_same_memory(run(op, provider, once), once)

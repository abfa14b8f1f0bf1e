"""prepare_qk and the two seams: each is the composition of roles that the original fusions already prove."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dsafuse import numerics
from tests.inputs import (
    EVERY_OP,
    FN,
    FNUZ,
    SEAMS,
    SHARED,
    Call,
    assert_same_memory,
    cache_row,
    call_of,
    guarded,
    indexer_row,
    latents_call,
    memory,
    on_cpu,
    ordered,
    qk_call,
    queries_call,
    run,
    storage_bytes,
    twin,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PROVIDERS = pytest.mark.parametrize("provider", ["oracle", "split", "interpreter"])
EVERY_SEAM = pytest.mark.parametrize("op", SEAMS)
NORMED = ("q_c_out", "kv_c_out", "kv_cache")
"""What a RMSNorm's sum, which has an order of its own, reaches."""
OPTIONAL_OUTPUTS = {"qk": ("topk_indices",), "latents": ("kv_c_out", "k_pe_out", "topk_indices")}


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def mla_part(call: Call) -> Call:
    return {name: value for name, value in call.items() if not name.startswith("index_")}


def index_part(call: Call) -> Call:
    shared = {name: call[name] for name in SHARED if name in call}
    return shared | {name.removeprefix("index_"): v for name, v in call.items() if name.startswith("index_")}


def assert_same_but_norms(got: Call, want: Call) -> None:
    """Every byte equal, except that one in 10,000 normed values, and four in all, may move by one code."""
    assert_same_memory(got, want, but=NORMED)
    moved = total = 0
    for name in NORMED:
        a, b = (storage_bytes(call[name]) for call in (got, want))
        if want[name].dtype.itemsize == 2:
            a, b = (t.view(torch.int16).int() for t in (a, b))
            a, b = (torch.where(t < 0, -(t & 0x7FFF), t) for t in (a, b))
        elif want[name].dtype == FP32:
            a, b = (t.view(torch.int32) for t in (a, b))
            b = torch.where((a - b).abs() <= 4, a, b)  # four units in the last place of a sum of 512 squares
        else:
            a, b = ordered(a), ordered(b)
        distance = (a.long() - b.long()).abs()
        assert int(distance.max()) <= 1, name
        moved, total = moved + int((distance > 0).sum()), total + distance.numel()
    assert moved <= 4 + 1e-4 * total


CASES: dict[str, dict[str, Any]] = {
    "fp8_ds_mla": {},
    "plain fp16, neox, 17 heads": {
        "layout": "plain",
        "activation": FP16,
        "rope_style": "neox",
        "heads": 17,
        "tokens": 2,
    },
    "fp8, block of 1, interleaved indexer": {"layout": "fp8", "block_size": 1, "index_rope_style": "interleaved"},
    "fp8_ds_mla fnuz, block of 64": {"fp8": FNUZ, "block_size": 64},
    "plain, unrounded": {"layout": "plain", "rounding": "fp32"},
    "fp32 activations and scales": {"layout": "plain", "activation": FP32, "scale_rule": "fp32"},
    "without an indexer": {"index": False},
    "fp8 without an indexer": {"layout": "fp8", "index": False, "heads": 1},
}


@pytest.mark.parametrize("provider", ["split", "interpreter"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@EVERY_SEAM
def test_every_provider_gives_the_oracles_bytes(op: str, case: dict[str, Any], provider: str) -> None:
    call = call_of(op, case.get("tokens", 4), **{k: v for k, v in case.items() if k != "tokens"}, seed=len(str(case)))
    got, want = run(op, provider, call), run(op, "oracle", call)
    (assert_same_but_norms if op == "latents" else assert_same_memory)(got, want)


CLEARING: dict[str, dict[str, Any]] = {
    "one index a token, a query of one head": {"topk": 1, "heads": 1},
    "odd, one token": {"topk": 33, "tokens": 1},
    "an engine's": {"topk": 2048, "layout": "fp8", "query": FN},
}


@pytest.mark.parametrize("provider", ["split", "interpreter"])
@pytest.mark.parametrize("case", CLEARING.values(), ids=CLEARING)
def test_prepare_qk_that_clears_gives_the_oracles_bytes(case: dict[str, Any], provider: str) -> None:
    call = qk_call(**{"tokens": 7} | case)
    assert_same_memory(run("qk", provider, call), run("qk", "oracle", call))


@PROVIDERS
@pytest.mark.parametrize("query", [BF16, FN], ids=str)
def test_prepare_qk_is_both_fusions_one_after_the_other(provider: str, query: torch.dtype) -> None:
    call = qk_call(4, 5, index_heads=9, query=query, seed=6)
    got = run("qk", provider, call)
    assert_same_memory(mla_part(got), run("mla", provider, mla_part(call)))
    assert_same_memory(index_part(got), run("indexer", provider, index_part(call)))


@PROVIDERS
@pytest.mark.parametrize("op", ["qk", "latents"])
@pytest.mark.parametrize("rules", [("fp32", "ue8m0"), ("ue8m0", "fp32")], ids=str)
def test_tiles_and_the_indexer_have_rules_of_their_own(rules: tuple[str, str], op: str, provider: str) -> None:
    call = call_of(op, 4, 1, seed=11) | {"scale_rule": rules[0], "index_scale_rule": rules[1]}
    call |= {"slot_mapping": slots(0, 1, 2, 3), "index_slot_mapping": slots(0, 1, 2, 3)}
    got = run(op, provider, call)
    (assert_same_but_norms if op == "latents" else assert_same_memory)(got, run(op, "oracle", call))
    tiles = torch.stack([cache_row(got["kv_cache"], t)[512:528].clone().view(FP32) for t in range(4)])
    keys = torch.tensor([indexer_row(got["index_kv_cache"], t)[1] for t in range(4)])
    for scales, rule in zip((tiles, keys), rules):
        assert bool((torch.frexp(scales).mantissa == 0.5).all()) == (rule == "ue8m0")


@PROVIDERS
def test_prepare_queries_gives_the_queries_of_prepare_qk(provider: str) -> None:
    call = qk_call(4, 5, index_heads=3, query=FN, seed=7)
    queries = queries_call(4, 5, index_heads=3, query=FN, seed=7)
    got, want = run("queries", provider, queries), run("qk", provider, call)
    assert_same_memory(got, {name: want[name] for name in got})


@PROVIDERS
@pytest.mark.parametrize("rounding", ["split", "fp32"])
@pytest.mark.parametrize("activation", [BF16, FP32], ids=str)
def test_without_q_nope_a_query_is_its_rotary_part(activation: torch.dtype, rounding: str, provider: str) -> None:
    call = queries_call(4, 5, index_heads=3, activation=activation, rounding=rounding, seed=9)
    want = run("queries", provider, call)
    alone = guarded((4, 7, 64), activation, (7 * 72, 72, 1))
    alone_call = call | {"q_nope": None, "q_out": alone}
    got = run("queries", provider, alone_call)
    for name in ("index_q_out", "index_weights_out"):
        assert torch.equal(storage_bytes(got[name]), storage_bytes(want[name]))
    expected = twin(alone_call)["q_out"]
    expected[:, :5] = want["q_out"][:, :5, 512:]
    assert torch.equal(storage_bytes(got["q_out"]), storage_bytes(expected))
    allocated = EVERY_OP["queries"].with_provider(provider)(**call | {"q_nope": None, "q_out": None})[0]
    assert allocated.shape == (4, 5, 64)
    assert torch.equal(allocated, want["q_out"][:, :5, 512:])


def test_a_rotary_part_alone_is_not_quantised() -> None:
    call = queries_call(2, 2) | {"q_nope": None, "q_out": None, "q_dtype": FN}
    with pytest.raises(TypeError, match=r"^q_dtype: got torch.float8_e4m3fn, expected torch.bfloat16 without q_nope"):
        EVERY_OP["queries"](**call)


def test_only_prepare_queries_does_without_q_nope() -> None:
    with pytest.raises(TypeError, match=r"^q_nope: got NoneType, expected a torch.Tensor"):
        EVERY_OP["qk"](**qk_call(2, 2) | {"q_nope": None})


@PROVIDERS
@pytest.mark.parametrize("layout", ["plain", "fp8", "fp8_ds_mla"])
def test_prepare_latents_caches_what_the_fusions_cache_of_normed_latents(layout: str, provider: str) -> None:
    latents = latents_call(4, 1, layout=layout, seed=8)
    got = run("latents", provider, latents)
    normed = numerics.rms_norm(latents["kv_c"].float(), latents["kv_norm_weight"], latents["kv_norm_eps"]).to(BF16)
    assert torch.allclose(got["kv_c_out"].float(), normed.float(), rtol=2.0**-7, atol=0)
    call = qk_call(4, 1, layout=layout, seed=8) | {"kv_c": got["kv_c_out"]}
    want = run("qk", provider, call)
    for name in ("kv_cache", "index_kv_cache"):
        assert torch.equal(storage_bytes(got[name]), storage_bytes(want[name]))


@PROVIDERS
def test_the_normed_query_latent_is_torch_nn_rms_norm_in_float64(provider: str) -> None:
    call = latents_call(5, width=1536, activation=FP32)
    done = run("latents", provider, call)
    for x, out, weight, eps in (
        ("q_c", "q_c_out", "q_norm_weight", 1e-6),
        ("kv_c", "kv_c_out", "kv_norm_weight", 1e-5),
    ):
        want = torch.nn.functional.rms_norm(call[x].double(), call[x].shape[1:], call[weight].double(), eps)
        torch.testing.assert_close(done[out].double(), want, rtol=2e-6, atol=0)


@PROVIDERS
def test_the_rotated_key_is_handed_out_as_the_plain_cache_holds_it(provider: str) -> None:
    call = latents_call(4, layout="plain", index=False) | {"slot_mapping": slots(3, 1, 8, 0)}
    done = run("latents", provider, call)
    for token, slot in enumerate((3, 1, 8, 0)):
        row = cache_row(done["kv_cache"], slot).view(BF16)
        assert torch.equal(row[:512], done["kv_c_out"][token])
        assert torch.equal(row[512:576], done["k_pe_out"][token])


@PROVIDERS
def test_what_is_handed_out_is_written_whatever_the_slots_are(provider: str) -> None:
    call = latents_call(4)
    live = run("latents", provider, call | {"slot_mapping": slots(3, 1, 8, 0)})
    dead = run("latents", provider, call | {"slot_mapping": slots(-1, -1)})
    for name in ("q_c_out", "kv_c_out", "k_pe_out", "topk_indices"):
        assert torch.equal(storage_bytes(live[name]), storage_bytes(dead[name]))
    assert storage_bytes(dead["kv_cache"]).unique().tolist() == [0x5A]


@PROVIDERS
@pytest.mark.parametrize(("op", "absent"), [(op, name) for op, names in OPTIONAL_OUTPUTS.items() for name in names])
def test_an_output_that_is_not_asked_for_changes_no_other(op: str, absent: str, provider: str) -> None:
    call = call_of(op, 3, topk=40)
    want = run(op, provider, call)
    got = run(op, provider, call | {absent: None})
    assert_same_memory(got, {name: value for name, value in want.items() if name != absent})


@PROVIDERS
@pytest.mark.parametrize("topk", [1, 40, 64])
@pytest.mark.parametrize("op", ["qk", "latents"])
def test_the_tokens_rows_of_top_k_are_cleared_and_no_other(op: str, topk: int, provider: str) -> None:
    call = call_of(op, 3, topk=topk)
    done = run(op, provider, call)["topk_indices"]
    assert bool((done[:3] == -1).all())
    storage = storage_bytes(done)
    done[:3] = 0x5A5A5A5A
    assert storage.unique().tolist() == [0x5A]


@PROVIDERS
@pytest.mark.parametrize("op", ["qk", "latents"])
def test_rows_of_top_k_are_cleared_whatever_the_slots_are(op: str, provider: str) -> None:
    call = call_of(op, 3, topk=40) | {"slot_mapping": slots(-1), "index_slot_mapping": slots(-1, -1)}
    assert bool((run(op, provider, call)["topk_indices"][:3] == -1).all())


@PROVIDERS
@pytest.mark.parametrize("op", ["qk", "latents"])
def test_neither_cache_is_guarded_by_the_slots_of_the_other(op: str, provider: str) -> None:
    # vLLM's fused_norm_rope guards both by the MLA slot: a row with indexer slot -1 writes before the block.
    call = call_of(op, 2) | {"slot_mapping": slots(-1, 3), "index_slot_mapping": slots(5, -1)}
    done = run(op, provider, call)
    both = run(op, provider, call | {"slot_mapping": slots(7, 3), "index_slot_mapping": slots(5, 9)})
    assert torch.equal(cache_row(done["kv_cache"], 3)[:656], cache_row(both["kv_cache"], 3)[:656])
    assert torch.equal(indexer_row(done["index_kv_cache"], 5)[0], indexer_row(both["index_kv_cache"], 5)[0])
    assert cache_row(done["kv_cache"], 7).unique().tolist() == [0x5A]
    assert indexer_row(done["index_kv_cache"], 9)[0].unique().tolist() == [0x5A]


@pytest.mark.parametrize("provider", ["oracle", "split"])
@pytest.mark.parametrize("op", ["qk", "latents"])
@pytest.mark.parametrize("name", ["slot_mapping", "index_slot_mapping"])
def test_a_slot_beyond_either_cache_is_an_index_error_before_anything_is_written(
    op: str, name: str, provider: str
) -> None:
    call = call_of(op, 3) | {name: slots(0, 2**40)}
    mine = twin(call)
    with pytest.raises(IndexError, match=rf"slot_mapping\[1\]: got {2**40}, expected less than the capacity"):
        EVERY_OP[op].with_provider(provider)(**mine)
    assert_same_memory(mine, call)


@pytest.mark.parametrize("op", ["qk", "latents"])
@pytest.mark.parametrize("name", ["slot_mapping", "index_slot_mapping"])
def test_a_kernel_writes_nothing_for_a_slot_beyond_either_cache(op: str, name: str) -> None:
    call = call_of(op, 3) | {name: slots(0, 2**40)}
    want = run(op, "interpreter", call | {name: slots(0, -1)})
    assert_same_memory(run(op, "interpreter", call), want, but=(name,))


@PROVIDERS
@EVERY_SEAM
def test_no_tokens_change_nothing(op: str, provider: str) -> None:
    call = call_of(op, 0)
    assert_same_memory(run(op, provider, call), call)


@PROVIDERS
@pytest.mark.parametrize("op", ["qk", "queries"])
def test_without_an_indexer_its_outputs_are_none(op: str, provider: str) -> None:
    call = call_of(op, 2, index=False)
    result = EVERY_OP[op].with_provider(provider)(**call)
    assert result[0] is call["q_out"]
    assert result[1:] == (None, None)


@pytest.mark.parametrize("op", ["qk", "queries"])
def test_fresh_outputs_have_the_shapes_and_dtypes_that_are_documented(op: str) -> None:
    call = call_of(op, 2, 3, index_heads=4) | {"q_out": None, "index_q_out": None, "index_weights_out": None}
    result = EVERY_OP[op](**call)
    assert [(tuple(t.shape), t.dtype) for t in result] == [
        ((2, 3, 576), BF16),
        ((2, 4, 128), FN),
        ((2, 4), FP32),
    ]
    latents = EVERY_OP["latents"](**latents_call(2) | {"q_c_out": None})
    assert (tuple(latents.shape), latents.dtype) == ((2, 192), BF16)


INDEX_TENSORS = {
    "qk": (
        "index_weights",
        "index_k",
        "index_kv_cache",
        "index_slot_mapping",
        "index_norm_weight",
        "index_norm_bias",
        "index_cos_sin_cache",
        "index_weights_scale",
    ),
    "latents": ("index_kv_cache", "index_slot_mapping", "index_norm_weight", "index_norm_bias", "index_cos_sin_cache"),
    "queries": ("index_weights", "index_cos_sin_cache", "index_weights_scale"),
}


def refuse(op: str, call: Call, error: type[Exception], message: str) -> None:
    before = memory(on_cpu(call))
    with pytest.raises(error, match=message):
        EVERY_OP[op](**call)
    after = memory(on_cpu(call))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in INDEX_TENSORS.items() for name in names])
def test_an_indexer_given_in_part_is_refused(op: str, name: str) -> None:
    refuse(op, call_of(op, 2) | {name: None}, ValueError, rf"^{name}: got None, expected index_[qk] and it to be both")
    whole, none = call_of(op, 2), call_of(op, 2, index=False)
    refuse(op, none | {name: whole[name]}, ValueError, rf"^{name}: got a value, expected index_[qk] and it to be both")


@pytest.mark.parametrize(
    ("op", "name"),
    [
        *((op, name) for op in ("qk", "queries") for name in ("index_q_out", "index_weights_out")),
        ("qk", "topk_indices"),
    ],
)
def test_an_index_output_without_an_indexer_is_refused(op: str, name: str) -> None:
    whole = call_of(op, 2, **({"topk": 40} if op == "qk" else {}))
    call = call_of(op, 2, index=False) | {name: whole[name]}
    refuse(op, call, ValueError, rf"^{name}: got a value, expected None without index_q")


BAD: dict[str, tuple[str, Any, type[Exception], str]] = {
    "index_q in another dtype": (
        "qk",
        lambda c: {"index_q": c["index_q"].half()},
        TypeError,
        r"^index_q: got torch.float16",
    ),
    "index_k in another dtype": (
        "qk",
        lambda c: {"index_k": c["index_k"].half()},
        TypeError,
        r"^index_k: got torch.float16",
    ),
    "index_q with other tokens": (
        "queries",
        lambda c: {"index_q": c["index_q"][:2]},
        ValueError,
        r"^index_q: got 2 tokens",
    ),
    "index_k with other tokens": (
        "latents",
        lambda c: {"index_k": c["index_k"][:2]},
        ValueError,
        r"^index_k: got 2 tokens",
    ),
    "an index cache too narrow": (
        "qk",
        lambda _: {"index_kv_cache": guarded((2, 16, 100), torch.uint8)},
        ValueError,
        r"^index_kv_cache \(flat\): got 100",
    ),
    "an unknown index style": (
        "qk",
        lambda _: {"index_rope_style": "gptj"},
        ValueError,
        r"^index_rope_style: got 'gptj', expected one of interl",
    ),
    "index_eps that is NaN": (
        "latents",
        lambda _: {"index_eps": math.nan},
        ValueError,
        r"^index_eps: got nan, expected a fin",
    ),
    "q_norm_eps missing": (
        "latents",
        lambda _: {"q_norm_eps": None},
        ValueError,
        r"^q_norm_eps: got None, expected a fin",
    ),
    "kv_norm_eps infinite": (
        "latents",
        lambda _: {"kv_norm_eps": math.inf},
        ValueError,
        r"^kv_norm_eps: got inf, expected",
    ),
    "kv_norm_weight too short": (
        "latents",
        lambda c: {"kv_norm_weight": c["kv_norm_weight"][:100]},
        ValueError,
        r"^kv_norm_weight: got shape \(100,\)",
    ),
    "q_norm_weight of another width": (
        "latents",
        lambda c: {"q_norm_weight": c["q_norm_weight"][:100]},
        ValueError,
        r"^q_norm_weight: got shape .*width=192",
    ),
    "integer q_norm_weight": (
        "latents",
        lambda c: {"q_norm_weight": c["q_norm_weight"].int()},
        TypeError,
        r"^q_norm_weight: got torch.int32",
    ),
    "q_c in another dtype": (
        "latents",
        lambda c: {"q_c": c["q_c"].half(), "q_c_out": None},
        TypeError,
        r": got torch.\w+16, exp",
    ),
    "q_c_out of another width": (
        "latents",
        lambda _: {"q_c_out": guarded((5, 100), BF16)},
        ValueError,
        r"^q_c_out: got shape \(5, 100\)",
    ),
    "q_c_out in another dtype": (
        "latents",
        lambda _: {"q_c_out": guarded((5, 192), FP32)},
        TypeError,
        r"^q_c_out: got torch.float32, expected",
    ),
    "q_c_out overlapping q_c": (
        "latents",
        lambda c: {"q_c_out": c["q_c"]},
        ValueError,
        r"^q_c_out: got memory that overlaps q_c",
    ),
    "kv_c_out overlapping kv_c": (
        "latents",
        lambda c: {"kv_c_out": c["kv_c"]},
        ValueError,
        r"^kv_c_out: got memory that over",
    ),
    "k_pe_out of another width": (
        "latents",
        lambda _: {"k_pe_out": guarded((5, 32), BF16)},
        ValueError,
        r"^k_pe_out: got shape \(5, 32\)",
    ),
    "too few top-k rows, latents": (
        "latents",
        lambda _: {"topk_indices": guarded((4, 8), torch.int32)},
        ValueError,
        r"^topk_indices: got 4 rows, exp.*=5",
    ),
    "too few top-k rows, qk": (
        "qk",
        lambda _: {"topk_indices": guarded((4, 8), torch.int32)},
        ValueError,
        r"^topk_indices: got 4 rows, exp.*=5",
    ),
    "64-bit top-k rows, latents": (
        "latents",
        lambda _: {"topk_indices": guarded((5, 8), torch.int64)},
        TypeError,
        r"^topk_indices: got torch.int64, exp",
    ),
    "64-bit top-k rows, qk": (
        "qk",
        lambda _: {"topk_indices": guarded((5, 8), torch.int64)},
        TypeError,
        r"^topk_indices: got torch.int64, exp",
    ),
    "top-k rows that share memory, latents": (
        "latents",
        lambda _: {"topk_indices": guarded((5, 8), torch.int32, (0, 1))},
        ValueError,
        r"^topk_indices: got strides",
    ),
    "top-k rows that share memory, qk": (
        "qk",
        lambda _: {"topk_indices": guarded((5, 8), torch.int32, (0, 1))},
        ValueError,
        r"^topk_indices: got strides",
    ),
    "top-k rows over q_out": (
        "qk",
        lambda c: {"topk_indices": storage_bytes(c["q_out"])[:160].view(torch.int32).view(5, 8)},
        ValueError,
        r"got memory that overlaps (topk_indices|q_out)",
    ),
    "index_q_out overlapping q_out": (
        "qk",
        lambda _: {
            "q_out": (shared := guarded((5, 3, 576), BF16)),
            "index_q_out": shared.view(torch.uint8).view(FN)[..., :128],
        },
        ValueError,
        r"got memory that overlaps (index_)?q_out",
    ),
    "a table on another device": (
        "queries",
        lambda c: {"index_cos_sin_cache": c["index_cos_sin_cache"].to("meta")},
        ValueError,
        r"^index_cos_sin_cache: got dev",
    ),
}


@pytest.mark.parametrize(("op", "change", "error", "message"), BAD.values(), ids=BAD)
def test_a_seam_refuses(op: str, change: Any, error: type[Exception], message: str) -> None:
    call = call_of(op)
    refuse(op, call | change(call), error, message)

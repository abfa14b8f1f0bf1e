"""Every bad input is refused before anything is written, by an error that names argument, value and expectation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.inputs import (
    EVERY_OP,
    FN,
    FNUZ,
    OPS,
    Call,
    assert_same_memory,
    call_of,
    guarded,
    indexer_call,
    memory,
    mla_call,
    on_cpu,
    run,
    seeded,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Change = Callable[[Call], Call]


def cast(name: str, dtype: torch.dtype) -> Change:
    return lambda call: {name: call[name].to(dtype)}


def put(name: str, value: Any) -> Change:
    return lambda _call: {name: value}


def cut(name: str, *index: Any) -> Change:
    return lambda call: {name: call[name][index]}


def on_meta(name: str) -> Change:
    return lambda call: {name: call[name].to("meta")}


def needing_grad(name: str) -> Change:
    return lambda call: {name: call[name].detach().clone().requires_grad_()}


def every_other_column(name: str) -> Change:
    def change(call: Call) -> Call:
        value = call[name]
        return {name: value.repeat_interleave(2, -1)[..., ::2]}

    return change


def cache(
    shape: tuple[int, ...], stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.uint8, **more: Any
) -> Change:
    return lambda _call: {"kv_cache": guarded(shape, dtype, stride), **more}


def shifted_cache(by: int) -> Change:
    def change(call: Call) -> Call:
        old = call["kv_cache"]
        return {"kv_cache": old.as_strided(old.shape, old.stride(), old.storage_offset() + by)}

    return change


def output(name: str, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Change:
    return lambda _call: {name: guarded(shape, dtype, stride)}


def q_out_inside(name: str, q_dtype: torch.dtype, width: int) -> Change:
    """q_out in the memory of an input."""

    def change(call: Call) -> Call:
        shared = torch.zeros(5, 3, width, dtype=BF16)
        return {
            name: shared[..., : call[name].shape[-1]]
            if call[name].dim() == 3
            else shared[:, 0, : call[name].shape[-1]],
            "q_out": shared.view(torch.uint8).view(q_dtype)[..., -(576 if width >= 576 else 128) :],
        }

    return change


Bad = tuple[str, Change, type[Exception], str]

MLA: dict[str, Bad] = {
    "q_nope is no tensor": ("mla", put("q_nope", [1.0]), TypeError, r"^q_nope: got list, expected a torch.Tensor"),
    "kv_cache is missing": ("mla", put("kv_cache", None), TypeError, r"^kv_cache: got NoneType, expected a torch"),
    "float64 activations": ("mla", cast("q_nope", FP64), TypeError, r"^q_nope: got torch.float64, expected torch.bf"),
    "integer activations": ("mla", cast("q_nope", torch.int32), TypeError, r"^q_nope: got torch.int32"),
    "q_pe in another dtype": (
        "mla",
        cast("q_pe", FP32),
        TypeError,
        r"^q_pe: got torch.float32, expected torch.bf.* as",
    ),
    "kv_c in another dtype": ("mla", cast("kv_c", FP16), TypeError, r"^kv_c: got torch.float16, expected torch.bf"),
    "k_pe in another dtype": ("mla", cast("k_pe", FP16), TypeError, r"^k_pe: got torch.float16, expected torch.bf"),
    "another latent width": (
        "mla",
        cut("q_nope", ..., slice(256)),
        ValueError,
        r"^q_nope: got shape \(5, 3, 256\), expected .*latent=512",
    ),
    "another rotary width": ("mla", cut("q_pe", ..., slice(32)), ValueError, r"^q_pe: got shape .* expected .*rope=64"),
    "q_pe with other heads": ("mla", cut("q_pe", slice(None), slice(2)), ValueError, r"^q_pe: got shape .*heads=3"),
    "q_pe with other tokens": ("mla", cut("q_pe", slice(4)), ValueError, r"^q_pe: got shape \(4, .*tokens=5"),
    "kv_c with other tokens": (
        "mla",
        cut("kv_c", slice(4)),
        ValueError,
        r"^kv_c: got 4 tokens, expected tokens=5 as q_nope",
    ),
    "kv_c too narrow": ("mla", cut("kv_c", ..., slice(128)), ValueError, r"^kv_c: got shape \(5, 128\), .*latent=512"),
    "k_pe with two heads": (
        "mla",
        put("k_pe", torch.zeros(5, 2, 64, dtype=BF16)),
        ValueError,
        r"^k_pe: got shape \(5, 2, 64\), .*one=1",
    ),
    "k_pe with one axis": ("mla", cut("k_pe", 0, 0), ValueError, r"^k_pe: got 64 tokens, expected tokens=5 as q_nope"),
    "q_nope with two axes": (
        "mla",
        cut("q_nope", 0),
        ValueError,
        r"^q_nope: got shape \(3, 512\), expected \[tokens, ",
    ),
    "q_nope not contiguous in its last axis": (
        "mla",
        every_other_column("q_nope"),
        ValueError,
        r"^q_nope: got strides .*, expected a contiguous last axis",
    ),
    "q_pe not contiguous in its last axis": ("mla", every_other_column("q_pe"), ValueError, r"^q_pe: got strides"),
    "kv_c not contiguous in its last axis": ("mla", every_other_column("kv_c"), ValueError, r"^kv_c: got strides"),
    "k_pe not contiguous in its last axis": ("mla", every_other_column("k_pe"), ValueError, r"^k_pe: got strides"),
    "cache too narrow": (
        "mla",
        cache((2, 16, 655)),
        ValueError,
        r"^kv_cache \(fp8_ds_mla\): got 655 elements a row, expected at least 656",
    ),
    "plain cache too narrow": (
        "mla",
        cache((2, 16, 575), dtype=BF16, kv_layout="plain"),
        ValueError,
        r"\(plain\): got 575 elements .*576",
    ),
    "fp8 cache too narrow": ("mla", cache((2, 16, 512), kv_layout="fp8"), ValueError, r"got 512 elements .*least 576"),
    "cache of the wrong dtype": (
        "mla",
        cache((2, 16, 656), dtype=BF16),
        TypeError,
        r"^kv_cache \(fp8_ds_mla\): got torch.bfloat16, expected torch.u",
    ),
    "plain cache of another activation dtype": (
        "mla",
        cache((2, 16, 576), dtype=FP16, kv_layout="plain"),
        TypeError,
        r"\(plain\): got torch.float16, expected torch.bf",
    ),
    "plain cache of bytes": ("mla", cache((2, 16, 1152), kv_layout="plain"), TypeError, r"\(plain\): got torch.uint8"),
    "cache with two axes": (
        "mla",
        cache((16, 656)),
        ValueError,
        r"^kv_cache .*got shape \(16, 656\), expected \[blocks",
    ),
    "cache without rows in a block": ("mla", cache((2, 0, 656)), ValueError, r"got block_size 0, expected at least 1"),
    "cache not contiguous in its last axis": (
        "mla",
        cache((2, 16, 656), (16 * 1312, 1312, 2)),
        ValueError,
        r"^kv_cache .*got strides .*contiguous last axis",
    ),
    "cache rows that overlap": (
        "mla",
        cache((2, 16, 656), (16 * 656, 640, 1)),
        ValueError,
        r"got row stride 640, expected at least 656",
    ),
    "an unknown rule": (
        "mla",
        put("scale_rule", "e8m0"),
        ValueError,
        r"^scale_rule: got 'e8m0', expected one of ue8m0, fp32",
    ),
    "an unknown rule where there are no tiles": (
        "mla",
        lambda _call: mla_call(layout="plain") | {"scale_rule": None},
        ValueError,
        r"^scale_rule: got None, expected one of ue8m0, fp32",
    ),
    "cache blocks that overlap": (
        "mla",
        cache((2, 16, 656), (656, 656, 1)),
        ValueError,
        r"got block stride 656, expected blocks one behind the other",
    ),
    "cache address not aligned": (
        "mla",
        shifted_cache(2),
        ValueError,
        r"got address \d+, expected a multiple of 4 bytes",
    ),
    "cache row stride not aligned": (
        "mla",
        cache((2, 16, 656), (16 * 660, 658, 1)),
        ValueError,
        r"got stride 658, expected a multiple of 4 bytes",
    ),
    "cache block stride not aligned": (
        "mla",
        cache((2, 16, 656), (16 * 656 + 2, 656, 1)),
        ValueError,
        r"got stride 10498, expected a multiple of 4",
    ),
    "auto on a width that no layout has": (
        "mla",
        cache((2, 16, 600), kv_layout="auto"),
        ValueError,
        r"^kv_cache: got torch.uint8 600 wide, expected .*auto",
    ),
    "auto on another activation dtype": (
        "mla",
        cache((2, 16, 576), dtype=FP16, kv_layout="auto"),
        ValueError,
        r"^kv_cache: got torch.float16 576 wide",
    ),
    "more slots than tokens": (
        "mla",
        put("slot_mapping", torch.full((6,), -1)),
        ValueError,
        r"^slot_mapping: got 6 slots, .* tokens=5",
    ),
    "slots of floats": (
        "mla",
        cast("slot_mapping", FP32),
        TypeError,
        r"^slot_mapping: got torch.float32, expected torch.i",
    ),
    "slots with two axes": (
        "mla",
        put("slot_mapping", torch.full((1, 5), -1)),
        ValueError,
        r"^slot_mapping: got shape \(1, 5\)",
    ),
    "slots with a stride": (
        "mla",
        put("slot_mapping", torch.full((8,), -1)[::2]),
        ValueError,
        r"^slot_mapping: got strides \(2,\)",
    ),
    "too few positions": ("mla", cut("positions", slice(4)), ValueError, r"^positions: got shape \(4,\), .*tokens=5"),
    "positions of floats": ("mla", cast("positions", FP32), TypeError, r"^positions: got torch.float32"),
    "positions with a stride": (
        "mla",
        put("positions", torch.zeros(10, dtype=torch.int64)[::2]),
        ValueError,
        r"^positions: got strides \(2,\)",
    ),
    "a rope table of the wrong width": (
        "mla",
        cut("cos_sin_cache", ..., slice(32)),
        ValueError,
        r"^cos_sin_cache: got shape \(37, 32\), .*rope_dim=64",
    ),
    "a rope table with four axes": (
        "mla",
        cut("cos_sin_cache", slice(None), None, None),
        ValueError,
        r"^cos_sin_cache: got shape \(37, 1, 1, 64\)",
    ),
    "an empty rope table": (
        "mla",
        cut("cos_sin_cache", slice(0)),
        ValueError,
        r"^cos_sin_cache: got 0 rows, expected at",
    ),
    "a float64 rope table": ("mla", cast("cos_sin_cache", FP64), TypeError, r"^cos_sin_cache: got torch.float64"),
    "a rope table with a strided last axis": (
        "mla",
        every_other_column("cos_sin_cache"),
        ValueError,
        r"^cos_sin_cache: got strides",
    ),
    "q_out of the wrong width": (
        "mla",
        output("q_out", (5, 3, 512), BF16),
        ValueError,
        r"^q_out: got shape \(5, 3, 512\), expected .*dim=576",
    ),
    "q_out with too few heads": (
        "mla",
        output("q_out", (5, 2, 576), BF16),
        ValueError,
        r"^q_out: got 2 heads, .*least 3",
    ),
    "q_out with other tokens": (
        "mla",
        output("q_out", (4, 3, 576), BF16),
        ValueError,
        r"^q_out: got shape \(4, 3, 576\)",
    ),
    "q_out of bytes": (
        "mla",
        output("q_out", (5, 3, 576), torch.uint8),
        TypeError,
        r"^q_out: got torch.uint8, expected",
    ),
    "q_out of another activation dtype": (
        "mla",
        output("q_out", (5, 3, 576), FP16),
        TypeError,
        r": got torch.float16, exp",
    ),
    "q_out against q_dtype": (
        "mla",
        put("q_dtype", FN),
        TypeError,
        r"^q_out: got torch.bfloat16, expected q_dtype=torch.fl",
    ),
    "q_out whose heads share memory": (
        "mla",
        output("q_out", (5, 3, 576), BF16, (576, 0, 1)),
        ValueError,
        r"^q_out: got strides .*do not overlap",
    ),
    "q_out whose rows share memory": (
        "mla",
        output("q_out", (5, 3, 576), BF16, (576, 576, 1)),
        ValueError,
        r"^q_out: got strides .*do not overlap",
    ),
    "q_out not contiguous in its last axis": (
        "mla",
        output("q_out", (5, 3, 576), BF16, (3456, 1152, 2)),
        ValueError,
        r"^q_out: got strides .*contiguous last",
    ),
    "q_out overlapping q_nope": (
        "mla",
        q_out_inside("q_nope", BF16, 576),
        ValueError,
        r"^q_out: got memory that overlaps q_nope",
    ),
    "q_out overlapping kv_c": ("mla", q_out_inside("kv_c", BF16, 576), ValueError, r"^q_out: got memory .* kv_c"),
    "q_out overlapping the cache": (
        "mla",
        lambda _call: {
            "kv_cache": (memory_ := torch.zeros(2, 16, 576, dtype=BF16)),
            "kv_layout": "plain",
            "q_out": memory_[0, :15].reshape(5, 3, 576),
        },
        ValueError,
        r"^q_out: got memory that overlaps kv_cache",
    ),
    "q_dtype e5m2": (
        "mla",
        lambda _call: {"q_out": None, "q_dtype": torch.float8_e5m2},
        TypeError,
        r"^q_dtype: got torch.float8_e5m2, expected torch.bfloat16 or torch.float8_e4m3fn or",
    ),
    "fp8_dtype e5m2": (
        "mla",
        put("fp8_dtype", torch.float8_e5m2),
        ValueError,
        r"^fp8_dtype: got torch.float8_e5m2, exp",
    ),
    "fp8_dtype as a word": ("mla", put("fp8_dtype", "fp8"), ValueError, r"^fp8_dtype: got fp8, expected torch.float8"),
    "fp8_dtype against the cache": (
        "mla",
        cache((2, 16, 576), dtype=FNUZ, kv_layout="fp8"),
        ValueError,
        r"^kv_cache: got torch.float8_e4m3fnuz, expected fp8_dtype=torch.float8_e4m3fn",
    ),
    "fp8_dtype against the query": (
        "mla",
        lambda _call: {"q_out": None, "q_dtype": FNUZ, "q_scale": torch.tensor(1.0)},
        ValueError,
        r"^q_dtype: got torch.float8_e4m3fnuz, expected fp8_dtype=torch.float8_e4m3fn",
    ),
    "an unknown style": (
        "mla",
        put("rope_style", "gptj"),
        ValueError,
        r"^rope_style: got 'gptj', expected one of interleaved, neox",
    ),
    "a bool for a style": ("mla", put("rope_style", True), ValueError, r"^rope_style: got True, expected one of inter"),
    "an unknown rounding": (
        "mla",
        put("rounding", "bf16"),
        ValueError,
        r"^rounding: got 'bf16', expected one of split, fp32",
    ),
    "an unknown layout": (
        "mla",
        put("kv_layout", "fp8_e5m2"),
        ValueError,
        r"^kv_layout: got 'fp8_e5m2', expected one of auto",
    ),
    "an indexer layout": (
        "mla",
        put("kv_layout", "flat"),
        ValueError,
        r"^kv_layout: got 'flat', expected one of auto, plain",
    ),
}

INDEXER: dict[str, Bad] = {
    "q is no tensor": ("indexer", put("q", 3), TypeError, r"^q: got int, expected a torch.Tensor"),
    "float64 q": ("indexer", cast("q", FP64), TypeError, r"^q: got torch.float64, expected torch.bfloat16 or"),
    "k in another dtype": (
        "indexer",
        cast("k", FP32),
        TypeError,
        r"^k: got torch.float32, expected torch.bfloat16 as q",
    ),
    "another index width": ("indexer", cut("q", ..., slice(64)), ValueError, r"^q: got shape \(5, 3, 64\), .*dim=128"),
    "k too narrow": ("indexer", cut("k", ..., slice(64)), ValueError, r"^k: got shape \(5, 64\), .*dim=128"),
    "k with other tokens": ("indexer", cut("k", slice(3)), ValueError, r"^k: got 3 tokens, expected tokens=5 as q"),
    "q not contiguous in its last axis": ("indexer", every_other_column("q"), ValueError, r"^q: got strides"),
    "k not contiguous in its last axis": ("indexer", every_other_column("k"), ValueError, r"^k: got strides"),
    "weights with other heads": (
        "indexer",
        cut("weights", ..., slice(2)),
        ValueError,
        r"^weights: got shape .*heads=3",
    ),
    "integer weights": (
        "indexer",
        cast("weights", torch.int32),
        TypeError,
        r"^weights: got torch.int32, expected torch.f",
    ),
    "weights not contiguous in their last axis": (
        "indexer",
        every_other_column("weights"),
        ValueError,
        r"^weights: got strides",
    ),
    "norm_weight too short": (
        "indexer",
        cut("norm_weight", slice(64)),
        ValueError,
        r"^norm_weight: got shape \(64,\), .*128",
    ),
    "norm_bias missing": (
        "indexer",
        put("norm_bias", None),
        TypeError,
        r"^norm_bias: got NoneType, expected a torch.Ten",
    ),
    "norm_bias with two axes": ("indexer", cut("norm_bias", None), ValueError, r"^norm_bias: got shape \(1, 128\)"),
    "integer norm_weight": (
        "indexer",
        cast("norm_weight", torch.int8),
        TypeError,
        r"^norm_weight: got torch.int8, expected",
    ),
    "strided norm_weight": (
        "indexer",
        every_other_column("norm_weight"),
        ValueError,
        r"^norm_weight: got strides \(2,\)",
    ),
    "more slots than tokens": (
        "indexer",
        put("slot_mapping", torch.full((9,), -1)),
        ValueError,
        r"^slot_mapping: got 9 slots, .* tokens=5",
    ),
    "too many positions": (
        "indexer",
        put("positions", torch.zeros(6, dtype=torch.int64)),
        ValueError,
        r"^positions: got shape \(6,\)",
    ),
    "a rope table of the wrong width": (
        "indexer",
        cut("cos_sin_cache", ..., slice(32)),
        ValueError,
        r"^cos_sin_cache: got shape .*rope_dim=64",
    ),
    "eps that is NaN": ("indexer", put("eps", math.nan), ValueError, r"^eps: got nan, expected a finite fp32 number"),
    "infinite eps": ("indexer", put("eps", math.inf), ValueError, r"^eps: got inf, expected a finite fp32 number"),
    "eps beyond fp32": ("indexer", put("eps", 1e39), ValueError, r"^eps: got 1e\+39, expected a finite fp32 number"),
    "eps that is no number": ("indexer", put("eps", "1e-6"), TypeError, r"^eps: got str, expected a number"),
    "infinite weights_scale": (
        "indexer",
        put("weights_scale", -math.inf),
        ValueError,
        r"^weights_scale: got -inf, expected",
    ),
    "weights_scale that is a tensor": (
        "indexer",
        put("weights_scale", torch.tensor(1.0)),
        TypeError,
        r"^weights_scale: got Tensor, expected a number",
    ),
    "an unknown style": ("indexer", put("rope_style", "half"), ValueError, r"^rope_style: got 'half', expected one of"),
    "an unknown rule": (
        "indexer",
        put("scale_rule", "e8m0"),
        ValueError,
        r"^scale_rule: got 'e8m0', expected one of ue8m0, fp32",
    ),
    "an unknown rounding": (
        "indexer",
        put("rounding", None),
        ValueError,
        r"^rounding: got None, expected one of split, fp32",
    ),
    "an unknown layout": (
        "indexer",
        put("kv_layout", "shuffled"),
        ValueError,
        r"^kv_layout: got 'shuffled', expected .*flat",
    ),
    "a tiled cache whose blocks are no multiple of a tile": (
        "indexer",
        cache((4, 8, 132), kv_layout="tiled16"),
        ValueError,
        r"^kv_layout: got 'tiled16' with block_size 8, expected a block_size that is a multiple of 16",
    ),
    "a cache too narrow": (
        "indexer",
        cache((2, 16, 128)),
        ValueError,
        r"^kv_cache \(flat\): got 128 elements a row, expected at least 132",
    ),
    "a cache of the wrong dtype": (
        "indexer",
        cache((2, 16, 132), dtype=torch.int8),
        TypeError,
        r"^kv_cache \(flat\): got torch.int8, expected torch.uint8",
    ),
    "a cache not contiguous inside its blocks": (
        "indexer",
        cache((2, 16, 132), (16 * 136, 136, 1)),
        ValueError,
        r"^kv_cache \(flat\): got strides \(2176, 136, 1\), expected each block contiguous \(planar layout\)",
    ),
    "cache blocks that overlap": (
        "indexer",
        cache((2, 16, 132), (132, 132, 1)),
        ValueError,
        r"got block stride 132, expected blocks one behind",
    ),
    "cache address not aligned": (
        "indexer",
        shifted_cache(1),
        ValueError,
        r"got address \d+, expected a multiple of 4",
    ),
    "cache block stride not aligned": (
        "indexer",
        cache((2, 16, 132), (16 * 132 + 1, 132, 1)),
        ValueError,
        r"got stride 2113, expected a multiple of 4",
    ),
    "q_out in the activation dtype": (
        "indexer",
        output("q_out", (5, 3, 128), BF16),
        TypeError,
        r"^q_out: got torch.bfloat16, expected torch.float8_e4m3fn",
    ),
    "q_out in the other format": (
        "indexer",
        output("q_out", (5, 3, 128), FNUZ),
        TypeError,
        r"^q_out: got torch.float8_e4m3fnuz, expected torch.float8",
    ),
    "q_out with too few heads": (
        "indexer",
        output("q_out", (5, 2, 128), FN),
        ValueError,
        r"^q_out: got 2 heads, expected",
    ),
    "weights_out in bf16": (
        "indexer",
        output("weights_out", (5, 3), BF16),
        TypeError,
        r"^weights_out: got torch.bfloat16",
    ),
    "weights_out with too few heads": (
        "indexer",
        output("weights_out", (5, 2), FP32),
        ValueError,
        r"^weights_out: got 2 heads, expected at least 3",
    ),
    "weights_out whose rows share memory": (
        "indexer",
        output("weights_out", (5, 3), FP32, (0, 1)),
        ValueError,
        r"^weights_out: got strides .*do not overlap",
    ),
    "q_out overlapping q": (
        "indexer",
        q_out_inside("q", FN, 128),
        ValueError,
        r"^q_out: got memory that overlaps q, exp",
    ),
    "q_out overlapping k": (
        "indexer",
        q_out_inside("k", FN, 128),
        ValueError,
        r"^q_out: got memory that overlaps k, exp",
    ),
    "outputs overlapping each other": (
        "indexer",
        lambda _call: {
            "q_out": (memory_ := torch.zeros(5, 3, 128, dtype=torch.uint8).view(FN)),
            "weights_out": memory_.view(torch.uint8)[:, :1].reshape(5, 128).view(FP32)[:, :3],
        },
        ValueError,
        r"got memory that overlaps (q_out|weights_out), expected memory of its own",
    ),
    "fp8_dtype against the cache": (
        "indexer",
        cache((2, 16, 132), dtype=FNUZ),
        ValueError,
        r"^kv_cache: got torch.float8_e4m3fnuz, expected fp8_dtype=",
    ),
}

DEVICES = {
    "mla": (
        "q_pe",
        "kv_c",
        "k_pe",
        "kv_cache",
        "slot_mapping",
        "positions",
        "cos_sin_cache",
        "q_out",
        "q_scale",
        "k_scale",
    ),
    "indexer": (
        "weights",
        "k",
        "kv_cache",
        "slot_mapping",
        "norm_weight",
        "norm_bias",
        "positions",
        "cos_sin_cache",
        "q_out",
        "weights_out",
    ),
}
GRADS = {
    "mla": ("q_nope", "q_pe", "kv_c", "k_pe", "cos_sin_cache", "q_out"),
    "indexer": ("q", "weights", "k", "norm_weight", "norm_bias", "cos_sin_cache", "weights_out"),
}


def assert_refused(op: str, call: Call, error: type[Exception], message: str) -> None:
    before = memory(on_cpu(call))
    with pytest.raises(error, match=message):
        OPS[op](**call)
    after = memory(on_cpu(call))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("op", OPS)
def test_what_the_cases_below_change_is_a_good_call(op: str) -> None:
    OPS[op](**call_of(op))


@pytest.mark.parametrize(("op", "change", "error", "message"), MLA.values(), ids=MLA)
def test_the_mla_fusion_refuses(op: str, change: Change, error: type[Exception], message: str) -> None:
    call = mla_call()
    assert_refused(op, call | change(call), error, message)


@pytest.mark.parametrize(("op", "change", "error", "message"), INDEXER.values(), ids=INDEXER)
def test_the_indexer_fusion_refuses(op: str, change: Change, error: type[Exception], message: str) -> None:
    call = indexer_call()
    assert_refused(op, call | change(call), error, message)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in DEVICES.items() for name in names])
def test_a_tensor_on_another_device_is_named(op: str, name: str) -> None:
    call = mla_call(layout="fp8", query=FN) if op == "mla" else indexer_call()
    assert_refused(op, call | on_meta(name)(call), ValueError, rf"^{name}: got device meta, expected cpu as q")


@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in GRADS.items() for name in names])
def test_a_tensor_that_requires_grad_is_named_and_welcome_under_no_grad(op: str, name: str) -> None:
    call = call_of(op)
    if call[name].dtype in (FN, FNUZ):
        call[name] = call[name].clone()
    call |= needing_grad(name)(call)
    assert_refused(op, call, ValueError, rf"^{name}: got a tensor that requires grad, expected none")
    with torch.no_grad():
        OPS[op](**call)


def test_a_view_with_the_negative_bit_is_refused() -> None:
    """It is another number than its memory holds, and only torch knows."""
    call = mla_call(3)
    call["q_pe"] = torch._neg_view(call["q_pe"])
    assert_refused("mla", call, ValueError, r"^q_pe: got a view with the negative bit")


@pytest.mark.parametrize(
    ("other", "got"),
    [
        (lambda tensor: tensor.to_sparse(), r"torch\.sparse_coo"),
        (lambda tensor: torch.nested.nested_tensor([tensor[0], tensor[1]]), "a nested tensor"),
    ],
    ids=["sparse", "nested"],
)
def test_a_tensor_without_strides_is_refused(other: Callable[[torch.Tensor], torch.Tensor], got: str) -> None:
    call = mla_call(3)
    with pytest.raises(TypeError, match=rf"^q_pe: got {got}, expected a strided tensor"):
        OPS["mla"](**call | {"q_pe": other(call["q_pe"])})


SCALES: dict[str, tuple[Any, type[Exception], str]] = {
    "missing": (None, ValueError, r"got None, expected one fp32 element"),
    "a float": (1.0, TypeError, r"got float, expected a torch.Tensor"),
    "bf16": (torch.ones(1, dtype=BF16), TypeError, r"got torch.bfloat16, expected torch.float32"),
    "float64": (torch.ones(1, dtype=FP64), TypeError, r"got torch.float64, expected torch.float32"),
    "two elements": (torch.ones(2), ValueError, r"got 2 elements, expected one"),
    "no element": (torch.ones(0), ValueError, r"got 0 elements, expected one"),
    "zero": (torch.zeros(1), ValueError, r"got 0.0, expected a positive finite scale"),
    "negative": (torch.tensor(-1.0), ValueError, r"got -1.0, expected a positive finite scale"),
    "infinite": (torch.tensor(math.inf), ValueError, r"got inf, expected a positive finite scale"),
    "NaN": (torch.tensor(math.nan), ValueError, r"got nan, expected a positive finite scale"),
}


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
@pytest.mark.parametrize(("scale", "error", "message"), SCALES.values(), ids=SCALES)
def test_a_scale_that_is_needed_is_checked(name: str, scale: Any, error: type[Exception], message: str) -> None:
    call = mla_call(layout="fp8", query=FN)
    assert_refused("mla", call | {name: scale}, error, rf"^{name}: {message}")


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
@pytest.mark.parametrize(
    "scale", [value for value, _, _ in SCALES.values() if value is None or isinstance(value, torch.Tensor)]
)
def test_a_scale_that_nothing_needs_is_ignored(name: str, scale: Any) -> None:
    call = mla_call(2)
    for provider in ("split", "interpreter"):
        assert_same_memory(run("mla", provider, call | {name: scale}), run("mla", "oracle", call), but=(name,))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale_may_have_any_number_of_axes(shape: tuple[int, ...]) -> None:
    call = mla_call(2, layout="fp8", query=FN)
    reshaped = {name: call[name].reshape(shape) for name in ("q_scale", "k_scale")}
    for provider in ("split", "interpreter"):
        assert_same_memory(run("mla", provider, call | reshaped), run("mla", "oracle", call))


@pytest.mark.parametrize(
    ("dtype", "width", "layout", "activation"),
    [
        (BF16, 576, "plain", BF16),
        (FP32, 576, "plain", FP32),
        (FN, 576, "fp8", BF16),
        (torch.uint8, 576, "fp8", FP16),
        (torch.uint8, 656, "fp8_ds_mla", BF16),
    ],
)
def test_auto_tells_the_layout_from_dtype_and_width(
    dtype: torch.dtype, width: int, layout: str, activation: torch.dtype
) -> None:
    call = mla_call(activation=activation, layout=layout)
    call |= {"kv_cache": guarded((3, 16, width), dtype), "kv_layout": "auto", "k_scale": torch.tensor(1.0)}
    _, config = OPS["mla"].resolve(**call)
    assert config.latent_kv.layout == layout


def test_bytes_take_their_format_from_fp8_dtype() -> None:
    codes = []
    for fp8 in (FN, FNUZ):
        call = mla_call(1, 1, layout="fp8", fp8=fp8, k_scale=torch.tensor(1.0), slot_mapping=torch.tensor([0]))
        call["kv_c"].fill_(1.0)
        call["kv_cache"] = call["kv_cache"].view(torch.uint8)
        codes.append(int(run("mla", "oracle", call)["kv_cache"][0, 0, 0]))
    assert codes == [0x38, 0x40]


def test_an_fp8_tensor_that_agrees_with_fp8_dtype_is_taken() -> None:
    for fp8 in (FN, FNUZ):
        call = indexer_call(2, fp8=fp8)
        as_fp8 = call | {"kv_cache": call["kv_cache"].view(fp8)}
        assert_same_memory(run("indexer", "split", as_fp8), run("indexer", "oracle", call))


@pytest.mark.parametrize("op", OPS)
def test_no_head_at_all_still_writes_keys(op: str) -> None:
    call = call_of(op, 2, heads=0, slot_mapping=torch.tensor([1, 3]))
    for provider in ("split", "interpreter"):
        assert_same_memory(run(op, provider, call), run(op, "oracle", call))


def test_queries_of_no_head_at_all_are_refused() -> None:
    with pytest.raises(ValueError, match="q_nope: got 0 heads, expected at least 1"):
        EVERY_OP["queries"](**call_of("queries", 2, heads=0))


@pytest.mark.parametrize("name", ["q_scale", "k_scale"])
def test_a_scale_that_nothing_needs_has_to_be_a_tensor_all_the_same(name: str) -> None:
    assert_refused("mla", mla_call() | {name: 1.0}, TypeError, f"^{name}: got float, expected a torch.Tensor")


@pytest.mark.parametrize("width", [132, 144])
def test_an_indexer_cache_may_be_wider_than_its_rows(width: int) -> None:
    call = indexer_call(3, slot_mapping=torch.tensor([0, 17, 5]))
    call["kv_cache"] = guarded((2, 16, width), torch.uint8)
    for provider in ("split", "interpreter"):
        assert_same_memory(run("indexer", provider, call), run("indexer", "oracle", call))


def test_outputs_beside_an_input_in_one_buffer_are_refused_only_where_byte_ranges_meet() -> None:
    arena = torch.randn(2 * 5 * 3 * 576, generator=seeded(1)).to(BF16)
    call = mla_call(slot_mapping=torch.empty(0, dtype=torch.int64))
    call["q_nope"] = arena[: 5 * 3 * 512].view(5, 3, 512)
    call["q_out"] = arena[5 * 3 * 512 : 5 * 3 * (512 + 576)].view(5, 3, 576)
    OPS["mla"](**call)
    call["q_out"] = arena[5 * 3 * 512 - 1 : 5 * 3 * (512 + 576) - 1].view(5, 3, 576)
    with pytest.raises(ValueError, match="q_out: got memory that overlaps q_nope"):
        OPS["mla"](**call)

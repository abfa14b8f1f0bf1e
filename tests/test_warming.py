"""What `warm_up` compiles, leaves out and refuses. That it is what launches look for: kernels/test_variants.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dsafuse import warm_up
from dsafuse.kernels import ahead
from dsafuse.models import MODELS, ModelShape
from dsafuse.registry import OPS
from dsafuse.target import Target
from dsafuse.warming import Compiled

MLA, INDEXER = "fused_qk_rope_concat_and_cache_mla", "indexer_qk_rope_quant_and_cache"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be compiled, without compiling it."""
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        ahead, "compile_call", lambda op, _, config, target, row, *, here: found.append((op, config, row, here))
    )
    return found


def test_every_op_is_compiled_for_every_cache_and_query_that_a_target_has(asked: list[tuple[Any, ...]]) -> None:
    done = warm_up("deepseek-v3.2", "sm_90", tp=8)
    assert {each.op for each in done.compiled} == OPS.keys()
    assert [(each.op, each.config, each.row_alignment, False) for each in done.compiled] == asked
    assert (done.target, done.loaded, done.left_out) == ("sm_90", False, ())
    assert len(set(done.compiled)) == len(done.compiled)
    mla = {(each.config.latent_kv.layout, each.config.latent_q.query) for each in done.compiled if each.op == MLA}
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    assert mla == {("plain", bf16), ("fp8", bf16), ("fp8", fp8), ("fp8_ds_mla", bf16)}
    for each in done.compiled:
        assert replace(each, row_alignment=17 - each.row_alignment) in done.compiled
        if each.config.latent_q:
            assert each.config.latent_q.heads == 16
        if each.config.index_q:
            assert (each.config.index_q.heads, each.config.index_q.rope_style) == (64, "neox")


def test_tiles_are_compiled_for_the_rule_that_is_asked_for(asked: list[tuple[Any, ...]]) -> None:
    done = warm_up("glm-5.2", "sm_90", scale_rule="fp32")
    rules = {(kv.layout, kv.scale_rule) for each in done.compiled if (kv := each.config.latent_kv)}
    assert rules == {("plain", "ue8m0"), ("fp8", "ue8m0"), ("fp8_ds_mla", "fp32")}
    assert {each.config.index_k.scale_rule for each in done.compiled if each.config.index_k} == {"ue8m0"}
    assert len(done.compiled) == len(warm_up("glm-5.2", "sm_90").compiled)


def test_the_indexer_is_compiled_for_its_own_rule(asked: list[tuple[Any, ...]]) -> None:
    done = warm_up("glm-5.2", "sm_90", index_scale_rule="fp32")
    roles = [role for each in done.compiled for role in (each.config.index_q, each.config.index_k) if role]
    assert {role.scale_rule for role in roles} == {"fp32"}
    assert {kv.scale_rule for each in done.compiled if (kv := each.config.latent_kv)} == {"ue8m0"}


def test_what_is_asked_for_is_all_that_is_compiled(asked: list[tuple[Any, ...]]) -> None:
    done = warm_up(
        replace(MODELS["glm-5.2"], heads=24),
        Target.named("gfx942"),
        ops=["prepare_qk"],
        tp=2,
        activation=torch.float16,
        kv_layouts=["fp8"],
        queries=["fp8"],
        index_kv_layouts=["tiled16"],
        layers=["indexed", "unindexed"],
        block_size=32,
        rounding="fp32",
    )
    configs = list(dict.fromkeys(each.config for each in done.compiled))
    assert done.compiled == tuple(Compiled("prepare_qk", config, row) for config in configs for row in (16, 1))
    first, kept, second = configs
    assert kept == replace(first, clear_topk=None)
    assert (first.latent_q, first.latent_kv) == (second.latent_q, second.latent_kv)
    assert (first.activation, first.fp8, first.rounding) == (torch.float16, torch.float8_e4m3fnuz, "fp32")
    assert (first.latent_q.heads, first.latent_q.query) == (12, torch.float8_e4m3fnuz)
    assert (first.latent_kv.layout, first.latent_kv.block_size) == ("fp8", 32)
    assert (first.index_k.layout, first.index_k.block_size, first.index_q.heads) == ("tiled16", 32, 32)
    assert (second.index_q, second.index_k, second.clear_topk) == (None, None, None)


@pytest.mark.parametrize(("op", "indexed"), [("prepare_latents", {2048}), ("prepare_qk", {2048, None})])
def test_top_k_rows_are_cleared_by_layers_with_an_indexer_alone(
    op: str, indexed: set[int | None], asked: list[tuple[Any, ...]]
) -> None:
    """prepare_qk stands where an engine may clear them by itself."""
    done = warm_up("glm-5.2", "sm_90", ops=[op], layers=["indexed", "unindexed"])
    assert {
        (c.index_k is not None, c.clear_topk and c.clear_topk.width) for c in (k.config for k in done.compiled)
    } == {
        *((True, topk) for topk in indexed),
        (False, None),
    }


@pytest.mark.parametrize("queries", [["activation"], ["fp8"], ["activation", "fp8"]])
def test_a_query_that_is_its_rotary_part_alone_has_a_kernel_of_its_own(
    asked: list[tuple[Any, ...]], queries: list[str]
) -> None:
    """FlashMLA takes the parts apart, and so do short prefills that are attended densely."""
    done = warm_up("glm-5.2", "sm_90", ops=["prepare_queries"], queries=queries, layers=["indexed", "unindexed"])
    found = {
        (q.nope, q.query, each.config.index_q is not None) for each in done.compiled if (q := each.config.latent_q)
    }
    held = {"activation": torch.bfloat16, "fp8": torch.float8_e4m3fn}
    expected = {(True, held[query], indexed) for query in queries for indexed in (True, False)}
    if "activation" in queries:
        expected |= {(False, torch.bfloat16, indexed) for indexed in (True, False)}
    assert found == expected
    assert done.left_out == ()


def test_what_can_not_be_compiled_is_left_out_and_says_why(asked: list[tuple[Any, ...]]) -> None:
    done = warm_up("glm-5.2", "sm_80", ops=[INDEXER, MLA])
    assert {each.config.latent_kv.layout for each in done.compiled} == {"plain"}
    assert set(done.left_out) == {f"{op}: sm_80 has no conversion to torch.float8_e4m3fn" for op in (INDEXER, MLA)}
    done = warm_up("glm-5.2", "gfx950", ops=[INDEXER], index_kv_layouts=["tiled16"], block_size=8)
    assert done.compiled == ()
    assert "expected a block_size that is a multiple of 16" in done.left_out[0]


@pytest.mark.parametrize("block_size", [2**25, 2**26, 2**31 - 1])
def test_a_block_is_refused_for_its_own_size_alone(block_size: int, asked: list[tuple[Any, ...]]) -> None:
    """How many there are is no matter of warm_up's."""
    done = warm_up("glm-5.2", "sm_90", block_size=block_size)
    assert {each.config.latent_kv.layout for each in done.compiled if each.op == MLA} == {"plain", "fp8", "fp8_ds_mla"}
    most = (2**31 - 1) // 132
    reason = f"kv_cache (flat): got block_size {block_size}, expected at most {most}"
    assert f"{INDEXER}: {reason}" in done.left_out
    assert all(reason in why for why in done.left_out)


def test_dtypes_are_those_of_the_engine(asked: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(ahead, "compile_call", lambda _op, arguments, *_, **__: seen.update(arguments))
    dtypes = {"positions": torch.int32, "index_weights": torch.float32, "index_cos_sin_cache": torch.bfloat16}
    warm_up("glm-5.2", "sm_90", ops=[INDEXER], dtypes=dtypes)
    assert (seen["positions"].dtype, seen["slot_mapping"].dtype) == (torch.int32, torch.int64)
    assert (seen["weights"].dtype, seen["cos_sin_cache"].dtype) == (torch.float32, torch.bfloat16)


def shaped(**changes: Any) -> ModelShape:
    return replace(MODELS["glm-5.2"], **changes)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"model": "llama"}, ValueError, "model: got 'llama', expected one of deepseek-v3.2, glm-5.2"),
        ({"target": "sm_42"}, ValueError, "target: got 'sm_42', expected one of"),
        ({"target": "cpu"}, ValueError, "target: got 'cpu', expected a GPU"),
        ({"ops": ["rope"]}, ValueError, "ops: got 'rope', expected one of"),
        ({"ops": "prepare_qk"}, TypeError, r"ops: got a str, expected several names, as \['prepare_qk'\]"),
        ({"tp": 3}, ValueError, "tp: got 3, expected a divisor of 64 heads"),
        ({"activation": torch.float64}, ValueError, "activation: got torch.float64, expected one of"),
        ({"kv_layouts": ["flat"]}, ValueError, "kv_layouts: got 'flat', expected one of"),
        ({"queries": ["bf16"]}, ValueError, "queries: got 'bf16', expected one of activation, fp8"),
        ({"index_kv_layouts": ["plain"]}, ValueError, "index_kv_layouts: got 'plain', expected one of"),
        ({"layers": ["dense"]}, ValueError, "layers: got 'dense', expected one of indexed, unindexed"),
        ({"block_size": -1}, ValueError, "block_size: got -1, expected 1 to 2147483647"),
        ({"block_size": 2**31}, ValueError, "block_size: got 2147483648, expected 1 to 2147483647"),
        ({"scale_rule": "e8m0"}, ValueError, "scale_rule: got 'e8m0', expected one of ue8m0, fp32"),
        ({"index_scale_rule": "e8m0"}, ValueError, "index_scale_rule: got 'e8m0', expected one of ue8m0, fp32"),
        ({"rounding": "none"}, ValueError, "rounding: got 'none', expected one of"),
        ({"dtypes": {"k": torch.int8}}, ValueError, "dtypes: got 'k', expected one of"),
        ({"dtypes": {"positions": torch.int8}}, TypeError, "positions: got torch.int8, expected"),
        ({"dtypes": {"positions": "int64"}}, TypeError, "dtypes: got 'int64' for positions, expected a torch.dtype"),
        ({"dtypes": 5}, TypeError, "dtypes: got int, expected a mapping"),
        ({"dtypes": ["positions"]}, TypeError, "dtypes: got list, expected a mapping"),
        ({"dtypes": {"q_out": torch.float16}}, ValueError, "dtypes: got 'q_out', expected one of"),
        ({"dtypes": {"k_scale": torch.float64}}, ValueError, "dtypes: got 'k_scale', expected one of"),
        ({"ops": 5}, TypeError, "ops: got int, expected several names"),
        ({"model": 5}, TypeError, "model: got int, expected a name or a ModelShape"),
        ({"model": None}, TypeError, "model: got NoneType, expected a name or a ModelShape"),
        ({"model": shaped(index_heads=0)}, ValueError, "model.index_heads: got 0, expected at least 1"),
        ({"model": shaped(heads=-1)}, ValueError, "model.heads: got -1, expected at least 1"),
        ({"model": shaped(heads=None)}, TypeError, "model.heads: got NoneType, expected an int"),
        ({"model": shaped(mla_rope_style=None)}, ValueError, "model.mla_rope_style: got None, expected one of"),
        ({"target": 5}, TypeError, "target: got int, expected a name or a Target"),
        ({"target": None}, TypeError, "target: got NoneType, expected a name or a Target"),
        ({"tp": "8"}, TypeError, "tp: got str, expected an int"),
        ({"tp": 8.0}, TypeError, "tp: got float, expected an int"),
        ({"tp": True}, TypeError, "tp: got bool, expected an int"),
        ({"block_size": "64"}, TypeError, "block_size: got str, expected an int"),
        ({"activation": "bf16"}, ValueError, "activation: got bf16, expected one of"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: dict[str, Any], error: type[Exception], match: str, asked: list[tuple[Any, ...]]
) -> None:
    with pytest.raises(error, match=f"^{match}"):
        warm_up(**{"model": "glm-5.2", "target": "sm_90"} | arguments)
    assert not asked

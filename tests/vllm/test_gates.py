"""Every gate is tripped, and says the value that it objects to."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.vllm import gates
from tests.vllm import layers

PIECEWISE = SimpleNamespace(requires_piecewise_compilation=lambda: True)
FULL = SimpleNamespace(requires_piecewise_compilation=lambda: False)

# (gate, op, changes of the wrapper, changes of the config, the sentence)
Trip = tuple[str, str, dict[str, Any], dict[str, Any], str]
TRIPS: list[Trip] = [
    (
        "why_not_attributes",
        "mla",
        {"mla_attn__impl": SimpleNamespace()},
        {},
        "the layer must have mla_attn.impl.supports_quant_query_input, got one without",
    ),
    (
        "why_not_indexer_attributes",
        "indexer",
        {"indexer__k_norm": None},
        {},
        "the layer must have indexer.k_norm.eps, got one without",
    ),
    ("why_not_query_path", "mla", {"q_lora_rank": None}, {}, "q_lora_rank must be set, got None"),
    ("why_not_query_path", "indexer", {"fuse_qkv_rmsnorm": True}, {}, "fuse_qkv_rmsnorm must be off, got True"),
    (
        "why_not_llama_4_scaling",
        "mla",
        {},
        {"model_config__hf_text_config__llama_4_scaling": {"beta": 0.1}},
        "llama_4_scaling must be absent, got {'beta': 0.1}",
    ),
    ("why_not_positions", "mla", {}, {"model_config__uses_mrope": True}, "got a model with multimodal RoPE"),
    (
        "why_not_parallel",
        "mla",
        {},
        {"parallel_config__decode_context_parallel_size": 2},
        "decode_context_parallel_size must be 1, got 2",
    ),
    (
        "why_not_parallel",
        "indexer",
        {},
        {"parallel_config__prefill_context_parallel_size": 4},
        "prefill_context_parallel_size must be 1, got 4",
    ),
    ("why_not_parallel", "mla", {"dcp_q_replicate": True}, {}, "context parallelism must be off"),
    (
        "why_not_graph",
        "mla",
        {},
        {"compilation_config__cudagraph_mode": PIECEWISE, "compilation_config__splitting_ops": []},
        "splitting_ops must name attention ops with piecewise CUDA graphs, got []",
    ),
    (
        "why_not_cache_key",
        "indexer",
        {},
        {"additional_config": "opaque"},
        "additional_config must be a dict, which the plan can join as a key of vLLM's compile cache, got 'opaque'",
    ),
    ("why_not_lora", "mla", {}, {"lora_config": object()}, "lora_config must be None, got adapters"),
    ("why_not_absorb", "mla", {"mla_attn__calculate_kv_scales": True}, {}, "calculate_kv_scales must be off, got True"),
    ("why_not_mla_rotary", "mla", {"rotary_emb": None}, {}, "rotary_emb must be present, got None"),
    (
        "why_not_mla_rotary",
        "mla",
        {"rotary_emb": torch.nn.Identity()},
        {},
        "rotary_emb must rotate by table lookup alone, got Identity",
    ),
    ("why_not_mla_rotary", "mla", {"rotary_emb__rotary_dim": 32}, {}, "rotary_emb must rotate 64 dims, got 32"),
    (
        "why_not_mla_sizes",
        "mla",
        {"kv_lora_rank": 256},
        {},
        "kv_lora_rank and qk_rope_head_dim must be 512 and 64, got 256 and 64",
    ),
    (
        "why_not_kv_cache_dtype",
        "mla",
        {"mla_attn__kv_cache_dtype": "nvfp4_ds_mla"},
        {},
        "kv_cache_dtype must be auto, torch.float32, fp8, fp8_e4m3 or fp8_ds_mla, got nvfp4_ds_mla",
    ),
    ("why_not_kv_cache_dtype", "mla", {"mla_attn__kv_cache_dtype": "bfloat16"}, {}, "got bfloat16"),
    (
        "why_not_absorb",
        "mla",
        {"mla_attn__is_aiter_triton_fp8_bmm_enabled": True},
        {},
        "is_aiter_triton_fp8_bmm_enabled must be off, got True",
    ),
    ("why_not_absorb", "mla", {"mla_attn__is_amx_bmm_enabled": True}, {}, "is_amx_bmm_enabled must be off, got True"),
    ("why_not_absorb", "mla", {"mla_attn__q_pad_num_heads": 64}, {}, "q_pad_num_heads must be None, got 64"),
    (
        "why_not_attention",
        "mla",
        {"mla_attn__attn_backend": SimpleNamespace(get_name=lambda: "XPU_MLA_SPARSE")},
        {},
        "the attention backend must be one of FLASHMLA_SPARSE, ",
    ),
    (
        "why_not_attention",
        "mla",
        {"mla_attn__attn_backend": SimpleNamespace(get_name=lambda: "TRITON_MLA")},
        {},
        "must take its query as it did when that was read, got TRITON_MLA: it was not read in vLLM 0.32",
    ),
    ("why_not_attention", "mla", {"mla_attn__use_direct_call": True}, {}, "must be an opaque op on this platform"),
    ("why_not_attention", "mla", {"mla_attn__hisparse_cache": object()}, {}, "hisparse must be off"),
    (
        "why_not_indexer_class",
        "indexer",
        {"indexer": torch.nn.Identity()},
        {},
        "the indexer must be vllm.model_executor.models.deepseek_v2.Indexer, got torch.nn.modules.linear.Identity",
    ),
    (
        "why_not_indexer_sizes",
        "indexer",
        {"indexer__head_dim": 64},
        {},
        "head_dim, rope_dim and quant_block_size must be 128, 64 and 128, got 64, 64, 128",
    ),
    (
        "why_not_indexer_sizes",
        "indexer",
        {"indexer__scale_fmt": "e4m3"},
        {},
        "scale_fmt must be ue8m0 or None, got e4m3",
    ),
    (
        "why_not_indexer_rotary",
        "indexer",
        {"indexer_rope_emb": None},
        {},
        "indexer_rotary_emb must be present, got None",
    ),
    ("why_not_indexer_cache", "indexer", {"indexer__indexer_op__use_fp4_cache": True}, {}, "must be fp8, got fp4"),
    ("why_not_indexer_cache", "indexer", {"indexer__k_cache__uses_shuffled_layout": True}, {}, "got the shuffled one"),
    (
        "why_not_indexer_cache",
        "indexer",
        {"indexer__indexer_op__compress_ratio": 4},
        {},
        "compress_ratio must be 1, got 4",
    ),
]


def reasons(op: str, wrapper: Any, config: Any) -> list[str]:
    ask = {"mla": gates.why_not_mla, "indexer": gates.why_not_indexer}[op]
    return ask(wrapper, config)


@pytest.mark.parametrize("op", ["mla", "indexer"])
def test_a_dsa_layer_passes_every_gate(op: str) -> None:
    assert reasons(op, layers.wrapper(), layers.config()) == []


@pytest.mark.parametrize("trip", TRIPS, ids=lambda trip: f"{trip[0]}-{trip[4][:30]}")
def test_a_gate_says_the_value_that_it_objects_to(trip: Trip) -> None:
    gate, op, wrapper_changes, config_changes, sentence = trip
    wrapper, config = layers.wrapper(**wrapper_changes), layers.config(**config_changes)
    (reason,) = [reason for reason in [getattr(gates, gate)(wrapper, config)] if reason]
    assert sentence in reason
    assert reason in reasons(op, wrapper, config)


def test_every_gate_is_tripped() -> None:
    gate = re.compile("why_not_(?!mla$|indexer$|asked$)")
    assert {name for name, _ in inspect.getmembers(gates, inspect.isfunction) if gate.match(name)} == {
        trip[0] for trip in TRIPS
    }


def test_dense_mla_has_no_indexer_and_the_same_gates() -> None:
    dense = layers.wrapper(is_sparse=False, indexer=None)
    assert reasons("mla", dense, layers.config()) == []
    assert reasons("indexer", dense, layers.config()) == ["dense MLA: there is no indexer"]
    (reason,) = reasons("mla", layers.wrapper(is_sparse=False, q_lora_rank=None), layers.config())
    assert reason == "q_lora_rank must be set, got None"


def test_a_backend_of_vllms_passes_as_long_as_it_takes_its_query_as_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"mla_attn__attn_backend": SimpleNamespace(get_name=lambda: "CPU_MLA")}
    dense = layers.wrapper(is_sparse=False, indexer=None, **changes)
    assert gates.why_not_attention(dense, layers.config()) is None
    changed = replace(gates.host.QUERY_SYMBOLS["0.32"]["CPU_MLA"], source="0123456789abcdef")
    monkeypatch.setattr(gates.host, "QUERY_SYMBOLS", {"0.32": {"CPU_MLA": changed}})
    gates.host.query_difference.cache_clear()
    reason = gates.why_not_attention(dense, layers.config())
    gates.host.query_difference.cache_clear()
    assert reason is not None
    assert "got CPU_MLA: vllm.v1.attention.backends.mla.cpu_mla.CPUMLAImpl.forward_mqa has another body" in reason


def test_a_layer_with_another_layers_top_k_has_no_indexer_to_fuse() -> None:
    wrapper = layers.wrapper(indexer=None)
    assert reasons("indexer", wrapper, layers.config()) == ["this layer uses another layer's top-k and has no indexer"]
    assert reasons("mla", wrapper, layers.config()) == []


@pytest.mark.parametrize(("asked", "refused"), [("mla", "indexer"), ("indexer", "mla")])
def test_an_op_that_is_not_asked_for_says_so(asked: str, refused: str) -> None:
    with switches.override(ops=frozenset({asked})):
        assert reasons(refused, layers.wrapper(), layers.config()) == [
            f"DSAFUSE_OPS must contain {refused}, got '{asked}'"
        ]
        assert reasons(asked, layers.wrapper(), layers.config()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"compilation_config__cudagraph_mode": FULL},
        {"compilation_config__cudagraph_mode": PIECEWISE, "compilation_config__splitting_ops": ["vllm::attention"]},
    ],
)
def test_graphs_that_capture_all_or_split_at_the_ops_are_fine(changes: dict[str, Any]) -> None:
    assert gates.why_not_graph(layers.wrapper(), layers.config(**changes)) is None


def test_breakable_graphs_are_interrupted_at_the_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    config = layers.config(compilation_config__cudagraph_mode=PIECEWISE, compilation_config__splitting_ops=[])
    monkeypatch.setattr(gates, "breakable_graphs", lambda: True)
    assert gates.why_not_graph(layers.wrapper(), config) is None


@pytest.mark.parametrize("path", gates.LAYER_ATTRIBUTES)
def test_a_layer_without_an_attribute_is_refused_for_that_alone(path: str) -> None:
    wrapper = layers.wrapper()
    *parents, name = path.split(".")
    holder = wrapper
    for parent in parents:
        holder = getattr(holder, parent)
    delattr(holder, name)
    for op in ("mla", "indexer"):
        assert reasons(op, wrapper, layers.config()) == [f"the layer must have {path}, got one without"]


def test_lora_adapters_are_refused_for_both_ops_with_the_reason() -> None:
    config = layers.config(lora_config=object())
    for op in ("mla", "indexer"):
        (reason,) = reasons(op, layers.wrapper(), config)
        assert reason.startswith("lora_config must be None, got adapters (the absorbed query would leave out one")


def test_attributes_that_a_version_lacks_mean_not_there() -> None:
    """vLLM 0.26 has none of these."""
    wrapper = layers.wrapper()
    del wrapper.fuse_qkv_rmsnorm, wrapper.dcp_q_replicate, wrapper.mla_attn.dcp_manager
    assert reasons("mla", wrapper, layers.config()) == []


@pytest.mark.parametrize("given", [[], None])
def test_a_graph_that_is_not_split_stays_whole(given: list[str] | None) -> None:
    config = layers.config(compilation_config__splitting_ops=given)
    gates.join_compilation(config, "a plan")
    assert config.compilation_config.splitting_ops == given


def test_a_split_graph_is_split_at_our_ops_too() -> None:
    config = layers.config(compilation_config__splitting_ops=["vllm::attention"])
    for _ in range(2):
        gates.join_compilation(config, "a plan")
    assert config.compilation_config.splitting_ops == ["vllm::attention", *gates.SPLITTING_OPS]


def test_our_ops_are_those_that_the_wrapper_defines() -> None:
    from dsafuse.vllm import wrapper  # noqa: F401 -- defines them

    for name in gates.SPLITTING_OPS:
        assert hasattr(torch.ops.dsafuse, name.removeprefix("dsafuse::"))


def test_the_plan_enters_vllms_compile_cache_key() -> None:
    """Another mode, another key: a graph that was compiled with the fused ops is not loaded without them."""
    from vllm.config import VllmConfig

    def key(*plans: str) -> str:
        config = VllmConfig()
        for text in plans:
            gates.join_compilation(config, text)
        return config.compute_hash()

    keys = [key(), key("DSA layer: fused"), key("DSA layer: fused by another provider"), key("a", "b")]
    assert len(set(keys)) == 4
    assert key("a", "b", "a") == keys[3]


class FlashMLASparseImpl:
    """As vLLM's of this name, as far as padding goes."""

    def __init__(self, fp8_decode_padded_heads: int, prefill_padding: int) -> None:
        self.fp8_decode_padded_heads, self.prefill_padding = fp8_decode_padded_heads, prefill_padding


@pytest.mark.parametrize(
    ("word", "heads", "padding", "expected"),
    [
        ("fp8_ds_mla", 16, 64, 64),
        ("fp8_ds_mla", 64, 64, 64),
        ("fp8_ds_mla", 128, 64, 128),
        ("auto", 16, 64, 64),
        ("auto", 128, 64, 128),
        ("auto", 64, 128, 128),  # Blackwell
    ],
)
def test_the_query_is_as_wide_as_flashmla_pads_it(
    monkeypatch: pytest.MonkeyPatch, word: str, heads: int, padding: int, expected: int
) -> None:
    impl = FlashMLASparseImpl(64 if heads <= 64 else 128, padding)
    attention = SimpleNamespace(impl=impl, kv_cache_dtype=word)
    monkeypatch.setattr(gates.host, "flashmla_differences", tuple)
    assert gates.query_heads(attention, heads) == expected
    monkeypatch.setattr(gates.host, "flashmla_differences", lambda: ("it has another body",))
    assert gates.query_heads(attention, heads) == heads


def test_other_backends_get_no_padding() -> None:
    assert gates.query_heads(SimpleNamespace(impl=object(), kv_cache_dtype="fp8"), 16) == 16


def test_vllms_op_is_told_of_cleared_rows_only_as_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    class Theirs(SparseAttnIndexer):
        pass

    def why(kind: type, **changes: Any) -> str | None:
        op = torch.nn.Module.__new__(kind)  # not what is registered in its place
        torch.nn.Module.__init__(op)
        op.__dict__.update({"topk_indices_buffer": torch.empty((16, 64), dtype=torch.int32), **changes})
        return gates.why_vllm_clears(layers.wrapper(indexer__indexer_op=op))

    assert gates.why_vllm_clears(layers.wrapper()) is None  # dsafuse's own, on CPU builds
    reason = why(Theirs)
    assert reason is not None
    assert reason.startswith("the indexer's op must be vLLM's SparseAttnIndexer, got tests.vllm.test_gates.")
    assert why(SparseAttnIndexer) == "the platform must be cuda, whose op takes skip_topk_buffer_clear, got cpu"
    monkeypatch.setattr(gates.host, "platform", lambda: "cuda")
    assert why(SparseAttnIndexer) == "vLLM must be one of 0.26 for cleared top-k rows, got 0.32.0"
    gates.host.scoring_differences.cache_clear()
    monkeypatch.setattr(gates.host, "version", lambda: "0.26.0")
    reason = why(SparseAttnIndexer)
    gates.host.scoring_differences.cache_clear()
    assert reason is not None
    assert "SparseAttnIndexer.forward_cuda has another body" in reason  # 0.32's
    monkeypatch.setattr(gates.host, "differences", lambda symbols: [])
    assert why(SparseAttnIndexer) is None
    gates.host.scoring_differences.cache_clear()
    assert why(SparseAttnIndexer, topk_indices_buffer=None) == "topk_indices_buffer must be torch.int32, got None"


def test_a_strange_indexer_is_reported_and_not_asked_further() -> None:
    wrapper = layers.wrapper(indexer=torch.nn.Identity())
    (reason,) = reasons("indexer", wrapper, layers.config())
    assert "got torch.nn.modules.linear.Identity" in reason

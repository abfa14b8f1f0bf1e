"""Bytes, ports, arguments and the model folder."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from dsafuse.serving import memory
from dsafuse.serving.client import arguments
from dsafuse.serving.grid import OFF, ON, Cell, Turn
from dsafuse.serving.record import Record
from dsafuse.serving.server import environment_of, free_ports, why_not_an_arm
from dsafuse.vllm import plan

DSA = {"kv_lora_rank": 512, "index_topk": 2048, "num_hidden_layers": 24, "torch_dtype": "bfloat16"}
GRID = [Cell(1024, 256, 64), Cell(1024, 256, 1)]
# 64 requests of 1280 tokens, 20 blocks and one, a tenth more, 64 blocks aside.
BLOCKS = 64 + int(64 * 21 * 1.1)


@pytest.mark.parametrize(
    ("config", "word", "row"),
    [
        (DSA, "auto", 1152 + 132),
        (DSA, "fp8", 656 + 132),
        (DSA, "fp8_ds_mla", 656 + 132),
        ({**DSA, "torch_dtype": "float32"}, "auto", 2304 + 132),
        ({**DSA, "index_topk": None}, "auto", 1152),
    ],
)
def test_caches_hold_the_largest_load(config: dict[str, object], word: str, row: int) -> None:
    assert memory.cache_bytes(config, word, GRID) == 24 * BLOCKS * 64 * row


def test_a_draft_layer_has_a_cache_too() -> None:
    assert memory.cache_bytes({**DSA, "num_nextn_predict_layers": 1}, "fp8", GRID) == 25 * BLOCKS * 64 * 788


@pytest.mark.parametrize(
    ("extra", "ranks"),
    [
        ((), 1),
        (("--tensor-parallel-size", "8"), 8),
        (("--tensor-parallel-size=4", "-pp", "2", "--enforce-eager"), 8),
        (("-tp",), 1),
    ],
)
def test_ranks_share_the_weights(extra: tuple[str, ...], ranks: int) -> None:
    assert memory.ranks(extra) == ranks


def test_ports_differ() -> None:
    assert len(set(free_ports(8))) == 8


def test_a_call_is_what_such_tables_are_made_with() -> None:
    call = " ".join(arguments(Turn(Cell(1024, 256, 8), 2, ON), "http://h:1", "/m", 24, 8))
    for part in (
        "--base-url http://h:1", "--model /m", "--dataset-name random", "--random-input-len 1024",
        "--random-output-len 256", "--num-prompts 24", "--max-concurrency 8", "--num-warmups 8", "--seed 2",
        "--ignore-eos", "--percentile-metrics ttft,tpot,itl,e2el",
    ):  # fmt: skip
        assert part in call


def test_the_arms_differ_in_the_mode_and_in_nothing_that_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "/cache")
    monkeypatch.setenv("DSAFUSE_MODE", "strict")
    off, on = environment_of(OFF, "0"), environment_of(ON, "0")
    differing = {name: (off[name], on[name]) for name in off if off[name] != on[name]}
    assert differing == {
        "DSAFUSE_MODE": ("off", "auto"),
        "VLLM_CACHE_ROOT": ("/cache/serve-bench-off", "/cache/serve-bench-on"),
    }
    assert on["CUDA_VISIBLE_DEVICES"] == "0"


def test_what_the_plugin_says_of_a_fused_layer_is_understood() -> None:
    fused = plan.OpPlan("mla", fused=True, provider="triton")
    refused = plan.OpPlan("mla", fused=False, reasons=("it is not fused: no",))
    other = plan.OpPlan("indexer", fused=False, reasons=("none",), absent=True)
    said = [str(plan.LayerPlan("l", "DSA layer", op, other)) for op in (fused, refused)]
    assert why_not_an_arm(ON, said[:1], Path("on.log")) is None
    assert why_not_an_arm(OFF, said[:1], Path("off.log")) is not None
    assert why_not_an_arm(ON, said[1:], Path("on.log")) is not None
    assert why_not_an_arm(OFF, said[1:], Path("off.log")) is None


def test_a_rank_has_real_widths_and_a_tokenizer_without_surprises(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from dsafuse.vllm import rank

    folder = rank.write(tmp_path / "model", heads=16, layers=24)
    config = json.loads((folder / "config.json").read_text())
    widths = ("hidden_size", "q_lora_rank", "kv_lora_rank", "index_n_heads", "index_topk")
    assert [config[name] for name in widths] == [7168, 1536, 512, 64, 2048]
    assert (config["num_attention_heads"], config["intermediate_size"], config["vocab_size"]) == (16, 2304, 16160)
    assert config["num_hidden_layers"] == config["first_k_dense_replace"] == 24
    tokenizer = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    every = [token for token in range(config["vocab_size"]) if token not in tokenizer.all_special_ids]
    assert tokenizer.encode(tokenizer.decode(every)) == every


def test_a_prompt_of_the_longest_words_has_no_more_characters_than_vllm_allows_its_tokens(tmp_path: Path) -> None:
    """Before it counts tokens vLLM holds a text to the longest token's name, times the tokens that it may have."""
    pytest.importorskip("tokenizers")
    from dsafuse.vllm import rank

    rank.write_tokenizer(tmp_path, 16160)
    tokenizer = pytest.importorskip("vllm.tokenizers").get_tokenizer(str(tmp_path))
    params = pytest.importorskip("vllm.renderers.params").TokenizeParams(max_total_tokens=1024)
    text = tokenizer.decode(list(range(16160 - 1024, 16160)))
    assert params.apply_pre_tokenization(tokenizer, {"prompt": text})["prompt"] == text
    assert len(tokenizer.encode(text)) == 1024
    refused = pytest.importorskip("vllm.exceptions").VLLMValidationError
    with pytest.raises(refused, match="maximum context length is 1024"):
        params.apply_pre_tokenization(tokenizer, {"prompt": f"{text} t16000"})


@pytest.mark.parametrize(
    ("heads", "layers", "says"), [(3, 1, "heads: got 3"), (0, 1, "heads: got 0"), (16, 0, "layers")]
)
def test_a_rank_that_cannot_be_is_refused(tmp_path: Path, heads: int, layers: int, says: str) -> None:
    pytest.importorskip("tokenizers")
    from dsafuse.vllm import rank

    with pytest.raises(ValueError, match=re.escape(says)):
        rank.write(tmp_path, heads, layers)


RECORDED = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*serve*.json"))


@pytest.mark.skipif(not RECORDED, reason="no measurement of serving is recorded in benchmarks/results")
def test_a_recorded_rank_is_written_again_to_the_byte(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    from dsafuse.vllm import rank

    for path in RECORDED:
        c = Record.read(path).conditions
        values = rank.config(c["heads"], c["layers"], c["weights"])
        assert hashlib.sha256((json.dumps(values, indent=2) + "\n").encode()).hexdigest() == c["config_sha256"]


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
def test_a_rank_of_fp8_is_the_same_but_for_how_weights_are_held(heads: int) -> None:
    pytest.importorskip("tokenizers")
    from dsafuse.vllm import rank

    plain, blocks = (rank.config(heads, 2, weights) for weights in rank.WEIGHTS)
    assert blocks == {**plain, "quantization_config": rank.FP8_BLOCKS}
    assert [memory.weights(one) for one in (plain, blocks)] == ["bf16", "fp8"]


@pytest.mark.parametrize(
    ("config", "extra", "weights"),
    [
        ({}, (), "bf16"),
        ({"torch_dtype": "float32"}, (), "fp32"),
        ({"dtype": "torch.float16"}, ("--dtype", "auto"), "fp16"),
        ({"torch_dtype": "bfloat16"}, ("--dtype=half",), "fp16"),
        ({"torch_dtype": "float32"}, ("--dtype", "float", "--dtype", "bfloat16"), "bf16"),
        ({"quantization_config": {}}, (), "bf16"),
        ({"quantization_config": {"quant_method": "fp8"}}, ("--dtype", "half"), "fp8"),
    ],
)
def test_what_weights_are_served(config: dict[str, Any], extra: tuple[str, ...], weights: str) -> None:
    assert memory.weights(config, extra) == weights


def test_weights_of_fp8_take_half_but_for_what_vllm_keeps_in_16_bits() -> None:
    pytest.importorskip("tokenizers")
    from dsafuse.vllm import checkpoints, rank

    model = checkpoints.TinyModel("rank", rank.config(16, 1))
    # Embedding, head, both norms of the layer and the last, those of latents and of the indexer's key; its projections.
    wide = 2 * 16160 * 7168 + 3 * 7168 + 1536 + 512 + 2 * 128 + (128 + 64) * 7168
    kv_b = 16 * 256 * 512
    fp8 = (1536 + 576) * 7168 + 16 * 192 * 1536 + 7168 * 16 * 128 + 64 * 128 * 1536 + 3 * 2304 * 7168
    assert checkpoints.served_bytes(model) == 2 * (wide + kv_b + fp8)
    assert checkpoints.served_bytes(model, rank.FP8_BLOCKS) == 2 * wide + 3 * kv_b + fp8
    spared = {**rank.FP8_BLOCKS, "modules_to_not_convert": ["model.layers.0.self_attn.o_proj"]}
    assert checkpoints.served_bytes(model, spared) == 2 * wide + 3 * kv_b + fp8 + 7168 * 16 * 128


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({}, "bf16"),
        ({"dtype": "float32"}, "fp32"),
        ({"torch_dtype": "float16"}, "fp16"),
        ({"quantization_config": None, "torch_dtype": "bfloat16"}, "bf16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
        ({"quantization_config": "odd"}, "odd"),
    ],
)
def test_weights_are_told_by_one_word(config: dict[str, object], word: str) -> None:
    assert memory.weights(config) == word

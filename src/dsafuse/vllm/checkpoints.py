"""Small seeded checkpoints with the real head sizes of DeepSeek-V3.2 and GLM-5.

They are written in Hugging Face format (config.json and safetensors under the names of the released
checkpoints), so vLLM reads them with its ordinary loader. What is small is what the fused preparation
does not see: depth, hidden size, number of heads, experts, vocabulary. What it does see is real: 512
latent, 64 rotary, 128 (GLM: 192) nope and 128 indexer dims, the rope style and the rope scaling.

Random weights are easily useless. With every matrix at one small scale attention is uniform, the residual
stream is the embedding, and every model prints the same tokens whatever its attention does. So matrices
are drawn with variance gain^2 / fan_in, the query side with a gain that makes attention peaked, and the
attention output with one that makes it a good part of the residual stream. A negative control in the tests
(a rotation left out must change the tokens) watches that this stays true.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Attention logits are sums over 128 + 64 products of unit-variance numbers, scaled by 1 / sqrt(192): they
# have a standard deviation of about the query's gain. 3 makes a few of 64 keys carry most of the weight.
QUERY_GAIN = 3.0
# Softmax averages values away; what attention writes back is amplified to weigh about as much as the MLP.
OUTPUT_GAIN = 4.0


@dataclass(frozen=True)
class TinyModel:
    """A model family in small: the config.json of one checkpoint."""

    name: str
    config: dict[str, Any]

    @property
    def layers(self) -> int:
        """Layers of the backbone."""
        return int(self.config["num_hidden_layers"])

    @property
    def draft_layers(self) -> int:
        """Layers of the MTP draft, which stand behind the backbone's in the checkpoint."""
        return int(self.config.get("num_nextn_predict_layers", 0))

    @property
    def index_topk(self) -> int:
        """How many tokens a query attends to; 0 for a model without sparse attention."""
        return int(self.config.get("index_topk", 0))

    def has_indexer(self, layer: int) -> bool:
        """Whether a layer selects tokens itself; with "S" in the pattern it reuses another layer's."""
        if not self.index_topk:
            return False
        pattern = self.config.get("index_topk_pattern")
        return pattern is None or layer >= len(pattern) or pattern[layer] == "F"


_COMMON: dict[str, Any] = {
    "torch_dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "first_k_dense_replace": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "max_position_embeddings": 2048,
}

_INDEXER: dict[str, Any] = {"index_topk": 64, "index_head_dim": 128, "index_n_heads": 4}

DEEPSEEK_V32 = TinyModel(
    "deepseek-v3.2",
    {
        **_COMMON,
        **_INDEXER,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
)

GLM_5 = TinyModel(
    "glm-5",
    {
        **_COMMON,
        **_INDEXER,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "indexer_rope_interleave": True,
        # GLM-5.2 shares top-k between layers: the second layer here reuses what the first one chose.
        "index_topk_pattern": "FSF",
    },
)

FAMILIES: dict[str, TinyModel] = {model.name: model for model in (DEEPSEEK_V32, GLM_5)}


def with_config(model: TinyModel, **changes: Any) -> TinyModel:
    """The same family with other values in its config.json."""
    return TinyModel(model.name, {**model.config, **changes})


QUANTISED = frozenset(
    {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b"}
    | {"gate_proj", "up_proj", "down_proj"}
)
"""What vLLM keeps in fp8 of a model that is quantised so. The indexer's wk is not among it: vLLM makes bf16 of it."""


def served_bytes(model: TinyModel, quantisation: Mapping[str, Any] | None = None) -> int:
    """What vLLM keeps of its checkpoint: 16 bits a number, 8 where `quantisation` (to fp8) says so.

    Of kv_b_proj it then has a copy in 16 bits, which attention multiplies with. Scales are one in 16,384, left out.
    """
    asked = quantisation or {}
    spared = {*(asked.get("modules_to_not_convert") or ()), *(asked.get("ignored_layers") or ())}

    def width(name: str) -> int:
        module = name.removesuffix(".weight")
        kind = module.rpartition(".")[2]
        if quantisation is None or kind not in QUANTISED or module in spared:
            return 2
        return 3 if kind == "kv_b_proj" else 1

    return sum(width(name) * math.prod(shape) for name, shape, _ in _parameters(model))


def write(model: TinyModel, directory: Path, seed: int = 0) -> Path:
    """Write config.json and model.safetensors; the same seed gives the same bytes. Returns directory."""
    from safetensors.torch import save_file  # it comes with vLLM, and without that `demo` says why not

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    random = torch.Generator().manual_seed(seed)
    tensors = {name: _draw(shape, gain, random) for name, shape, gain in _parameters(model)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


# How a tensor is drawn: a gain for a matrix, "norm" around one, "bias" around zero.
Draw = float | str
Parameter = tuple[str, tuple[int, ...], Draw]


def _draw(shape: tuple[int, ...], how: Draw, random: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=random, dtype=torch.float32)
    if how == "norm":
        return values.mul_(0.1).add_(1.0)
    if how == "bias":
        return values.mul_(0.1)
    return values.mul_(float(how) / shape[-1] ** 0.5)


def _parameters(model: TinyModel) -> Iterator[Parameter]:
    config = model.config
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    # An embedding row has unit variance: its fan-in is one, not the hidden size.
    yield "model.embed_tokens.weight", (vocab, hidden), hidden**0.5
    for layer in range(model.layers):
        yield from _layer(model, layer)
    yield "model.norm.weight", (hidden,), "norm"
    yield "lm_head.weight", (vocab, hidden), 1.0
    for layer in range(model.layers, model.layers + model.draft_layers):
        at = f"model.layers.{layer}."
        yield at + "enorm.weight", (hidden,), "norm"
        yield at + "hnorm.weight", (hidden,), "norm"
        yield at + "eh_proj.weight", (hidden, 2 * hidden), 1.0
        yield at + "embed_tokens.weight", (vocab, hidden), hidden**0.5
        yield from _layer(model, layer)
        yield at + "shared_head.norm.weight", (hidden,), "norm"
        yield at + "shared_head.head.weight", (vocab, hidden), 1.0


def _layer(model: TinyModel, layer: int) -> Iterator[Parameter]:
    config = model.config
    at = f"model.layers.{layer}."
    hidden = config["hidden_size"]
    yield at + "input_layernorm.weight", (hidden,), "norm"
    yield at + "post_attention_layernorm.weight", (hidden,), "norm"
    yield from _attention(config, at + "self_attn.")
    if model.has_indexer(layer):
        yield from _indexer(config, at + "self_attn.indexer.")
    if layer < config["first_k_dense_replace"]:
        yield from _mlp(at + "mlp.", hidden, config["intermediate_size"])
    else:
        yield from _moe(config, at + "mlp.")


def _attention(config: dict[str, Any], at: str) -> Iterator[Parameter]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    q_rank = config["q_lora_rank"]
    if q_rank is None:
        yield at + "q_proj.weight", (heads * (nope + rope), hidden), QUERY_GAIN
    else:
        yield at + "q_a_proj.weight", (q_rank, hidden), 1.0
        yield at + "q_a_layernorm.weight", (q_rank,), "norm"
        yield at + "q_b_proj.weight", (heads * (nope + rope), q_rank), QUERY_GAIN
    yield at + "kv_a_proj_with_mqa.weight", (latent + rope, hidden), 1.0
    yield at + "kv_a_layernorm.weight", (latent,), "norm"
    yield at + "kv_b_proj.weight", (heads * (nope + value), latent), 1.0
    yield at + "o_proj.weight", (hidden, heads * value), OUTPUT_GAIN


def _indexer(config: dict[str, Any], at: str) -> Iterator[Parameter]:
    dim, heads, hidden = config["index_head_dim"], config["index_n_heads"], config["hidden_size"]
    yield at + "wq_b.weight", (heads * dim, config["q_lora_rank"]), 1.0
    yield at + "wk.weight", (dim, hidden), 1.0
    yield at + "k_norm.weight", (dim,), "norm"
    yield at + "k_norm.bias", (dim,), "bias"
    yield at + "weights_proj.weight", (heads, hidden), 1.0


def _mlp(at: str, hidden: int, width: int) -> Iterator[Parameter]:
    yield at + "gate_proj.weight", (width, hidden), 1.0
    yield at + "up_proj.weight", (width, hidden), 1.0
    yield at + "down_proj.weight", (hidden, width), 1.0


def _moe(config: dict[str, Any], at: str) -> Iterator[Parameter]:
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield at + "gate.weight", (experts, hidden), 1.0
    if config["topk_method"] == "noaux_tc":
        yield at + "gate.e_score_correction_bias", (experts,), "bias"
    for expert in range(experts):
        yield from _mlp(f"{at}experts.{expert}.", hidden, width)
    yield from _mlp(at + "shared_experts.", hidden, width * config["n_shared_experts"])

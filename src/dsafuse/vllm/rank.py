"""A folder to measure with: one tensor-parallel rank of DeepSeek-V3.2 in real widths, without weights.

It holds config.json, for `--load-format dummy`, and a tokenizer, which `vllm bench serve` needs to write random
prompts. Widths that a rank sees whole are the model's: hidden size, both latents, indexer heads, top-k, rotation. What
tensor parallelism divides is divided: attention heads, vocabulary, MLP. Every MLP is dense, of the model's dense width:
in fp8 it reads as many bytes at small batches as a rank's share of 9 experts, in bf16 twice as many (50 and 99 MB at 16
heads), and its time does not hang on which experts random weights choose. There is no all-reduce.

With fp8 weights config.json says what the published one does, and vLLM quantises what it would of the whole model: all
linear layers (`_quantised`) but the indexer's key and head weights, which are one bf16 GEMM. Embedding, output head and
norms are bf16, too.

Source of the widths: the published config.json of DeepSeek-V3.2.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from dsafuse.models import MODELS
from dsafuse.vllm.checkpoints import DEEPSEEK_V32, with_config

DEEPSEEK = MODELS["deepseek-v3.2"]
VOCABULARY, DENSE_WIDTH = 129280, 18432

_WHOLE: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "q_lora_rank": DEEPSEEK.q_lora_rank,
    "index_topk": DEEPSEEK.index_topk,
    "index_n_heads": DEEPSEEK.index_heads,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


WEIGHTS = ("bf16", "fp8")
FP8_BLOCKS: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
"""The published quantization_config."""


def config(heads: int, layers: int, weights: str = "bf16") -> dict[str, Any]:
    """The config.json of a rank with `heads` of the model's 128 attention heads, and `layers` of its 61 layers.

    weights: of WEIGHTS. Raises ValueError unless it is, the heads divide the model's, there is a layer, and fp8 blocks
    fit what a rank has.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights: got {weights}, expected one of {', '.join(WEIGHTS)}")
    if heads < 1 or DEEPSEEK.heads % heads:
        raise ValueError(f"heads: got {heads}, expected a divisor of {DEEPSEEK.heads}")
    if layers < 1:
        raise ValueError(f"layers: got {layers}, expected 1 or more")
    ranks = DEEPSEEK.heads // heads
    model = with_config(
        DEEPSEEK_V32,
        **_WHOLE,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCABULARY // ranks,
        intermediate_size=DENSE_WIDTH // ranks,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
    )
    if weights == "bf16":
        return model.config
    for name, outputs, inputs in _quantised(model.config):
        if (reason := _why_no_blocks(outputs, inputs)) is not None:
            raise ValueError(f"heads: got {heads}, whose {name} does not fit fp8 weights: {reason}")
    return with_config(model, quantization_config=FP8_BLOCKS).config


Gemm = tuple[str, tuple[int, ...], int]
"""A linear layer of vLLM's: name, the widths that it computes at once, fan-in."""


def _quantised(c: dict[str, Any]) -> list[Gemm]:
    """What vLLM quantises of a layer."""
    heads, hidden, q_rank, latent = (
        c[name] for name in ("num_attention_heads", "hidden_size", "q_lora_rank", "kv_lora_rank")
    )
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    return [
        ("fused_qkv_a_proj", (q_rank, latent + rope), hidden),
        ("q_b_proj", (heads * (nope + rope),), q_rank),
        ("kv_b_proj", (heads * (nope + value),), latent),
        ("o_proj", (hidden,), heads * value),
        ("indexer.wq_b", (c["index_n_heads"] * c["index_head_dim"],), q_rank),
        ("gate_up_proj", (c["intermediate_size"],) * 2, hidden),
        ("down_proj", (hidden,), c["intermediate_size"]),
    ]


def _why_no_blocks(outputs: tuple[int, ...], inputs: int) -> str | None:
    """Why vLLM does not take blocks of these widths; None if it does.

    Its loader wants every matrix but the last of a merged one to end with a block (`validate_fp8_block_shape`), its
    Hopper kernel a fan-in of whole blocks and outputs in units of 64 (`should_use_deepgemm_for_fp8_linear`).
    """
    block_n, block_k = FP8_BLOCKS["weight_block_size"]
    for width in outputs[:-1]:
        if width % block_n:
            return f"got {width} outputs before others, expected a multiple of {block_n}"
    if inputs % block_k:
        return f"got {inputs} inputs, expected a multiple of {block_k}"
    return f"got {sum(outputs)} outputs, expected a multiple of 64" if sum(outputs) % 64 else None


def write(directory: Path, heads: int, layers: int, weights: str = "bf16") -> Path:
    """Write the folder. Returns it."""
    values = config(heads, layers, weights)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    write_tokenizer(directory, values["vocab_size"])
    return directory


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPACE = "\u2581"
"""What stands for the space in a token's name."""


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """A word for each token: text and tokens go back and forth without a difference.

    The space before a word is part of its name. vLLM refuses a prompt with more characters than its longest name allows
    for the tokens that fit beside the answer, before it counts tokens; spaces that are in no name would be too many.
    """
    # The tokenizer looks for special tokens inside words, so none may be the beginning of one.
    names = [*SPECIAL.values(), *(f"{SPACE}t{token}" for token in range(len(SPECIAL), vocabulary))]
    words = Tokenizer(models.WordLevel({name: token for token, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(SPACE), decoders.Metaspace(SPACE)
    words.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")

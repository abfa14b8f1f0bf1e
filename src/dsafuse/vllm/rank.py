"""A folder to measure with: one tensor-parallel rank of DeepSeek-V3.2 in real widths, without weights.

It holds config.json, for `--load-format dummy`, and a tokenizer, which `vllm bench serve` needs to write random
prompts. Widths that a rank sees whole are the model's: hidden size, both latents, indexer heads, top-k, rotation. What
tensor parallelism divides is divided: attention heads, vocabulary, MLP. Every MLP is dense, of the model's dense
width: at small batches it reads about as many bytes of bf16 as a rank's 9 experts hold in fp8 (99 and 50 MB at 16
heads), and its time does not hang on which experts random weights choose. There is no all-reduce.

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


def config(heads: int, layers: int) -> dict[str, Any]:
    """The config.json of a rank with `heads` of the model's 128 attention heads, and `layers` of its 61 layers.

    Raises ValueError unless the heads divide the model's and there is a layer.
    """
    if heads < 1 or DEEPSEEK.heads % heads:
        raise ValueError(f"heads: got {heads}, expected a divisor of {DEEPSEEK.heads}")
    if layers < 1:
        raise ValueError(f"layers: got {layers}, expected 1 or more")
    ranks = DEEPSEEK.heads // heads
    return with_config(
        DEEPSEEK_V32,
        **_WHOLE,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=VOCABULARY // ranks,
        intermediate_size=DENSE_WIDTH // ranks,
        num_hidden_layers=layers,
        first_k_dense_replace=layers,
    ).config


def write(directory: Path, heads: int, layers: int) -> Path:
    """Write the folder. Returns it."""
    values = config(heads, layers)
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

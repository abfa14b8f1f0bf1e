"""Write a trained network as a checkpoint that vLLM and transformers load unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsafuse.accuracy import tokenizer
from models.network import Network

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
CHECKPOINT = (CONFIG, GENERATION, WEIGHTS, *tokenizer.FILES)
"""The files of an exported checkpoint."""


def stored(network: Network) -> dict[str, Tensor]:
    """The tensors of model.safetensors: bf16, the indexer's LayerNorm in fp32 as DeepSeek stores it.

    An MTP layer of a released checkpoint carries the embedding and the output matrix again. vLLM asks for both.
    """
    tensors = {
        name: weight.detach().to(torch.float32 if "k_norm" in name else torch.bfloat16).cpu().contiguous()
        for name, weight in network.state_dict().items()
    }
    first_draft = network.config["num_hidden_layers"]
    for layer in range(first_draft, len(network.model.layers)):
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"model.layers.{layer}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return tensors


def export(network: Network, directory: Path) -> None:
    """Write the files of CHECKPOINT; the weights whole or not at all."""
    tokenizer.write(directory, network.config["max_position_embeddings"])
    generation = {name: network.config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, content in ((CONFIG, network.config), (GENERATION, generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    part = directory / f"{WEIGHTS}.part"
    save_file(stored(network), part, metadata={"format": "pt"})
    part.replace(directory / WEIGHTS)


def load(directory: Path) -> Network:
    """The network of an exported checkpoint, in fp32."""
    network = Network(json.loads((directory / CONFIG).read_text()))
    tensors = load_file(directory / WEIGHTS)
    names = network.state_dict().keys()
    network.load_state_dict({name: tensors[name].float() for name in names})
    return network

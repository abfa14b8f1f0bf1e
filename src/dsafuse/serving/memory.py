"""Bytes that a model's caches and weights take, from its config.json: whether two servers fit on one GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsafuse.layouts import FLAT, FP8_DS_MLA, PLAIN
from dsafuse.models import WEIGHT_FORMATS, is_block
from dsafuse.serving.grid import Cell

SPLITS = ("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp")
BLOCK_TOKENS = 64
SPARE_BLOCKS = 64
SPARE_FRACTION = 0.1
"""Caches of a size that the largest load only just fits into would preempt requests, and time that."""

WEIGHT_FILES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("auto", "hf"), ("*.safetensors", "*.bin", "*.pt")),
    **dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor"), ("*.safetensors",)),
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "npcache": ("*.bin", "*.pt"),
}
"""What vLLM looks for in a local folder, by the words of --load-format that read one file or another there."""

OTHER_BYTES = 6 << 30
"""What a server takes beside weights and caches: context, activations of a prefill, CUDA graphs."""


def read_config(model: Path) -> dict[str, Any]:
    """A model folder's config.json. Raises ValueError unless it is that of a model with multi-head latent attention."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    if not isinstance(config, dict) or not isinstance(config.get("kv_lora_rank"), int):
        raise ValueError(f"{path}: has no kv_lora_rank: no model with multi-head latent attention, nothing to fuse")
    return config


UNQUANTISED: Mapping[str, str] = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}


def quantisation(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How weights are quantised, as config.json says it; None if they are not."""
    found = next((value for name in WEIGHT_FORMATS if (value := config.get(name))), None)
    return found if found is None or isinstance(found, Mapping) else {"quant_method": found}


def weights(config: Mapping[str, Any], extra: Sequence[str] = ()) -> str:
    """What weights are served: bf16, fp16, fp32, or the method of quantisation, as fp8.

    By config.json, and by a --dtype among the further arguments of `vllm serve`, of which the last wins.
    """
    found = quantisation(config)
    if found is not None:
        return str(found.get("quant_method"))
    stated = dict(options(extra)).get("--dtype", "auto")
    word = _dtype(config) if stated == "auto" else stated
    return UNQUANTISED.get(str(word).removeprefix("torch."), "bf16")


def why_not_scaled(config: Mapping[str, Any]) -> str | None:
    """Why dummy weights of such a config can't be put to scale; None for unquantised ones and for fp8 in blocks."""
    found = quantisation(config)
    if found is None:
        return None
    method, block = found.get("quant_method"), found.get("weight_block_size")
    if method != "fp8" or found.get("fmt", "e4m3") != "e4m3":
        return f"quant_method and fmt must be fp8 and e4m3, got {method} and {found.get('fmt')}"
    if not is_block(block):
        return f"weight_block_size must be two sizes, whose scales are filled beside the weights, got {block}"
    return None


def _dtype(config: Mapping[str, Any]) -> Any:
    return config.get("dtype") or config.get("torch_dtype")


def _activation(config: Mapping[str, Any]) -> torch.dtype:
    return torch.float32 if _dtype(config) == "float32" else torch.bfloat16


def cache_bytes(config: Mapping[str, Any], kv_cache_dtype: str, cells: Sequence[Cell]) -> int:
    """What the largest cell needs, every request in blocks of its own, on one rank."""
    most = max(c.concurrency * (-(-(c.isl + c.osl) // BLOCK_TOKENS) + 1) for c in cells)
    blocks = SPARE_BLOCKS + int(most * (1 + SPARE_FRACTION))
    # Of several meanings of "fp8" the larger one: what is not needed stays unused.
    layout = FP8_DS_MLA if kv_cache_dtype.startswith("fp8") else PLAIN
    row = layout.row_bytes(_activation(config)) + (FLAT.row_bytes() if config.get("index_topk") else 0)
    layers = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    return int(layers * blocks * BLOCK_TOKENS * row)


def weight_bytes(model: Path) -> int | None:
    """What lies in the folder's safetensors; None without any."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) or None


def lacking(model: Path, load_format: str) -> tuple[str, ...]:
    """The patterns of which no file lies in the folder, though this --load-format needs one; none if all is well."""
    patterns = WEIGHT_FILES.get(load_format, ())
    return () if any(path for pattern in patterns for path in model.glob(pattern)) else patterns


def ranks(extra: Sequence[str]) -> int:
    """How many GPUs share the weights, by the further arguments of `vllm serve`."""
    return math.prod(int(value) for name, value in options(extra) if name in SPLITS and value.isdecimal())


def options(extra: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Further arguments of `vllm serve` as (option, value), as vLLM reads them: = before a value, and _ for -."""
    for place, word in enumerate(extra):
        name, _, value = word.partition("=")
        yield name.replace("_", "-"), value or (extra[place + 1] if place + 1 < len(extra) else "")


def fits_twice(free_bytes: int, weights: int, caches: int) -> bool:
    """Whether two servers fit into what is free on one GPU."""
    return 2 * (weights + caches + OTHER_BYTES) <= free_bytes

"""Transformers' side of the oracle: log-probabilities by other people's model code, and its cache, rounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from dsafuse.accuracy.oracle import Scores


def read_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as a per-tensor e4m3 cache of scale 1 gives it back."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return x.float().clamp(-limit, limit).to(torch.float8_e4m3fn).to(x.dtype)


def read_fp8_tiles(latent: torch.Tensor) -> torch.Tensor:
    """latent [..., 512] as fp8_ds_mla gives it back: tiles of 128 under a power of two, at least amax / 448."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    tiles = latent.double().unflatten(-1, (-1, 128))
    scale = torch.exp2(torch.log2((tiles.abs().amax(-1, keepdim=True) / limit).clamp(min=1e-4)).ceil())
    return (read_fp8((tiles / scale).float()).double() * scale).flatten(-2).to(latent.dtype)


def read_bf16(x: torch.Tensor) -> torch.Tensor:
    """x as bf16 gives it back."""
    return x.to(torch.bfloat16).to(x.dtype)


Read = Callable[[torch.Tensor], torch.Tensor]
ROUNDED: dict[str, tuple[Read, Read]] = {"fp8": (read_fp8, read_fp8), "fp8_ds_mla": (read_fp8_tiles, read_bf16)}
"""What becomes of the latent and of the rotary key in a cache layout; `plain` keeps both."""


class RoundedCache(DynamicCache):
    """Transformers' cache, given what an fp8 cache would have given back."""

    def __init__(self, layout: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._latent, self._rotary = ROUNDED[layout]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep the normed latent and the rotated key; MLA's cache of transformers calls them key and value."""
        return super().update(self._latent(key_states), self._rotary(value_states), *args, **kwargs)


def scores(directory: Path, sequences: Sequence[list[int]], dtype: torch.dtype, layout: str, device: str) -> Scores:
    """What transformers says of every sequence, in one pass each. Raises OSError or ValueError without weights."""
    # A report of the weights that it does not read, those of the draft, is of no use here.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    except SafetensorError as error:
        raise ValueError(f"{directory}: weights can't be read: {error}") from None
    model.requires_grad_(False).train(False).to(device)
    found: Scores = []
    for tokens in sequences:
        ids = torch.tensor([tokens], device=device)
        cache = RoundedCache(layout, config=model.config) if layout in ROUNDED else None
        with torch.no_grad():
            logits = model(ids, past_key_values=cache, use_cache=cache is not None).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        found.append(list(zip(chosen.tolist(), logprobs.argmax(-1).tolist(), strict=True)))
    return found

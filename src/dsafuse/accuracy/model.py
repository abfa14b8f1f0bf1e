"""What a model folder says of itself, as far as it matters here. Every refusal names the file and the value."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Model:
    """A checkpoint folder with DeepSeek Sparse Attention, in Hugging Face's format."""

    directory: Path
    config: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.directory.resolve().name

    @property
    def index_topk(self) -> int:
        """How many tokens a query attends to."""
        return int(self.config["index_topk"])

    @property
    def draft_layers(self) -> int:
        """MTP layers behind the backbone; none means that there is no draft."""
        return int(self.config.get("num_nextn_predict_layers") or 0)

    @property
    def longest(self) -> int:
        """Tokens of the longest text that the model was made for."""
        return int(self.config["max_position_embeddings"])

    @property
    def eos(self) -> list[int]:
        """Token ids that end an answer."""
        eos = self.config.get("eos_token_id")
        return eos if isinstance(eos, list) else [] if eos is None else [eos]

    def tokenizer(self) -> Tokenizer:
        """The folder's own tokenizer. Raises ValueError if it knows tokens that the model does not."""
        path = self.directory / "tokenizer.json"
        try:
            found = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises nothing narrower)
            raise ValueError(f"{path}: no tokenizer: {error}") from None
        if found.get_vocab_size() > self.config["vocab_size"]:
            raise ValueError(
                f"{path}: has {found.get_vocab_size()} tokens, and the model knows {self.config['vocab_size']}"
            )
        return found

    def weights(self) -> list[Path]:
        """The folder's weight files. Raises ValueError if there is none."""
        found = sorted(self.directory.glob("*.safetensors"))
        if not found:
            raise ValueError(f"{self.directory}: has no *.safetensors: no weights")
        return found


def read(directory: Path) -> Model:
    """A model folder. Raises ValueError unless it holds a DSA model with a tokenizer, OSError if it can't be read."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key in ("index_topk", "max_position_embeddings", "vocab_size"):
        if not isinstance(config, dict) or not isinstance(config.get(key), int):
            raise ValueError(f"{path}: has no {key}: no model with DeepSeek Sparse Attention")
    drafts = config.get("num_nextn_predict_layers")
    if not isinstance(drafts, int | None):
        raise ValueError(f"{path}: got num_nextn_predict_layers {drafts!r}, expected an integer")
    if not (directory / "tokenizer.json").is_file():
        raise ValueError(f"{directory}: has no tokenizer.json, and the tasks are text")
    return Model(directory, config)

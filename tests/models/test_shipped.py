"""The checkpoints that ship: they are what families.py says, they answer, and the README says what was recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="not installed (requirements/vllm-cpu.txt)")

from safetensors import safe_open

from models.export import load, stored
from models.families import CONFIGS
from models.measure import accuracy
from models.network import Network

MODELS = Path(__file__).parents[2] / "models"
FAMILIES = list(CONFIGS)
LARGEST_BYTES = 15_000_000


def recorded(family: str) -> dict[str, Any]:
    return json.loads((MODELS / family / "training.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_what_its_family_says(family: str) -> None:
    assert json.loads((MODELS / family / "config.json").read_text()) == CONFIGS[family]
    weights = MODELS / family / "model.safetensors"
    assert weights.stat().st_size <= LARGEST_BYTES
    expected = {name: (list(tensor.shape), tensor.dtype) for name, tensor in stored(Network(CONFIGS[family])).items()}
    with safe_open(weights, "pt") as file:
        found = {name: (list(file.get_tensor(name).shape), file.get_tensor(name).dtype) for name in file.keys()}  # noqa: SIM118
    assert found == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_answers(family: str) -> None:
    network = load(MODELS / family)
    for task in ("recall", "arithmetic"):
        asked = recorded(family)["accuracy"][f"{task} 256 sparse fp32"]["accuracy"]
        # 32 of other lengths: the recorded share, less three standard errors.
        least = asked - 3 * (asked * (1 - asked) / 32) ** 0.5
        assert accuracy(network, task, 32, 64, sparse=True)["accuracy"] >= least


def test_the_readme_says_what_was_recorded() -> None:
    readme = (MODELS / "README.md").read_text()
    lines = re.findall(r"^\| (recall|arithmetic) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.M)
    assert {(task, context) for task, context, *_ in lines} == {
        tuple(name.split()[:2]) for family in FAMILIES for name in recorded(family)["accuracy"]
    }
    for task, context, *shown in lines:
        for family, percent in zip(FAMILIES, shown, strict=True):
            for arm in ("dense", "sparse", "sparse fp32"):
                found = recorded(family)["accuracy"][f"{task} {context} {arm}"]["accuracy"]
                assert f"{100 * found:.1f}" == percent, (family, task, context, arm)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_readme_has_the_recorded_command_and_its_steps(family: str) -> None:
    readme = (MODELS / "README.md").read_text()
    facts = recorded(family)
    given = facts["arguments"]
    command = f"python -m models.train {family} --minutes 6.2 --seed 0 --graphs --out OUT"
    assert command in readme
    assert sorted(command.split()[3:]) == sorted(given)
    assert f"{facts['steps']:,}" in readme


AIM = {"recall": 0.95, "arithmetic": 0.90}
# A checkpoint that misses the aim. Strict: the line goes when a better one comes.
MISS = [pytest.param("dsa-glm-small", marks=pytest.mark.xfail(strict=True, reason="recall is 91 % at 2,048 tokens"))]


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f not in {p.values[0] for p in MISS}), *MISS])
def test_a_checkpoint_reaches_the_aim(family: str) -> None:
    found = recorded(family)["accuracy"]
    assert {name: part["accuracy"] for name, part in found.items() if part["accuracy"] < AIM[name.split()[0]]} == {}

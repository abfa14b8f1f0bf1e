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
from models.record import asked, runs, table

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
def test_the_readme_has_the_recorded_command(family: str) -> None:
    facts = recorded(family)
    given = asked(facts)
    command = f"python -m models.train {family} --minutes {given.minutes:g} --seed {given.seed} --graphs --out OUT"
    assert command in (MODELS / "README.md").read_text()
    assert sorted(command.split()[3:]) == sorted(facts["arguments"])


def test_the_readme_has_the_table_of_recorded_runs() -> None:
    assert table() in (MODELS / "README.md").read_text()


RUNS = {f"{asked(run).family}, seed {asked(run).seed}, {run['commit']}": run for run, _ in runs()}
BOUND = {"recall": 0.95, "arithmetic": 0.90}


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_keeps_the_stated_bound(name: str) -> None:
    found = RUNS[name]["accuracy"]
    assert {task.split()[0] for task in found} == set(BOUND)
    assert {task: part["accuracy"] for task, part in found.items() if part["accuracy"] < BOUND[task.split()[0]]} == {}


def test_what_ships_and_other_runs_are_told_apart() -> None:
    assert len(RUNS) == len(runs()), "a shipped run that is not its own record stands twice"
    assert [asked(run).family for run, shipped in runs() if shipped] == FAMILIES
    assert "dsa-glm-small" in {asked(run).family for run, shipped in runs() if not shipped}


def test_the_bound_is_the_one_that_the_readme_states() -> None:
    stated = "at least {recall:.0%} recall and {arithmetic:.0%} arithmetic".format(**BOUND).replace("%", " %")
    assert stated in (MODELS / "README.md").read_text()

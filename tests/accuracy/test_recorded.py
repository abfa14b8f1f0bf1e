"""Recorded accuracy runs: each passed, is precise enough to speak, and tables in README and docs are those of the runs.

A table that stands behind `<!-- COMMAND -->` is what the command prints; it ends with an empty line.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from benchmarks import sabotage

from dsafuse.accuracy import report

MODELS = ("dsa-glm-small", "dsa-v32-small")
COMPARED = {("float32", "plain"), ("float32", "fp8"), ("bfloat16", "plain")}
"""(dtype, cache layout) that transformers must have been asked about, of each model."""

SPEAKS = {"float32": 0.05, "bfloat16": 2.0}, {"float32": 3e-3, "bfloat16": 0.2}
"""Largest distance and mean that a bound may allow. It is measured in 16 bit, and one near what a fault costs (k_pe not
rotated: 31, mean 5.7) would say nothing."""

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
KINDS = ("eval", "oracle", "sabotage")
RECORDED = {kind: sorted(RESULTS.glob(f"*-{kind}-*.json")) for kind in KINDS}
TABLE = re.compile(r"^<!-- ((?:dsafuse eval|python -m benchmarks\.sabotage) --read .*?) -->\n\n((?:\|.*\n)+)", re.M)
TABLES = {
    (name, command): table.rstrip()
    for name in ("README.md", "docs/accuracy.md")
    for command, table in TABLE.findall((ROOT / name).read_text())
}


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def files(command: str) -> list[Path]:
    return [ROOT / word for word in shlex.split(command) if word.endswith(".json")]


@pytest.mark.parametrize("path", RECORDED["eval"], ids=lambda path: path.stem)
def test_a_recorded_run_passed_and_is_precise(path: Path) -> None:
    record = load(path)
    assert record["ok"]
    for cell in record["cells"]:
        assert cell["fused"]["standard_error"] <= 0.01
        assert cell["fused_calls"]["mla"]["fused"] > 0
        assert cell["fused_calls"]["mla"]["fallback"] == 0


@pytest.mark.parametrize("path", RECORDED["oracle"], ids=lambda path: path.stem)
def test_a_recorded_comparison_is_within_the_bounds_in_both_arms(path: Path) -> None:
    record = load(path)
    assert record["ok"]
    assert {each["arm"] for each in record["oracle"]} == {"un-fused", "fused"}
    for each in record["oracle"]:
        assert each["covered"]["positions"] > 500
        assert each["covered"]["largest"] <= each["bound"]["largest"]
        assert each["covered"]["mean"] <= each["bound"]["mean"]
        assert each["beyond"]["positions"] > 500
        assert each["dtype"] == record["dtype"]
        assert each["bound"]["largest"] <= SPEAKS[0][record["dtype"]]
        assert each["bound"]["mean"] <= SPEAKS[1][record["dtype"]]


@pytest.mark.parametrize("model", MODELS)
def test_every_dtype_and_cache_was_compared(model: str) -> None:
    records = [record for record in map(load, RECORDED["oracle"]) if record["model"] == model]
    assert {(record["dtype"], each["layout"]) for record in records for each in record["oracle"]} >= COMPARED


@pytest.mark.parametrize("path", RECORDED["sabotage"], ids=lambda path: path.stem)
def test_a_recorded_sabotage_was_of_a_trained_model_and_verify_saw_all_six(path: Path) -> None:
    record = load(path)
    assert sabotage.right(record)
    assert list(record["faults"]) == list(sabotage.FAULTS)
    for name, fault in record["faults"].items():
        assert fault["seen_by"] == sabotage.verdicts(fault)
        assert fault["seen_by"]["verify"] == (name != sabotage.NONE)
        # Where nothing is right already, nothing can be lost.
        assert all(cell["unfused"]["accuracy"] > 0.9 for cell in fault["eval"])


@pytest.mark.parametrize(("name", "command"), TABLES)
def test_a_table_is_what_its_command_prints(name: str, command: str) -> None:
    records = [load(path) for path in files(command)]
    if command.startswith("dsafuse"):
        assert TABLES[name, command] == report.summary(records)
    else:
        (record,) = records
        assert TABLES[name, command] == sabotage.markdown(record["faults"])


def shown(document: str) -> set[Path]:
    return {path for (name, command) in TABLES if name == document for path in files(command)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_docs_show_every_recorded_run(kind: str) -> None:
    assert RECORDED[kind]
    assert shown("docs/accuracy.md") >= set(RECORDED[kind])


def test_the_readme_shows_every_run_of_the_tasks_or_none() -> None:
    assert shown("README.md") in (set(), set(RECORDED["eval"]))


ARM = {"accuracy": 0.985, "standard_error": 0.0038, "count": 1000, "right": 985}
CELL = {
    **{"kv_cache_dtype": "fp8", "draft_tokens": 1, "unfused": ARM, "fused": ARM, "lost": 1, "gained": 1, "p": 1.0},
    **{"difference": 0.0, "difference_standard_error": 0.0014, "differing": 3},
    "acceptance_length": {"un-fused": 1.8, "fused": 1.8},
}
AGREEMENT = {
    **{"kv_cache_dtype": "fp8", "arm": "fused", "ok": True, "bound": {"largest": 0.05, "mean": 0.003, "why": ""}},
    "covered": {"positions": 900, "largest": 0.012, "mean": 0.001, "moved": 0, "other_choices": 0},
    "beyond": {"positions": 400, "largest": 0.5, "mean": 0.01, "moved": 8, "other_choices": 1},
}


def test_a_summary_has_a_row_for_every_cell() -> None:
    table = report.summary([{"model": "m", "cells": [CELL]}, {"model": "n", "cells": [CELL]}]).splitlines()
    assert table[0].startswith("| model | cache | MTP | problems | un-fused, % | fused, % | difference, % |")
    assert table[2] == "| m | fp8 | 1 | 1000 | 98.50 ± 0.38 | 98.50 ± 0.38 | +0.00 ± 0.14 | 3 | 1.800 / 1.800 |"
    assert len(table) == 4


def test_a_summary_has_a_row_for_every_arm_that_transformers_was_asked_about() -> None:
    run = {"model": "m", "device": "cuda", "dtype": "bfloat16", "oracle": [AGREEMENT]}
    (row,) = report.summary([run]).splitlines()[2:]
    assert row == (
        "| m | cuda | bfloat16 | fp8 | fused | 900 | 0.012 (0.05) | 0.001 (0.003) | 400 | 8 (2.0 %) | 1 (0.2 %) |"
    )
    both = report.summary([run, {"model": "n", "cells": [CELL]}])
    assert [block.splitlines()[2].split(" | ")[0] for block in both.split("\n\n")] == ["| n", "| m"]


def odd(way: str, value: Any) -> Any:
    """A change of a document: what lies at way becomes value."""

    def change(document: Any) -> None:
        *path, last = (int(word) if word.isdigit() else word for word in way.split("."))
        for word in path:
            document = document[word]
        document[last] = value

    return change


@pytest.mark.parametrize("path", [*RECORDED["eval"], *RECORDED["oracle"]], ids=lambda path: path.stem)
def test_every_recorded_run_reads_back(path: Path) -> None:
    assert report.read(path) == load(path)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("eval", odd("ok", value)) for value in (None, "false", 1, False)),
        ("eval", odd("cells.0.problems", ["answers differ"])),
        ("eval", odd("problems", ["an arm ended"])),
        *(("eval", odd("cells.0.p", value)) for value in (-3, 1.5, float("nan"), True)),
        *(("eval", odd("cells.0.fused.accuracy", value)) for value in (17.0, 0.5)),
        *(("eval", odd("cells.0.fused.right", value)) for value in (-1, 1e3, 999, 10**6)),
        *(("eval", odd("cells.0.unfused.count", value)) for value in (0, "many", 1000.0)),
        *(("eval", odd("cells.0.lost", value)) for value in (-1, 1, 0.0)),
        ("eval", odd("cells.0.difference", float("nan"))),
        ("eval", odd("cells.0.parts.0.p", 2)),
        *(("oracle", odd("oracle.0.ok", value)) for value in (None, False)),
        *(("oracle", odd(f"oracle.0.covered.{name}", value)) for name, value in (("largest", 9.0), ("positions", 0))),
        *(("oracle", odd("oracle.0.beyond.moved", value)) for value in (-5, 10**6, 1.5)),
        ("oracle", odd("oracle", 5)),
        ("oracle", odd("cells", None)),
    ],
)
def test_what_no_run_can_have_written_is_refused(tmp_path: Path, kind: str, change: Any) -> None:
    document = load(RECORDED[kind][0])
    change(document)
    (tmp_path / "run.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="got"):
        report.read(tmp_path / "run.json")

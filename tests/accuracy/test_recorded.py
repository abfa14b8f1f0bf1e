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

"""Recorded evaluations: each passed, is precise enough to speak, and docs/accuracy.md has its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsafuse.accuracy import report

ROOT = Path(__file__).parents[2]
RECORDED = sorted((ROOT / "benchmarks" / "results").glob("*eval*.json"))
recorded = pytest.mark.skipif(not RECORDED, reason="no evaluation is recorded in benchmarks/results")


@recorded
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_recorded_run_passed_and_is_precise(path: Path) -> None:
    record = json.loads(path.read_text())
    assert record["ok"]
    for cell in record["cells"]:
        assert cell["fused"]["standard_error"] <= 0.01
        assert cell["fused_calls"]["mla"]["fused"] > 0
        assert cell["fused_calls"]["mla"]["fallback"] == 0


@recorded
def test_the_docs_have_the_recorded_table() -> None:
    runs = [json.loads(path.read_text()) for path in RECORDED]
    rows = report.summary([run for run in runs if run["cells"]]).splitlines()[2:]
    text = (ROOT / "docs" / "accuracy.md").read_text()
    assert [row for row in rows if row not in text] == []


def test_a_summary_has_a_row_for_every_cell() -> None:
    arm = {"accuracy": 0.985, "standard_error": 0.0038, "count": 1000, "right": 985}
    cell = {
        **{"kv_cache_dtype": "fp8", "draft_tokens": 1, "unfused": arm, "fused": arm, "lost": 1, "gained": 1, "p": 1.0},
        **{"difference": 0.0, "difference_standard_error": 0.0014, "differing": 3},
        "acceptance_length": {"un-fused": 1.8, "fused": 1.8},
    }
    table = report.summary([{"model": "m", "cells": [cell]}, {"model": "n", "cells": [cell]}]).splitlines()
    assert table[0].startswith("| model | cache | MTP | problems | un-fused, % | fused, % | difference, % |")
    assert table[2] == "| m | fp8 | 1 | 1000 | 98.50 ± 0.38 | 98.50 ± 0.38 | +0.00 ± 0.14 | 3 | 1.800 / 1.800 |"
    assert len(table) == 4

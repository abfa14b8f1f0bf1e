"""Recorded measurements against targets, and the command that shows them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsafuse.cli.app import app
from dsafuse.serving import tables
from dsafuse.serving.grid import Cell
from dsafuse.serving.record import BY_KEY, Record, compare
from dsafuse.serving.targets import Target, check, read_targets
from tests.serving.test_record import record

RUNNER = CliRunner()
ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "benchmarks/serve-targets.toml"
SERVED = sorted((ROOT / "benchmarks/results").glob("*serve*.json"))
TOLD = ("median_tpot_ms", "mean_tpot_ms", "median_itl_ms", "output_throughput")
"""What docs/serving.md shows of each cell of 128 heads, TPOT's repeats after the first."""


def measured(ratio: float, concurrency: int = 8, isl: int = 1024, **conditions: Any) -> Any:
    return record((5.0 * ratio, 5.0), cell=Cell(isl, 256, concurrency), **conditions)


def states(*records: Any) -> list[tuple[str, Any]]:
    return [(finding.state, finding.at) for finding in check(records, read_targets(TARGETS))]


def test_the_targets_ask_for_every_cell_and_hold_all_to_the_floor() -> None:
    asked = [at for state, at in states() if state == "not measured"]
    assert len(asked) == len(set(asked))
    assert {(16, "auto", 8192, 32), (128, "fp8", 1024, 1)} <= {(heads, *rest) for heads, _, *rest in asked}
    found = states(measured(1.05), measured(1.0, 64), measured(1.04, heads=128), measured(0.98, 64, isl=8192))
    told = [finding for finding in found if finding[0] != "not measured"]
    assert told == [
        ("misses", (16, "bf16", "fp8", 1024, 8)),
        ("holds", (128, "bf16", "fp8", 1024, 8)),
        ("holds", (16, "bf16", "fp8", 1024, 8)),
        ("holds", (16, "bf16", "fp8", 1024, 64)),
        ("holds", (128, "bf16", "fp8", 1024, 8)),
        ("misses", (16, "bf16", "fp8", 8192, 64)),
    ]


@pytest.mark.parametrize(
    ("weights", "found"),
    [
        (None, {("holds", "bf16"), ("holds", "fp8")}),
        (("fp8",), {("holds", "fp8")}),
        (("bf16", "fp8", "fp32"), {("holds", "bf16"), ("holds", "fp8"), ("not measured", "fp32")}),
    ],
)
def test_a_target_speaks_of_the_weights_in_its_list_or_of_any(
    weights: tuple[str, ...] | None, found: set[tuple[str, str]]
) -> None:
    one = Target(
        metric="median_tpot_ms",
        at_least=1.1,
        weights=weights,
        heads=(16,),
        kv_cache_dtype=("fp8",),
        isl=(1024,),
        concurrency=(8,),
    )
    measured_of_both = [measured(1.2), measured(1.2, weights="fp8")]
    assert {(finding.state, finding.at[1]) for finding in check(measured_of_both, [one])} == found
    (nothing,) = check([], [replace(one, weights=weights and weights[:1])])
    assert str(nothing).startswith(f"H=16, {weights[0]} weights, cache" if weights else "H=16, cache fp8, ISL 1024")


def test_times_and_throughput_are_held_by_ratios_above_one() -> None:
    faster = [Target(metric=metric, at_least=1.19) for metric in ("median_ttft_ms", "output_throughput")]
    assert [finding.state for finding in check([measured(1.2)], faster)] == ["holds", "holds"]
    assert [finding.state for finding in check([measured(1.1)], faster)] == ["misses", "misses"]


@pytest.mark.skipif(not SERVED, reason="no measurement of serving is recorded in benchmarks/results")
def test_docs_tell_what_the_recorded_runs_hold_and_miss() -> None:
    document = (ROOT / "docs/serving.md").read_text()
    records = [Record.read(path) for path in SERVED]
    found = check(records, read_targets(TARGETS))
    told = re.search(r"^`--summary --check .*: (\d+) hold, (\d+) missed, (\d+) not measured\.$", document, re.MULTILINE)
    assert told is not None
    counted = [[finding.state for finding in found].count(state) for state in ("holds", "misses", "not measured")]
    assert counted == [int(count) for count in told.groups()]

    (record,) = (one for one in records if (one.conditions["heads"], one.conditions["weights"]) == (128, "bf16"))
    rows = re.findall(r"^\| (\d+) \| (\d\.\d+) \| (\d\.\d{3} \|.*) \|$", document, re.MULTILINE)
    assert len(rows) == len(record.cells())
    for cell, (concurrency, target, cells) in zip(record.cells(), rows, strict=True):
        repeats = record.repeats(cell)
        shown = [f"{compared.ratio:.3f}" for key in TOLD if (compared := compare(BY_KEY[key], repeats)) is not None]
        shown.insert(1, ", ".join(f"{BY_KEY[TOLD[0]].ratio(off, on):.3f}" for off, on in repeats))
        assert (int(concurrency), cells) == (cell.concurrency, " | ".join(shown))
        asked = [one.target.at_least for one in found if one.at == (128, "bf16", "fp8", cell.isl, cell.concurrency)]
        assert float(target) == max(asked)
    missed = {finding.at for finding in found if finding.state == "misses" and finding.at[1] == "bf16"}
    short = {concurrency for concurrency, target, cells in rows if float(cells.split(" | ")[0]) < float(target)}
    assert missed == {(128, "bf16", "fp8", 1024, int(concurrency)) for concurrency in short}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got no [[target]]"),
        ("target = 1", "got no [[target]]"),
        ("target = [1]", "target 1: got 1, expected some of at_least"),
        ("[[target]", "Expected"),
        ("[[target]]\nmetric = 'tpot'\nat_least = 1.0", "got metric='tpot', expected one of median_ttft_ms"),
        ("[[target]]\nmetric = []\nat_least = 1.0", "got metric=[]"),
        ("[[target]]\nmetric = 'median_tpot_ms'", "got at_least=None, expected a ratio"),
        ("[[target]]\nmetric = 'median_tpot_ms'\nat_least = nan", "got at_least=nan, expected a ratio"),
        ("[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nhead = [1]", "got head, expected some of"),
        ("[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nheads = 16", "got heads=16, expected a list of int"),
        ("[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nisl = ['8']", "got isl=['8'], expected a list of int"),
        (
            "[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nweights = [8]",
            "got weights=[8], expected a list of str",
        ),
    ],
)
def test_a_table_that_means_nothing_is_one_line(tmp_path: Path, text: str, says: str) -> None:
    table, run = tmp_path / "targets.toml", tmp_path / "run.json"
    table.write_text(text)
    measured(1.2).write(run)
    done = RUNNER.invoke(app, ["serve-bench", "--read", str(run), "--check", str(table)])
    assert done.exit_code == 2
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two recorded measurements."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, one in zip(paths, (measured(1.2), measured(1.01, heads=128, layers=16)), strict=True):
        one.write(path)
    return [part for path in paths for part in ("--read", str(path))]


def show(*arguments: str) -> Any:
    return RUNNER.invoke(app, ["serve-bench", *arguments])


def test_a_record_is_shown_as_it_was_printed_and_nothing_is_served(runs: list[str]) -> None:
    done = show(*runs[:2], "--markdown")
    assert done.exit_code == 0
    assert done.stdout.strip() == tables.markdown(measured(1.2)).strip()
    assert "NVIDIA H200" in show(*runs).stdout
    assert len(json.loads(show(*runs, "--json").stdout)["records"]) == 2


def test_several_records_are_one_table_with_what_misses_under_it(runs: list[str]) -> None:
    done = show(*runs, "--summary")
    assert done.exit_code == 0
    assert done.stdout == tables.summary([measured(1.2), measured(1.01, heads=128, layers=16)]) + "\n"
    done = show(*runs, "--summary", "--check", str(TARGETS))
    assert done.exit_code == 1
    assert (
        "MISSES H=128, bf16 weights, cache fp8, ISL 1024, concurrency 8: TPOT p50, ms ratio: got 1.010, "
        "expected at least 1.03" in done.stdout
    )
    assert re.search(r"NOT MEASURED H=16, (bf16 weights, )?cache auto, ISL 8192, concurrency 32: ", done.stdout)
    assert re.search(r"targets by cell: 3 hold, 1 missed, \d+ not measured", done.stdout)
    assert show(*runs[:2], "--check", str(TARGETS)).exit_code == 0


def test_a_record_is_drawn_again(runs: list[str], tmp_path: Path) -> None:
    picture = tmp_path / "again.png"
    assert show(*runs[:2], "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--summary",), "--summary: needs --read"),
        (("--check", "targets.toml"), "--check: needs --read"),
        (("--plot", "a.png"), "--plot: needs --read"),
        ((), "MODEL_DIR: got none, expected a folder with a config.json (or --read)"),
        (("model", "--read", "a.json"), "MODEL_DIR: got model, expected none with --read"),
        (("--read", "a.json"), "--read: got a.json, expected a file"),
        (("--read", "a.json", "--read", "b.json", "--plot", "a.png"), "--plot: got 2 files to --read, expected one"),
        (("--read", "a.json", "--plot", "a.txt"), "--plot: got a.txt, expected a name that ends in one of .png"),
        (("--read", "a.json", "--check", "none.toml"), "--check: got none.toml, expected a file"),
    ],
)
def test_what_cannot_be_shown_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = show(*arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(says)
    assert len(done.stderr.splitlines()) == 1


def test_a_file_of_odd_types_is_one_line(tmp_path: Path) -> None:
    document = measured(1.2).document()
    document["results"][0]["turn"]["cell"]["isl"] = "long"
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(document))
    done = show("--read", str(path))
    assert done.exit_code == 2
    assert done.stderr == (
        f"--read: {path}: no measurement of this version: results[0].turn.cell.isl: got 'long', expected int\n"
    )

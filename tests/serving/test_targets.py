"""Recorded measurements against targets, and the command that shows them."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dsafuse.check.bound import counted
from dsafuse.cli.app import app
from dsafuse.serving import tables
from dsafuse.serving.grid import Cell
from dsafuse.serving.record import BY_KEY, Record, compare
from dsafuse.serving.targets import Target, check, read_targets
from tests.check.test_targets import headings
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


def test_the_targets_ask_for_every_cell_of_the_grid_once() -> None:
    caches = {16: ("fp8", "auto"), 128: ("fp8",)}
    lengths = {16: (1024, 8192), 128: (1024,)}
    weights = {16: ("bf16",), 128: ("bf16", "fp8")}
    wanted = {16: 1.06, 128: 1.03}
    grid = {
        (bound, (heads, of, cache, isl, concurrency))
        for heads, most in wanted.items()
        for of, cache, isl in product(weights[heads], caches[heads], lengths[heads])
        for bound, counts in ((most, (1, 8, 32)), (0.99, (1, 8, 32, 64)))
        for concurrency in counts
    }
    findings = check([], read_targets(TARGETS))
    assert Counter((finding.target.at_least, finding.at) for finding in findings) == Counter(grid)
    assert {finding.state for finding in findings} == {"not measured"}


def test_cells_hold_are_argued_or_miss() -> None:
    plain = {"isl": 8192, "kv_cache_dtype": "auto"}
    slow, slower = measured(1.055, **plain), measured(1.049, **plain)
    found = states(measured(1.05), measured(1.0, 64), measured(0.98, 64, isl=8192), slow, slower)
    told = [finding for finding in found if finding[0] != "not measured"]
    assert told == [
        ("misses", (16, "bf16", "fp8", 1024, 8)),
        ("argued", (16, "bf16", "auto", 8192, 8)),
        ("misses", (16, "bf16", "auto", 8192, 8)),
        ("holds", (16, "bf16", "fp8", 1024, 8)),
        ("holds", (16, "bf16", "fp8", 1024, 64)),
        ("misses", (16, "bf16", "fp8", 8192, 64)),
        ("holds", (16, "bf16", "auto", 8192, 8)),
        ("holds", (16, "bf16", "auto", 8192, 8)),
    ]


def test_each_argument_is_a_heading_of_the_docs() -> None:
    for argued in {target.argued for target in read_targets(TARGETS)} - {None}:
        page, _, heading = argued.partition("#")
        assert heading in headings(ROOT / page), f"{argued}: no such heading"


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
    counts = counted([finding.state for finding in found])
    assert f"`--summary --check benchmarks/serve-targets.toml`: {counts}." in document
    why = document.partition("### What misses, and why\n")[2].partition("\n#")[0]
    short = [f"{finding.ratio:.3f}" for finding in found if finding.state in ("argued", "misses")]
    assert [ratio for ratio in short if ratio not in why] == []

    rows = re.findall(r"^\| (\d+) \| (bf16|fp8) \| (\d\.\d{3} \|.*) \|$", document, re.MULTILINE)
    told = {(int(concurrency), weights): cells for concurrency, weights, cells in rows}
    recorded = {}
    for one in records:
        for cell in one.cells() if one.conditions["heads"] == 128 else ():
            repeats = one.repeats(cell)
            shown = [f"{compared.ratio:.3f}" for key in TOLD if (compared := compare(BY_KEY[key], repeats)) is not None]
            shown.insert(1, ", ".join(f"{BY_KEY[TOLD[0]].ratio(off, on):.3f}" for off, on in repeats))
            recorded[cell.concurrency, one.conditions["weights"]] = " | ".join(shown)
    assert len(rows) == len(told)
    assert told == recorded


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "got no [[target]]"),
        ("target = 1", "got no [[target]]"),
        ("target = [1]", "target 1: got 1, expected a table"),
        ("[[target]", "Expected"),
        ("[[target]]\nmetric = 'tpot'\nat_least = 1.0", "got metric='tpot', expected one of median_ttft_ms"),
        ("[[target]]\nmetric = []\nat_least = 1.0", "got metric=[]"),
        ("[[target]]\nmetric = 'median_tpot_ms'", "target 1: expected one of at_most and at_least"),
        ("[[target]]\nmetric = 'median_tpot_ms'\nat_least = nan", "got at_least=nan, expected a positive number"),
        ("[[target]]\nmetric = 'median_tpot_ms'\nat_least = true", "got at_least=True, expected a positive number"),
        ("[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nheld_to = 0.9", "expected held_to and argued together"),
        (
            "[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nargued = 'docs/serving.md#x'",
            "expected held_to and argued together",
        ),
        (
            "[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nheld_to = 1\nargued = 'docs/serving.md#x'",
            "got held_to=1, expected what misses at least 1",
        ),
        (
            "[[target]]\nmetric = 'median_tpot_ms'\nat_least = 1\nheld_to = 0.9\nargued = 'waves'",
            "got argued='waves', expected page.md#heading",
        ),
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
        "expected at least 1.03 (held to 1.025, docs/serving.md#what-misses-and-why)" in done.stdout
    )
    assert "NOT MEASURED H=16, bf16 weights, cache auto, ISL 8192, concurrency 32: " in done.stdout
    assert "targets by cell: 3 hold, 0 argued, 1 missed, 38 not measured\n" in done.stdout
    assert show(*runs[:2], "--check", str(TARGETS)).exit_code == 0


def test_what_is_argued_is_said_and_is_no_failure(tmp_path: Path) -> None:
    run = tmp_path / "run.json"
    measured(1.026, heads=128).write(run)
    done = show("--read", str(run), "--check", str(TARGETS))
    assert done.exit_code == 0
    assert (
        "ARGUED H=128, bf16 weights, cache fp8, ISL 1024, concurrency 8: TPOT p50, ms ratio: got 1.026, "
        "expected at least 1.03 (held to 1.025, docs/serving.md#what-misses-and-why)\n" in done.stdout
    )
    assert "targets by cell: 1 hold, 1 argued, 0 missed, 40 not measured" in done.stdout
    targets = json.loads(show("--read", str(run), "--check", str(TARGETS), "--json").stdout)["targets"]
    assert Counter(target["state"] for target in targets) == {"holds": 1, "argued": 1, "not measured": 40}


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

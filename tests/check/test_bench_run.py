"""A whole run of `dsafuse bench` without a GPU: cells near a target come again, and a run cut short keeps its own."""

import json
import os
import signal
import threading

import pytest
import torch
from typer.testing import CliRunner

from dsafuse.check.bench import Cell, form_of, label
from dsafuse.check.records import Run
from dsafuse.cli import bench as command
from dsafuse.cli.app import app
from tests.check.test_targets import row

QUERIES = "prepare_queries"
TARGET = """
[[target]]
op = "prepare_queries"
heads = "16/32"
tokens = [1, 64]
l2 = "cold"
metric = "median_us"
at_most = 2.0
"""
TIMES = {1: 1.0, 8: 1.98, 64: 2.02}
"""Far below the bound, and near it on either side."""


@pytest.fixture
def timed(monkeypatch):
    """The (form, heads, tokens, captures) that were timed, in order; `then` is called after each."""
    order = []

    def cell(case, arms, states, seed, device, yardsticks, captures=1):
        order.append((form_of(case), label(case), case.tokens, captures))
        cell.then(case)
        us = TIMES[case.tokens] if captures == 1 else 1.99
        common = {"op": case.op, "form": form_of(case), "heads": label(case), "tokens": case.tokens}
        return Cell([row(**common, median_us=us, captures=captures)])

    cell.then = lambda case: None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr("dsafuse.check.environment.target_here", lambda: "sm_90")
    monkeypatch.setattr(command, "copy_bandwidth", lambda device: 4e12)
    monkeypatch.setattr(command, "empty_kernel_us", lambda device: 0.6)
    monkeypatch.setattr(command, "bench_cell", cell)
    return order, cell


def run(tmp_path, *more):
    (tmp_path / "targets.toml").write_text(TARGET)
    arguments = [
        QUERIES,
        "--tokens",
        "1,8,64",
        "--arms",
        "fused",
        "--commit",
        "abc",
        "--out",
        str(tmp_path / "run.json"),
    ]
    return CliRunner().invoke(app, ["bench", *arguments, *more])


def test_cells_near_a_target_are_timed_again_on_either_side_of_it(tmp_path, timed):
    order, _ = timed
    result = run(tmp_path, "--check", str(tmp_path / "targets.toml"))
    once = [(form, heads, t, 1) for form in ("wrapper", "model") for heads in ("128/64", "16/32") for t in TIMES]
    assert order == [*once, ("wrapper", "16/32", 8, 3), ("wrapper", "16/32", 64, 3)]
    recorded = Run.read(tmp_path / "run.json")
    kept = {
        row.tokens: (row.median_us, row.captures)
        for row in recorded.rows
        if (row.call, row.heads) == (QUERIES, "16/32")
    }
    assert kept == {1: (1.0, 1), 8: (1.99, 3), 64: (1.99, 3)}
    assert recorded.unreached == 0
    assert result.exit_code == 0
    assert "2 cells lay within 2% of a target" in result.stdout
    assert [line.partition("] ")[2] for line in result.stderr.splitlines()] == [
        "arms loaded: fused",
        "prepare_queries 128/64: T = 1, 8, 64",
        "prepare_queries 16/32: T = 1, 8, 64",
        "prepare_queries (model) 128/64: T = 1, 8, 64",
        "prepare_queries (model) 16/32: T = 1, 8, 64",
        "prepare_queries 16/32, again: T = 8, 64",
    ]


def test_without_targets_nothing_is_timed_again(tmp_path, timed):
    order, _ = timed
    assert run(tmp_path).exit_code == 0
    assert {captures for *_, captures in order} == {1}


@pytest.mark.parametrize(("after", "unreached"), [(5, 7), (13, 1)])
def test_a_run_cut_short_keeps_its_cells_and_says_so(tmp_path, timed, after, unreached):
    """By SIGTERM, as a time limit sends it: once among the first cells, once among those that are timed again."""
    order, cell = timed

    def cut(case):
        if len(order) == after + 1:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(1)

    cell.then = cut
    before = signal.getsignal(signal.SIGTERM)
    result = run(tmp_path, "--check", str(tmp_path / "targets.toml"))
    assert signal.getsignal(signal.SIGTERM) == before
    recorded = Run.read(tmp_path / "run.json")
    assert (len(recorded.rows), recorded.unreached) == (min(after, 12), unreached)
    assert result.exit_code == 1
    assert f"INCOMPLETE: the run was cut short, {unreached} cells before its end" in result.stdout
    again = CliRunner().invoke(app, ["bench", "--read", str(tmp_path / "run.json")])
    assert again.exit_code == 1
    assert "INCOMPLETE" in again.stdout


def test_each_group_of_cells_is_kept_as_it_ends(tmp_path, timed):
    order, cell = timed
    seen = []

    def look(case):
        data = json.loads((tmp_path / "run.json").read_text())
        seen.append((len(data["rows"]), data["unreached"]))

    cell.then = look
    assert run(tmp_path).exit_code == 0
    assert seen == [(done, 12 - done) for done in (0, 3, 6, 9) for _ in range(3)]
    assert len(order) == 12

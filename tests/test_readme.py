"""Figures in README and docs are those of the recorded runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dsafuse.check.records import WRAPPER, Run
from dsafuse.check.targets import check, read_targets
from dsafuse.serving import tables
from dsafuse.serving.record import Record
from tests.serving.test_record import record

ROOT = Path(__file__).parents[1]
RUN = ROOT / "benchmarks/results/h200-2026-11-30.json"
COMPILED = ROOT / "benchmarks/results/h200-2026-11-30-compiled.json"
SERVED = sorted((ROOT / "benchmarks/results").glob("*serve*.json"))
MARKED = re.compile(r"^<!-- serve-bench -->\n(.*?)^<!-- /serve-bench -->$", re.MULTILINE | re.DOTALL)
"""Where a document has the table of `dsafuse serve-bench --read ... --summary`."""


def figure(us: float) -> str:
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


@pytest.mark.parametrize(
    ("page", "run", "other"), [("README.md", RUN, "split"), ("docs/benchmarks.md", COMPILED, "compiled")]
)
def test_the_table_has_the_figures_of_the_recorded_run(page: str, run: Path, other: str) -> None:
    shown = [row for row in Run.read(run).rows if (row.l2, row.form) == ("cold", WRAPPER)]
    times = {(row.op, row.heads, row.tokens, row.arm): row.median_us for row in shown}
    document = (ROOT / page).read_text()
    header = re.search(r"^\| op, H/HI \|(.*)\|$", document, re.MULTILINE)
    assert header is not None
    tokens = [int(cell.split("=")[1].replace(",", "")) for cell in header[1].split("|")]
    rows = re.findall(r"^\| `(\w+)`, (\d+/\d+) \|(.*)\|$", document, re.MULTILINE)
    assert {(op, heads) for op, heads, _ in rows} == {(row.op, row.heads) for row in shown}
    for op, heads, cells in rows:
        for count, cell in zip(tokens, cells.split("|"), strict=True):
            fused, its = (times[op, heads, count, arm] for arm in ("fused", other))
            assert cell.strip() == f"{figure(fused)} ({its / fused:.1f}x)", (op, heads, count)
            assert fused < its


def test_the_counts_of_held_and_missed_targets_are_those_of_the_recorded_run() -> None:
    document = (ROOT / "docs/benchmarks.md").read_text()
    rows = re.findall(
        r"^\| \[.*\]\(\.\./(benchmarks/results/\S+)\) \|.*?\| (\d+) \| (\d+) \| (\d+) \| (\d+)", document, re.MULTILINE
    )
    ((path, *shown),) = rows
    assert ROOT / path == RUN
    run = Run.read(RUN)
    assert run.unreached == 0
    states = [finding.state for finding in check(run, read_targets(ROOT / "benchmarks/targets.toml"))]
    assert [states.count(state) for state in ("holds", "argued", "misses", "not measured")] == [int(n) for n in shown]


def wrong_serving_tables(text: str, records: list[Record]) -> list[str]:
    """Tables between the markers of a document that are not those of these records."""
    return [table for table in MARKED.findall(text) if table.strip() != tables.summary(records)]


@pytest.mark.skipif(not SERVED, reason="no measurement of serving is recorded in benchmarks/results")
def test_the_serving_tables_are_those_of_the_recorded_runs() -> None:
    records = [Record.read(path) for path in SERVED]
    documents = [path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))]
    assert MARKED.search(documents[0])
    assert [wrong for text in documents for wrong in wrong_serving_tables(text, records)] == []


def test_a_figure_that_is_not_the_recorded_one_is_seen() -> None:
    one = record((6.0, 5.0))
    text = f"Before.\n\n<!-- serve-bench -->\n{tables.summary([one])}\n<!-- /serve-bench -->\n\nAfter.\n"
    assert len(MARKED.findall(text)) == 1
    assert wrong_serving_tables(text, [one]) == []
    assert wrong_serving_tables(text.replace("6.00", "6.01"), [one]) != []
    assert wrong_serving_tables(text, [one, record((8.0, 7.0), heads=128)]) != []


def test_the_table_of_compiled_code_is_that_of_the_floors() -> None:
    document = (ROOT / "docs/codegen.md").read_text()
    kernels = tomllib.loads((ROOT / "benchmarks/codegen.toml").read_text())["kernel"]
    shown = [k for k in kernels if (k["variant"], k["kernel"], k["heads"]) == ("fp8", "prepare", 128)]
    assert len(shown) == 20
    for k in shown:
        counts = (k["registers"], k.get("scalar_registers", "-"), k["shared_bytes"], k["load_bytes_16"])
        counts += (k["store_bytes_8"], k["fp8_conversions"], k["instructions"])
        assert f"| {k['target']} | `{k['op']}` | {' | '.join(map(str, counts))} |" in document


def test_the_example_runs() -> None:
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert example is not None
    names: dict[str, object] = {}
    exec(example[1], names)
    assert tuple(names["query"].shape) == (4, 16, 576)  # type: ignore[attr-defined]
    assert tuple(names["index_weights"].shape) == (4, 32)  # type: ignore[attr-defined]

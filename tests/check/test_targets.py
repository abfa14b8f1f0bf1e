"""Targets as data: what holds, what misses, what was not measured; and the picture of a run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsafuse.check import plot
from dsafuse.check.bench import FORMS
from dsafuse.check.records import Row, Run
from dsafuse.check.targets import cells_near, check, not_measured, read_targets
from dsafuse.cli.app import app

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "benchmarks" / "targets.toml"
ARGUED = {"held_to": 2.2, "argued": "docs/performance.md#x"}
QK, MLA, INDEXER = "prepare_qk", "fused_qk_rope_concat_and_cache_mla", "indexer_qk_rope_quant_and_cache"


def row(op=QK, arm="fused", tokens=8, l2="cold", median_us=2.0, **values):
    common = {"case": "", "heads": "16/32", "what": arm, "p10_us": 1.0, "p90_us": 3.0, "bytes_moved": 10**6 * tokens}
    common |= {"gb_per_s": 1.0, "fraction_of_copy": 0.5, "empty_launches": 3.0, "input_sets": 4}
    return Row(op=op, arm=arm, tokens=tokens, l2=l2, median_us=median_us, **{**common, **values})


def run_of(*rows):
    return Run.of(rows, 4e12, 0.6, commit="abc")


def targets_of(tmp_path, **entry):
    values = {"op": QK, "heads": "16/32", "tokens": [1, 8], "l2": "cold", **entry}
    lines = [f"{key} = {str(value) if not isinstance(value, str) else repr(value)}" for key, value in values.items()]
    (tmp_path / "targets.toml").write_text("[[target]]\n" + "\n".join(lines).replace("'", '"'))
    return read_targets(tmp_path / "targets.toml")


def states(run, targets):
    return [finding.state for finding in check(run, targets)]


@pytest.mark.parametrize(
    ("entry", "rows", "state"),
    [
        ({"metric": "median_us", "at_most": 2.0}, [row()], "holds"),
        ({"metric": "median_us", "at_most": 1.9}, [row()], "misses"),
        ({"metric": "fraction_of_copy", "at_least": 0.5}, [row()], "holds"),
        ({"metric": "fraction_of_copy", "at_least": 0.51}, [row()], "misses"),
        ({"metric": "host_of_mul", "at_most": 2.0}, [row(host_us=16.0, mul_us=8.0)], "holds"),
        ({"metric": "host_of_mul", "at_most": 1.75}, [row(host_us=16.0, mul_us=8.0)], "misses"),
        ({"metric": "host_of_mul", "at_most": 1.75}, [row()], "not measured"),
        ({"metric": "speedup", "over": "split", "at_least": 3}, [row(), row(arm="split", median_us=6.0)], "holds"),
        ({"metric": "speedup", "over": "split", "at_least": 3}, [row(), row(arm="split", median_us=5.0)], "misses"),
        ({"metric": "speedup", "over": "vllm_fused", "at_least": 1}, [row(), row(arm="split")], "not measured"),
        ({"metric": "speedup", "over": "split", "at_least": 1}, [row(), row(arm="split", l2="warm")], "not measured"),
        (
            {"metric": "eager_speedup", "over": "split", "at_least": 2},
            [row(eager_us=10.0), row(arm="split", eager_us=21.0)],
            "holds",
        ),
        ({"metric": "eager_speedup", "over": "split", "at_least": 2}, [row(), row(arm="split")], "not measured"),
        (
            {"metric": "speedup_over_parts", "parts": [MLA, INDEXER], "at_least": 1},
            [row(), row(op=MLA, median_us=1.5), row(op=INDEXER, median_us=0.4)],
            "misses",
        ),
        (
            {"metric": "speedup_over_parts", "parts": [MLA, INDEXER], "at_least": 1},
            [row(), row(op=MLA, median_us=1.5)],
            "not measured",
        ),
        ({"metric": "median_us", "at_most": 2.0, **ARGUED}, [row()], "holds"),
        ({"metric": "median_us", "at_most": 1.9, **ARGUED}, [row()], "argued"),
        ({"metric": "median_us", "at_most": 1.9, **ARGUED}, [row(median_us=2.2)], "argued"),
        ({"metric": "median_us", "at_most": 1.9, **ARGUED}, [row(median_us=2.21)], "misses"),
        ({"metric": "fraction_of_copy", "at_least": 2.5, **ARGUED}, [row(fraction_of_copy=2.2)], "argued"),
        ({"metric": "fraction_of_copy", "at_least": 2.5, **ARGUED}, [row(fraction_of_copy=2.1)], "misses"),
        ({"metric": "median_us", "at_most": 1.9, **ARGUED}, [row(op=MLA)], "not measured"),
        ({"metric": "median_us", "at_most": 2.0}, [row(op=MLA)], "not measured"),
        ({"metric": "median_us", "at_most": 2.0}, [row(l2="warm")], "not measured"),
        ({"metric": "median_us", "at_most": 2.0}, [row(tokens=9)], "not measured"),
    ],
)
def test_a_target_holds_misses_or_was_not_measured(tmp_path, entry, rows, state):
    assert states(run_of(*rows), targets_of(tmp_path, **entry)) == [state]


def test_every_cell_of_the_range_counts(tmp_path):
    targets = targets_of(tmp_path, metric="median_us", at_most=2.0)
    run = run_of(row(tokens=1), row(tokens=8, median_us=2.1), row(tokens=16, median_us=9.0), row(op=MLA, tokens=4))
    findings = check(run, targets)
    assert [(f.tokens, f.state) for f in findings] == [(1, "holds"), (4, "not measured"), (8, "misses")]
    assert list(not_measured(findings)) == [f"{targets[0]} (at T=4)"]
    assert "got 2.1, at T=8" in str(findings[2])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"op": "no_op"}, "op='no_op'"),
        ({"metric": "speed"}, "metric='speed'"),
        ({"l2": "hot"}, "l2='hot'"),
        ({"tokens": [1]}, "first and the last"),
        ({"at_least": 1}, "one of at_most and at_least"),
        ({"colour": "red"}, "colour"),
        ({"held_to": 2.2}, "held_to and argued together"),
        ({"argued": "docs/performance.md#x"}, "held_to and argued together"),
        ({"held_to": 2.0, "argued": "docs/performance.md#x"}, "expected what misses at most 2"),
        ({"metric": "speedup", "over": "nobody"}, "over='nobody'"),
        ({"metric": "speedup_over_parts", "parts": ["x"]}, "names of ops"),
        ({"form": "model"}, "form='model', expected one that prepare_qk has"),
        ({"form": "no_form"}, "form='no_form'"),
        ({"at_most": float("nan")}, "got at_most=nan, expected a positive number"),
        ({"at_most": float("inf")}, "got at_most=inf"),
        ({"at_most": 0}, "got at_most=0"),
        ({"at_most": -2.0}, "got at_most=-2"),
        ({**ARGUED, "held_to": float("nan")}, "got held_to=nan"),
        ({**ARGUED, "held_to": float("inf")}, "got held_to=inf"),
        ({"at_most": 10**400}, "target 1: got at_most=1000"),
        ({"metric": "speedup_over_parts"}, r"target 1: got parts=\(\)"),
        ({"metric": "speedup_over_parts", "parts": [QK]}, "got parts=.*, expected names of ops"),
        ({"parts": [MLA]}, "got parts=.*, expected none with median_us"),
        ({"tokens": [512, 1]}, r"target 1: got tokens=\(512, 1\), expected a first of 1 or more"),
        ({"tokens": [0, 1]}, r"got tokens=\(0, 1\)"),
        ({"heads": "banana"}, "target 1: got heads='banana', expected a pair as 128/64"),
        ({"metric": "speedup", "over": "fused"}, "target 1: got over='fused', expected one of split"),
        ({"over": "split"}, "target 1: got over='split', expected none with median_us"),
        ({**ARGUED, "argued": ""}, "target 1: got argued='', expected page.md#heading"),
    ],
)
def test_a_target_that_can_mean_nothing_is_refused(tmp_path, change, words):
    with pytest.raises(ValueError, match=words):
        targets_of(tmp_path, **{"metric": "median_us", "at_most": 2.0, **change})


@pytest.mark.parametrize(
    ("entry", "near", "far"),
    [
        ({"metric": "median_us", "at_most": 2.0}, (1.97, 2.0, 2.03), (1.94, 2.06)),
        ({"metric": "fraction_of_copy", "at_least": 0.5}, (0.495, 0.505), (0.485, 0.515)),
        ({"metric": "median_us", "at_most": 1.9, **ARGUED}, (1.87, 1.93, 2.17, 2.24), (2.05, 2.3)),
    ],
)
def test_near_is_either_side_of_what_was_wanted_and_of_what_is_held(tmp_path, entry, near, far):
    (target,) = targets_of(tmp_path, **entry)
    assert [target.is_near(value) for value in (*near, *far)] == [True] * len(near) + [False] * len(far)


def test_cells_near_a_target_are_it_and_the_parts_it_is_compared_with(tmp_path):
    targets = targets_of(tmp_path, metric="speedup_over_parts", parts=[MLA, INDEXER], at_least=1.0)
    parts = [row(op=op, tokens=tokens, median_us=1.0) for op in (MLA, INDEXER) for tokens in (1, 8)]
    run = run_of(row(tokens=1, median_us=1.0), row(tokens=4, median_us=2.0), row(tokens=8, median_us=2.02), *parts)
    assert cells_near(check(run, targets)) == {(op, "16/32", "wrapper", 8) for op in (QK, MLA, INDEXER)}


def test_a_target_speaks_of_its_form_alone(tmp_path):
    op = "prepare_latents"
    run = run_of(
        *(row(op=op, form=form, median_us=us) for form, us in (("wrapper", 1.0), ("model", 2.0))),
        *(row(op=op, form=form, arm="split", median_us=6.0) for form in ("wrapper", "model")),
    )
    for form, value in (("wrapper", 6.0), ("model", 3.0)):
        entry = {"op": op, "metric": "speedup", "over": "split", "at_least": value, "form": form}
        (finding,) = check(run, targets_of(tmp_path, **entry))
        assert (finding.value, finding.state) == (value, "holds")
        assert cells_near([finding]) == {(op, "16/32", form, 8)}
        assert str(finding).startswith(f"{op} (model) 16/32" if form == "model" else f"{op} 16/32")


@pytest.mark.parametrize("text", ["", "target = ", "[[target]]\nop = 'prepare_qk'"])
def test_a_file_without_targets_is_refused(tmp_path, text):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(ValueError, match=r"t\.toml"):
        read_targets(tmp_path / "t.toml")


def test_the_table_that_the_project_is_held_to():
    targets = read_targets(TABLE)
    assert {target.op for target in targets} == {QK, MLA, INDEXER, "prepare_latents", "prepare_queries"}
    assert {target.heads for target in targets} == {"128/64", "16/32"}
    hosts = {target.at_most for target in targets if target.metric == "host_of_mul"}
    assert hosts == {1.75, 2.2}
    assert len(set(targets)) == len(targets)
    forms = {form: {target.op for target in targets if target.form == form} for form in FORMS}
    assert forms["model"] == set(FORMS["model"][0])


def test_each_argument_is_a_heading_of_the_docs():
    for target in read_targets(TABLE):
        if target.argued is not None:
            page, _, heading = target.argued.partition("#")
            assert heading in headings(ROOT / page), f"{target.argued}: no such heading"


def test_the_page_of_performance_shows_a_recorded_run():
    """What `dsafuse bench --read FILE --cold --markdown` prints of the file that the page names."""
    page = (ROOT / "docs/performance.md").read_text()
    (shown,) = re.findall(r"<!-- (\S+), cold -->\n(.*?)\n<!-- end -->", page, re.DOTALL)
    said = CliRunner().invoke(app, ["bench", "--read", str(ROOT / shown[0]), "--cold", "--markdown"]).stdout
    rows = Run.read(ROOT / shown[0]).rows
    assert shown[1].count("| `") == len({(row.call, row.heads) for row in rows})
    assert shown[1] in said


def headings(page):
    """Anchors of a page's headings, as GitHub makes them."""
    lines = [line.lstrip("#").strip() for line in page.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def test_a_run_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(op=op, arm=arm, tokens=tokens, l2=l2, median_us=(1 + tokens / 50) * (1 if arm == "fused" else 4))
        for op in (QK, MLA, INDEXER, "prepare_latents", "prepare_queries")
        for arm in ("fused", "split")
        for l2 in ("cold", "warm")
        for tokens in (1, 64, 4096)
    ]
    for name, drawn in (("five.png", rows), ("one.png", rows[:12])):
        plot.plot(run_of(*drawn), tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_what_brings_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "dsafuse[bench]" in plot.why_not()


def test_rows_of_one_cell_are_told_apart():
    run = run_of(row(), row(l2="warm", median_us=1.0), replace(row(), heads="128/64"))
    assert run.row(QK, "16/32", 8, "fused", "warm").median_us == 1.0
    assert run.row(QK, "16/32", 8, "split", "warm") is None

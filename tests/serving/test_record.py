"""Numbers, ratios and tables, against values worked out by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from dsafuse.serving import plot, tables
from dsafuse.serving.grid import Cell, Turn, cells, turns
from dsafuse.serving.record import EARLIER, METRICS, TPOT, Record, Result, Start, compare, differences

ENVIRONMENT = {"gpu": "NVIDIA H200", "driver": "580", "vllm": "0.26.0", "torch": "2.11", "triton": "3.6",
               "dsafuse": "0.1.0", "commit": "abc", "clean": True}  # fmt: skip
CONDITIONS = {"model": "/models/m", "heads": 16, "layers": 24, "weights": "bf16", "kv_cache_dtype": "fp8",
              "load_format": "dummy-scaled", "prompts_per_slot": 3, "in_turn": False,
              "server_arguments": ["/models/m"]}  # fmt: skip


def metrics(value: float, throughput: float = 100.0) -> dict[str, Any]:
    numbers = {metric.key: throughput if metric.more_is_better else value for metric in METRICS}
    return {**numbers, "ttfts": [value / 1e3] * 8 + [value / 500] * 16, "start_times": [0.0] * 24}


CELL = Cell(1024, 256, 8)


def record(*pairs: tuple[float, float], cell: Cell = CELL, **conditions: Any) -> Record:
    results = [
        Result(Turn(cell, repeat, arm), 0, 1.0, metrics(value, 600.0 / value), {"queue_ms": value / 2}, [])
        for repeat, pair in enumerate(pairs)
        for arm, value in zip(("off", "on"), pair)
    ]
    start = Start("on", ["vllm"], "auto", None, 3.0, ["DSA layer: mla: fused, provider triton"])
    return Record({**CONDITIONS, **conditions}, ENVIRONMENT, [start], results, "complete")


def test_ratios_are_of_pairs_and_above_one_where_the_plugin_is_better() -> None:
    found = compare(TPOT, record((6.0, 5.0), (6.6, 5.0), (6.0, 6.0)).repeats(CELL))
    assert found is not None
    assert (found.off, found.on, found.ratio, found.low) == (6.0, 5.0, 1.2, 1.0)
    assert found.high == pytest.approx(1.32)
    tokens = compare(METRICS[-1], record((6.0, 5.0)).repeats(CELL))
    assert tokens is not None
    assert (tokens.off, tokens.on, tokens.ratio) == (100.0, 120.0, 1.2)


def test_what_is_not_known_of_where_it_ran_is_not_stated() -> None:
    bare = record((6.0, 5.0))
    assert "NVIDIA H200, driver 580, vLLM 0.26.0" in tables.origin(bare)
    assert "at abc (clean)." in tables.origin(bare)
    bare.environment = {**ENVIRONMENT, "gpu": None, "driver": None, "commit": None, "clean": None}
    assert tables.origin(bare).startswith("CPU, vLLM 0.26.0, ")
    assert "at an unknown commit. Model" in tables.origin(bare)


def test_a_table_names_the_models_folder_and_not_where_it_was() -> None:
    text = tables.markdown(record((6.0, 5.0)))
    assert "Model m (16 heads, 24 layers, bf16 weights, dummy, scaled to 1/sqrt(fan-in))" in text
    assert "/models" not in text


def test_a_repeat_with_one_arm_alone_makes_no_ratio() -> None:
    one = record((6.0, 5.0), (6.0, 3.0))
    one.results.pop()
    assert len(one.repeats(CELL)) == 1
    one.results[:] = one.results[:1]
    assert compare(TPOT, one.repeats(CELL)) is None
    assert tables.brief(one) == []


def test_a_latency_of_zero_has_no_ratio() -> None:
    found = compare(TPOT, [(metrics(0.0), metrics(0.0))])
    assert found is not None
    assert (found.off, found.ratio) == (0.0, None)


def test_all_that_is_asked_for_is_in_the_table() -> None:
    names = [metric.name for metric in METRICS]
    assert names == [
        "TTFT p50, ms", "TTFT mean, ms", "TPOT p50, ms", "TPOT mean, ms", "ITL p50, ms", "ITL mean, ms",
        "E2EL p50, ms", "E2EL mean, ms", "output tokens/s",
    ]  # fmt: skip
    text = tables.markdown(record((6.0, 5.0), (6.6, 5.0), (6.0, 6.0)))
    assert "| 1024/256 | 8 | 6.00 | 5.00 | 1.200 | 1.000-1.320 |" in text
    assert "| 1024 | 256 | 8 | output tokens/s | 100.00 | 120.00 | 1.200 | 1.000-1.320 | 3 |" in text
    assert text.count("| 1024 | 256 | 8 | ") == len(METRICS)
    for word in ("NVIDIA H200", "driver 580", "vLLM 0.26.0", "abc (clean)", "--kv-cache-dtype fp8", "3 prompts a slot",
                 "16 heads, 24 layers, bf16 weights, dummy, scaled to 1/sqrt(fan-in)"):  # fmt: skip
        assert word in text
    assert "- DSA layer: mla: fused, provider triton\n" in text
    assert "Not complete" not in text


def test_where_the_time_to_the_first_token_goes_is_shown_for_each_arm() -> None:
    one = record((60.0, 50.0), (66.0, 50.0), (60.0, 70.0))
    assert tables.first(one) == [
        ("1024/256", "8", "off", "60.0", "60.0", "60.0", "-", "30.0", "-"),
        ("1024/256", "8", "on", "50.0", "50.0", "50.0", "-", "25.0", "-"),
    ]
    for result in one.results[0:4:2]:
        result.metrics["ttfts"][:8] = [0.5] * 8
    one.results[1].compiled.append("Triton JIT compilation during inference: _k")
    assert tables.first(one)[0][3:5] == ("60.0", "500.0")
    assert "- 1024/256 at 8, repeat 1, on: Triton JIT compilation during inference: _k" in tables.markdown(one)


def test_what_is_not_complete_says_so() -> None:
    cut = record((6.0, 5.0))
    cut.ended = "the time limit came first: 2 of 6 turns"
    assert "Not complete: the time limit came first: 2 of 6 turns." in tables.markdown(cut)


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    one = record((6.0, 5.0), (6.6, 5.0))
    one.write(tmp_path / "state.json")
    assert Record.read(tmp_path / "state.json") == one
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    assert one.document()["summary"][0]["metrics"]["median_tpot_ms"]["ratio"] == pytest.approx(1.26)


def test_a_record_of_before_weights_were_told_is_of_bf16(tmp_path: Path) -> None:
    before = record((6.0, 5.0)).document()
    del before["conditions"]["weights"]
    (tmp_path / "state.json").write_text(json.dumps(before))
    read = Record.read(tmp_path / "state.json")
    assert read == record((6.0, 5.0))
    assert differences(read, record(weights="fp8")) == ["condition weights was 'bf16', is 'fp8'"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 0}', '{"format": 1, "results": [1]}', "null", '{"format": 1}']
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json"):
        Record.read(tmp_path / "state.json")


def places(value: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The way to everything inside a JSON document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in entries:
        yield (*path, key)
        yield from places(inside, *path, key)


def complaint(document: Any, path: Path) -> str:
    """Why a file was refused; empty if everything that is made of a record could be made of it."""
    path.write_text(json.dumps(document))
    try:
        read = Record.read(path)
    except ValueError as error:
        return str(error)
    assert tables.markdown(read)
    assert tables.summary([read])
    assert json.dumps(read.document())
    return ""


ODD: tuple[Any, ...] = (None, True, -1, 10**400, "\ud800", 1.5, float("nan"), "", "odd", [], [1], {}, {"a": None})


def test_a_field_of_another_type_or_none_at_all_is_refused_or_does_no_harm(tmp_path: Path) -> None:
    whole = record((6.0, 5.0)).document()
    for way in places({key: value for key, value in whole.items() if key != "summary"}):
        for odd in (*ODD, KeyError):
            document = deepcopy(whole)
            inside = document
            for key in way[:-1]:
                inside = inside[key]
            if odd is KeyError:
                del inside[way[-1]]
            else:
                inside[way[-1]] = odd
            said = complaint(document, tmp_path / "state.json")
            assert not said or said.startswith(f"{tmp_path}/state.json: no measurement of this version: ")


@pytest.mark.parametrize(
    ("way", "value", "says"),
    [
        (("results", 1, "turn", "cell", "isl"), "1024", "results[1].turn.cell.isl: got '1024', expected int"),
        (("results", 0, "turn", "arm"), "maybe", "results[0].turn.arm: got 'maybe', expected one of off, on"),
        (
            ("results", 0, "metrics", "median_tpot_ms"),
            None,
            "results[0].metrics.median_tpot_ms: got None, expected int or",
        ),
        (
            ("results", 0, "metrics", "mean_itl_ms"),
            -1,
            "results[0].metrics.mean_itl_ms: got -1, expected a number of 0",
        ),
        (("results", 0), 7, "results[0]: got 7, expected an object"),
        (("starts", 0, "plans"), [1], "starts[0].plans: got [1], expected a list of str"),
        (("conditions", "in_turn"), 0, "conditions.in_turn: got 0, expected bool"),
        (("conditions", "weights"), None, "conditions.weights: got None, expected str"),
        (("environment", "clean"), "yes", "environment.clean: got 'yes', expected bool or null"),
        (("ended",), None, "ended: got None, expected str"),
    ],
)
def test_what_is_odd_is_named(tmp_path: Path, way: tuple[Any, ...], value: Any, says: str) -> None:
    document = deepcopy(record((6.0, 5.0)).document())
    inside = document
    for key in way[:-1]:
        inside = inside[key]
    inside[way[-1]] = value
    (tmp_path / "state.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=re.escape(says)):
        Record.read(tmp_path / "state.json")
    del inside[way[-1]]
    if isinstance(way[-1], str) and way[-1] not in EARLIER:
        (tmp_path / "state.json").write_text(json.dumps(document))
        with pytest.raises(ValueError, match=f"{way[-1]} is missing"):
            Record.read(tmp_path / "state.json")


def test_a_summary_has_a_line_for_every_cell_in_order() -> None:
    small = record((6.0, 5.0), (6.6, 5.0), (6.0, 6.0))
    small.results += record((8.0, 7.0), cell=Cell(1024, 256, 64)).results
    small.results += record((9.0, 9.0), cell=Cell(8192, 256, 1)).results[:1]  # one arm alone
    large = record((9.0, 8.0), heads=128, layers=16)
    plain = record((9.0, 8.0), kv_cache_dtype="auto")
    blocks = record((9.0, 8.0), kv_cache_dtype="auto", weights="fp8")
    rows = tables.summary([large, small, blocks, plain]).splitlines()
    assert rows == tables.summary([plain, blocks, large, small]).splitlines()
    assert rows[0] == (
        "| H | layers | weights | cache | ISL/OSL | concurrency | TPOT off, ms | on, ms | ratio | TTFT ratio |"
        " tokens/s ratio | repeats |"
    )
    assert rows[3] == (
        "| 16 | 24 | bf16 | fp8 | 1024/256 | 8 | 6.00 | 5.00 | 1.200 (1.000 to 1.320) | 1.200 (1.000 to 1.320) |"
        " 1.200 (1.000 to 1.320) | 3 |"
    )
    assert [row.split(" | ")[:6] for row in rows[2:]] == [
        ["| 16", "24", "bf16", "auto", "1024/256", "8"],
        ["| 16", "24", "bf16", "fp8", "1024/256", "8"],
        ["| 16", "24", "bf16", "fp8", "1024/256", "64"],
        ["| 16", "24", "fp8", "auto", "1024/256", "8"],
        ["| 128", "16", "bf16", "fp8", "1024/256", "8"],
    ]


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    one = record((6.0, 5.0), (6.6, 5.0))
    one.results += record((8.0, 7.0), cell=Cell(1024, 256, 64)).results
    one.results += record((9.0, 9.0), cell=Cell(8192, 256, 1)).results[:1]  # one arm alone
    plot.plot(one, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes()[:4] == b"\x89PNG"


def test_turns_interleave_the_arms_and_see_every_cell_before_the_next_repeat() -> None:
    grid = cells([1024], [256], [8, 1, 8])
    assert [cell.concurrency for cell in grid] == [1, 8]
    order = [(turn.repeat, turn.cell.concurrency, turn.arm) for turn in turns(grid, 2)]
    assert order == [
        (0, 1, "off"), (0, 1, "on"), (0, 8, "on"), (0, 8, "off"),
        (1, 1, "on"), (1, 1, "off"), (1, 8, "off"), (1, 8, "on"),
    ]  # fmt: skip

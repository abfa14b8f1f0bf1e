"""Numbers, ratios and tables, against values worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsafuse.serving import plot, tables
from dsafuse.serving.grid import Cell, Turn, cells, turns
from dsafuse.serving.record import METRICS, TPOT, Record, Result, Start, compare

ENVIRONMENT = {"gpu": "NVIDIA H200", "driver": "580", "vllm": "0.26.0", "torch": "2.11", "triton": "3.6",
               "dsafuse": "0.1.0", "commit": "abc", "clean": True}  # fmt: skip
CONDITIONS = {"model": "/models/m", "kv_cache_dtype": "fp8", "prompts_per_slot": 3, "in_turn": False}


def metrics(value: float, throughput: float = 100.0) -> dict[str, float]:
    return {metric.key: throughput if metric.more_is_better else value for metric in METRICS}


CELL = Cell(1024, 256, 8)


def record(*pairs: tuple[float, float], cell: Cell = CELL) -> Record:
    results = [
        Result(Turn(cell, repeat, arm), 0, 1.0, metrics(value, 600.0 / value))
        for repeat, pair in enumerate(pairs)
        for arm, value in zip(("off", "on"), pair)
    ]
    start = Start("on", ["vllm"], "auto", None, 3.0, ["DSA layer: mla: fused, provider triton"])
    return Record(CONDITIONS, ENVIRONMENT, [start], results, "complete")


def test_ratios_are_of_pairs_and_above_one_where_the_plugin_is_better() -> None:
    found = compare(TPOT, record((6.0, 5.0), (6.6, 5.0), (6.0, 6.0)).repeats(CELL))
    assert found is not None
    assert (found.off, found.on, found.ratio, found.low) == (6.0, 5.0, 1.2, 1.0)
    assert found.high == pytest.approx(1.32)
    tokens = compare(METRICS[-1], record((6.0, 5.0)).repeats(CELL))
    assert tokens is not None
    assert (tokens.off, tokens.on, tokens.ratio) == (100.0, 120.0, 1.2)


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
    for word in ("NVIDIA H200", "driver 580", "vLLM 0.26.0", "abc (clean)", "--kv-cache-dtype fp8", "3 prompts a slot"):
        assert word in text
    assert "- DSA layer: mla: fused, provider triton\n" in text
    assert "Not complete" not in text


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


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 0}', '{"format": 1, "results": [1]}', "null", '{"format": 1}']
)
def test_a_file_that_is_no_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state\.json"):
        Record.read(tmp_path / "state.json")


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

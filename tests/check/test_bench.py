"""Rows: only after verify, with bytes counted from shapes, and read back as they were written."""

from types import SimpleNamespace

import pytest
import torch

from dsafuse.check import bench, records, timing
from dsafuse.check.cases import CASES, IndexerCase, MlaCase
from dsafuse.check.inputs import blank_outputs, draw_inputs
from dsafuse.check.timing import Spread
from dsafuse.registry import OPS

CPU = torch.device("cpu")


@pytest.fixture
def fake_timers(monkeypatch):
    """Time without a GPU: the interpreter in place of the compiled kernels, and times from a table."""
    monkeypatch.setattr(bench, "PROVIDERS", ("interpreter", "split"))
    monkeypatch.setattr(bench, "sets_needed", lambda *_: 2)
    monkeypatch.setattr(bench, "GraphTimer", lambda calls, device: [call() for call in calls])
    monkeypatch.setattr(bench, "eager_us", lambda calls: Spread(20.0, 19.0, 21.0))
    monkeypatch.setattr(
        bench, "interleaved", lambda timers: {"interpreter": Spread(2.0, 1.9, 2.2), "split": Spread(5.0, 4.9, 5.5)}
    )


@pytest.mark.usefixtures("fake_timers")
@pytest.mark.parametrize("op", CASES)
def test_a_row_for_each_provider(op):
    case = bench.bench_case(op, 2, (3, 2))
    fused, split = bench.bench_one(case, 0, CPU, copy_bytes_per_s=1e12)
    assert (fused.provider, split.provider) == ("interpreter", "split")
    assert "interpreter: accepted" in fused.trace
    assert fused.gb_per_s == pytest.approx(fused.bytes_moved / 2e-6 / 1e9)
    assert fused.fraction_of_copy == pytest.approx(fused.gb_per_s / 1000)
    assert records.table([fused, split])[0][:4] == (op, str(case.heads), "2", "2.00")
    assert records.table([fused, split])[0][7] == "2.50"


@pytest.mark.usefixtures("fake_timers")
def test_nothing_is_timed_that_has_not_passed(monkeypatch):
    def wrong(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("dsafuse.split.run", wrong)
    monkeypatch.setattr(bench, "GraphTimer", lambda *_: pytest.fail("timed"))
    with pytest.raises(bench.UnprovenError, match="broken"):
        bench.bench_one(bench.bench_case(MlaCase.op, 2, (3, 2)), 0, CPU, 1e12)


@pytest.mark.parametrize(
    "case", [MlaCase(tokens=5, heads=3, query="fp8", layout="fp8"), IndexerCase(tokens=5, heads=3)]
)
def test_bytes_moved_are_those_of_the_tensors(case):
    a, outputs = draw_inputs(case, 0, CPU).arguments, blank_outputs(case, 0, CPU).arguments
    names = ("q_nope", "q_pe", "kv_c", "k_pe", "q", "k", "weights", "positions", "slot_mapping")
    read = sum(a[name].numel() * a[name].element_size() for name in names if name in a)
    read += case.tokens * 64 * 4  # one row of the table a token
    written = sum(outputs[name].numel() * outputs[name].element_size() for name in OPS[case.op].output_names)
    written += case.tokens * (576 if isinstance(case, MlaCase) else 132)
    assert bench.bytes_moved(case) == read + written


def test_inputs_rotate_over_more_than_twice_the_l2(monkeypatch):
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 50_000_000)
    assert timing.sets_needed(1_000_000, CPU) == 101
    assert timing.sets_needed(10**9, CPU) == 2
    assert timing.sets_needed(1000, CPU) == timing.MAX_LAUNCHES


def test_rounds_are_interleaved_and_the_order_turns():
    order = []

    def timer(name):
        return SimpleNamespace(replay_us=lambda: order.append(name) or 1.0)

    spread = timing.interleaved({"a": timer("a"), "b": timer("b")}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert spread["a"] == Spread(1.0, 1.0, 1.0)


def test_a_spread_holds_four_fifths():
    assert Spread.of([float(n) for n in range(101)]) == Spread(50.0, 10.0, 90.0)


def run_of_two():
    common = {"op": MlaCase.op, "case": "tokens=2", "tokens": 2, "heads": 16, "p10_us": 1.0, "p90_us": 3.0}
    common |= {"eager_us": 20.0, "bytes_moved": 1000, "gb_per_s": 0.5, "fraction_of_copy": 0.1, "input_sets": 2}
    rows = [
        records.Row(**common, provider="triton", trace="triton: accepted", median_us=2.0),
        records.Row(**common, provider="split", trace="split: accepted", median_us=7.0),
    ]
    return records.Run.of(rows, 4e12, 0.6, commit="abc")


def test_a_run_reads_back_as_written(tmp_path):
    run = run_of_two()
    run.write(tmp_path / "results" / "run.json")
    assert records.Run.read(tmp_path / "results" / "run.json") == run


def test_a_run_says_where_it_comes_from():
    text = records.markdown(run_of_two())
    for word in (torch.__version__, "copy bandwidth 4000 GB/s", "3.50", "an empty kernel 0.60 us"):
        assert word in text
    assert text.count("\n| ") == 2

"""Rows: only of what is proven, with bytes counted from tensors, and read back as they were written."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsafuse.check import arms, bench, records, tables, timing
from dsafuse.check.arms import BenchArm, arms_of, out_form
from dsafuse.check.bench import Yardsticks, bench_case, bench_cell
from dsafuse.check.cases import ROLES, Case
from dsafuse.check.inputs import blank_outputs, draw_inputs
from dsafuse.check.peers import Bound, Peer
from dsafuse.check.timing import Spread
from dsafuse.check.traffic import bytes_moved
from dsafuse.check.working_sets import copy_of, working_sets
from dsafuse.registry import OPS
from tests.check.made import indexer, latents, mla, qk, queries

CPU = torch.device("cpu")
YARDSTICKS = Yardsticks(1e12, 0.5)
TIMES = {"fused": [1.9, 2.0, 2.2], "split": [4.9, 5.0, 5.5], "peer": [2.9, 3.0, 3.1]}


@pytest.fixture
def fake_timers(monkeypatch):
    """Time without a GPU: the interpreter in place of the compiled kernels, and times from a table."""
    monkeypatch.setitem(arms.PROVIDERS, "fused", "interpreter")
    monkeypatch.setattr(bench, "sets_needed", lambda *_: 5)
    monkeypatch.setattr(bench, "GraphTimer", lambda calls, *_, **__: [call() for call in calls])
    monkeypatch.setattr(bench, "eager_us", lambda calls: 20.0)
    monkeypatch.setattr(bench, "host_us", lambda calls: {name: 10.0 + 2 * len(name) for name in calls})
    monkeypatch.setattr(bench, "samples", lambda timers, rounds: {name: TIMES[name] for name in timers})


def cell_of(op, tokens=2, states=("cold", "warm"), more=()):
    found, _ = arms_of(op, ("fused", "split"))
    return bench_cell(bench_case(op, tokens, (3, 2)), [*found, *more], states, 0, CPU, YARDSTICKS)


@pytest.mark.usefixtures("fake_timers")
@pytest.mark.parametrize("op", ROLES)
def test_a_row_for_each_arm_and_state(op):
    cell = cell_of(op)
    assert cell.unproven == []
    assert [(row.arm, row.l2) for row in cell.rows] == [
        ("fused", "cold"),
        ("split", "cold"),
        ("fused", "warm"),
        ("split", "warm"),
    ]
    fused = cell.rows[0]
    assert (fused.op, fused.heads, fused.tokens, fused.what) == (op, "3/2", 2, "interpreter")
    assert fused.gb_per_s == pytest.approx(fused.bytes_moved / 2e-6 / 1e9)
    assert fused.fraction_of_copy == pytest.approx(fused.gb_per_s / 1000)
    assert fused.empty_launches == 4
    assert [row.input_sets for row in cell.rows] == [5, 5, 4, 4]
    assert fused.host_of_mul == pytest.approx(24 / 22)
    assert fused.torch_ops_us == 34
    assert cell.rows[1].torch_ops_us is None


@pytest.mark.usefixtures("fake_timers")
def test_no_warm_row_of_what_no_l2_holds(monkeypatch):
    monkeypatch.setattr(bench, "MOST_WARM_TOKENS", 1)
    monkeypatch.setattr(bench, "MOST_EAGER_TOKENS", 1)
    rows = cell_of("prepare_queries").rows
    assert {row.l2 for row in rows} == {"cold"}
    assert {row.eager_us for row in rows} == {None}


@pytest.mark.usefixtures("fake_timers")
def test_an_arm_that_is_not_proven_is_not_timed_and_the_others_are(monkeypatch):
    def wrong(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr("dsafuse.split.run", wrong)
    cell = cell_of("fused_qk_rope_concat_and_cache_mla", states=("cold",))
    (unproven,) = [entry for entry in cell.unproven if entry.arm == "split"]
    assert "broken" in unproven.reason
    assert "dsafuse verify fused_qk" in unproven.reason
    assert [row.arm for row in cell.rows if row.arm == "split"] == []


def peer_of(bind, tolerance=None):
    peer = Peer("peer", frozenset(ROLES), lambda: None, lambda: "peer 1", bind, "nothing", tolerance or {})
    return BenchArm("peer", "peer 1", peer.context, peer)


def by_oracle(case, arguments, spoil=None):
    """A peer that is right, unless it spoils something."""
    own = {**arguments, **blank_outputs(case, 0, CPU).arguments}

    def call():
        OPS[case.op].with_provider("oracle")(**own)
        if spoil:
            spoil(own)

    return Bound(call, lambda: {name: value for name, value in own.items() if isinstance(value, torch.Tensor)})


@pytest.mark.usefixtures("fake_timers")
@pytest.mark.parametrize("op", ROLES)
def test_a_peer_that_holds_is_timed(op):
    cell = cell_of(op, more=[peer_of(by_oracle)])
    assert cell.unproven == []
    assert [row.median_us for row in cell.rows if row.arm == "peer"] == [3.0, 3.0]


@pytest.mark.usefixtures("fake_timers")
def test_a_peer_that_is_too_far_off_is_said_and_not_timed():
    def spoil(own):
        own["q_out"].view(torch.uint8)[0, 0] ^= 0x80

    cell = cell_of("prepare_queries", more=[peer_of(lambda case, a: by_oracle(case, a, spoil))])
    (entry,) = cell.unproven
    assert entry.arm == "peer"
    assert "latent_q: error" in entry.reason
    assert {row.arm for row in cell.rows} == {"fused", "split"}


@pytest.mark.usefixtures("fake_timers")
@pytest.mark.parametrize("bind", [by_oracle, lambda *_: Bound(lambda: None, dict)])
def test_a_peer_that_raises_or_leaves_nothing_is_said(bind, monkeypatch):
    def raising(case, arguments):
        raise TypeError("another signature")

    cell = cell_of("prepare_queries", more=[peer_of(raising if bind is by_oracle else bind)])
    (entry,) = cell.unproven
    assert ("another signature" if bind is by_oracle else "no result") in entry.reason


@pytest.mark.usefixtures("fake_timers")
def test_an_arm_that_no_graph_holds_is_said(monkeypatch):
    def timer(calls, *_, warm=False, **__):
        if warm:
            raise RuntimeError("cannot capture")

    monkeypatch.setattr(bench, "GraphTimer", timer)
    cell = cell_of("prepare_queries")
    assert {row.l2 for row in cell.rows} == {"cold"}
    assert ["cannot capture" in entry.reason for entry in cell.unproven] == [True, True]


def test_arms_say_why_they_are_absent():
    found, absent = arms_of("prepare_latents", None)
    assert [arm.name for arm in found][:2] == ["fused", "split"]
    if not torch.cuda.is_available():
        assert "GPU" in absent["vllm_fused"]
    assert "compiled" not in {*absent, *(arm.name for arm in found)}, "it runs only when asked for"
    assert [arm.name for arm in arms_of("prepare_latents", ("compiled",))[0]] == ["compiled"]
    assert arms_of("prepare_latents", ("flashinfer",)) == ([], {}), "it has no such op"


@pytest.mark.parametrize("op", ROLES)
def test_the_same_call_through_torch_ops(op):
    case = bench_case(op, 2, (3, 2))
    _, (first, second) = working_sets(case, 2, 0, CPU)
    with arms_of(op, ("split",))[0][0].context():
        OPS[op](**first)
        out_form(op, second)()
    for name in OPS[op].output_names:
        assert torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))


def test_copied_sets_share_nothing_with_the_first_and_look_like_it():
    arguments = draw_inputs(mla(tokens=5, heads=3, strides="odd"), 0, CPU).arguments
    copy = copy_of(arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            assert copy[name].data_ptr() != value.data_ptr()
            assert copy[name].data_ptr() % 16 == value.data_ptr() % 16
            assert (copy[name].stride(), copy[name].dtype) == (value.stride(), value.dtype)
            assert torch.equal(copy[name].nan_to_num(), value.nan_to_num())
        else:
            assert copy[name] == value
    assert copy["kv_c"].untyped_storage().data_ptr() == copy["k_pe"].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "case",
    [
        mla(tokens=5, heads=3, query="fp8", layout="fp8"),
        indexer(tokens=5, index_heads=3),
        qk(tokens=5, heads=3, index_heads=2, layout="fp8_ds_mla", block_size=1, index_block_size=1),
        qk(tokens=5, heads=3, index_heads=2, topk="narrow"),
        latents(tokens=5, q_width=96, topk="wide"),
        latents(tokens=5, q_width=96, topk="absent", key_outs="absent", index="absent"),
        queries(tokens=5, heads=3, index_heads=2, weights="bf16"),
    ],
)
def test_bytes_moved_are_those_of_the_tensors(case):
    a, outputs = draw_inputs(case, 0, CPU).arguments, blank_outputs(case, 0, CPU).arguments
    shared = ("cos_sin_cache", "norm", "scale", "kv_cache")
    tensors = {name: t for name, t in {**a, **outputs}.items() if isinstance(t, torch.Tensor)}
    if "topk_indices" in tensors:
        tensors["topk_indices"] = tensors["topk_indices"][: case.tokens]
    total = sum(t.numel() * t.element_size() for name, t in tensors.items() if not any(word in name for word in shared))
    total += case.tokens * 64 * 4 * sum("cos_sin_cache" in name for name in a)  # one row of each table a token
    rows = {"kv_cache": {"plain": 1152, "fp8": 576, "fp8_ds_mla": 656}[case.layout], "index_kv_cache": 132}
    if case.op == "indexer_qk_rope_quant_and_cache":
        rows["kv_cache"] = 132
    total += sum(case.tokens * rows[name] for name in tensors if "kv_cache" in name)
    assert bytes_moved(case) == total


def test_inputs_rotate_over_more_than_twice_the_l2(monkeypatch):
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 50_000_000)
    assert timing.sets_needed(1_000_000, CPU) == 101
    assert timing.sets_needed(10**9, CPU) == 2
    assert timing.sets_needed(1000, CPU) == timing.MAX_LAUNCHES


def test_what_takes_long_is_run_less_often():
    efforts = [timing.effort(moved) for moved in (1000, 100_000_000, 3_000_000_000)]
    assert [effort.launches for effort in efforts] == [40, 8, 4]
    assert efforts[0].rounds == timing.ROUNDS > efforts[2].rounds > 9


def test_rounds_are_interleaved_and_the_order_turns():
    order = []

    def timer(name):
        return SimpleNamespace(replay_us=lambda: order.append(name) or 1.0)

    spread = timing.interleaved({"a": timer("a"), "b": timer("b")}, rounds=2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert spread["a"] == Spread(1.0, 1.0, 1.0)


def test_host_times_are_interleaved(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    order = []
    times = timing.host_us({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, count=2)
    assert order == ["a", "a", "b", "b"] * 2
    assert set(times) == {"a", "b"}
    assert min(times.values()) > 0


def test_a_spread_holds_four_fifths():
    assert Spread.of([float(n) for n in range(101)]) == Spread(50.0, 10.0, 90.0)


@pytest.mark.usefixtures("fake_timers")
def test_a_run_reads_back_as_written(tmp_path):
    cell = cell_of("prepare_latents", states=("cold",))
    run = records.Run.of(
        cell.rows,
        4e12,
        0.6,
        "abc",
        unproven=[records.Unproven(op="x", heads="1/1", tokens=1, arm="peer", reason="far off")],
        absent={"flashinfer": "not installed"},
    )
    run.write(tmp_path / "results" / "run.json")
    assert records.Run.read(tmp_path / "results" / "run.json") == run


@pytest.mark.usefixtures("fake_timers")
def test_several_captures_give_one_median_of_all_samples(monkeypatch):
    found, _ = arms_of("prepare_queries", ("fused",))
    times = iter([[1.0, 1.1, 1.2], [3.0, 3.1, 3.2], [2.0, 2.1, 2.2]])
    monkeypatch.setattr(bench, "samples", lambda timers, rounds: {"fused": next(times)})
    case = bench_case("prepare_queries", 2, (3, 2))
    (row,) = bench_cell(case, found, ("cold",), 0, CPU, YARDSTICKS, captures=3).rows
    assert (row.median_us, row.captures) == (2.1, 3)
    assert (row.p10_us, row.p90_us) == (1.1, 3.1)


@pytest.mark.parametrize("form", ["wrapper", "model"])
@pytest.mark.parametrize("op", ["prepare_latents", "prepare_queries"])
def test_a_case_tells_its_form(op, form):
    case = bench_case(op, 2, (3, 2), form)
    assert bench.form_of(case) == form
    assert (case.rounding == "fp32") == (form == "model")


def test_who_is_cut_off_while_writing_leaves_the_file_before(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    records.Run.of([], 4e12, 0.6, commit="abc").write(path)

    def cut(self, text):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", cut)
    with pytest.raises(KeyboardInterrupt):
        records.Run.of([], 4e12, 0.6, commit="later").write(path)
    assert records.Run.read(path).commit == "abc"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"rows": [{"op": "x"}], "unproven": []}'])
def test_what_is_no_run_is_refused(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="no recorded run"):
        records.Run.read(tmp_path / "run.json")


@pytest.mark.usefixtures("fake_timers")
def test_a_run_says_where_it_comes_from_and_fits_a_readme():
    rows = [row for op in ("prepare_qk", "prepare_queries") for t in (1, 8) for row in cell_of(op, t, ("cold",)).rows]
    text = tables.markdown(records.Run.of(rows, 4e12, 0.6, commit="abc"))
    for word in (torch.__version__, "copy bandwidth 4000 GB/s", "an empty kernel 0.60 us", "cold L2", "H/HI = 3/2"):
        assert word in text
    assert "| `prepare_qk` | 2.00 (5.00) 2.5x | 2.00 (5.00) 2.5x |" in text.splitlines()
    assert len(tables.lines(records.Run.of(rows, 4e12, 0.6))) == len(rows)
    assert all(len(line) == len(tables.HEADER) for line in tables.lines(records.Run.of(rows, 4e12, 0.6)))


@pytest.mark.usefixtures("fake_timers")
def test_tables_keep_the_forms_of_an_op_apart():
    found, _ = arms_of("prepare_queries", ("fused", "split"))
    cases = [bench_case("prepare_queries", 8, (3, 2), form) for form in ("wrapper", "model")]
    rows = [row for case in cases for row in bench_cell(case, found, ("cold",), 0, CPU, YARDSTICKS).rows]
    rows[2:] = [replace(row, median_us=2 * row.median_us) for row in rows[2:]]
    run = records.Run.of(rows, 4e12, 0.6)
    text = tables.markdown(run).splitlines()
    assert [line for line in text if line.startswith("| `")] == [
        "| `prepare_queries` | 2.00 (5.00) 2.5x |",
        "| `prepare_queries` (model) | 4.00 (10.0) 2.5x |",
    ]
    assert [line[0] for line in tables.lines(run)] == ["prepare_queries"] * 2 + ["prepare_queries (model)"] * 2


@pytest.mark.parametrize("op", OPS)
def test_the_call_that_reproduces_a_cell_names_a_case(op: str) -> None:
    case = bench_case(op, 8, (16, 32))
    assert Case.named(op, case.name).name == case.name

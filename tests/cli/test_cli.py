"""Exit codes, one-line errors and JSON of every command."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from dsafuse.check import verify as checks
from dsafuse.check.cases import ROLES
from dsafuse.check.records import Run
from dsafuse.cli.app import app
from dsafuse.cli.engines import KV_CACHE_DTYPES, MEANINGS, meanings
from dsafuse.cli.output import print_json
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.models import MODELS
from dsafuse.target import Target

MLA = "fused_qk_rope_concat_and_cache_mla"
INDEXER = "indexer_qk_rope_quant_and_cache"


def call(*arguments):
    return CliRunner().invoke(app, list(arguments))


def call_json(*arguments):
    result = call(*arguments, "--json")
    return result.exit_code, json.loads(result.stdout)


def test_without_a_command_it_prints_its_help():
    result = call()
    assert result.exit_code == 0
    for command in ("explain", "verify", "bench", "demo", "env"):
        assert command in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["frobnicate"], "frobnicate"),
        (["explain", "--target", "sm_1"], "sm_1"),
        (["explain", "--model", "llama"], "llama"),
        (["explain", "--tp", "7"], "divisor of 128"),
        (["explain", "--tp", "0"], "got 0"),
        (["explain", "--tp", "x"], "--tp"),
        (["explain", "--kv-cache-dtype", "int4"], "int4"),
        (["explain", "--block-size", "0"], "--block-size: got 0"),
        (["verify", "no_such_op"], "no_such_op"),
        (["verify", "--cases", "some"], "quick, full"),
        (["verify", "--seed", "-1"], "--seed: got -1"),
        (["verify", "--seed", "one"], "--seed"),
        (["verify", "--provider", "cuda"], "triton, interpreter, split"),
        (["verify", "--device", "tpu"], "cpu, cuda"),
        (["verify", "--device", "cuda:99"], "cuda:99"),
        (["verify", "--case", "tokens=1"], "exactly one OP"),
        (["verify", MLA, "--case", "tokens=x"], "tokens=x"),
        (["verify", MLA, "--case", "weights=fp32"], "weights"),
        (["verify", MLA, "--case", "index=absent"], "index"),
        (["verify", "--nonsense"], "--nonsense"),
        (["bench", "--tokens", "0"], "--tokens: got '0'"),
        (["bench", "--tokens", "1,,2"], "separated by commas"),
        (["bench", "--heads", "128"], "128/64"),
        (["bench", "--heads", "128/999"], "128/999"),
        (["bench", "no_such_op"], "no_such_op"),
        (["bench", "--arms", "fused,fastest"], "fastest"),
        (["bench", "--check", "/no/such/targets.toml"], "--check"),
        (["bench", "--read", "/no/such/run.json"], "--read"),
    ],
)
def test_a_value_out_of_range_is_one_line_and_exit_code_2(arguments, words):
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert words in result.stderr


def test_a_switch_out_of_range_is_one_line_and_exit_code_2():
    done = subprocess.run(
        [sys.executable, "-m", "dsafuse", "env"],
        env={"DSAFUSE_MODE": "fast", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == ["DSAFUSE_MODE: got 'fast', expected one of auto, off, strict"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so bench would run")
def test_bench_says_that_it_needs_a_gpu():
    result = call("bench")
    assert result.exit_code == 2
    assert result.stderr.strip() == "bench needs a GPU, and torch sees none on this machine"


def test_env_says_what_a_bug_report_needs():
    code, facts = call_json("env")
    assert code == 0
    assert facts["torch"] == torch.__version__
    for name in ("dsafuse", "python", "triton", "gpu", "driver", "target", "switches", "commit", "entry_points"):
        assert name in facts
    assert facts["torch"] in call("env").stdout


def test_json_has_no_nan(capsys):
    print_json({"a": [float("nan"), 1.5, (float("inf"),)]})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5, [None]]}


class TestExplain:
    @pytest.mark.parametrize("word", KV_CACHE_DTYPES)
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("target", Target.names())
    def test_every_target_model_and_word_has_an_answer(self, target, model, word):
        code, document = call_json("explain", "--target", target, "--model", model, "--kv-cache-dtype", word)
        assert code == 0
        assert document["target"]["arch"] == target
        assert document["meanings"]
        for meaning in document["meanings"]:
            assert {decision["op"] for decision in meaning["ops"]} == set(ROLES)
            for decision in meaning["ops"]:
                for verdict in decision["trace"]:
                    assert verdict["accepted"] == (verdict["reason"] is None)
                    assert verdict["accepted"] == (verdict["provider"] == decision["provider"])

    def test_the_table_says_the_same(self):
        result = call("explain", "--target", "sm_90", "--kv-cache-dtype", "fp8")
        assert result.exit_code == 0
        for words in (
            "sm_90",
            "fp8_ds_mla",
            "FLASHMLA_SPARSE",
            "triton: accepted",
            "656 bytes a token",
            "DSAFUSE_MODE=auto",
        ):
            assert words in result.stdout

    def test_without_a_target_it_is_this_machine(self):
        expected = Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).arch
        assert call_json("explain")[1]["target"]["arch"] == expected

    @pytest.mark.parametrize(
        ("target", "word", "layout", "query", "indexer"),
        [
            ("sm_90", "auto", "plain", "bfloat16", "flat"),
            ("sm_90", "fp8", "fp8_ds_mla", "bfloat16", "flat"),
            ("sm_100", "fp8", "fp8", "float8_e4m3fn", "flat"),
            ("sm_100", "fp8_ds_mla", "fp8_ds_mla", "bfloat16", "flat"),
            ("sm_120", "auto", "fp8_ds_mla", "bfloat16", "flat"),
            ("gfx942", "fp8", "fp8", "float8_e4m3fnuz", "tiled16"),
            ("gfx950", "fp8", "fp8", "float8_e4m3fn", "tiled16"),
            ("cpu", "fp8_ds_mla", "fp8_ds_mla", "bfloat16", "flat"),
        ],
    )
    def test_the_engines_own_choice_comes_first(self, target, word, layout, query, indexer):
        meaning = call_json("explain", "--target", target, "--kv-cache-dtype", word)[1]["meanings"][0]
        assert (meaning["layout"], meaning["query"], meaning["indexer"]) == (layout, query, indexer)

    @pytest.mark.parametrize("target", ["gfx942", "gfx950"])
    def test_the_tiled_indexer_cache_of_amd_is_written(self, target):
        _, document = call_json("explain", "--target", target, "--kv-cache-dtype", "fp8")
        assert [op["provider"] for op in document["meanings"][0]["ops"]] == ["triton"] * 5

    def test_a_tiled_cache_needs_blocks_of_16(self):
        _, document = call_json("explain", "--target", "gfx942", "--kv-cache-dtype", "fp8", "--block-size", "24")
        ops = {decision["op"]: decision for decision in document["meanings"][0]["ops"]}
        assert {name for name, decision in ops.items() if decision["provider"] == "triton"} == {MLA, "prepare_queries"}
        for name in (INDEXER, "prepare_qk", "prepare_latents"):
            assert ops[name]["provider"] is None
            assert all("block size 24 is no multiple of 16" in verdict["reason"] for verdict in ops[name]["trace"])

    def test_one_token_a_block_needs_no_tiles(self):
        _, document = call_json("explain", "--target", "gfx942", "--kv-cache-dtype", "fp8", "--block-size", "1")
        assert [op["provider"] for op in document["meanings"][0]["ops"]] == ["triton"] * 5

    def test_layouts_are_those_of_the_library(self):
        _, document = call_json("explain")
        assert set(document["layouts"]) == {*MLA_LAYOUTS, *INDEXER_LAYOUTS}
        scale = document["layouts"]["fp8_ds_mla"]["fields"][1]
        assert scale == {"field": "scale", "store": "fp32", "count": 4, "bytes": 16, "offset_bytes": 512}

    def test_every_meaning_names_a_layout_of_the_library(self):
        for arch in MEANINGS:
            assert arch in Target.names()
            for word in KV_CACHE_DTYPES:
                assert all(meaning.layout in MLA_LAYOUTS for meaning in meanings(arch, word, 64))


class TestVerify:
    CASE = "tokens=2,heads=2,query=fp8,layout=fp8"

    def test_a_case_passes(self):
        code, document = call_json("verify", MLA, "--case", self.CASE, "--device", "cpu")
        assert code == 0
        assert document["ok"]
        assert {s["provider"]: s["passed"] for s in document["summary"]} == {"triton": 0, "interpreter": 1, "split": 1}
        assert document["failures"] == []

    def test_the_table_names_op_and_provider(self):
        result = call("verify", INDEXER, "--case", "tokens=2,index_heads=2", "--device", "cpu", "--provider", "split")
        assert result.exit_code == 0
        assert INDEXER in result.stdout
        assert "split" in result.stdout

    def test_a_failure_prints_its_call_and_exits_1(self, monkeypatch):
        real = checks.compare

        def flipped(case, inputs, got, expected):
            got.buffers["q_out"][600] ^= 1
            return real(case, inputs, got, expected)

        monkeypatch.setattr(checks, "compare", flipped)
        arguments = ("verify", MLA, "--case", self.CASE, "--device", "cpu", "--provider", "split")
        result = call(*arguments)
        assert result.exit_code == 1
        reproduced = f"dsafuse verify {MLA} --case {self.CASE} --seed 0 --provider split --device cpu"
        assert reproduced in " ".join(result.stdout.split())
        code, document = call_json(*arguments)
        assert code == 1
        assert document["failures"][0]["call"] == reproduced

    def test_a_provider_that_was_asked_for_and_declines_is_no_success(self):
        code, document = call_json("verify", MLA, "--case", self.CASE, "--device", "cpu", "--provider", "triton")
        assert code == 1
        assert not document["ok"]

    def test_sets_are_run_in_whole(self, monkeypatch):
        """The set itself takes minutes on CPU; what is run here is its first cases."""
        plan = checks.plan
        monkeypatch.setattr(checks, "plan", lambda *arguments: plan(*arguments)[:2])
        code, document = call_json("verify", MLA, INDEXER, "--device", "cpu", "--cases", "quick", "--provider", "split")
        assert code == 0
        assert document["summary"][0]["passed"] == 2

    @pytest.mark.parametrize("op", ROLES)
    def test_every_op_has_a_case_of_its_own(self, op):
        code, document = call_json("verify", op, "--case", "tokens=2", "--device", "cpu", "--provider", "split")
        assert code == 0
        assert document["summary"][0]["passed"] == 1


class TestBench:
    """What a recorded run shows; timing itself is tested where there is a GPU."""

    @pytest.fixture
    def recorded(self, tmp_path):
        from tests.check.test_targets import row

        rows = [
            row(arm=arm, tokens=t, median_us=t + extra) for t in (1, 8) for arm, extra in (("fused", 0), ("split", 9))
        ]
        path = tmp_path / "run.json"
        Run.of(rows, 4e12, 0.6, commit="abc", absent={"aiter": "aiter is not installed"}).write(path)
        return path

    @pytest.fixture
    def target(self, tmp_path):
        def write(at_most):
            text = 'op = "prepare_qk"\nheads = "16/32"\ntokens = [1, 8]\nl2 = "cold"\nmetric = "median_us"\n'
            text = f"[[target]]\n{text}at_most = {at_most}\n"
            more = text.replace("median_us", "host_of_mul")
            (tmp_path / "targets.toml").write_text(text + more)
            return str(tmp_path / "targets.toml")

        return write

    def test_a_recorded_run_is_shown(self, recorded):
        result = call("bench", "--read", str(recorded))
        assert result.exit_code == 0
        assert "aiter was not timed: aiter is not installed" in result.stdout
        assert (
            "| `prepare_qk` | 1.00 (10.0) 10.0x | 8.00 (17.0) 2.1x |"
            in call("bench", "--read", str(recorded), "--markdown").stdout.splitlines()
        )
        code, document = call_json("bench", "--read", str(recorded))
        assert code == 0
        assert len(document["rows"]) == 4

    @pytest.mark.parametrize(("at_most", "code", "words"), [(8.0, 0, "2 hold, 0 missed"), (5.0, 1, "1 hold, 1 missed")])
    def test_targets_decide_the_exit_code(self, recorded, target, at_most, code, words):
        result = call("bench", "--read", str(recorded), "--check", target(at_most))
        assert result.exit_code == code
        assert f"{words}, 2 not measured" in result.stdout
        assert ("MISSED prepare_qk" in result.stdout) == bool(code)
        assert "NOT MEASURED prepare_qk" in result.stdout
        again, document = call_json("bench", "--read", str(recorded), "--check", target(at_most))
        assert again == code
        assert len(document["targets"]) == 4

    def test_a_run_with_an_unproven_arm_is_no_success(self, recorded, tmp_path):
        from dataclasses import replace

        from dsafuse.check.records import Unproven

        entry = Unproven(op="prepare_qk", heads="16/32", tokens=1, arm="split", reason="other bytes")
        replace(Run.read(recorded), unproven=(entry,)).write(recorded)
        result = call("bench", "--read", str(recorded))
        assert result.exit_code == 1
        assert "UNPROVEN prepare_qk 16/32 T=1, split: other bytes" in result.stdout

    def test_a_plot_is_written(self, recorded, tmp_path):
        pytest.importorskip("matplotlib")
        assert call("bench", "--read", str(recorded), "--plot", str(tmp_path / "p.png")).exit_code == 0
        assert (tmp_path / "p.png").exists()


class TestDemo:
    def test_without_vllm_it_says_what_to_install(self, monkeypatch):
        from dsafuse.vllm import demo

        monkeypatch.setattr(demo, "why_not_here", lambda: "vLLM is not installed here; `make demo` installs it")
        result = call("demo")
        assert result.exit_code == 2
        assert len(result.stderr.strip().splitlines()) == 1

    @pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
    def test_its_outcome_is_the_exit_code(self, monkeypatch, ok, code):
        from dsafuse.vllm import demo

        monkeypatch.setattr(demo, "why_not_here", lambda: None)
        monkeypatch.setattr(demo, "run", lambda report: SimpleNamespace(ok=ok, as_dict=lambda: {"ok": ok}))
        assert call_json("demo") == (code, {"ok": ok})

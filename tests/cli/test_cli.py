"""Exit codes, one-line errors and JSON of every command."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import dsafuse
from dsafuse.check import codegen, plot
from dsafuse.check import verify as checks
from dsafuse.check.cases import ROLES
from dsafuse.check.environment import checkout
from dsafuse.check.records import Run
from dsafuse.cli import files
from dsafuse.cli.app import app
from dsafuse.cli.engines import KV_CACHE_DTYPES, MEANINGS, meanings
from dsafuse.cli.output import print_json
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS
from dsafuse.models import MODELS
from dsafuse.registry import OPS
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
        (["verify", "--device", "cuda:"], "--device: got 'cuda:'"),
        (["verify", "--device", "cpu:"], "--device: got 'cpu:'"),
        (["verify", "--device", "cpu:1"], "--device: got 'cpu:1'"),
        (["verify", "--device", "cpu:99999999999"], "--device: got 'cpu:99999999999'"),
        (["verify", "--device", "cpu:٣"], "--device: got 'cpu:٣'"),
        (["verify", "--case", "tokens=1"], "exactly one OP"),
        (["verify", MLA, "--case", ""], "--case: got field '', expected one of"),
        (["verify", MLA, "--case", "tokens=1,tokens=2"], "--case: got 'tokens' 2 times"),
        (["verify", MLA, "--case", "tokens=٣"], "--case: got 'tokens=٣'"),
        (["verify", MLA, "--case", "tokens=x"], "tokens=x"),
        (["verify", MLA, "--case", "weights=fp32"], "weights"),
        (["verify", MLA, "--case", "index=absent"], "index"),
        (["verify", "--nonsense"], "--nonsense"),
        (["bench", "--tokens", "0"], "--tokens: got '0'"),
        (["bench", "--tokens", "1,,2"], "separated by commas"),
        (["bench", "--tokens", "٣"], "--tokens: got '٣'"),
        (["bench", "--tokens", "1" * 5000], "--tokens: got '111"),
        (["bench", "--heads", "٣/3"], "--heads: got '٣/3'"),
        (["bench", "--heads", "128"], "128/64"),
        (["bench", "--heads", "128/999"], "128/999"),
        (["bench", "no_such_op"], "no_such_op"),
        (["bench", "--arms", "fused,fastest"], "fastest"),
        (["bench", "--check", "/no/such/targets.toml"], "--check"),
        (["bench", "--read", "/no/such/run.json"], "--read"),
        (["codegen", "--check", "/no/such/floors.toml"], "--check: got /no/such/floors.toml, expected a file"),
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


KERNEL = 'target = "sm_90", op = "o", variant = "v", kernel = "k", heads = 1, index_heads = 1'
FLOORS = "load_bytes_16 = 1, store_bytes_8 = 1, fp8_conversions = 1"
TARGET = 'heads = "16/32"\nl2 = "cold"\nmetric = "median_us"\nat_most = 1\n'


def floors(*kernels, slack="1.05"):
    return f'triton = "3"\nslack = {slack}\nkernel = [{", ".join(kernels)}]'


@pytest.mark.parametrize(
    ("command", "option", "text", "words"),
    [
        *(
            (command, option, text, words)
            for command, option in (("codegen", "--check"), ("bench", "--check"), ("bench", "--read"))
            for text, words in ((b"\xff", "utf-8"), (None, "Is a directory"), (b"a = ", "Invalid value"))
            if (option, text) != ("--read", b"a = ")
        ),
        ("codegen", "--check", "a = " + "[" * 9999, "recursion"),
        ("codegen", "--check", "kernel = 5", "got no triton"),
        ("codegen", "--check", 'triton = "3"\nslack = 1.05\nkernel = 5', "got kernel=5"),
        ("codegen", "--check", floors(slack="true"), "got slack=True"),
        ("codegen", "--check", floors(slack="nan"), "got slack=nan"),
        ("codegen", "--check", floors("1"), "kernel 1: got 1"),
        ("codegen", "--check", floors("{}"), "kernel 1: got no target, op"),
        ("codegen", "--check", floors(f"{{ {KERNEL} }}"), "got no load_bytes_16"),
        ("codegen", "--check", floors(f"{{ {KERNEL}, {FLOORS}, registres = 1 }}"), "got registres"),
        ("codegen", "--check", floors(f'{{ {KERNEL}, {FLOORS}, registers = "1" }}'), "got registers='1'"),
        ("codegen", "--check", floors(*[f"{{ {KERNEL}, {FLOORS} }}"] * 2), "kernel 2: is there twice"),
        ("bench", "--check", "target = 5", "got no [[target]]"),
        ("bench", "--check", "target = [5]", "target 1: got 5, expected a table"),
        ("bench", "--check", f'[[target]]\nop = "prepare_qk"\ntokens = 3\n{TARGET}', "got tokens=3"),
        ("bench", "--check", f'[[target]]\nop = "prepare_qk"\ntokens = ["a", "b"]\n{TARGET}', "got tokens=('a', 'b')"),
        ("bench", "--read", "[" * 99999, "recursion"),
        ("bench", "--read", "[]", "no recorded run"),
        *(
            (command, "--read", text, words)
            for command in ("bench", "eval", "serve-bench")
            for text, words in (
                ("1" + "0" * 400, "an integer of 401 digits, expected one of 64 bits"),
                (str(10**30), "an integer of 31 digits"),
                ('"\\ud800"', r"got '\ud800' in a text"),
            )
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_and_exit_code_2(tmp_path, command, option, text, words):
    path = tmp_path / "file"
    if text is None:
        path.mkdir()
    else:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    result = call(command, option, str(path))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{option}: {path}")
    assert line.count(str(path)) == 1
    assert words in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere/x.png", "there is no directory"),
        ("file/x.png", "Not a directory"),
        ("directory.png", "is a directory"),
        (f"{'x' * 300}.png", "File name too long"),
        ("dangling.png", "there is no directory"),
        pytest.param(
            "locked/x.png",
            "Permission denied",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere"),
        ),
    ],
)
@pytest.mark.parametrize(
    ("command", "option"), [("codegen", "--record"), ("bench", "--out"), ("bench", "--plot"), ("verify", "--out")]
)
def test_a_file_that_cannot_be_written_is_refused_before_any_work(monkeypatch, tmp_path, command, option, name, words):
    monkeypatch.setattr(plot, "why_not", lambda: None)
    monkeypatch.setattr(codegen, "reports", lambda wanted: pytest.fail("it compiles"))
    (tmp_path / "file").touch()
    (tmp_path / "directory.png").mkdir()
    (tmp_path / "dangling.png").symlink_to(tmp_path / "nowhere" / "x.png")
    (tmp_path / "locked").mkdir(mode=0o500)
    before = sorted(tmp_path.rglob("*"))
    result = call(command, option, str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"{option}: {tmp_path / name}: ")
    assert words in line
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_the_system_does_not_write_to_is_refused(monkeypatch, tmp_path, capsys):
    """As root may find: a read-only file system, a full one."""

    def refuses(dir):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", refuses)
    with pytest.raises(typer.Exit):
        files.check_writable("--out", tmp_path / "x")
    assert capsys.readouterr().err == f"--out: {tmp_path / 'x'}: Read-only file system\n"


def test_a_picture_of_no_known_kind_is_refused(monkeypatch):
    monkeypatch.setattr(plot, "why_not", lambda: None)
    result = call("bench", "--plot", "x.doc")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "--plot: got x.doc, expected a name that ends in one of .png, .pdf, .svg\n"


def test_a_record_on_a_full_disk_is_one_line(monkeypatch):
    monkeypatch.setattr(codegen, "reports", lambda wanted: ())
    result = call("codegen", "--record", "/dev/full")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "--record: /dev/full: No space left on device\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "--json"),
        ("explain",),
        ("env",),
        ("--help",),
        ("verify", MLA, "--case", "tokens=1,heads=1", "--device", "cpu", "--provider", "split"),
    ],
    ids=" ".join,
)
def test_standard_output_on_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "dsafuse", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    who = "dsafuse" if arguments == ("--help",) else "standard output"
    assert (done.returncode, done.stderr) == (2, f"{who}: No space left on device\n")


def test_standard_error_on_a_full_disk_still_gives_the_exit_code():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "dsafuse", "nonsense"], stderr=full, check=False)
    assert done.returncode == 2


class TestOrder:
    """One order of the ops, whoever names them."""

    ORDER = (MLA, INDEXER, "prepare_qk", "prepare_latents", "prepare_queries")

    def test_it_has_every_op(self):
        assert tuple(ROLES) == self.ORDER
        assert set(self.ORDER) == set(OPS) == set(dsafuse.__all__) - {"__version__", "warm_up"}

    def test_of_explain(self):
        meaning = call_json("explain")[1]["meanings"][0]
        assert tuple(decision["op"] for decision in meaning["ops"]) == self.ORDER

    def test_of_codegen(self):
        assert tuple(dict.fromkeys(kernel.op for kernel in codegen.kernels(["sm_90"]))) == self.ORDER

    @pytest.mark.parametrize("named", [(), ORDER[::-1], (*ORDER, MLA)])
    def test_of_verify(self, monkeypatch, named):
        planned = []
        monkeypatch.setattr(checks, "plan", lambda names, *others: planned.extend(names) or [])
        assert call("verify", *named, "--device", "cpu").exit_code == 0
        assert tuple(planned) == self.ORDER

    def test_of_a_recorded_run(self, monkeypatch, tmp_path):
        from tests.check.test_targets import row

        drawn = []
        monkeypatch.setattr(plot, "why_not", lambda: None)
        monkeypatch.setattr(plot, "plot", lambda run, path: drawn.extend(row.op for row in run.rows))
        names = ("an_op_of_old", *OPS)
        Run.of([row(op=name, tokens=t) for name in names for t in (8, 1)], 4e12, 0.6).write(tmp_path / "run.json")
        arguments = ("bench", "--read", str(tmp_path / "run.json"), "--plot", str(tmp_path / "p.png"))
        expected = (*self.ORDER, "an_op_of_old")
        code, document = call_json(*arguments)
        assert code == 0
        assert [(row["op"], row["tokens"]) for row in document["rows"]] == [(n, t) for n in expected for t in (8, 1)]
        assert tuple(dict.fromkeys(drawn)) == expected
        shown = call(*arguments, "--markdown").stdout
        assert [line.split("`")[1] for line in shown.splitlines() if line.startswith("| `")] == list(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so bench would run")
def test_bench_says_that_it_needs_a_gpu():
    result = call("bench")
    assert result.exit_code == 2
    assert result.stderr == f"bench needs a GPU, and torch {torch.__version__} sees none on this machine\n"


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

    @pytest.mark.parametrize("how", [(), ("--json",)])
    @pytest.mark.parametrize("starts", [False, True])
    def test_a_model_that_would_not_start_is_exit_code_1(self, monkeypatch, tmp_path, starts, how):
        from dsafuse.vllm import foresee

        (tmp_path / "config.json").write_text("{}")
        found = {
            "vllm": "0", "platform": "cpu", "dtype": "bfloat16", "block_size": 64, "left_out": [],
            "not_installed": ["vLLM 9 is not known"], "kinds": [], "starts": starts,
        }  # fmt: skip
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr(foresee, "ask", lambda *arguments, **options: found)
        result = call("explain", "--vllm", str(tmp_path), *how)
        assert result.exit_code == (0 if starts else 1)
        assert ("vLLM would not start" in result.stdout) == (not starts and not how)
        assert ("vLLM's own code runs" in result.stdout) == (starts and not how)

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
        assert document["environment"]["torch"]
        assert {s["provider"]: s["passed"] for s in document["summary"]} == {"triton": 0, "interpreter": 1, "split": 1}
        assert document["failures"] == []

    def test_the_document_goes_to_a_file_too(self, tmp_path):
        arguments = ("verify", MLA, "--case", self.CASE, "--device", "cpu", "--provider", "split")
        _, document = call_json(*arguments, "--out", str(tmp_path / "verified.json"))
        assert json.loads((tmp_path / "verified.json").read_text()) == document

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

    @pytest.mark.parametrize("more", [("--commit", "abc"), ()])
    def test_a_record_names_the_commit_that_the_caller_states(self, tmp_path, more):
        arguments = (
            MLA,
            "--case",
            "tokens=2",
            "--device",
            "cpu",
            "--provider",
            "split",
            "--out",
            str(tmp_path / "v.json"),
        )
        assert call("verify", *arguments, *more).exit_code == 0
        found = json.loads((tmp_path / "v.json").read_text())["environment"]
        assert (found["commit"], found["clean"]) == (("abc", None) if more else checkout())

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
        def write(at_most, more=""):
            text = 'op = "prepare_qk"\nheads = "16/32"\ntokens = [1, 8]\nl2 = "cold"\nmetric = "median_us"\n'
            text = f"[[target]]\n{text}at_most = {at_most}\n"
            other = text.replace("median_us", "host_of_mul")
            (tmp_path / "targets.toml").write_text(text + more + other)
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

    @pytest.mark.parametrize(
        ("at_most", "code", "words"), [(8.0, 0, "2 hold, 0 argued, 0 missed"), (5.0, 1, "1 hold, 0 argued, 1 missed")]
    )
    def test_targets_decide_the_exit_code(self, recorded, target, at_most, code, words):
        result = call("bench", "--read", str(recorded), "--check", target(at_most))
        assert result.exit_code == code
        assert f"{words}, 2 not measured" in result.stdout
        assert ("MISSED prepare_qk" in result.stdout) == bool(code)
        assert "NOT MEASURED prepare_qk" in result.stdout
        again, document = call_json("bench", "--read", str(recorded), "--check", target(at_most))
        assert again == code
        assert len(document["targets"]) == 4

    @pytest.mark.parametrize(
        ("held_to", "code", "words"), [(8.0, 0, "1 hold, 1 argued, 0 missed"), (7.0, 1, "1 hold, 0 argued, 1 missed")]
    )
    def test_what_is_argued_is_said_and_held_to_something(self, recorded, target, held_to, code, words):
        argued = f'held_to = {held_to}\nargued = "docs/performance.md#here"\n'
        result = call("bench", "--read", str(recorded), "--check", target(5.0, argued))
        assert result.exit_code == code
        assert words in result.stdout
        said = f"at most 5 (held to {held_to:g}, docs/performance.md#here): got 8, at T=8"
        assert f"{'MISSED' if code else 'ARGUED'} prepare_qk" in result.stdout
        assert said in result.stdout

    def test_a_run_with_an_unproven_arm_is_no_success(self, recorded, tmp_path):
        from dataclasses import replace

        from dsafuse.check.records import Unproven

        entry = Unproven(op="prepare_qk", heads="16/32", tokens=1, arm="split", reason="other bytes")
        replace(Run.read(recorded), unproven=(entry,)).write(recorded)
        result = call("bench", "--read", str(recorded))
        assert result.exit_code == 1
        assert "UNPROVEN prepare_qk 16/32 T=1, split: other bytes" in result.stdout

    @pytest.mark.parametrize(
        ("field", "value", "words"),
        [
            ("op", 5, "got op=5"),
            ("eager_us", "x", "got eager_us='x'"),
            ("median_us", 0.0, "rows[0].median_us: got 0.0"),
            ("host_us", -1.0, "rows[0].host_us: got -1.0, expected more than 0"),
            ("p90_us", float("inf"), "rows[0].p90_us: got inf"),
            ("mul_us", float("nan"), "rows[0].mul_us: got nan"),
            ("tokens", 0, "rows[0].tokens: got 0"),
            ("l2", "hot", "rows[0].l2: got 'hot', expected one of cold, warm"),
            ("form", "x", "rows[0].form: got 'x'"),
            ("heads", "banana", "rows[0].heads: got 'banana'"),
        ],
    )
    def test_a_recorded_row_that_cannot_be_is_refused(self, recorded, field, value, words):
        document = json.loads(recorded.read_text())
        document["rows"][0][field] = value
        recorded.write_text(json.dumps(document))
        result = call("bench", "--read", str(recorded))
        assert (result.exit_code, result.stdout) == (2, "")
        (line,) = result.stderr.splitlines()
        assert words in line

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
        monkeypatch.setattr(demo, "run", lambda report, questions: SimpleNamespace(ok=ok, as_dict=lambda: {"ok": ok}))
        assert call_json("demo") == (code, {"ok": ok})

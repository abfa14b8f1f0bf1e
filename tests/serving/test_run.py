"""The measurement over fakes: order, resumption, and every way in which it may end early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsafuse import stopping
from dsafuse.serving import run
from dsafuse.serving.grid import Cell, Turn, cells
from dsafuse.serving.process import Ended, Process
from dsafuse.serving.record import Record
from dsafuse.serving.run import STATE, Changed, Plan, Unusable, measure, prepare, resume
from tests.serving.conftest import alive, changed

Fake = Callable[..., Path]


def take(plan: Plan, record: Record | None = None, **options: Any) -> Record:
    record = record or prepare(plan)
    measure(plan, record, plan.model.parent / "out", lambda done, work, doing: None, **options)
    return record


def test_every_cell_is_measured_in_both_arms_and_nothing_is_left(plan: Plan, fake: Fake) -> None:
    pids = fake(child=True)
    record = take(plan)
    assert record.ended == "complete"
    assert Counter(result.turn for result in record.results) == Counter(
        Turn(cell, repeat, arm) for cell in plan.cells for repeat in (0, 1) for arm in ("off", "on")
    )
    assert {start.arm: start.plans for start in record.starts}["off"] == []
    assert "fused" in record.starts[1].plans[0]
    assert len(pids.read_text().split()) == 5  # two servers, a stubborn child of each, the client
    assert alive(pids) == []
    assert Record.read(plan.model.parent / "out" / STATE) == record


def test_a_server_warms_up_every_load_once_with_all_slots(plan: Plan, fake: Fake, tmp_path: Path) -> None:
    fake()
    take(changed(plan, prompts_per_slot=3))
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    asked = [(c[c.index("--max-concurrency") + 1], c[c.index("--num-warmups") + 1]) for c in calls]
    assert asked == [("1", "1")] * 2 + [("2", "2")] * 2 + [("1", "1")] * 2 + [("2", "1")] * 2
    assert {c[c.index("--num-prompts") + 1] for c in calls if c[c.index("--max-concurrency") + 1] == "2"} == {"6"}


def test_a_server_that_dies_ends_all_and_its_last_words_are_shown(plan: Plan, fake: Fake) -> None:
    pids = fake(die_after={"auto": 1.5}, child=True, turn_seconds=0.3)
    with pytest.raises(Ended, match=r"plugin on ended with exit code 3(.|\n)*the engine is no more"):
        take(changed(plan, repeats=50))
    record = Record.read(plan.model.parent / "out" / STATE)
    assert record.ended.startswith("the server with the plugin on ended with exit code 3")
    assert alive(pids) == []


def test_a_server_that_dies_while_it_starts_is_not_waited_for(plan: Plan, fake: Fake) -> None:
    fake(die_after={"off": 0.0})
    start = time.monotonic()
    with pytest.raises(Ended, match="plugin off ended"):
        take(changed(plan, repeats=10**3))
    assert time.monotonic() - start < 20


def test_a_client_that_dies_is_shown(plan: Plan, fake: Fake) -> None:
    pids = fake()
    rude = changed(plan, client=(sys.executable, "-c", "import sys; sys.exit('no such dataset')"))
    with pytest.raises(Ended, match=r"the benchmark client ended with exit code 1(.|\n)*no such dataset"):
        take(rude)
    assert alive(pids) == []


@pytest.mark.parametrize(
    ("logged", "why"),
    [
        (["KeyError: 1", "(Worker) ERROR RuntimeError: no weights", *["-"] * 60], " (RuntimeError: no weights)"),
        (["no reason", "-"], ""),
    ],
)
def test_the_last_error_and_the_end_of_a_log_are_shown(tmp_path: Path, logged: list[str], why: str) -> None:
    end = "import sys; print(*sys.argv[1:], sep=chr(10)); sys.exit(1)"
    process = Process("it", [sys.executable, "-c", end, *logged], os.environ, tmp_path / "log")
    process.end(time.monotonic() + 60)
    with pytest.raises(Ended) as raised:
        process.check()
    assert str(raised.value).splitlines() == [
        f"it ended with exit code 1{why}; the end of {tmp_path / 'log'}:",
        *logged[-stopping.TAIL_LINES :],
    ]


@pytest.mark.parametrize(
    ("plans", "says"),
    [
        ({}, "on fused no layer.*VLLM_PLUGINS"),
        ({"auto": ["dsafuse: DSA layer: mla: vLLM's own code (no) [first: l.0]"]}, "on fused no layer.*own code"),
        ({mode: ["dsafuse: DSA layer: mla: fused [first: l.0]"] for mode in ("auto", "off")}, "off fused layers"),
    ],
)
def test_arms_that_are_not_what_they_claim_are_not_measured(
    plan: Plan, fake: Fake, plans: dict[str, list[str]], says: str
) -> None:
    pids = fake(plans=plans)
    with pytest.raises(Unusable, match=says):
        take(plan)
    assert Record.read(plan.model.parent / "out" / STATE).results == []
    assert alive(pids) == []


def test_caches_that_are_too_small_are_not_measured(plan: Plan, fake: Fake) -> None:
    fused = "dsafuse: DSA layer: mla: fused [first: l.0]"
    fake(plans={"off": ["GPU KV cache size: 1,047 tokens"], "auto": [fused, "GPU KV cache size: 1,048 tokens"]})
    with pytest.raises(Unusable, match=r"plugin off has caches for 1047 tokens, and the largest load is 1048"):
        take(changed(plan, cells=cells([254], [8], [1, 4])))
    fake(plans={"off": ["GPU KV cache size: 1,048 tokens"], "auto": [fused]})
    assert take(changed(plan, cells=cells([254], [8], [1, 4]))).ended == "complete"


def test_failed_requests_are_no_result(plan: Plan, fake: Fake) -> None:
    fake(fail_requests=1)
    says = (
        r"16/8 at 1, repeat 1, off: completed, failed, output tokens: got \(2, 1, 16\).*said: HTTP 400 .*no such luck"
    )
    with pytest.raises(Unusable, match=says):
        take(plan)
    assert Record.read(plan.model.parent / "out" / STATE).results == []


def test_a_turn_has_what_the_server_says_of_its_own_time(plan: Plan, fake: Fake) -> None:
    fake()
    record = take(plan)
    for result in record.results:
        assert dict(result.server) == pytest.approx({"server_ttft_ms": 450.0, "queue_ms": 150.0, "prefill_ms": 225.0})
        assert result.compiled == []


def test_what_is_compiled_while_a_turn_is_measured_is_told_of_that_turn(plan: Plan, fake: Fake) -> None:
    fake(compiles={"auto": "_topk"}, turn_seconds=0.2)
    told = [result for result in take(plan).results if result.compiled]
    assert [(result.turn.arm, result.compiled) for result in told] == [
        ("on", ["Triton kernel JIT compilation during inference: _topk"])
    ]


def test_a_time_limit_keeps_what_there_is(plan: Plan, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "RESERVE_SECONDS", 1.0)
    pids = fake(turn_seconds=0.5, child=True)
    start = time.monotonic()
    record = take(changed(plan, repeats=1000), deadline=start + 6.0)
    assert record.ended.startswith("the time limit came first: ")
    assert 1 <= len(record.results) < 12
    assert alive(pids) == []


def test_a_time_limit_while_servers_start_is_no_result(plan: Plan, fake: Fake) -> None:
    pids = fake()
    record = take(plan, deadline=time.monotonic())
    assert record.ended == "the time limit came first: 0 of 8 turns"
    assert record.results == []
    assert alive(pids) == []


def test_a_server_that_never_serves_is_given_up(plan: Plan, fake: Fake) -> None:
    pids = fake()
    deaf = (sys.executable, "-c", "import time; time.sleep(600)")
    with pytest.raises(Unusable, match="plugin off and the server with the plugin on did not serve within 1 s"):
        take(changed(plan, vllm=deaf, start_seconds=1.0))
    assert alive(pids) == []


def test_a_later_run_takes_only_what_is_missing(plan: Plan, fake: Fake, tmp_path: Path) -> None:
    fake()
    before = take(changed(plan, repeats=1))
    (tmp_path / "calls").unlink()
    record = take(plan, resume(prepare(plan), Record.read(tmp_path / "out" / STATE)))
    assert len((tmp_path / "calls").read_text().splitlines()) == 4
    assert record.results[:4] == before.results
    assert [result.start for result in record.results] == [0, 1, 1, 0, 3, 2, 2, 3]
    assert len(record.starts) == 4
    assert record.ended == "complete"


def test_a_complete_measurement_starts_no_server(plan: Plan, fake: Fake, tmp_path: Path) -> None:
    pids = fake()
    before = take(plan)
    pids.unlink()
    take(plan, resume(prepare(plan), before))
    assert not pids.exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_cache_dtype": "fp8"}, "condition kv_cache_dtype was 'auto', is 'fp8'"),
        ({"prompts_per_slot": 5}, "condition prompts_per_slot was 3, is 5"),
        ({"extra": ("--enforce-eager",)}, "condition server_arguments was"),
        ({"cells": cells([16], [8], [1, 4])}, "condition server_arguments was"),
    ],
)
def test_a_changed_setting_is_refused(plan: Plan, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Changed, match=says):
        resume(prepare(changed(plan, **changes)), prepare(plan))


def test_the_commit_that_is_stated_is_recorded_and_not_the_checkouts(plan: Plan) -> None:
    """A copy of the code may lie in a checkout of something else."""
    stated = prepare(changed(plan, commit="def")).environment
    assert (stated["commit"], stated["clean"]) == ("def", None)
    told = prepare(plan).environment
    assert (told["commit"], told["clean"]) == ("abc", True)


def test_another_machine_code_or_model_is_refused(plan: Plan, facts: dict[str, Any]) -> None:
    before = prepare(plan)
    facts["gpu"] = "NVIDIA B200"
    with pytest.raises(Changed, match="environment gpu was 'NVIDIA H200', is 'NVIDIA B200'"):
        resume(prepare(plan), before)
    facts.update(gpu="NVIDIA H200", commit="def")
    with pytest.raises(Changed, match="environment commit was 'abc', is 'def'"):
        resume(prepare(plan), before)
    facts.update(commit="abc", memory_bytes=[[1, 2]])
    resume(prepare(plan), before)
    config = plan.model / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(Changed, match="condition config_sha256"):
        resume(prepare(plan), before)


def test_in_turn_each_server_is_alone(plan: Plan, fake: Fake, tmp_path: Path) -> None:
    pids = fake()
    record = take(changed(plan, in_turn=True))
    assert [result.turn.arm for result in record.results] == ["off"] * 4 + ["on"] * 4
    assert "0.9" in record.conditions["server_arguments"]
    assert record.ended == "complete"
    assert alive(pids) == []


def test_memory_decides_whether_servers_share_a_gpu(plan: Plan, facts: dict[str, Any]) -> None:
    by_memory = changed(plan, in_turn=None, weight_bytes=20 << 30)
    assert prepare(by_memory).conditions["in_turn"] is False
    facts["memory_bytes"] = [[50 << 30, 141 << 30]]
    here = prepare(by_memory).conditions
    assert here["in_turn"] is True
    assert "weights 20.0 GiB" in here["in_turn_because"]
    assert "50.0 GiB free" in here["in_turn_because"]
    facts["memory_bytes"] = [[50 << 30, 141 << 30]] * 8
    spread = prepare(changed(by_memory, weight_bytes=60 << 30, extra=("-tp", "4"))).conditions
    assert spread["in_turn"] is False
    assert "weights 15.0 GiB" in spread["in_turn_because"]
    apart = prepare(changed(by_memory, gpus=("0", "1"))).conditions
    assert apart["in_turn"] is False
    assert "0.9" in apart["server_arguments"]


def test_a_model_without_latent_attention_is_refused(plan: Plan) -> None:
    (plan.model / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no kv_lora_rank"):
        prepare(plan)


INTERRUPTED = """
import sys
from pathlib import Path
from dsafuse.serving import run
from dsafuse.serving.grid import cells
from dsafuse.serving.process import Stopped, listening
from tests.serving.conftest import FACTS, FAKE
run.facts = lambda gpus: dict(FACTS)
model = Path(sys.argv[1])
plan = run.Plan(model=model, cells=cells([16], [8], [1]), repeats=10**3, in_turn=False, vllm=FAKE,
                client=(*FAKE, "client"))
with listening() as interrupted:
    record = run.prepare(plan)
    report = lambda done, work, doing: print(done, flush=True)
    try:
        run.measure(plan, record, model.parent / "out", report, interrupted=interrupted)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("after", ["0", "3"])
def test_a_signal_ends_all_and_keeps_what_there_is(
    plan: Plan, fake: Fake, tmp_path: Path, number: signal.Signals, after: str
) -> None:
    pids = fake(child=True, turn_seconds=0.2)
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(plan.model)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env=dict(os.environ),
        # Under nohup, or in a shell's background, we are made to ignore it.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.strip() == after and pids.exists() and len(pids.read_text().split()) == 5:
            break
    child.send_signal(number)
    child.send_signal(number)  # impatience must not cut the ending short
    for _ in child.stdout:
        child.send_signal(number)
    child.stdout.close()
    assert child.wait(timeout=60) == 128 + number
    record = Record.read(tmp_path / "out" / STATE)
    assert record.ended == f"it was stopped by {number.name}"
    assert len(record.results) >= int(after)
    assert record.cells() == ([Cell(16, 8, 1)] if int(after) else record.cells())
    assert alive(pids) == []

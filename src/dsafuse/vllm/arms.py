"""Arms as processes: started together, heard while they work, ended whatever happens."""

import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from dsafuse import stopping
from dsafuse.vllm.arm import ENVIRONMENT

# (arm, work done, work in all, what it is doing)
Report = Callable[[str, int, int, str], None]

UNFUSED, FUSED = "un-fused", "fused"


@dataclass(frozen=True)
class ArmResult:
    """What one arm said about one cell.

    calls: `dsafuse.vllm.stats`, by op. plans: as `dsafuse.vllm.plan.document` has each layer's.
    ways: calls that were interpreted and calls that ran the oracle, under `arm.interpret_up_to`.
    logprobs, drafts: as `arm.serve` says, where they were asked for.
    """

    tokens: list[list[int]]
    step_seconds: list[float]
    calls: dict[str, dict[str, int]]
    plans: list[dict[str, Any]]
    ways: dict[str, int] | None = None
    logprobs: list[list[tuple[float, int]]] | None = None
    drafts: tuple[int, int] | None = None

    @property
    def decode_step_ms(self) -> float:
        """Median time of a decode step; the first step is the prefill."""
        return 1000 * statistics.median(self.step_seconds[1:] or self.step_seconds)


C = TypeVar("C", bound=Hashable)


class Arm(Generic[C]):
    """A process that serves cells (`dsafuse.vllm.arm`); its events arrive in a queue, its log in a file.

    Args:
        name: for reports and problems.
        cells: what the process is told about each cell.
        prompts, max_tokens: served in every cell.
        settings: environment variables that make the arm what it is.
        log: where vLLM's log goes.
        sampling, interpret_up_to: further parts of the job, see `dsafuse.vllm.arm`.
        command: what Python runs; it must do as `dsafuse.vllm.arm` does, and take its job by `arm.take_job`.
    """

    def __init__(
        self,
        name: str,
        cells: Mapping[C, dict[str, Any]],
        prompts: list[list[int]],
        max_tokens: int,
        settings: Mapping[str, str],
        log: Path,
        *,
        sampling: Mapping[str, Any] = MappingProxyType({}),
        interpret_up_to: int | None = None,
        command: Sequence[str] = ("-m", "dsafuse.vllm.arm"),
    ) -> None:
        self.name = name
        self.results: dict[C, ArmResult] = {}
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._cell_work = 1 + len(prompts) * max_tokens
        self.work = len(cells) * self._cell_work
        self.done = 0
        self._cells = list(cells)
        job = {"prompts": prompts, "max_tokens": max_tokens, "cells": list(cells.values())}
        self._job = json.dumps({**job, "sampling": dict(sampling), "interpret_up_to": interpret_up_to})
        self.command = [*command]
        self._log = log
        self._environment = {
            # What the caller has set for dsafuse or for vLLM's plugins would make it another comparison.
            **{key: value for key, value in os.environ.items() if not key.startswith("DSAFUSE_")},
            **ENVIRONMENT,
            "VLLM_PLUGINS": "dsafuse",
            **settings,
        }

    def __enter__(self) -> "Arm[C]":
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *self.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                text=True,
                start_new_session=True,
            )
        for work in (self._write, self._read):
            threading.Thread(target=work, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        stopping.end(self.process)

    def _write(self) -> None:
        """The job, which a pipe does not hold: who imports vLLM, or hangs there, does not read yet.

        Behind it the pipe stays open as long as both live: by its end the arm learns that we were killed.
        """
        assert self.process.stdin is not None
        # A process that is dead already takes no job; its exit code and its log say why.
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(self._job + "\n")
            stdin.flush()
            self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.process.wait()
        self.events.put(None)

    def hear(self, event: dict[str, Any]) -> str:
        """Take in what the process said. Returns what it is doing."""
        cell = self._cells[event["cell"]]
        if event["event"] in ("loaded", "step"):
            self.done = event["cell"] * self._cell_work + 1 + event.get("tokens", 0)
        elif event["event"] == "done":
            self.results[cell] = ArmResult(**{f.name: event[f.name] for f in fields(ArmResult) if f.name in event})
        return f"{cell}: {event['event']}"

    def problem(self) -> str | None:
        """Why the process ended badly, with the end of its log; None if it ended well."""
        code = self.process.wait()
        if code == 0:
            return None
        what = f"the {self.name} arm {stopping.how_ended(code)}"
        return stopping.last_words(what, self._log.read_text(errors="replace"))


def serve(arms: Sequence[Arm[C]], report: Report, deadline: float) -> list[str]:
    """Run the arms side by side until all have ended, or time.monotonic() passes the deadline.

    Returns what went wrong. No process outlives the call, nor does any that it started; a signal that stops us acts
    behind it.
    """
    problems: list[str] = []
    with stopping.held() as stopped, ExitStack() as stack:
        running = [stack.enter_context(arm) for arm in arms]
        while running and not stopped():
            if time.monotonic() > deadline:
                return [*problems, *(f"the {arm.name} arm did not end in time" for arm in running)]
            for arm in list(running):
                try:
                    event = arm.events.get(timeout=0.05)
                except queue.Empty:
                    continue
                if event is not None:
                    doing = arm.hear(event)
                    report(arm.name, arm.done, arm.work, doing)
                    continue
                running.remove(arm)
                problem = arm.problem()
                if problem is not None:
                    problems.append(problem)
    return problems


def not_fused(
    unfused: ArmResult, fused: ArmResult, provider: str, *, draft_layers: int = 0, counted: bool = True
) -> list[str]:
    """In what two arms of one cell are not an un-fused and a fused one, one sentence each.

    Args:
        provider: what the fused arm's ops must have run on.
        draft_layers: of the layers, those that a draft runs: how often in a step, or whether, depends on what was
            accepted. All others run once, and that is counted.
        counted: whether calls are counted at every step. The replay of a CUDA graph runs no Python; there the plans,
            made once when the layers were built, and the absence of fallbacks are what is known.
    """
    found = []
    if any(calls["fused"] for calls in unfused.calls.values()):
        found.append(f"the un-fused arm called fused ops: {unfused.calls}")
    if not fused.plans:
        found.append("the fused arm planned no layer: the plugin's hook was not installed")
    steps = len(fused.step_seconds)
    planned = [each for layer in fused.plans for each in layer["ops"]]
    for op in dict.fromkeys(each["op"] for each in planned):
        plans = [each for each in planned if each["op"] == op and not each["absent"]]
        found += [f"{op} was not fused: {'; '.join(plan['reasons'])}" for plan in plans if not plan["fused"]]
        found += [
            f"{op} ran on provider {plan['provider']}, not {provider}"
            for plan in plans
            if plan["fused"] and plan["provider"] != provider
        ]
        calls = fused.calls[op]
        least = (len(plans) - draft_layers) * steps if counted else min(len(plans), 1)
        right = calls["fused"] >= least if draft_layers or not counted else calls["fused"] == least
        if not right or calls["fallback"]:
            expected = {"fused": least, "fallback": 0}
            found.append(
                f"{op} calls in {steps} steps: {calls}, expected {expected}{' or more fused' * (draft_layers > 0)}"
            )
    return list(dict.fromkeys(found))

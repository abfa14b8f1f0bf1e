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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dsafuse.vllm.arm import ENVIRONMENT

# (arm, work done, work in all, what it is doing)
Report = Callable[[str, int, int, str], None]

LOG_LINES = 20


@dataclass(frozen=True)
class ArmResult:
    """What one arm said about one cell."""

    tokens: list[list[int]]
    step_seconds: list[float]
    calls: dict[str, dict[str, int]]
    plans: list[dict[str, Any]]

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
    """

    def __init__(
        self,
        name: str,
        cells: Mapping[C, dict[str, Any]],
        prompts: list[list[int]],
        max_tokens: int,
        settings: Mapping[str, str],
        log: Path,
    ) -> None:
        self.name = name
        self.results: dict[C, ArmResult] = {}
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.work = len(cells) * (1 + max_tokens)
        self.done = 0
        self._cells = list(cells)
        self._job = json.dumps({"prompts": prompts, "max_tokens": max_tokens, "cells": list(cells.values())})
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
                [sys.executable, "-m", "dsafuse.vllm.arm"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                text=True,
            )
        assert self.process.stdin is not None
        # A process that is dead already takes no job; its exit code and its log say why.
        with suppress(BrokenPipeError), self.process.stdin as stdin:
            stdin.write(self._job)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put(None)

    def hear(self, event: dict[str, Any]) -> str:
        """Take in what the process said. Returns what it is doing."""
        cell = self._cells[event["cell"]]
        if event["event"] in ("loaded", "step"):
            self.done += 1
        elif event["event"] == "done":
            fields = ("tokens", "step_seconds", "calls", "plans")
            self.results[cell] = ArmResult(**{name: event[name] for name in fields})
        return f"{cell}: {event['event']}"

    def problem(self) -> str | None:
        """Why the process ended badly, with the end of its log; None if it ended well."""
        code = self.process.wait()
        if code == 0:
            return None
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"the {self.name} arm ended with exit code {code}; the end of its log:", *lines])


def serve(arms: Sequence[Arm[C]], report: Report, deadline: float) -> list[str]:
    """Run the arms side by side until all have ended, or time.monotonic() passes the deadline.

    Returns what went wrong. No process outlives the call.
    """
    problems: list[str] = []
    with ExitStack() as stack:
        running = [stack.enter_context(arm) for arm in arms]
        while running:
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

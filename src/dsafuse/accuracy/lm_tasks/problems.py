"""The shipped tasks as data sets of lm-eval; its `--metadata` gives seed, count and context_tokens."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dsafuse.accuracy.tasks import TASKS


def recall(**metadata: Any) -> Any:
    """See `dsafuse.accuracy.tasks.recall`."""
    return _splits("recall", **metadata)


def arithmetic(**metadata: Any) -> Any:
    """See `dsafuse.accuracy.tasks.arithmetic`."""
    return _splits("arithmetic", **metadata)


def _splits(task: str, seed: int = 0, count: int = 200, context_tokens: int = 384, **_others: Any) -> Any:
    from datasets import Dataset  # lm-eval brings it

    return {"test": Dataset.from_list([asdict(problem) for problem in TASKS[task](seed, count, context_tokens)])}

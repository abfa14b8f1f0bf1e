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
    import pyarrow  # type: ignore[import-not-found, import-untyped]
    from datasets import Dataset  # lm-eval brings both

    table = pyarrow.Table.from_pylist([asdict(problem) for problem in TASKS[task](seed, count, context_tokens)])
    # Without a fingerprint datasets pickles the table for one, which datasets 5.2 with pyarrow 26 can't.
    return {"test": Dataset(table, fingerprint=f"{task}-{seed}-{count}-{context_tokens}")}

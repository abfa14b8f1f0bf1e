"""An arm for tests: serves a job like dsafuse.vllm.arm, with changes that a product has no switch for.

    python tests/vllm/harness.py < job.json

A cell may carry "change", one of CHANGES, and "ops", what DSAFUSE_OPS would say. Wherever the fused path is planned
(for provider interpreter), the ops' oracles run in place of the interpreted kernels: they are equal, which other
tests prove, and much faster. The kernels themselves serve in test_vllm_demo.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from dsafuse import fused_qk_rope_concat_and_cache_mla as mla_op
from dsafuse import indexer_qk_rope_quant_and_cache as indexer_op
from dsafuse import switches
from dsafuse.vllm import arm

# Where an op takes its slots and its positions.
MLA_SLOTS, MLA_POSITIONS = 5, 6
INDEXER_SLOTS, INDEXER_POSITIONS = 4, 7


def not_rotated(op: Callable[..., Any], at: int) -> Callable[..., Any]:
    """At position 0 every angle is zero: the rotation is left out."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args[:at], torch.zeros_like(args[at]), *args[at + 1 :], **kwargs)

    return call


def other_pairing(op: Callable[..., Any]) -> Callable[..., Any]:
    """The costliest known bug of the field: the rotary pairs of the other style."""

    def call(*args: Any, **kwargs: Any) -> Any:
        style = {"neox": "interleaved", "interleaved": "neox"}[kwargs.pop("rope_style")]
        return op(*args, rope_style=style, **kwargs)

    return call


def dropped_write(op: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The cache is not written: every slot is negative."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args[:at], torch.full_like(args[at], -1), *args[at + 1 :], **kwargs)

    return call


MLA = mla_op.with_provider("oracle")
INDEXER = indexer_op.with_provider("oracle")
CHANGES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "none": (MLA, INDEXER),
    "mla not rotated": (not_rotated(MLA, MLA_POSITIONS), INDEXER),
    "mla paired otherwise": (other_pairing(MLA), INDEXER),
    "mla not written": (dropped_write(MLA, MLA_SLOTS), INDEXER),
    "indexer not rotated": (MLA, not_rotated(INDEXER, INDEXER_POSITIONS)),
    "indexer paired otherwise": (MLA, other_pairing(INDEXER)),
    "indexer not written": (MLA, dropped_write(INDEXER, INDEXER_SLOTS)),
}


def serve(cell: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """One cell, changed as it asks."""
    from dsafuse.vllm import wrapper

    wrapper.fused_qk_rope_concat_and_cache_mla, wrapper.indexer_qk_rope_quant_and_cache = CHANGES[
        cell.pop("change", "none")
    ]
    ops = cell.pop("ops", "mla,indexer")
    with switches.override(ops=frozenset(ops.split(","))):
        return arm.serve(cell, job["prompts"], job["max_tokens"], lambda event: None)


def main() -> None:
    """The job on standard input, the results on standard output."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    for number, cell in enumerate(job["cells"]):
        events.write(json.dumps({"cell": number, "event": "done", **serve(cell, job)}) + "\n")


if __name__ == "__main__":
    main()

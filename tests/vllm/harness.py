"""An arm for tests: serves a job like dsafuse.vllm.arm, with changes that a product has no switch for.

    python tests/vllm/harness.py < job.json

A cell may carry "change", one of CHANGES, and "ops", what DSAFUSE_OPS would say. Wherever the fused path is planned
(for provider interpreter), the ops' oracles run in place of the interpreted kernels: they are equal, which other
tests prove, and much faster. The kernels themselves serve in test_vllm_demo.
"""

import json
import os
from collections.abc import Callable
from typing import Any

import torch

from dsafuse import fused_qk_rope_concat_and_cache_mla as mla_op
from dsafuse import indexer_qk_rope_quant_and_cache as indexer_op
from dsafuse import prepare_qk as joint_op
from dsafuse import switches
from dsafuse.vllm import arm

# Where an op takes its slots and its positions.
MLA_SLOTS, MLA_POSITIONS = 5, 6
INDEXER_SLOTS, INDEXER_POSITIONS = 4, 7
# prepare_qk has the MLA op's first, then the indexer's, and one argument for the positions of both.
JOINT_TABLE, JOINT_INDEXER_SLOTS, JOINT_INDEXER_TABLE = 7, 12, 15


def not_rotated(op: Callable[..., Any], at: int) -> Callable[..., Any]:
    """At position 0 every angle is zero: the rotation is left out."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args[:at], torch.zeros_like(args[at]), *args[at + 1 :], **kwargs)

    return call


def other_pairing(op: Callable[..., Any], keyword: str = "rope_style") -> Callable[..., Any]:
    """The costliest known bug of the field: the rotary pairs of the other style."""

    def call(*args: Any, **kwargs: Any) -> Any:
        style = {"neox": "interleaved", "interleaved": "neox"}[kwargs.pop(keyword)]
        return op(*args, **{keyword: style}, **kwargs)

    return call


def dropped_write(op: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The cache is not written: every slot is negative."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args[:at], torch.full_like(args[at], -1), *args[at + 1 :], **kwargs)

    return call


MLA = mla_op.with_provider("oracle")
INDEXER = indexer_op.with_provider("oracle")
JOINT = joint_op.with_provider("oracle")


def flat_table(op: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The rope table says no rotation anywhere: cosines of one, sines of zero."""

    def call(*args: Any, **kwargs: Any) -> Any:
        table = torch.zeros_like(args[at])
        table[:, : table.shape[1] // 2] = 1
        return op(*args[:at], table, *args[at + 1 :], **kwargs)

    return call


def stale_choice(op: Callable[..., Any], *, cleared: bool) -> Callable[..., Any]:
    """The top-k rows hold the positions of a longer context, and vLLM's indexer op is told that they are clear."""

    def call(*args: Any, topk_indices: torch.Tensor, **kwargs: Any) -> Any:
        topk_indices.copy_(torch.arange(topk_indices.shape[1]).expand_as(topk_indices))
        return op(*args, topk_indices=topk_indices if cleared else None, **kwargs)

    return call


# name: (MLA op, indexer op, both in one)
CHANGES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "none": (MLA, INDEXER, JOINT),
    "mla not rotated": (not_rotated(MLA, MLA_POSITIONS), INDEXER, flat_table(JOINT, JOINT_TABLE)),
    "mla paired otherwise": (other_pairing(MLA), INDEXER, other_pairing(JOINT)),
    "mla not written": (dropped_write(MLA, MLA_SLOTS), INDEXER, dropped_write(JOINT, MLA_SLOTS)),
    "indexer not rotated": (MLA, not_rotated(INDEXER, INDEXER_POSITIONS), flat_table(JOINT, JOINT_INDEXER_TABLE)),
    "indexer paired otherwise": (MLA, other_pairing(INDEXER), other_pairing(JOINT, "index_rope_style")),
    "top-k stale": (MLA, INDEXER, stale_choice(JOINT, cleared=True)),
    "top-k not cleared": (MLA, INDEXER, stale_choice(JOINT, cleared=False)),
    "indexer not written": (MLA, dropped_write(INDEXER, INDEXER_SLOTS), dropped_write(JOINT, JOINT_INDEXER_SLOTS)),
}


def serve(cell: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """One cell, changed as it asks."""
    from dsafuse.vllm import launches

    (
        launches.fused_qk_rope_concat_and_cache_mla,
        launches.indexer_qk_rope_quant_and_cache,
        launches.prepare_qk,
    ) = CHANGES[cell.pop("change", "none")]
    ops = cell.pop("ops", "mla,indexer")
    with switches.override(ops=frozenset(ops.split(","))):
        return arm.serve(cell, job["prompts"], job["max_tokens"], lambda event: None)


def main() -> None:
    """The job on standard input, the results on standard output."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = arm.take_job()
    for number, cell in enumerate(job["cells"]):
        events.write(json.dumps({"cell": number, "event": "done", **serve(cell, job)}) + "\n")


if __name__ == "__main__":
    main()

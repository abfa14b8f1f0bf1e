"""`prepare_qk` against the two original ops: one launch must leave the bytes that the two leave, top-k rows cleared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dsafuse.check.cases import INDEXER, MLA, Case
from dsafuse.check.compare import Arm
from dsafuse.check.inputs import Inputs, blank_outputs
from dsafuse.check.memory import chunks
from dsafuse.ops import roles
from dsafuse.ops.resolve import SHARED
from dsafuse.registry import OPS


def part_of(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an original op out of those of `prepare_qk`."""
    prefix = OPS["prepare_qk"].index_prefix
    if name == MLA:
        return {key: value for key, value in arguments.items() if not key.startswith((prefix, "topk_"))}
    own = {key.removeprefix(prefix): value for key, value in arguments.items() if key.startswith(prefix)}
    return {**own, **{key: arguments[key] for key in SHARED}}


def unlike_its_parts(case: Case, inputs: Inputs, arm: Arm, provider: str, seed: int) -> Iterator[str]:
    """What the two original ops, run by the same provider on equal poison, leave elsewise than `arm` has it."""
    outputs = blank_outputs(case, seed, arm.tensors["kv_cache"].device)
    arguments = {**inputs.arguments, **outputs.arguments}
    tensors = dict(outputs.memory.buffers)
    names = [MLA] if case.index == "absent" else [MLA, INDEXER]
    for name in names:
        returned = OPS[name].with_provider(provider)(**part_of(name, arguments))
        values = returned if isinstance(returned, tuple) else (returned,)
        prefix = "" if name == MLA else OPS["prepare_qk"].index_prefix
        for key, value in zip(OPS[name].output_names, values):
            tensors.setdefault(prefix + key, value.view(torch.uint8).flatten())
    if "clear_topk" in case.roles:
        roles.clear_topk(arguments["topk_indices"], case.tokens)
    for name, buffer in arm.buffers.items():
        if not all(torch.equal(*pair) for pair in zip(chunks(buffer), chunks(tensors[name]))):
            yield f"{name}: not the bytes that {' and '.join(names)} leave"

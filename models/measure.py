"""Held-out accuracy of a network, without an engine.

A greedy answer is right if and only if every one of its tokens, <eos> included, has the largest logit behind the
prompt and the right tokens before it. So one forward pass over prompt and answer decides a problem.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsafuse.accuracy.tasks import TASKS
from dsafuse.accuracy.tokenizer import EOS, IDS, encode
from models.network import Network, Request

SEED, VALIDATION = 20_261_129, 20_261_130


@torch.no_grad()
def accuracy(
    network: Network, task: str, count: int, context: int, sparse: bool, at_once: int = 16, seed: int = SEED
) -> dict[str, float]:
    """Share of problems answered right and, with an MTP layer, of answer tokens that its draft foresaw."""
    device = next(network.parameters()).device
    right = drafted = drafts = 0
    problems = TASKS[task](seed, count, context)
    for start in range(0, count, at_once):
        prompts = [encode(problem.prompt) for problem in problems[start : start + at_once]]
        answers = [[*encode(p.answer, bos=False), IDS[EOS]] for p in problems[start : start + at_once]]
        width = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        ids = torch.full((len(prompts), width), IDS[EOS])
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        output = network(ids.to(device), Request(sparse=sparse))
        best = output.logits.argmax(-1).cpu()
        ahead = None if output.draft is None else output.draft.argmax(-1).cpu()
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            at, expected = len(prompt), torch.tensor(answer)
            right += same(best[row, at - 1 : at - 1 + len(answer)], expected)
            if ahead is not None:
                drafted += int((ahead[row, at - 1 : at - 2 + len(answer)] == expected[1:]).sum())
                drafts += len(answer) - 1
    result = {"accuracy": right / count}
    return {**result, "draft_accuracy": drafted / drafts} if drafts else result


def same(first: Tensor, second: Tensor) -> int:
    """1 if two sequences of tokens are equal."""
    return int(torch.equal(first, second))

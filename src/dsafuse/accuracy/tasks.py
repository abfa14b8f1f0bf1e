"""The tasks that the shipped checkpoints were trained for: what is asked, and what is right.

    recall      " bam472 dor913 ...? dor"         -> "913"   one of hundreds of pairs, anywhere before
    arithmetic  " bam472 dor913 ...?347+589="     -> "936"   a sum or a difference behind the same pairs

A prompt fills `context_tokens` with pairs of a word and three digits, so for a context several times
index_topk a right answer needs the right rows among those that the indexer chose. Answers are exact: digits,
then <eos>. Problems are drawn by a seed alone; the same seed, count and length give the same problems.

Pairs of operands for which `held_out` is true are asked here and never shown in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from dsafuse.accuracy.tokenizer import WORDS

VALUE_DIGITS = 3
PAIR_TOKENS = 1 + VALUE_DIGITS
# <bos>, "?" and a word; <bos>, "?", two operands, a sign and "=".
RECALL_TOKENS, ARITHMETIC_TOKENS = 3, 10
# Digits of the longest answer (999 + 999) and <eos>.
ANSWER_TOKENS = 5


@dataclass(frozen=True)
class Problem:
    """A prompt (without <bos>, which the tokenizer adds) and the one right continuation (without <eos>)."""

    prompt: str
    answer: str


Generator = Callable[[int, int, int], list[Problem]]


def score(answer_text: str, problem: Problem) -> bool:
    """Whether a greedy continuation is right: the whole answer, and nothing behind it."""
    return answer_text.strip() == problem.answer


def held_out(first: int, second: int) -> bool:
    """Whether a pair of operands is kept from training: one in eleven, over all digits (11 and 10 share no factor)."""
    return (37 * first + 91 * second) % 11 == 0


def recall(seed: int, count: int, context_tokens: int) -> list[Problem]:
    """`count` prompts of at most context_tokens tokens that end with a word shown before; every word stands once."""
    draw = random.Random(f"recall {seed}")
    pairs = _pairs_that_fit(context_tokens, RECALL_TOKENS)
    problems = []
    for _ in range(count):
        words, values = _context(draw, pairs)
        asked = draw.randrange(pairs)
        problems.append(Problem(f"{_shown(words, values)}?{words[asked]}", values[asked]))
    return problems


def arithmetic(seed: int, count: int, context_tokens: int) -> list[Problem]:
    """`count` prompts of at most context_tokens tokens that end with a sum or a difference of held-out operands."""
    draw = random.Random(f"arithmetic {seed}")
    pairs = _pairs_that_fit(context_tokens, ARITHMETIC_TOKENS)
    problems = []
    for _ in range(count):
        words, values = _context(draw, pairs)
        sign = draw.choice("+-")
        first, second = _operands(draw, sign)
        answer = first + second if sign == "+" else first - second
        problems.append(Problem(f"{_shown(words, values)}?{first}{sign}{second}=", str(answer)))
    return problems


TASKS: dict[str, Generator] = {"recall": recall, "arithmetic": arithmetic}


def _pairs_that_fit(context_tokens: int, question_tokens: int) -> int:
    pairs = (context_tokens - question_tokens) // PAIR_TOKENS
    if not 1 <= pairs <= len(WORDS):
        longest = len(WORDS) * PAIR_TOKENS + question_tokens
        raise ValueError(
            f"context_tokens must be between {question_tokens + PAIR_TOKENS} and {longest}, got {context_tokens}"
        )
    return pairs


def _context(draw: random.Random, pairs: int) -> tuple[list[str], list[str]]:
    values = [f"{draw.randrange(10**VALUE_DIGITS):0{VALUE_DIGITS}d}" for _ in range(pairs)]
    return draw.sample(WORDS, pairs), values


def _shown(words: list[str], values: list[str]) -> str:
    return "".join(word + value for word, value in zip(words, values, strict=True))


def _operands(draw: random.Random, sign: str) -> tuple[int, int]:
    while True:
        first, second = draw.randrange(100, 1000), draw.randrange(100, 1000)
        if sign == "-":
            first, second = max(first, second), min(first, second)
        if held_out(first, second):
            return first, second

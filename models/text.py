"""Training text: endless, drawn by (seed, step) alone, in the format of dsafuse.accuracy.tasks.

A sequence begins with pairs and goes on with a mixture of questions about earlier pairs, sums and differences, and
more pairs, so that one sequence has many answers to learn from. Loss is taken on answers and their <eos>.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dsafuse.accuracy.tasks import VALUE_DIGITS, held_out
from dsafuse.accuracy.tokenizer import BOS, EOS, IDS, WORDS

ZERO, FIRST_WORD = IDS["0"], IDS[WORDS[0]]
# "?", two operands, a sign, "=", four digits, <eos>.
WIDEST = 1 + 3 + 1 + 3 + 1 + 4 + 1
PAIR, RECALL, ARITHMETIC = 0, 1, 2


def digits(numbers: Tensor, width: int) -> Tensor:
    """Token ids of decimal digits: [..., width]."""
    powers = 10 ** torch.arange(width - 1, -1, -1, device=numbers.device)
    return ZERO + numbers[..., None] // powers % 10


def batch(
    seed: int, step: int, sequences: int, tokens: int, device: torch.device, words: int = len(WORDS)
) -> tuple[Tensor, Tensor]:
    """ids [sequences, tokens] int64 and, of the same shape, whose answer a token belongs to (PAIR: to none)."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    # Nothing here copies from the host: a copy would wait for the step before, and leave the GPU idle meanwhile.
    def below(limit: int | Tensor, *shape: int) -> Tensor:
        # fp32 rounds up to the limit once in 2^24
        return (uniform(*shape) * limit).long().clamp(max=limit - 1)

    items = tokens // (1 + VALUE_DIGITS) + 1
    shape = (sequences, items)
    # The share of pairs before the first question: short contexts and nearly full ones.
    opening = (0.2 + 0.79 * uniform(sequences, 1)) * min(items, words)
    dice = uniform(*shape)
    kind = (dice > 0.2).long() + (dice > 0.7).long()
    kind = torch.where(torch.arange(items, device=device) < opening.clamp(min=1), PAIR, kind)
    pairs = (kind == PAIR).cumsum(1)
    kind = torch.where((kind == PAIR) & (pairs > words), RECALL, kind)
    pairs = pairs.clamp(max=words)

    names = FIRST_WORD + uniform(sequences, words).argsort(1)
    values = digits(below(10**VALUE_DIGITS, sequences, words), VALUE_DIGITS)
    which = torch.where(kind == PAIR, pairs - 1, below(pairs, *shape))
    name = names.gather(1, which)[..., None]
    value = values.gather(1, which[..., None].expand(-1, -1, VALUE_DIGITS))

    def sign(text: str) -> Tensor:
        return torch.full((*shape, 1), IDS[text], device=device)

    def line(*parts: Tensor) -> Tensor:
        joined = torch.cat(parts, dim=-1)
        return torch.cat([joined, joined.new_full((*shape, WIDEST - joined.shape[-1]), -1)], dim=-1)

    minus = uniform(*shape) < 0.5
    first, second = operands(below(899, *shape) + 101, below(899, *shape) + 101, minus)
    result = torch.where(minus, first - second, first + second)
    answer = digits(result, 4)
    leading = (answer != ZERO).long().cumsum(-1) == 0
    leading[..., -1] = False
    answer = answer.masked_fill(leading, -1)
    operation = torch.where(minus, IDS["-"], IDS["+"])[..., None]
    lines = torch.stack(
        [
            line(name, value),
            line(sign("?"), name, value, sign(EOS)),
            line(sign("?"), digits(first, 3), operation, digits(second, 3), sign("="), answer, sign(EOS)),
        ],
        dim=2,
    )
    # Where the answer of a line begins; a pair has none.
    begins = torch.where(kind == PAIR, WIDEST, torch.where(kind == RECALL, 2, 9))
    written = lines.gather(2, kind[..., None, None].expand(-1, -1, 1, WIDEST))[:, :, 0]
    asked = torch.where(torch.arange(WIDEST, device=device) >= begins[..., None], kind[..., None], PAIR)
    written, asked = written.flatten(1), asked.flatten(1)
    # Push the tokens of all lines together; what does not fit goes to a column that is cut off.
    place = (written >= 0).cumsum(1)
    place = torch.where((written >= 0) & (place < tokens), place, tokens)
    ids = torch.full((sequences, tokens + 1), IDS[BOS], device=device).scatter_(1, place, written)
    answers = torch.full((sequences, tokens + 1), PAIR, device=device).scatter_(1, place, asked)
    return ids[:, :tokens], answers[:, :tokens]


def operands(first: Tensor, second: Tensor, minus: Tensor) -> tuple[Tensor, Tensor]:
    """Order the operands of a difference, and step aside where a pair is held out for evaluation."""
    first, second = (
        torch.where(minus, torch.maximum(first, second), first),
        torch.where(minus, torch.minimum(first, second), second),
    )
    # One less in the second operand always leaves the held-out class, and 100 or more remains.
    return first, torch.where(held_out(first, second), second - 1, second)

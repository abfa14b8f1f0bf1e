"""Training text: it says what the tasks ask, in their words, and never shows what is held out."""

from __future__ import annotations

import re

import pytest
import torch

from dsafuse.accuracy.tasks import held_out
from dsafuse.accuracy.tokenizer import BOS, EOS, VOCABULARY, WORDS, encode
from models import text

CPU = torch.device("cpu")
LINE = re.compile(
    r"(?P<word> [a-z]{3})(?P<value>\d{3})|\?(?P<asked> [a-z]{3})(?P<said>\d{3})<eos>|\?(?P<sum>[^<?]+)<eos>"
)


def written(ids: torch.Tensor) -> str:
    return "".join(VOCABULARY[index] for index in ids)


@pytest.mark.parametrize("tokens", [32, 64, 300, 2048])
def test_every_line_of_a_sequence_is_true(tokens: int) -> None:
    ids, answers = text.batch(3, 7, 8, tokens, CPU)
    assert ids.shape == answers.shape == (8, tokens)
    for row, asked in zip(ids, answers, strict=True):
        whole = written(row)
        assert whole.startswith(BOS)
        known: dict[str, str] = {}
        at = len(BOS)
        while match := LINE.match(whole, at):
            at = match.end()
            if match["word"]:
                assert match["word"] not in known
                known[match["word"]] = match["value"]
            elif match["asked"]:
                assert known[match["asked"]] == match["said"]
            else:
                question, said = match["sum"].split("=")
                first, second = (int(number) for number in re.split("[+-]", question))
                assert eval(f"{first}{question[3]}{second}") == int(said)
                assert str(int(said)) == said
                assert not held_out(first, second)
        assert len(encode(whole[at:].replace(EOS, ""), bos=False)) < text.WIDEST, whole[at:]  # a line that was cut
        said = re.findall(r"(?:(?<=[a-z])|(?<==))\d+<eos>", re.sub(r" [a-z]{3}\d{3}(?!<eos>)", "", whole))
        learnt = written(row[asked != text.PAIR])
        assert learnt.startswith("".join(said))


def test_loss_is_taken_on_all_kinds_of_answers_and_on_nothing_else() -> None:
    ids, answers = text.batch(0, 0, 32, 256, CPU)
    assert set(answers.unique().tolist()) == {text.PAIR, text.RECALL, text.ARITHMETIC}
    words = torch.isin(ids, torch.tensor(encode("".join(WORDS), bos=False)))
    assert not (words & (answers != text.PAIR)).any()


def test_a_step_is_drawn_by_seed_and_step_alone() -> None:
    first, again = text.batch(1, 5, 4, 64, CPU), text.batch(1, 5, 4, 64, CPU)
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], text.batch(1, 6, 4, 64, CPU)[0])
    assert not torch.equal(first[0], text.batch(2, 5, 4, 64, CPU)[0])

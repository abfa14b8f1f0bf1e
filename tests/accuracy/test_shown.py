"""What the demonstration asks: the shipped checkpoints, where they are, and a long question before a short one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed (requirements/vllm-cpu.txt)")

from dsafuse.accuracy import shown, tokenizer
from dsafuse.accuracy.tasks import TASKS
from dsafuse.vllm import demo
from tests.accuracy.conftest import needs_vllm, write

TOPK = 128


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as models/ is, with seeded weights."""
    models = tmp_path_factory.mktemp("models")
    write(models / "dsa-glm-small", "glm-5", num_nextn_predict_layers=1, index_topk=TOPK)
    (models / "dsa-half-small").mkdir()
    return models


def test_a_folder_without_weights_is_no_checkpoint(place: Path, tmp_path: Path) -> None:
    assert list(shown.shipped(place)) == ["dsa-glm-small"]
    assert shown.shipped(tmp_path / "nowhere") == {}


def test_long_questions_come_before_short_ones(place: Path) -> None:
    questions = shown.questions(shown.shipped(place))
    lengths = [len(asked.tokens) for asked in questions.asked]
    long, short = lengths[: len(TASKS)], lengths[len(TASKS) :]
    assert min(long) > TOPK > max(short)
    assert min(long) > questions.interpret_up_to
    assert sum(short) <= questions.interpret_up_to
    for asked in questions.asked:
        text = tokenizer.decode(asked.tokens)
        begin, *end = asked.text.split(" ... ")
        assert text.strip().startswith(begin)
        assert text.endswith("".join(end))
        assert asked.answer.isdigit()
    assert questions.decode([*tokenizer.encode("472"), tokenizer.IDS[tokenizer.EOS]]) == "472"


@needs_vllm
def test_a_shipped_checkpoint_is_asked_in_vllm(place: Path) -> None:
    result = demo.run(questions=shown.questions(shown.shipped(place)), kv_cache_dtypes=["fp8_ds_mla"])
    assert result.problems == []
    (cell,) = result.cells
    assert cell.problems == []
    assert cell.identical
    assert len(cell.answers["fused"]) == len(result.asked) == 4
    ways = cell.fused.ways
    assert ways is not None
    assert ways["interpreted"] > 0 < ways["oracle"]

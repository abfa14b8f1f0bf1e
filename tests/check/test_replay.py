"""The replay check, with a graph that runs its step when it is replayed: what it stages, copies and compares."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsafuse.check import replay
from dsafuse.check.cases import IndexerCase, MlaCase
from dsafuse.dispatch import PROVIDERS

CPU = torch.device("cpu")
CASES = [
    MlaCase(tokens=3, heads=2, query="fp8", layout="fp8", out="wide", slot_rule="negative"),
    IndexerCase(tokens=3, heads=2, slot_rule="short"),
]


@pytest.fixture
def eager_graphs(monkeypatch):
    """Stand in for CUDA graphs on a machine without a GPU."""
    monkeypatch.setattr(replay, "_captured", lambda step, result: SimpleNamespace(replay=step))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.parametrize("case", CASES)
def test_replays_compare_with_the_oracle_on_new_inputs(case):
    (result,) = replay.replay_case(case, ["split"], 0, CPU)
    assert (result.status, result.how, result.reasons) == ("passed", "graph", [])
    assert result.comparison.bytes_compared > 0


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.parametrize("case", CASES)
def test_a_replay_that_keeps_its_first_slots_is_found(case, monkeypatch):
    """As a kernel with a slot baked into its launch would."""
    load = PROVIDERS["split"].load()
    first = {}

    def run(op, arguments, config):
        slots = first.setdefault(op, arguments["slot_mapping"].clone())
        load.run(op, {**arguments, "slot_mapping": slots}, config)

    module = SimpleNamespace(run=run, why_not=load.why_not, why_not_here=load.why_not_here)
    split = PROVIDERS["split"]
    fake = SimpleNamespace(name="split", on_request=None, fused=split.fused, load=lambda: module)
    monkeypatch.setitem(PROVIDERS, "split", fake)
    (result,) = replay.replay_case(case, ["split"], 0, CPU)
    assert result.status == "failed"
    assert any(reason.startswith("replay 2: kv_cache") for reason in result.reasons)


def test_cases_that_are_replayed():
    gpu = torch.device("cuda")
    assert replay.replayed(CASES[0], gpu)
    assert not replay.replayed(CASES[0], CPU)
    for change in ({"tokens": 0}, {"tokens": 8192}, {"out": "allocated"}, {"capacity": "huge"}):
        assert not replay.replayed(replace(CASES[0], **change), gpu)

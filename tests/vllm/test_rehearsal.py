"""What vLLM's profiling run compiles ahead, against what batches launch later. Nothing is launched here for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.kernels.parameters import alignments, constants_of, launch_options, runtime_arguments
from dsafuse.kernels.plans import plan_of
from dsafuse.registry import OPS as REGISTERED
from dsafuse.target import Target
from dsafuse.vllm.model_path import functions
from dsafuse.vllm.model_path.functions import Functions
from tests.inputs import FN
from tests.vllm.layer_case import BLOCK_SIZE, OPS, POISON, TOKENS, WAYS, Case, decode, dense_026, launches_of

H200 = Target.named("sm_90")


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if kernels were compiled for these tensors."""
    from dsafuse.vllm import rehearsal

    monkeypatch.setattr(rehearsal, "_REHEARSED", set())
    monkeypatch.setattr(rehearsal, "_compiles", lambda tensor: True)
    with switches.override(provider="interpreter"):
        yield


def mixed(decodes: int, prefill: int) -> Any:
    return SimpleNamespace(
        num_actual_tokens=decodes + prefill, num_decode_tokens=decodes, prefill_max_seq_len=40, topk_tokens=64
    )


def profile(case: Case, way: str) -> None:
    """vLLM's profiling run: the most tokens, and no caches yet."""
    caches = case.cache, case.index_cache
    case.cache = case.index_cache = torch.tensor([])
    getattr(case, way)()
    case.cache, case.index_cache = caches


@pytest.mark.parametrize("way", WAYS)
def test_a_profiling_run_rehearses_every_launch_of_a_batch(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """On a GPU: what a batch may launch is compiled before the first request."""
    case = Case(monkeypatch, decode(TOKENS))
    launched = launches_of(case, monkeypatch)
    for _ in range(2):  # once for its kind
        profile(case, way)
    rehearsed = set(launched)
    assert len(launched) == len(rehearsed)
    launched.clear()
    for metadata, dense in ((decode(2), False), (decode(TOKENS), False), (mixed(2, 4), True), (mixed(2, 4), False)):
        case.metadata = metadata
        dense_026(case, dense)
        getattr(case, way)()
    assert launched
    assert {(name, config) for name, config, _ in launched} == {(name, config) for name, config, _ in rehearsed}


def variants_of(
    holder: ModuleType, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, returned: Any = None
) -> set[tuple[Any, ...]]:
    """What an H200 would have to compile for each call from now on: all that Triton tells variants apart by."""
    found: set[tuple[Any, ...]] = set()
    for name in names:

        def call(*args: Any, name: str = name, **kwargs: Any) -> Any:
            arguments, config = REGISTERED[name].resolve(*args, **kwargs)
            cut = plan_of(H200, config)
            runtime = runtime_arguments(name, arguments, config)
            kinds = [value.dtype if isinstance(value, torch.Tensor) else type(value) for value in runtime]
            constants = constants_of(config, H200, cut) | alignments(name, arguments, config)
            options = launch_options(H200, cut.threads)
            found.add((*map(str, constants.items()), *options.items(), *kinds))
            return returned

        monkeypatch.setattr(holder, name, call)
    return found


MOST = 384


@pytest.mark.parametrize("way", WAYS)
def test_no_batch_compiles_what_the_profiling_run_has_not(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """fp8 caches, rows that begin anywhere in a batch, block sizes that vLLM settles once the model is loaded."""
    monkeypatch.setattr(Target, "of", lambda device: H200)
    monkeypatch.setattr("dsafuse.vllm.launches._absorbed", lambda layer, q: q.new_empty((*q.shape[:2], 512)))
    case = Case(monkeypatch, tokens=MOST, heads=16)
    case.to(torch.bfloat16, "fp8_ds_mla", 656)
    case.slots, case.index_slots = torch.full((2, MOST), -1)
    latents = torch.randn(MOST, 1536 + 512 + 64, dtype=torch.bfloat16)
    case.k_pe = latents[:, -64:]
    case.cache_config.block_size = 64
    case.cache = torch.empty((3, 64, 656), dtype=torch.uint8)
    case.index_cache = torch.empty((3, 64, 132), dtype=torch.uint8)
    variants = variants_of(case.launches, OPS, monkeypatch)
    profile(case, way)
    rehearsed = variants.copy()
    variants.clear()
    batches = [decode(1), decode(3), decode(8), decode(MOST)]
    batches += [mixed(decodes, prefill) for decodes in (0, 1, 3, 8) for prefill in (1, 2, 5, 8, 257, MOST - 8)]
    for case.metadata in batches:
        for dense in (False, True):
            dense_026(case, dense)
            getattr(case, way)()
    assert rehearsed
    assert variants == rehearsed  # and none is compiled for nothing


@pytest.mark.parametrize("way", WAYS)
def test_a_kernels_blocks_may_be_smaller_than_those_that_vllm_manages(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """--block-size 128 with FlashMLA: each block becomes two of 64."""

    class Fixed:
        @staticmethod
        def get_supported_kernel_block_sizes(_spec: Any = None) -> list[Any]:
            return [64]

    case = Case(monkeypatch)
    blocks = case.launches.Blocks(SimpleNamespace(block_size=128), (Fixed, *case.blocks.backends))
    case.layer.dsafuse = replace(case.layer.dsafuse, blocks=blocks)
    case.index_layer.dsafuse = case.index_layer.dsafuse._replace(blocks=blocks)
    launched = launches_of(case, monkeypatch)
    profile(case, way)
    sizes = {role.block_size for _, config, _ in launched for role in (config.latent_kv, config.index_k) if role}
    assert sizes == {64}


def test_a_second_model_is_rehearsed_where_its_heads_blocks_or_top_k_alone_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dsafuse.vllm.rehearsal import rehearse

    case = Case(monkeypatch)
    assert case.topk is not None
    launched = launches_of(case, monkeypatch)
    mla = case.launches.MlaInputs(case.q, case.kv_c, case.k_pe, case.positions, case.table)
    index = case.launches.IndexInputs(
        *(case.index_q, case.k_and_weights, *case.norm, case.positions, case.index_table),
        *(case.index_q_out, case.weights_out),
    )
    rehearse(case.layer, mla, index)
    once = len(launched)
    fewer = index._replace(q=index.q[:, :1], k_and_weights=index.k_and_weights[:, : index.q.shape[-1] + 1])
    fewer = fewer._replace(q_out=index.q_out[:, :1], weights_out=index.weights_out[:, :1])
    rehearse(case.layer, mla, fewer)
    assert len(launched) == 2 * once
    case.cache_config.block_size = 2 * BLOCK_SIZE
    rehearse(case.layer, mla, index)
    assert len(launched) == 3 * once
    for rows in (case.topk, case.topk[:, :4]):  # rows to clear, and narrower ones
        rehearse(case.layer, mla, index._replace(topk=rows))
    assert len(launched) == 5 * once
    assert (case.cache == POISON).all()
    assert (case.index_cache == 7).all()


class FusedLayer:
    """A layer of vLLM's own fused model, as far as its two functions see it. AMD's class asks for keys now and then."""

    def __init__(self, ours: Functions, word: str, amd: bool, index_heads: int = 64, topk: int = 2048) -> None:
        self.ours, self.word, self.amd, self.index_heads = ours, word, amd, index_heads
        self.interleave = index_heads == 32  # as GLM-5
        width = {"auto": (576, torch.bfloat16), "fp8": (576, torch.uint8), "fp8_ds_mla": (656, torch.uint8)}[word]
        self.cache = torch.empty((3, 64, width[0]), dtype=width[1])
        self.index_cache = torch.empty((3, 64, 132), dtype=torch.uint8)
        self.slots = torch.full((2, MOST), -1)
        self.topk = torch.zeros((MOST, topk), dtype=torch.int32)
        self.tables = torch.randn(2, 4096, 64)

    def forward(self, tokens: int, *, indexed: bool = True, dense: bool = False, profiling: bool = False) -> None:
        one = torch.ones(1536, dtype=torch.bfloat16)
        q_c, kv_c, k_pe = torch.randn(tokens, 1536 + 512 + 64, dtype=torch.bfloat16).split([1536, 512, 64], dim=-1)
        index_k, weights = torch.randn(tokens, 128 + self.index_heads, dtype=torch.bfloat16).tensor_split([128], dim=-1)
        norm = (index_k, torch.ones(128), torch.zeros(128), 1e-6, self.tables[1])
        outs = {"kv_c_out": torch.empty_like(kv_c), "k_pe_out": torch.empty_like(k_pe)}
        caches = {
            "mla_kv_cache": self.cache,
            "mla_k_scale": torch.tensor(1.0),
            "slot_mapping": self.slots[0, :tokens],
            "indexer_slot_mapping": None if self.amd else self.slots[1, :tokens],
            "indexer_k_cache": self.index_cache if indexed else None,
        }
        self.ours.fused_norm_rope(
            *(torch.arange(tokens), q_c, one, 1e-6, kv_c, one[:512], 1e-6, k_pe, self.tables[0]),
            *(norm if indexed else (None, None, None, 1e-6, None)),
            self.topk,
            **(dict.fromkeys(caches) if profiling else caches),
            mla_kv_cache_dtype=self.word,
            has_indexer=indexed,
            index_rope_interleave=self.interleave,
            indexer_cache_shuffled=self.amd and indexed,
            **(dict.fromkeys(outs) if self.amd and not dense else outs),
        )
        index_q = torch.randn(tokens, self.index_heads, 128, dtype=torch.bfloat16)
        _, q_pe = torch.randn(tokens, 16, 192, dtype=torch.bfloat16).split([128, 64], dim=-1)
        self.ours.fused_q(
            *(torch.arange(tokens), q_pe, self.tables[0]),
            *((index_q, self.tables[1]) if indexed else (None, None)),
            *(torch.randn(16, tokens, 512, dtype=torch.bfloat16).transpose(0, 1), torch.tensor(1.0)),
            *((weights, 128**-0.5, 64**-0.5) if indexed else (None, 0.0, 0.0)),
            has_indexer=indexed,
            index_rope_interleave=self.interleave,
            quantize_mqa=self.word == "fp8" and not dense,
        )


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize(("word", "amd"), [("auto", False), ("fp8", False), ("fp8_ds_mla", False), ("fp8", True)])
def test_no_call_of_vllms_own_fused_model_compiles_what_the_profiling_run_has_not(
    word: str, amd: bool, indexed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an indexer and, as a draft's layer now and then, without; attended densely or not; and nothing twice."""
    from dsafuse.vllm.launches import Blocks

    monkeypatch.setattr(Target, "of", lambda device: H200)
    own: list[str] = []
    ours = Functions(lambda *args, **options: own.append("norm_rope"), lambda *args, **options: None, FN)
    packed = {word == "fp8", False}
    for each in {indexed, False}:
        ours.latents[each, torch.bfloat16, word] = True
        ours.queries.update({(each, torch.bfloat16, kind): True for kind in packed})
    settled = SimpleNamespace(block_size=16)
    ours.blocks[word] = Blocks(settled, ())
    settled.block_size = 64
    variants = variants_of(functions, ("prepare_latents", "prepare_queries"), monkeypatch, (None, None, None))
    models = [FusedLayer(ours, word, amd), FusedLayer(ours, word, amd, 32), FusedLayer(ours, word, amd, topk=64)]
    for number, served in enumerate(models, 1):
        served.forward(MOST, indexed=indexed, profiling=True)
        assert len(own) == number
    rehearsed = variants.copy()
    variants.clear()
    for served, tokens, each, dense in product(models, (1, 3, 8, 257, MOST), {indexed, False}, (False, True)):
        served.forward(tokens, indexed=each, dense=dense)
    assert len(own) == len(models)
    assert variants == rehearsed


@pytest.mark.parametrize("accepted", [True, False])
def test_a_kind_that_is_not_ours_is_not_rehearsed_and_no_call_twice(
    accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm.launches import Blocks

    called: list[str] = []
    monkeypatch.setattr(functions, "prepare_latents", lambda *args, **kwargs: called.append("latents"))
    ours = Functions(lambda *args, **options: None, lambda *args, **options: None, FN)
    ours.latents[True, torch.bfloat16, "fp8"] = accepted
    ours.blocks["fp8"] = Blocks(SimpleNamespace(block_size=64), ())
    for tokens in (MOST, 3):
        FusedLayer(ours, "fp8", amd=False).forward(tokens, profiling=True)
    assert called == ["latents"] * accepted

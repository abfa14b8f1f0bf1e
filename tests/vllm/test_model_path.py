"""The hook for vLLM's own fused model: symbols, gates, plans, and what a replaced function passes on."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse import switches
from dsafuse.vllm import arms, counters, demo, gates, host, plan
from dsafuse.vllm.model_path import functions, symbols
from dsafuse.vllm.model_path import plan as seam_plan
from dsafuse.vllm.model_path.functions import Functions
from tests.inputs import FN, latents_call, queries_call, twin

PLATFORMS = pytest.mark.parametrize("platform", ["cuda", "rocm"])


# symbols


@PLATFORMS
def test_the_installed_vllm_looks_as_it_was_read(platform: str) -> None:
    path = symbols.of(host.version(), platform)
    assert isinstance(path, symbols.Path)
    assert host.differences(path.symbols) == []


@PLATFORMS
def test_every_function_and_caller_is_probed_by_its_source(platform: str) -> None:
    path = symbols.PATHS["0.32", platform]
    for symbol in path.symbols:
        assert symbol.source is not None
        changed = replace(symbol, source="0" * 16)
        difference = changed.difference()
        assert difference is not None
        assert difference.startswith(f"{symbol.module}.{symbol.name} has another body")
    names = {symbol.name.split(".")[-1] for symbol in path.symbols}
    assert names > {"fused_norm_rope", "fused_q", "_fused_norm_rope_kernel", "_fused_q_kernel", "__init__"}


def test_a_newer_function_is_another_one() -> None:
    """0.33's row on this 0.32: what changed between them is named, and nothing else."""
    differences = host.differences(symbols.PATHS["0.33", "cuda"].symbols)
    assert [text.split(" ")[0].rpartition(".")[2] for text in differences] == [
        "fused_norm_rope",
        "_fused_norm_rope_kernel",
        "_fp8_quant_and_cache_write",
        "forward",
        "_sparse_indexer_and_attn",
    ]
    assert "skip_scale" in differences[0]


@pytest.mark.parametrize(("version", "platform"), [("0.31.0", "cuda"), ("0.26.0", "rocm"), ("0.34.1", "cuda")])
def test_a_vllm_that_was_not_read_has_no_path(version: str, platform: str) -> None:
    reason = symbols.of(version, platform)
    assert isinstance(reason, str)
    assert reason.startswith("vLLM and its platform must be one of those read for this path (0.26 on cuda, ")
    assert reason.endswith(f", got {version} on {platform}")


def test_every_row_of_the_model_path_has_its_symbols() -> None:
    rows = [row for row in host.TESTED if row.path == "model"]
    assert {(row.minor, row.platform) for row in rows} == {
        (minor, platform) for minor, platform in symbols.PATHS if minor != "0.26"
    }


# installing


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> symbols.Path:
    """A model of vLLM's: two functions, and a class in another module that calls them and is built with a config."""

    def fused_norm_rope() -> None:
        pass

    def fused_q() -> None:
        pass

    class Layer:
        def __init__(self, vllm_config: Any, prefix: str) -> None:
            self.built = prefix

    kernels, module = ModuleType("stand_in_kernels"), ModuleType("stand_in_attention")
    kernels.__dict__.update(fused_norm_rope=fused_norm_rope, fused_q=fused_q)
    module.__dict__.update(kernels.__dict__ | {"Layer": Layer, "__name__": "stand_in_attention"})
    for each in (kernels, module):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    return symbols.Path("stand_in_kernels", "stand_in_attention", "Layer", ())


def test_installing_replaces_two_names_and_plans_each_layer_once_it_is_built(
    stand_in: symbols.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm.model_path import hook

    planned: list[tuple[Any, Any]] = []
    monkeypatch.setattr(seam_plan, "build", lambda layer, config, functions, path: planned.append((layer, config)))
    module, kernels = sys.modules["stand_in_attention"], sys.modules["stand_in_kernels"]
    assert hook.install(stand_in) == []
    ours = module.fused_q.__self__
    assert isinstance(ours, Functions)
    assert module.fused_norm_rope == ours.fused_norm_rope
    assert (ours.own_norm_rope, ours.own_q) == (kernels.fused_norm_rope, kernels.fused_q)
    assert hook.install(stand_in) == []  # again, as in a process that is asked twice
    assert module.fused_q.__self__ is ours
    layer = module.Layer(vllm_config="config", prefix="layer")
    assert layer.built == "layer"
    assert planned == [(layer, "config")]


def test_a_name_that_another_plugin_holds_is_left_alone(stand_in: symbols.Path) -> None:
    from dsafuse.vllm.model_path import hook

    module = sys.modules["stand_in_attention"]
    module.fused_q = other = test_a_name_that_another_plugin_holds_is_left_alone
    (reason,) = hook.install(stand_in)
    assert reason.startswith("the hook 'stand_in_attention.fused_q' is already held by ")
    assert module.fused_q is other
    assert module.fused_norm_rope is sys.modules["stand_in_kernels"].fused_norm_rope


def test_a_difference_installs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsafuse.vllm import model_path
    from dsafuse.vllm.model_path import hook

    monkeypatch.setattr(hook, "install", lambda path: pytest.fail("installed"))
    path = symbols.PATHS["0.32", "cuda"]
    changed = replace(path, symbols=(host.Symbol("vllm.config", "NoSuchClass"), *path.symbols))
    monkeypatch.setattr(symbols, "PATHS", {("0.32", "cuda"): changed})
    (reason,) = model_path.install("cuda")
    assert reason.startswith("vllm.config.NoSuchClass is missing")
    (reason,) = model_path.install("rocm")
    assert reason.startswith("vLLM and its platform must be one of those read")


@pytest.mark.parametrize("mode", ["off", "auto", "strict"])
def test_the_opt_in_class_is_vllms_and_strict_raises(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models import deepseek_v32

    from dsafuse.vllm import model_path

    monkeypatch.setattr(model_path, "install", lambda: ["a reason"] if mode != "off" else pytest.fail("asked"))
    with switches.override(mode=mode):
        if mode == "strict":
            with pytest.raises(RuntimeError, match="not installed: a reason"):
                model_path.DeepseekV32ForCausalLM  # noqa: B018
        else:
            assert model_path.DeepseekV32ForCausalLM is deepseek_v32.DeepseekV32ForCausalLM
    with pytest.raises(AttributeError):
        model_path.LlamaForCausalLM  # noqa: B018


# plans


class Layer:
    """Whatever a layer has."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


BACKEND = SimpleNamespace(get_supported_kernel_block_sizes=lambda *_: [64])


def indexer(head_dim: int = 128) -> Any:
    sizes = {"head_dim": head_dim, "rope_dim": 64, "quant_block_size": 128, "scale_fmt": "ue8m0", "n_head": 16}
    return SimpleNamespace(**sizes, k_cache=SimpleNamespace(get_attn_backend=lambda: BACKEND))


def layer(**changes: Any) -> Any:
    """A layer as vLLM's class leaves it; every gate accepts it until a test changes something."""
    made = Layer(
        layer_name="model.layers.0.self_attn.attn",
        kv_cache_dtype="auto",
        attn_backend=BACKEND,
        kv_lora_rank=512,
        q_lora_rank=128,
        qk_rope_head_dim=64,
        num_heads=4,
        use_pcp=False,
        dcp_manager=None,
        hisparse_cache=None,
        _fp8_query=False,
        _index_rope_interleave=False,
        indexer=indexer(),
    )
    made.__dict__.update(changes)
    return made


def config(**parallel: int) -> Any:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16, uses_mrope=False),
        parallel_config=SimpleNamespace(**sizes | parallel),
        cache_config=SimpleNamespace(block_size=64),
    )


PATH = symbols.PATHS["0.32", "cuda"]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A fresh process as far as plans go, and what it logs."""
    lines: list[str] = []
    log = lambda text, *args: lines.append(text % args)  # noqa: E731
    monkeypatch.setattr(plan, "logger", SimpleNamespace(info=log, warning=log))
    monkeypatch.setattr(plan, "_SAID", set())
    monkeypatch.setattr(plan, "PLANS", {})
    return lines


def built(made: Any, settings: Any = None, **switched: Any) -> tuple[seam_plan.SeamPlan, Functions]:
    ours = Functions(lambda: None, lambda: None, FN)
    with switches.override(**{"provider": "interpreter", **switched}):
        return seam_plan.build(made, settings or config(), ours, PATH), ours


def test_a_layer_is_planned_said_once_and_kept(said: list[str]) -> None:
    first, ours = built(layer())
    built(layer(layer_name="model.layers.1.self_attn.attn"))
    assert [op.fused for op in first.ops] == [True, True]
    kind = "DSA layer: latents: fused, provider interpreter; queries: fused, provider interpreter"
    assert said[0] == f"dsafuse: {kind} [first: model.layers.0.self_attn.attn]"
    assert sum(kind in line for line in said) == 1
    assert list(plan.PLANS) == ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
    # An MTP draft's layer has an indexer, and does without it where it takes over an earlier step's top-k.
    assert ours.latents == {(True, torch.bfloat16, "auto"): True, (False, torch.bfloat16, "auto"): True}
    assert ours.queries == {(True, torch.bfloat16, False): True, (False, torch.bfloat16, False): True}


def test_both_arms_of_this_path_are_compared_by_its_plans(said: list[str]) -> None:
    """As `dsafuse eval` and `dsafuse demo` compare them, and `dsafuse explain` shows them."""
    plans = [made.as_dict() for made in (built(layer())[0], built(layer(layer_name="shared", indexer=None))[0])]
    assert json.loads(json.dumps(plans[0]))["ops"][1]["op"] == "queries"
    none, each = ({name: {"fused": fused, "fallback": 0} for name in ("latents", "queries")} for fused in (0, 6))
    off, on = arms.ArmResult([[1]], [0.1] * 3, none, []), arms.ArmResult([[1]], [0.1] * 3, each, plans)
    found = demo.compare(demo.Cell("m", "auto"), off, on, "interpreter")
    assert found.problems == []
    assert (found.providers, list(found.launches.values())) == (["interpreter"], [(2, 2), (2, 2)])
    assert arms.not_fused(off, replace(on, calls=none), "interpreter") != []


def test_a_layer_that_shares_another_layers_choice(said: list[str]) -> None:
    made, ours = built(layer(indexer=None))
    assert made.kind == "DSA layer with another layer's top-k"
    assert [op.fused for op in made.ops] == [True, True]
    assert list(ours.latents) == [(False, torch.bfloat16, "auto")]


@pytest.mark.parametrize("attribute", ["_fp8_query", "_fp8_kv"])
def test_a_packed_query_may_be_wanted_unpacked_for_a_dense_prefill(attribute: str, said: list[str]) -> None:
    _, ours = built(layer(kv_cache_dtype="fp8", **{attribute: True}))
    assert {kind[2] for kind, fused in ours.queries.items() if fused} == {True, False}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, int], str]] = {
    "decode context parallelism": ({}, {"decode_context_parallel_size": 2}, "decode_context_parallel_size must be 1"),
    "prefill context parallelism": (
        {},
        {"prefill_context_parallel_size": 2},
        "prefill_context_parallel_size must be 1, got 2",
    ),
    "a layer built for PCP": ({"use_pcp": True}, {}, "context parallelism must be off"),
    "hisparse": ({"hisparse_cache": object()}, {}, "hisparse must be off"),
    "another latent": ({"kv_lora_rank": 256}, {}, "kv_lora_rank and qk_rope_head_dim must be 512 and 64"),
    "another indexer": (
        {"indexer": indexer(head_dim=64)},
        {},
        "head_dim, rope_dim and quant_block_size must be 128, 64 and 128, got 64, 64, 128",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_to_vllm_and_why(case: str, said: list[str]) -> None:
    changes, parallel, reason = REFUSED[case]
    made, ours = built(layer(**changes), config(**parallel))
    for op in made.ops:
        assert not op.fused
        assert reason in op.reasons[0]
    every = [*ours.latents.items(), *ours.queries.items()]
    assert not any(fused for (indexed, *_), fused in every if indexed)
    # A draft's layer that takes over an earlier step's top-k calls as one that has no indexer.
    assert any(fused for _, fused in every) == (case == "another indexer")
    assert f"vLLM's own code ({reason}" in said[0]
    with pytest.raises(RuntimeError, match=r"DSAFUSE_MODE=strict: model\.layers\.0"):
        built(layer(**changes), config(**parallel), mode="strict")


def test_a_cache_without_a_layout_leaves_the_queries_fused(said: list[str]) -> None:
    made, _ = built(layer(kv_cache_dtype="nvfp4_ds_mla"))
    assert [op.fused for op in made.ops] == [False, True]
    assert made.latents.reasons[0].endswith("got nvfp4_ds_mla")


def test_packed_scales_leave_the_latents_to_vllm(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import deep_gemm

    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: True, raising=False)
    made, _ = built(layer())
    assert [op.fused for op in made.ops] == [False, True]
    assert "got packed UE8M0 ones" in made.latents.reasons[0]
    assert built(layer(indexer=None))[0].latents.fused


@pytest.mark.parametrize(
    ("capability", "changes", "cutedsl", "fused"),
    [
        (100, {}, True, False),
        (90, {}, True, True),
        (100, {}, False, True),
        (100, {"num_heads": 6}, True, True),
        (100, {"indexer": None}, True, False),
    ],
)
def test_vllms_cutedsl_kernel_is_not_replaced(
    capability: int,
    changes: dict[str, Any],
    cutedsl: bool,
    fused: bool,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm.platforms

    here = SimpleNamespace(is_cuda=lambda: True, has_device_capability=lambda asked: capability >= asked)
    monkeypatch.setattr(vllm.platforms, "current_platform", here)
    monkeypatch.setattr(gates, "fp8_dtype", lambda: FN)
    monkeypatch.setattr(gates, "device", lambda: torch.device("cpu"))
    ours = Functions(lambda: None, lambda: None, FN)
    with switches.override(provider="interpreter"):
        made = seam_plan.build(layer(**changes), config(), ours, replace(PATH, cutedsl=cutedsl))
    assert made.latents.fused
    assert made.queries.fused == fused
    assert fused or "got its CuTeDSL one (sm_100)" in made.queries.reasons[0]


def test_one_family_alone_is_nobodys_refusal(said: list[str]) -> None:
    """Each seam serves both families, so with one of them off vLLM's code runs, in strict mode, too."""
    made, _ = built(layer(), ops=frozenset({"mla"}), mode="strict")
    for op in made.ops:
        assert (op.fused, op.absent) == (False, True)
        assert op.reasons == ("DSAFUSE_OPS must contain indexer, got 'mla'",)
    assert built(layer(indexer=None), ops=frozenset({"mla"}))[0].latents.fused


# name: (layers that have an indexer, and what is fused of each: latents, queries), (DSAFUSE_OPS)
EVERY_OP = frozenset({"mla", "indexer"})
ORDERS: dict[str, tuple[list[tuple[bool, bool, bool]], frozenset[str]]] = {
    "one family": ([(True, False, False), (False, True, True)], frozenset({"mla"})),
    "packed scales": ([(True, False, True), (False, True, True), (False, True, True), (True, False, True)], EVERY_OP),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_in_which_layers_are_built_decides_nothing(
    case: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is ours exactly where the plan of the layer says so, whichever layer is built last."""
    from vllm.utils import deep_gemm

    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", lambda: case == "packed scales", raising=False)
    rows, ops = ORDERS[case]
    for order in permutations(rows):
        ours, there = Functions(lambda: None, lambda: None, FN), []
        with switches.override(provider="interpreter", ops=ops, mode="auto" if ops == EVERY_OP else "strict"):
            for number, (indexed, latents, queries) in enumerate(order):
                there.append(layer(layer_name=str(number), **({} if indexed else {"indexer": None})))
                made = seam_plan.build(there[-1], config(), ours, PATH)
                assert [op.fused for op in made.ops] == [latents, queries]
        for indexed, latents, queries in rows:
            assert ours.latents[indexed, torch.bfloat16, "auto"] == latents
            assert ours.queries[indexed, torch.bfloat16, False] == queries
    assert not any("layers differ" in line for line in said)


@pytest.mark.parametrize("refused_first", [True, False])
def test_where_layers_of_one_kind_differ_vllms_function_runs_for_all_of_them(
    refused_first: bool, said: list[str]
) -> None:
    """A call does not say whose it is. The plans of those that were built before are corrected; strict raises."""

    def build_all(mode: str) -> tuple[Functions, list[Any]]:
        ours = Functions(lambda: None, lambda: None, FN)
        there = [layer(layer_name=f"good {number}") for number in range(2)]
        there.insert(0 if refused_first else 1, layer(layer_name="bad", hisparse_cache=object()))
        with switches.override(provider="interpreter", mode=mode):
            for each in there:
                seam_plan.build(each, config(), ours, PATH)
        return ours, there

    ours, there = build_all("auto")
    assert not any([*ours.latents.values(), *ours.queries.values()])
    for name in ("good 0", "good 1"):
        (reason, why) = plan.PLANS[name].ops[0].reasons
        assert reason.startswith("bad makes the same kind of call and is not fused")
        assert why.startswith("hisparse must be off")
    warned = [line for line in said if "layers differ" in line]
    assert [line.split(":")[1] for line in warned] == [" latents", " queries"]
    del there
    with switches.override(provider="interpreter"):
        seam_plan.build(alone := layer(layer_name="alone"), config(), ours, PATH)
    assert all(ours.latents.values()), "layers that are gone have no say"
    assert alone.layer_name == "alone"
    with pytest.raises(RuntimeError, match="DSAFUSE_MODE=strict: "):
        build_all("strict")


def test_without_a_fused_provider_vllms_functions_run(said: list[str]) -> None:
    made, ours = built(layer(), provider=None)
    assert [op.fused for op in made.ops] == [False, False]
    assert "fuses nothing" in made.latents.reasons[0]
    assert not any(ours.latents.values())


# functions


@pytest.fixture
def ours() -> Iterator[Functions]:
    """Ours over two functions that return what they were called with."""
    counters.reset()
    yield Functions(
        lambda *args, **kwargs: ("norm_rope", args, kwargs), lambda *args, **kwargs: ("q", args, kwargs), FN
    )
    counters.reset()


def norm_rope_arguments(call: dict[str, Any], word: str, indexed: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """vLLM's call of `fused_norm_rope` for the call of `prepare_latents`."""
    one = call.get if indexed else lambda name: None
    positional = (
        *(call[name] for name in ("positions", "q_c", "q_norm_weight", "q_norm_eps")),
        *(call[name] for name in ("kv_c", "kv_norm_weight", "kv_norm_eps")),
        call["k_pe"].flatten(1),
        call["cos_sin_cache"],
        *(one(name) for name in ("index_k", "index_norm_weight", "index_norm_bias")),
        1e-6,
        one("index_cos_sin_cache"),
        call["topk_indices"],
    )
    options = {
        "slot_mapping": call["slot_mapping"],
        "indexer_slot_mapping": one("index_slot_mapping"),
        "indexer_k_cache": one("index_kv_cache"),
        "indexer_cache_shuffled": False,
        "mla_kv_cache": call["kv_cache"],
        "mla_kv_cache_dtype": word,
        "mla_k_scale": call.get("k_scale"),
        "has_indexer": indexed,
        "index_rope_interleave": False,
        "kv_c_out": call["kv_c_out"],
        "k_pe_out": call["k_pe_out"],
    }
    return positional, options


LATENTS = {
    "fp8_ds_mla": ("fp8_ds_mla", {"layout": "fp8_ds_mla"}),
    "fp8 without an indexer": ("fp8", {"layout": "fp8", "index": False}),
    "plain": ("bfloat16", {"layout": "plain"}),
}


@pytest.mark.parametrize("case", LATENTS)
def test_the_first_function_is_prepare_latents(case: str, ours: Functions) -> None:
    word, options = LATENTS[case]
    call = latents_call(5, 1, seed=3, **options)
    call["k_pe"] = call["k_pe"].reshape(5, 64)
    indexed = "index_k" in call
    ours.latents[indexed, torch.bfloat16, word] = True
    got, want = twin(call), twin(call)
    positional, rest = norm_rope_arguments(got, word, indexed)
    with switches.override(provider="interpreter"):
        result = ours.fused_norm_rope(*positional, **rest)
        if not indexed:
            want.pop("topk_indices")  # it belongs to the layer whose choice is shared
        functions.prepare_latents(**want | {"rounding": "fp32", "kv_layout": options["layout"]})
    assert torch.equal(result, want["q_c_out"])
    for name in ("kv_cache", "index_kv_cache", "kv_c_out", "k_pe_out"):
        if name in call:
            assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8))
    cleared = got["topk_indices"][:5] == -1
    assert bool(cleared.all()) if indexed else not bool(cleared.any())
    assert counters.CALLS["latents"] == {"fused": 1, "fallback": 0}


@pytest.mark.parametrize(("version", "rule"), [("0.26.0", "fp32"), ("0.32.0", "ue8m0"), ("0.33.1", "ue8m0")])
def test_tiles_are_scaled_as_the_vllm_at_hand_scales_them(
    version: str, rule: str, stand_in: symbols.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm.model_path import hook

    seen: dict[str, Any] = {}
    monkeypatch.setattr(functions, "prepare_latents", lambda *args, **kwargs: seen.update(kwargs))
    monkeypatch.setattr(host, "version", lambda: version)
    assert hook.install(stand_in) == []
    ours = sys.modules["stand_in_attention"].fused_q.__self__
    ours.latents[True, torch.bfloat16, "fp8_ds_mla"] = True
    positional, rest = norm_rope_arguments(latents_call(2, 1), "fp8_ds_mla", True)
    ours.fused_norm_rope(*positional, **rest)
    assert seen["scale_rule"] == rule


def test_one_mapping_serves_both_caches_and_may_be_padded(ours: Functions) -> None:
    """AMD's class passes one mapping; an engine's may be longer than the batch."""
    ours.latents[True, torch.bfloat16, "auto"] = True
    call = latents_call(5, 1, layout="plain", block_size=16)
    call["index_slot_mapping"] = call["slot_mapping"].clone()
    positional, rest = norm_rope_arguments(twin(call), "auto", True)
    other, given = norm_rope_arguments(twin(call), "auto", True)
    given["slot_mapping"] = torch.cat([given["slot_mapping"], torch.tensor([0, 1])])
    given["indexer_slot_mapping"] = None
    with switches.override(provider="interpreter"):
        ours.fused_norm_rope(*positional, **rest)
        ours.fused_norm_rope(*other, **given)
    for name in ("mla_kv_cache", "indexer_k_cache"):
        assert torch.equal(rest[name], given[name])


def test_a_shuffled_cache_is_tiled16(ours: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(functions, "prepare_latents", lambda *args, **kwargs: seen.update(kwargs))
    ours.latents[True, torch.bfloat16, "auto"] = True
    positional, rest = norm_rope_arguments(latents_call(2, 1, layout="plain"), "auto", True)
    ours.fused_norm_rope(*positional, **rest | {"indexer_cache_shuffled": True, "index_rope_interleave": True})
    assert (seen["index_kv_layout"], seen["index_rope_style"]) == ("tiled16", "interleaved")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_the_second_function_is_prepare_queries(packed: bool, indexed: bool, ours: Functions) -> None:
    call = queries_call(4, 5, index_heads=3, index=indexed, query=FN if packed else None, seed=5)
    call["positions"] = call["positions"].long()
    ours.queries[indexed, torch.bfloat16, packed] = True
    one = call.get if indexed else lambda name: None
    scales = (128**-0.5, 3**-0.5) if indexed else (0.0, 0.0)
    arguments = (
        *(call[name] for name in ("positions", "q_pe", "cos_sin_cache")),
        *(one(name) for name in ("index_q", "index_cos_sin_cache")),
        call["q_nope"],
        torch.tensor(0.37),
        one("index_weights"),
        *scales,
    )
    own = {name: call[name] for name in ("index_q", "index_weights", "index_cos_sin_cache")} if indexed else {}
    with switches.override(provider="interpreter"):
        index_q, weights, query = ours.fused_q(*arguments, has_indexer=indexed, quantize_mqa=packed)
        want = functions.prepare_queries(
            call["q_nope"] if packed else None,
            call["q_pe"],
            call["positions"],
            call["cos_sin_cache"],
            q_scale=torch.tensor(0.37),
            q_dtype=FN if packed else None,
            rounding="fp32",
            index_weights_scale=scales[0] * scales[1] if indexed else None,
            **own,
        )
    assert query.shape == (4, 5, 576 if packed else 64)
    assert torch.equal(query.view(torch.uint8), want[0].view(torch.uint8))
    if indexed:
        assert torch.equal(index_q.view(torch.uint8), want[1].view(torch.uint8))
        assert torch.equal(weights, want[2])
    else:
        assert (index_q, weights) == (None, None)
    assert counters.CALLS["queries"] == {"fused": 1, "fallback": 0}


def test_a_call_that_no_plan_accepted_is_vllms_with_all_its_arguments(ours: Functions) -> None:
    positional, rest = norm_rope_arguments(latents_call(2, 1), "fp8_ds_mla", True)
    rest |= {"an option of a later version": 1}
    ours.latents[True, torch.bfloat16, "fp8"] = True
    assert ours.fused_norm_rope(*positional, **rest) == ("norm_rope", positional, rest)
    options = {"has_indexer": True, "index_rope_interleave": True, "quantize_mqa": False}
    given = (0, torch.zeros(1), *range(2, 10))
    assert ours.fused_q(*given, **options) == ("q", given, options)
    assert counters.CALLS["latents"] == counters.CALLS["queries"] == {"fused": 0, "fallback": 1}


def test_a_call_without_caches_is_vllms_and_no_fallback(ours: Functions) -> None:
    ours.latents[True, torch.bfloat16, "auto"] = True
    positional, rest = norm_rope_arguments(latents_call(2, 1, layout="plain"), "auto", True)
    rest |= {"mla_kv_cache": None, "indexer_k_cache": None, "slot_mapping": None}
    assert ours.fused_norm_rope(*positional, **rest)[0] == "norm_rope"
    assert counters.CALLS["latents"] == {"fused": 0, "fallback": 0}

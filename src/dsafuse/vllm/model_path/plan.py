"""What one layer of vLLM's fused model does: decided once, when the layer is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from dsafuse import prepare_latents, prepare_queries, switches
from dsafuse.ops.config import Config, IndexK, IndexQ, LatentKv, LatentQ, NormQ
from dsafuse.registry import Op
from dsafuse.target import Target
from dsafuse.vllm import gates, host
from dsafuse.vllm.launches import Blocks
from dsafuse.vllm.model_path.functions import Functions, Kind
from dsafuse.vllm.model_path.symbols import Path
from dsafuse.vllm.plan import OpPlan, decided, document, keep, kept, refused, warn


@dataclass(frozen=True)
class SeamPlan:
    """Both seams of one layer: each is fused if every kind of call that the layer may make is."""

    layer: str
    kind: str
    latents: OpPlan
    queries: OpPlan
    together = False  # q_b lies between them

    @property
    def ops(self) -> tuple[OpPlan, ...]:
        """Both."""
        return self.latents, self.queries

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return document(self)

    def __str__(self) -> str:
        return f"{self.kind}: {self.latents}; {self.queries}"


def build(layer: Any, config: Any, functions: Functions, path: Path) -> SeamPlan:
    """Plan a layer from itself and vLLM's config, tell the functions, keep it, and say it once per kind of layer.

    Raises RuntimeError with the trace if DSAFUSE_MODE=strict and the layer is refused, or another one's call with it.
    """
    # A draft's layer takes over the top-k of an earlier step now and then: it calls as one without an indexer.
    indexers = [None] if layer.indexer is None else [layer.indexer, None]
    every = [_Facts(layer, config, index) for index in indexers]
    functions.layers[layer] = own = _Layer(
        layer.layer_name,
        "DSA layer" if layer.indexer is not None else "DSA layer with another layer's top-k",
        {
            "latents": _decide("latents", prepare_latents, [(each, each.latents) for each in every], path, _LATENTS),
            "queries": _decide("queries", prepare_queries, [(each, each.queries) for each in every], path, _QUERIES),
        },
    )
    caches = [] if layer.indexer is None else [layer.indexer.k_cache.get_attn_backend()]
    functions.blocks[layer.kv_cache_dtype] = Blocks(config.cache_config, (layer.attn_backend, *caches))
    _settle(functions)
    assert own.plan is not None
    return own.plan


Gate = Callable[["_Facts", Path], str | None]


@dataclass(eq=False)
class _Layer:
    """A layer that is there: what was decided of each kind of call that it may make, and the plan that follows."""

    name: str
    kind: str
    decided: dict[str, dict[Kind, OpPlan]]
    plan: SeamPlan | None = None


def _decide(
    name: str,
    op: Op[..., Any],
    every: list[tuple[_Facts, dict[Kind, Config]]],
    path: Path,
    asked: tuple[Gate, ...],
) -> dict[Kind, OpPlan]:
    """What one layer may do by itself, for each kind of call that it may make; the first is the usual one."""
    target = Target.of(gates.device())
    found = {}
    for facts, kinds in every:
        unwanted = why_not_asked(facts)
        reasons = [text for gate in asked if (text := gate(facts, path)) is not None]
        for kind, config in kinds.items():
            found[kind] = (
                refused(name, [*([unwanted] if unwanted else []), *reasons], absent=unwanted is not None)
                if unwanted or reasons
                else decided(name, op.choose(config, target, here=True))
            )
    return found


def _settle(functions: Functions) -> None:
    """Tell the functions which kinds of call are ours, and keep the plan of each layer for which that is news.

    A call does not say which layer makes it. So it is ours if every layer that may make such a one is accepted,
    whatever their order; with two models in one process, every layer of both.
    """
    layers: list[_Layer] = list(functions.layers.values())
    refusals: dict[str, dict[Kind, tuple[str, OpPlan]]] = {}
    for seam in ("latents", "queries"):
        accepted, refusals[seam] = getattr(functions, seam), {}
        for each in layers:
            for kind, plan in each.decided[seam].items():
                accepted[kind] = True
                if not plan.fused:
                    refusals[seam].setdefault(kind, (each.name, plan))
        accepted.update(dict.fromkeys(refusals[seam], False))
    for each in layers:
        plans = {seam: _plan(kinds, refusals[seam]) for seam, kinds in each.decided.items()}
        before, made = each.plan, SeamPlan(each.name, each.kind, **plans)
        if made == before:
            continue
        each.plan = made
        # The name of an earlier engine's layer may be another's by now.
        if before is None or kept(before):
            keep(made)


def _plan(kinds: dict[Kind, OpPlan], refusals: dict[Kind, tuple[str, OpPlan]]) -> OpPlan:
    """One seam of a layer: the first refusal, its own before another layer's, else the plan of the usual call."""
    for plan in kinds.values():
        if not plan.fused:
            return plan
    for kind, plan in kinds.items():
        if kind in refusals:
            other, why = refusals[kind]
            differs = f"{other} makes the same kind of call and is not fused, and a call does not say whose it is"
            warn(f"{plan.op}: layers differ: {other} is not fused ({'; '.join(why.reasons)}), so no such call is")
            return refused(plan.op, [differs, *why.reasons], trace=why.trace)
    return next(iter(kinds.values()))


class _Facts:
    """What the gates and the ops' configurations need to know of a layer's calls, under the gates' names.

    index: the layer's indexer, in calls that have one.
    """

    def __init__(self, layer: Any, config: Any, index: Any) -> None:
        self.layer = layer
        self.config = config
        self.index = index
        self.activation: torch.dtype = config.model_config.dtype
        self.word: str = layer.kv_cache_dtype
        self.layout = gates.MLA_LAYOUTS.get(self.word, "plain")
        self.heads: int = layer.num_heads
        self.families = {"mla"} if self.index is None else {"mla", "indexer"}
        self.as_wrapper = SimpleNamespace(
            mla_attn=layer,
            indexer=self.index,
            kv_lora_rank=layer.kv_lora_rank,
            qk_rope_head_dim=layer.qk_rope_head_dim,
        )

    @property
    def packed(self) -> tuple[bool, ...]:
        """Values of quantize_mqa. A short prefill that is attended densely wants its query unpacked."""
        # AMD's class packs for every fp8 cache; NVIDIA's where the backend takes such a query.
        packs = getattr(self.layer, "_fp8_kv", getattr(self.layer, "_fp8_query", False))
        return (True, False) if packs else (False,)

    def _config(self, **roles: Any) -> Config:
        return Config(self.activation, gates.fp8_dtype(), "fp32", **roles)

    @property
    def latents(self) -> dict[Kind, Config]:
        """The configuration of the call before q_b."""
        block_size = self.config.cache_config.block_size
        norm_q = NormQ(self.layer.q_lora_rank)
        latent_kv = LatentKv(self.layout, block_size, "interleaved", norm=True, scale_rule=host.tile_scale_rule())
        # Which layout an indexer's cache has is known when it is there: the call says it.
        index_k = IndexK("flat", block_size, self._index_style, "ue8m0")
        return {
            (self.index is not None, self.activation, self.word): self._config(
                norm_q=norm_q, latent_kv=latent_kv, index_k=None if self.index is None else index_k
            )
        }

    @property
    def queries(self) -> dict[Kind, Config]:
        """The configuration of each kind of call behind q_b."""
        index_q = None if self.index is None else IndexQ(self.index.n_head, self._index_style, "ue8m0")
        return {
            (self.index is not None, self.activation, packed): self._config(
                latent_q=LatentQ(
                    self.heads, gates.fp8_dtype() if packed else self.activation, "interleaved", nope=packed
                ),
                index_q=index_q,
            )
            for packed in self.packed
        }

    @property
    def _index_style(self) -> str:
        return "interleaved" if self.layer._index_rope_interleave else "neox"


def why_not_asked(facts: _Facts) -> str | None:
    """Each seam serves both families in one launch, so both must be wanted."""
    wanted = switches.current().ops
    missing = sorted(facts.families - wanted)
    return f"DSAFUSE_OPS must contain {' and '.join(missing)}, got {','.join(sorted(wanted))!r}" if missing else None


def why_not_hisparse(facts: _Facts, path: Path) -> str | None:
    """There the key is written later, by another function."""
    if getattr(facts.layer, "hisparse_cache", None) is not None:
        return "hisparse must be off, got a layer with a hisparse cache"
    return None


def why_not_mx_scales(facts: _Facts, path: Path) -> str | None:
    """vLLM 0.33 on sm_100 stores an indexer key's scale as four equal exponents."""
    import vllm.utils.deep_gemm as deep_gemm

    asks = getattr(deep_gemm, "mqa_logits_use_mx_scales", None)
    if facts.index is not None and asks is not None and asks():
        return "the indexer cache must hold fp32 scales, got packed UE8M0 ones (vLLM 0.33 on sm_100)"
    return None


def why_not_cutedsl(facts: _Facts, path: Path) -> str | None:
    """On sm_100 and newer vLLM's function chooses a CuTeDSL kernel: nobody has measured ours against it."""
    from vllm.platforms import current_platform

    if not (path.cutedsl and current_platform.is_cuda() and current_platform.has_device_capability(100)):
        return None
    index_heads = 16 if facts.index is None else facts.index.n_head
    if facts.activation == torch.bfloat16 and facts.heads % 4 == 0 and index_heads % 16 == 0:
        return "fused_q must be vLLM's Triton kernel, got its CuTeDSL one (sm_100), which ours was not measured against"
    return None


def _of_wrapper(gate: gates.Gate) -> Gate:
    return lambda facts, path: gate(facts.as_wrapper, facts.config)


def _if_indexed(gate: Gate) -> Gate:
    return lambda facts, path: None if facts.index is None else gate(facts, path)


_EITHER: tuple[Gate, ...] = (
    _of_wrapper(gates.why_not_positions),
    _of_wrapper(gates.why_not_parallel),
    why_not_hisparse,
    _of_wrapper(gates.why_not_mla_sizes),
    _if_indexed(_of_wrapper(gates.why_not_indexer_sizes)),
)
_LATENTS: tuple[Gate, ...] = (*_EITHER, _of_wrapper(gates.why_not_kv_cache_dtype), why_not_mx_scales)
_QUERIES: tuple[Gate, ...] = (*_EITHER, why_not_cutedsl)

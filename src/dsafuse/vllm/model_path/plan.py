"""What one layer of vLLM's fused model does: decided once, when the layer is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch

from dsafuse import prepare_latents, prepare_queries, switches
from dsafuse.ops.config import Config, IndexK, IndexQ, LatentKv, LatentQ, NormQ
from dsafuse.registry import Op
from dsafuse.target import Target
from dsafuse.vllm import gates, host
from dsafuse.vllm.model_path.functions import Functions, Kind
from dsafuse.vllm.model_path.symbols import Path
from dsafuse.vllm.plan import OpPlan, decided, keep, refused


@dataclass(frozen=True)
class SeamPlan:
    """Both seams of one layer."""

    layer: str
    kind: str
    latents: OpPlan
    queries: OpPlan

    @property
    def ops(self) -> tuple[OpPlan, ...]:
        """Both."""
        return self.latents, self.queries

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "layer": self.layer,
            "kind": self.kind,
            "latents": asdict(self.latents),
            "queries": asdict(self.queries),
        }

    def __str__(self) -> str:
        return f"{self.kind}: {self.latents}; {self.queries}"


def build(layer: Any, config: Any, functions: Functions, path: Path) -> SeamPlan:
    """Plan a layer from itself and vLLM's config, tell the functions, keep it, and say it once per kind of layer.

    Raises RuntimeError with the trace if DSAFUSE_MODE=strict and the layer is refused.
    """
    facts = _Facts(layer, config)
    latents = _plan("latents", prepare_latents, facts, path, _LATENTS, facts.latents, functions.latents)
    queries = _plan("queries", prepare_queries, facts, path, _QUERIES, facts.queries, functions.queries)
    kind = "DSA layer" if facts.index is not None else "DSA layer with another layer's top-k"
    found = SeamPlan(layer.layer_name, kind, latents, queries)
    keep(found, strict=True)
    return found


Gate = Callable[["_Facts", Path], str | None]


def _plan(
    name: str,
    op: Op[..., Any],
    facts: _Facts,
    path: Path,
    asked: tuple[Gate, ...],
    kinds: dict[Kind, Config],
    accepted: dict[Kind, bool],
) -> OpPlan:
    """The plan of one seam. Every kind of call that the layer may make is decided; the first is the usual one."""
    target = Target.of(gates.device())
    unwanted = why_not_asked(facts)
    reasons = [text for gate in asked if (text := gate(facts, path)) is not None]
    plans = [
        refused(name, [*([unwanted] if unwanted else []), *reasons], absent=unwanted is not None)
        if unwanted or reasons
        else decided(name, op.choose(config, target, here=True))
        for config in kinds.values()
    ]
    accepted.update({kind: plan.fused for kind, plan in zip(kinds, plans, strict=True)})
    return plans[0]


class _Facts:
    """What the gates and the ops' configurations need to know of a layer, under the gates' names."""

    def __init__(self, layer: Any, config: Any) -> None:
        self.layer = layer
        self.config = config
        self.index = layer.indexer
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
    def indexed(self) -> tuple[bool, ...]:
        """Values of has_indexer. A draft's layer takes over the top-k of an earlier step now and then."""
        return (False,) if self.index is None else (True, False)

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
        """The configuration of each kind of call before q_b."""
        block_size = self.config.cache_config.block_size
        norm_q = NormQ(self.layer.q_lora_rank)
        latent_kv = LatentKv(self.layout, block_size, "interleaved", norm=True, scale_rule=host.tile_scale_rule())
        # Which layout an indexer's cache has is known when it is there: the call says it.
        index_k = IndexK("flat", block_size, self._index_style, "ue8m0")
        return {
            (indexed, self.activation, self.word): self._config(
                norm_q=norm_q, latent_kv=latent_kv, index_k=index_k if indexed else None
            )
            for indexed in self.indexed
        }

    @property
    def queries(self) -> dict[Kind, Config]:
        """The configuration of each kind of call behind q_b."""
        heads = 0 if self.index is None else self.index.n_head
        index_q = IndexQ(heads, self._index_style, "ue8m0")
        return {
            (indexed, self.activation, packed): self._config(
                latent_q=LatentQ(
                    self.heads, gates.fp8_dtype() if packed else self.activation, "interleaved", nope=packed
                ),
                index_q=index_q if indexed else None,
            )
            for packed in self.packed
            for indexed in self.indexed
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

"""What one layer does: decided once, when the layer is built, and looked up at every step.

Three things must agree or the model is silently wrong: the wrapper leaves q_pe and k_pe unrotated, nobody but the
fused op writes the cache, and the op does both. So all three read one frozen object, `LayerPlan`.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from dsafuse import fused_qk_rope_concat_and_cache_mla, indexer_qk_rope_quant_and_cache, prepare_qk, switches
from dsafuse.dispatch import PROVIDERS, Decision
from dsafuse.ops.config import ClearTopk, Config, indexer_config, mla_config
from dsafuse.target import Target
from dsafuse.vllm import gates, host, logger


@dataclass(frozen=True)
class OpPlan:
    """One op on one layer.

    reasons: why vLLM's own code runs instead; empty if the op is fused.
    absent: there is no such work on this layer, or nobody asked for it: no refusal, and nothing to count.
    """

    op: str
    fused: bool
    provider: str | None = None
    trace: str = ""
    reasons: tuple[str, ...] = ()
    absent: bool = False

    def __str__(self) -> str:
        if self.fused:
            return f"{self.op}: fused, provider {self.provider}"
        return f"{self.op}: vLLM's own code ({'; '.join(self.reasons)})"


@dataclass(frozen=True)
class MlaCall:
    """The constants of a layer's fused MLA call.

    query_heads: the width of the query, at least the layer's heads; more where the attention kernel wants padding.
    query_form: how the backend takes the query, one of the values of `gates.QUERY_FORMS`.
    scale_rule: of the tiles of fp8_ds_mla, as the installed vLLM writes them; other layouts have none.
    """

    kv_layout: str
    rope_style: str
    query_dtype: torch.dtype
    query_heads: int
    query_form: str
    fp8_dtype: torch.dtype
    scale_rule: str


@dataclass(frozen=True)
class IndexerCall:
    """The constants of a layer's fused indexer call."""

    kv_layout: str
    rope_style: str
    scale_rule: str
    eps: float
    weights_scale: float
    fp8_dtype: torch.dtype


@dataclass(frozen=True)
class LayerPlan:
    """Both ops of one layer.

    together: both are fused, and in one launch, `prepare_qk`.
    uncleared: why vLLM's indexer op clears its top-k rows itself; None if that launch does.
    """

    layer: str
    kind: str
    mla: OpPlan
    indexer: OpPlan
    mla_call: MlaCall | None = None
    indexer_call: IndexerCall | None = None
    together: bool = False
    uncleared: str | None = None

    @property
    def clears_topk(self) -> bool:
        """Whether the one launch clears the top-k rows, and vLLM's indexer op is told so."""
        return self.together and self.uncleared is None

    @property
    def ops(self) -> tuple[OpPlan, ...]:
        """Both."""
        return self.mla, self.indexer

    @property
    def fused(self) -> bool:
        """Whether anything is fused here; if not, vLLM's own forward runs."""
        return self.mla.fused or self.indexer.fused

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**document(self), "clears_topk": self.clears_topk}

    def __str__(self) -> str:
        launch = ""
        if self.together:
            cleared = ", top-k rows cleared" if self.clears_topk else f"; vLLM clears its top-k rows ({self.uncleared})"
            launch = f"; both in one launch, prepare_qk{cleared}"
        return f"{self.kind}: {self.mla}; {self.indexer}{launch}"


class Plan(Protocol):
    """What both paths' plans of a layer have."""

    @property
    def layer(self) -> str:
        """The layer's name."""

    @property
    def kind(self) -> str:
        """What kind of layer it is."""

    @property
    def ops(self) -> tuple[OpPlan, ...]:
        """What was decided of each op."""

    @property
    def together(self) -> bool:
        """Whether its ops are one launch."""

    def as_dict(self) -> dict[str, Any]:
        """`document`, and what else this path has."""


def document(plan: Plan) -> dict[str, Any]:
    """A plan as JSON has it, on either path."""
    return {
        "layer": plan.layer,
        "kind": plan.kind,
        "ops": [asdict(op) for op in plan.ops],
        "together": plan.together,
    }


DENSE = "dense MLA layer"
"""The kind of a layer without DeepSeek Sparse Attention."""

# Every plan of this process, by layer name; of several engines in one process, the latest.
PLANS: dict[str, Plan] = {}
_SAID: set[str] = set()


def build(wrapper: Any, config: Any) -> LayerPlan:
    """Plan a layer from the wrapper around it and vLLM's config, keep it, and say it once per layer kind.

    A fused layer's plan joins vLLM's compilation (`gates.join_compilation`).
    Raises RuntimeError with the trace if DSAFUSE_MODE=strict and a DSA layer is refused.
    """
    mla, mla_call, mla_facts = _plan_mla(wrapper, config)
    indexer, indexer_call, indexer_facts = _plan_indexer(wrapper, config)
    together, uncleared = False, None
    if mla_facts is not None and indexer_facts is not None:
        # The same gates as for each alone, over both: in practice this is always accepted.
        facts = replace(mla_facts, index_q=indexer_facts.index_q, index_k=indexer_facts.index_k)
        uncleared = gates.why_vllm_clears(wrapper)
        if uncleared is None:
            facts = replace(facts, clear_topk=ClearTopk(wrapper.indexer.indexer_op.topk_indices_buffer.shape[1]))
        decision = prepare_qk.choose(facts, Target.of(gates.device()), here=True)
        together = decision.provider == mla.provider == indexer.provider
    plan = LayerPlan(
        wrapper.mla_attn.layer_name, _kind(wrapper), mla, indexer, mla_call, indexer_call, together, uncleared
    )
    keep(plan)
    if plan.fused:
        gates.join_compilation(config, f"{plan} {mla_call} {indexer_call}")
    return plan


def refusals(plan: Plan) -> list[OpPlan]:
    """What DSAFUSE_MODE=strict raises: of a DSA layer, every op that is refused."""
    return [] if plan.kind == DENSE else [op for op in plan.ops if not op.fused and not op.absent]


def keep(plan: Plan) -> None:
    """Keep a layer's plan in PLANS and say it once per kind. DSAFUSE_MODE=strict raises the first of its refusals."""
    PLANS[plan.layer] = plan
    text = str(plan)
    if text not in _SAID:
        _SAID.add(text)
        logger.info("dsafuse: %s [first: %s]", text, plan.layer)
        for op in plan.ops:
            if op.trace:
                logger.info("dsafuse: %s", op.trace)
    if switches.current().mode == "strict":
        for op in refusals(plan):
            raise RuntimeError(
                f"DSAFUSE_MODE=strict: {plan.layer}: {op.op} is not fused: {'; '.join(op.reasons)}\n{op.trace}"
            )


def kept(plan: Plan) -> bool:
    """Whether PLANS shows this plan still."""
    return PLANS.get(plan.layer) is plan


def warn(text: str) -> None:
    """A warning in the log, once."""
    if text not in _SAID:
        _SAID.add(text)
        logger.warning("dsafuse: %s.", text)


def _kind(wrapper: Any) -> str:
    if not wrapper.is_sparse:
        return DENSE
    return "DSA layer" if wrapper.indexer is not None else "DSA layer with another layer's top-k"


def refused(op: str, reasons: list[str], absent: bool = False, trace: str = "") -> OpPlan:
    """vLLM's own code, and why."""
    return OpPlan(op, fused=False, reasons=tuple(reasons), absent=absent, trace=trace)


def decided(op: str, decision: Decision) -> OpPlan:
    """A layer that passed the gates gets what dispatch says, if that is a fused provider.

    In an engine the fallback is the engine's own code, never our split chain.
    """
    provider = decision.provider
    if provider is None:
        return refused(op, ["no provider accepts; see the trace"], trace=str(decision))
    if not PROVIDERS[provider].fused:
        reason = f"only provider {provider} accepts, which fuses nothing; see the trace"
        return refused(op, [reason], trace=str(decision))
    return OpPlan(op, fused=True, provider=provider, trace=str(decision))


def _plan_mla(wrapper: Any, config: Any) -> tuple[OpPlan, MlaCall | None, Config | None]:
    reasons = gates.why_not_mla(wrapper, config)
    if reasons:
        absent = not wrapper.is_sparse or "mla" not in switches.current().ops
        return refused("mla", reasons, absent=absent), None, None
    attention = wrapper.mla_attn
    activation = config.model_config.dtype
    fp8 = gates.fp8_dtype()
    call = MlaCall(
        kv_layout=gates.MLA_LAYOUTS.get(attention.kv_cache_dtype, "plain"),
        rope_style=gates.rope_style(wrapper.rotary_emb),
        query_dtype=fp8 if gates.quantised_query(attention) else activation,
        query_heads=gates.query_heads(attention, wrapper.num_heads),
        query_form=gates.QUERY_FORMS[attention.attn_backend.get_name()],
        fp8_dtype=fp8,
        scale_rule=host.tile_scale_rule(),
    )
    shape = mla_config(
        heads=wrapper.num_heads,
        activation=activation,
        query=call.query_dtype,
        layout=call.kv_layout,
        fp8=fp8,
        block_size=config.cache_config.block_size,
        rope_style=call.rope_style,
        scale_rule=call.scale_rule,
        rounding="split",
    )
    target = Target.of(gates.device())
    plan = decided("mla", fused_qk_rope_concat_and_cache_mla.choose(shape, target, here=True))
    return (plan, call, shape) if plan.fused else (plan, None, None)


def _plan_indexer(wrapper: Any, config: Any) -> tuple[OpPlan, IndexerCall | None, Config | None]:
    indexer = wrapper.indexer
    reasons = gates.why_not_indexer(wrapper, config)
    if reasons:
        absent = not wrapper.is_sparse or indexer is None or "indexer" not in switches.current().ops
        return refused("indexer", reasons, absent=absent), None, None
    fp8 = gates.fp8_dtype()
    call = IndexerCall(
        kv_layout="flat",
        rope_style=gates.rope_style(wrapper.indexer_rope_emb),
        scale_rule="ue8m0" if indexer.scale_fmt == "ue8m0" else "fp32",
        eps=float(indexer.k_norm.eps),
        weights_scale=float(indexer.softmax_scale * indexer.n_head_scale),
        fp8_dtype=fp8,
    )
    shape = indexer_config(
        heads=indexer.n_head,
        activation=config.model_config.dtype,
        layout=call.kv_layout,
        fp8=fp8,
        block_size=config.cache_config.block_size,
        rope_style=call.rope_style,
        scale_rule=call.scale_rule,
        rounding="split",
    )
    target = Target.of(gates.device())
    plan = decided("indexer", indexer_qk_rope_quant_and_cache.choose(shape, target, here=True))
    return (plan, call, shape) if plan.fused else (plan, None, None)

"""Shapes of the models that use DSA, as frozen records. Source: the models' published config.json."""

from __future__ import annotations

from dataclasses import dataclass

from dsafuse.numerics import RopeStyle


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What Q/K preparation needs to know of a model."""

    name: str
    layers: int
    heads: int
    index_heads: int
    index_topk: int
    q_lora_rank: int
    qk_nope_head_dim: int
    index_rope_style: RopeStyle
    mla_rope_style: RopeStyle = RopeStyle.INTERLEAVED

    def local_heads(self, tensor_parallel: int) -> int:
        """Attention heads of one rank; indexer heads are replicated. Raises ValueError if they don't divide."""
        if tensor_parallel < 1 or self.heads % tensor_parallel:
            raise ValueError(f"tp: got {tensor_parallel}, expected a divisor of {self.heads} heads")
        return self.heads // tensor_parallel


MODELS = {
    model.name: model
    for model in (
        ModelShape("deepseek-v3.2", 61, 128, 64, 2048, 1536, 128, RopeStyle.NEOX),
        ModelShape("glm-5.2", 78, 64, 32, 2048, 2048, 192, RopeStyle.INTERLEAVED),
    )
}

"""What published config.json files of models that use DSA say: their shapes, and how weights are held."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsafuse.numerics import RopeStyle

WEIGHT_FORMATS = ("quantization_config", "compression_config")
"""Where config.json says how weights are quantised."""


def is_block(size: Any) -> bool:
    """Whether a weight_block_size is one: two positive integers, of outputs and of fan-in."""
    return isinstance(size, Sequence) and len(size) == 2 and all(type(each) is int and each > 0 for each in size)


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

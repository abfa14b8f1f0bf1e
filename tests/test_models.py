"""Model shapes, as the published configurations state them."""

from __future__ import annotations

import pytest

from dsafuse.models import MODELS
from dsafuse.numerics import RopeStyle


@pytest.mark.parametrize(
    ("name", "heads", "index_heads", "style"),
    [("deepseek-v3.2", 128, 64, RopeStyle.NEOX), ("glm-5.2", 64, 32, RopeStyle.INTERLEAVED)],
)
def test_the_indexer_rotates_neox_in_deepseek_and_interleaved_in_glm(
    name: str, heads: int, index_heads: int, style: RopeStyle
) -> None:
    model = MODELS[name]
    assert (model.heads, model.index_heads, model.index_rope_style) == (heads, index_heads, style)
    assert model.mla_rope_style is RopeStyle.INTERLEAVED


def test_attention_heads_are_split_over_tensor_parallel_ranks() -> None:
    assert [MODELS["deepseek-v3.2"].local_heads(tp) for tp in (1, 8, 128)] == [128, 16, 1]


@pytest.mark.parametrize("tp", [0, -8, 3, 256])
def test_a_tensor_parallel_size_that_does_not_divide_is_named(tp: int) -> None:
    with pytest.raises(ValueError, match=f"tp: got {tp}, expected a divisor of 128 heads"):
        MODELS["deepseek-v3.2"].local_heads(tp)

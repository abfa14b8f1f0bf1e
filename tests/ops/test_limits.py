"""Sizes that kernels take in 32 bits are refused before they would not fit."""

from __future__ import annotations

import pytest
import torch

from tests.inputs import EVERY_OP, call_of


@pytest.mark.parametrize(
    ("op", "name"), [("mla", "cos_sin_cache"), ("indexer", "cos_sin_cache"), ("qk", "index_cos_sin_cache")]
)
def test_a_rope_table_has_fewer_than_two_billion_rows(op: str, name: str) -> None:
    most = 2**31 - 1
    table = torch.zeros(1, 64)
    EVERY_OP[op].resolve(**call_of(op) | {name: table.expand(most, 64)})
    with pytest.raises(ValueError, match=rf"^{name}: got {most + 1} rows, expected at most {most}$"):
        EVERY_OP[op].resolve(**call_of(op) | {name: table.expand(most + 1, 64)})


@pytest.mark.parametrize("layout", ["flat", "tiled16"])
def test_a_block_of_a_planar_cache_has_fewer_than_two_gigabytes(layout: str) -> None:
    most = (2**31 - 1) // 132 // 16 * 16
    call = {name: v.to("meta") if isinstance(v, torch.Tensor) else v for name, v in call_of("indexer").items()}
    call["kv_layout"] = layout
    EVERY_OP["indexer"].resolve(**call | {"kv_cache": torch.empty(1, most, 132, dtype=torch.uint8, device="meta")})
    large = torch.empty(1, most + 16, 132, dtype=torch.uint8, device="meta")
    expected = rf"^kv_cache \({layout}\): got block_size {most + 16}, expected at most {(2**31 - 1) // 132}$"
    with pytest.raises(ValueError, match=expected):
        EVERY_OP["indexer"].resolve(**call | {"kv_cache": large})

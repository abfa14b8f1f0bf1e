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

"""Layouts as numbers: offsets, widths, views, and the tables that docs/layouts.md shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsafuse.layouts import (
    FLAT,
    FP8,
    FP8_DS_MLA,
    INDEXER_LAYOUTS,
    MLA_LAYOUTS,
    PLAIN,
    CacheLayout,
)
from tests.inputs import ACTIVATIONS, guarded

DOCS = Path(__file__).parents[1] / "docs" / "layouts.md"
LAYOUTS = (*MLA_LAYOUTS.values(), *INDEXER_LAYOUTS.values())


@pytest.mark.parametrize(
    ("layout", "row_bytes", "offsets"),
    [
        (PLAIN, 1152, {"latent": 0, "rope": 1024}),
        (FP8, 576, {"latent": 0, "rope": 512}),
        (FP8_DS_MLA, 656, {"latent": 0, "scale": 512, "rope": 528}),
        (FLAT, 132, {"key": 0, "scale": 128}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_rows_have_the_published_widths_and_offsets(
    layout: CacheLayout, row_bytes: int, offsets: dict[str, int]
) -> None:
    assert layout.row_bytes() == row_bytes
    assert {field.name: layout.offset_bytes(field.name) for field in layout.fields} == offsets


def test_a_plain_row_follows_the_activation_dtype() -> None:
    assert [PLAIN.row_bytes(dtype) for dtype in ACTIVATIONS] == [1152, 1152, 2304]
    assert PLAIN.offset_bytes("rope", torch.float32) == 2048


def test_an_unknown_field_names_the_layout() -> None:
    with pytest.raises(KeyError, match="fp8 has no field 'scale'"):
        FP8.offset_bytes("scale")


@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_a_flat_block_holds_all_keys_and_then_all_scales(block_size: int) -> None:
    cache = torch.zeros(2, block_size, 132, dtype=torch.uint8)
    FLAT.field_bytes(cache, "key", torch.bfloat16).copy_(torch.arange(1, block_size + 1)[None, :, None])
    FLAT.field_bytes(cache, "scale", torch.bfloat16).copy_(100 + torch.arange(block_size)[None, :, None])
    for block in cache.reshape(2, -1):
        for token in range(block_size):
            assert block[128 * token : 128 * token + 128].unique().tolist() == [token + 1]
            start = 128 * block_size + 4 * token
            assert block[start : start + 4].unique().tolist() == [100 + token]


def test_a_flat_view_honours_offset_and_block_stride() -> None:
    cache = guarded((3, 16, 132), torch.uint8, (16 * 132 + 12, 132, 1))
    view = FLAT.field_bytes(cache, "scale", torch.bfloat16)
    assert view[2, 5].data_ptr() - cache.data_ptr() == 2 * (16 * 132 + 12) + 16 * 128 + 5 * 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_fields_of_a_block_cover_it_once(layout: CacheLayout) -> None:
    row_bytes = layout.row_bytes()
    dtype = torch.bfloat16 if layout is PLAIN else torch.uint8
    cache = torch.zeros(2, 4, row_bytes // dtype.itemsize, dtype=dtype)
    for field in layout.fields:
        layout.field_bytes(cache, field.name, torch.bfloat16).add_(1)
    assert cache.view(torch.uint8).unique().tolist() == [1]


@pytest.mark.parametrize(("layout", "bytes_"), [(PLAIN, 1), (FP8, 1), (FP8_DS_MLA, 4), (FLAT, 4)])
def test_alignment_follows_from_the_widest_scalar_field(layout: CacheLayout, bytes_: int) -> None:
    assert layout.alignment_bytes == bytes_


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_docs_show_the_table_of_the_code(layout: CacheLayout) -> None:
    section = DOCS.read_text().split(f"## `{layout.name}`")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    want = [
        [field.name, str(field.count), field.store.value, str(layout.offset_bytes(field.name))]
        for field in layout.fields
    ]
    assert [row[:4] for row in rows[2:]] == want
    assert f"{layout.row_bytes()} bytes a token" in section


def test_docs_describe_every_layout_of_the_code_and_no_other() -> None:
    headings = [line for line in DOCS.read_text().splitlines() if line.startswith("## `")]
    assert headings == [f"## `{layout.name}`" for layout in LAYOUTS]

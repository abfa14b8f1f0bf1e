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
    TILED16,
    CacheLayout,
    retile,
)
from tests.inputs import ACTIVATIONS, guarded, seeded

DOCS = Path(__file__).parents[1] / "docs" / "layouts.md"
LAYOUTS = (*MLA_LAYOUTS.values(), *INDEXER_LAYOUTS.values())


@pytest.mark.parametrize(
    ("layout", "row_bytes", "offsets"),
    [
        (PLAIN, 1152, {"latent": 0, "rope": 1024}),
        (FP8, 576, {"latent": 0, "rope": 512}),
        (FP8_DS_MLA, 656, {"latent": 0, "scale": 512, "rope": 528}),
        (FLAT, 132, {"key": 0, "scale": 128}),
        (TILED16, 132, {"key": 0, "scale": 128}),
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


def numbered(blocks: int, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct slots of a cache and a key row for each, in which every byte tells its slot or its dim."""
    slots = torch.arange(blocks * block_size)
    keys = (slots[:, None] * 7 + torch.arange(128)[None] * 3).to(torch.uint8)
    return slots, keys


def test_a_tiled_block_holds_sixteen_bytes_of_sixteen_tokens_side_by_side() -> None:
    cache = torch.zeros(2, 32, 132, dtype=torch.uint8)
    slots, keys = numbered(2, 32)
    TILED16.store_rows(cache, "key", torch.bfloat16, slots, keys)
    for slot, d in ((0, 0), (1, 0), (0, 16), (17, 35), (31, 127), (40, 90)):
        block, t = divmod(slot, 32)
        place = (t // 16) * 2048 + (d // 16) * 256 + (t % 16) * 16 + d % 16
        assert int(cache[block].flatten()[place]) == int(keys[slot, d])


@pytest.mark.parametrize("layout", [FLAT, TILED16], ids=lambda layout: layout.name)
def test_rows_that_were_stored_are_loaded(layout: CacheLayout) -> None:
    cache = guarded((2, 32, 132), torch.uint8, (32 * 132 + 12, 132, 1))
    slots, keys = numbered(2, 32)
    order = torch.randperm(64, generator=seeded(1))
    layout.store_rows(cache, "key", torch.bfloat16, slots[order], keys[order])
    assert torch.equal(layout.load_rows(cache, "key", torch.bfloat16, slots), keys)


def test_retiling_moves_every_row_and_back_again() -> None:
    cache = torch.randint(0, 256, (3, 48, 132), dtype=torch.uint8, generator=seeded(2))
    tiled = retile(cache, FLAT, TILED16)
    slots = torch.arange(3 * 48)
    for field in ("key", "scale"):
        flat = FLAT.load_rows(cache, field, torch.bfloat16, slots)
        assert torch.equal(TILED16.load_rows(tiled, field, torch.bfloat16, slots), flat)
    assert not torch.equal(tiled, cache)
    assert torch.equal(retile(tiled, TILED16, FLAT), cache)


def test_what_can_not_be_retiled_is_refused() -> None:
    with pytest.raises(ValueError, match="target: got fp8, expected a planar layout with the fields of flat"):
        retile(torch.zeros(1, 16, 132, dtype=torch.uint8), FLAT, FP8)
    with pytest.raises(ValueError, match="block_size: got 8, expected a multiple of 16 for tiled16"):
        retile(torch.zeros(1, 8, 132, dtype=torch.uint8), FLAT, TILED16)


def test_a_tiled_field_has_no_view_of_whole_rows() -> None:
    with pytest.raises(ValueError, match="key: got a tiled field of tiled16"):
        TILED16.field_bytes(torch.zeros(1, 16, 132, dtype=torch.uint8), "key", torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_the_fields_of_a_block_cover_it_once(layout: CacheLayout) -> None:
    dtype = torch.bfloat16 if layout is PLAIN else torch.uint8
    cache = torch.zeros(2, 16, layout.row_bytes() // dtype.itemsize, dtype=dtype)
    for field in layout.fields:
        layout.pieces(cache, field.name, torch.bfloat16).add_(1)
    assert cache.view(torch.uint8).unique().tolist() == [1]


@pytest.mark.parametrize(("layout", "multiple"), [(FLAT, 1), (TILED16, 16), (FP8_DS_MLA, 1)])
def test_only_tiles_ask_for_a_multiple_of_a_block_size(layout: CacheLayout, multiple: int) -> None:
    assert layout.block_multiple == multiple


@pytest.mark.parametrize(("layout", "bytes_"), [(PLAIN, 1), (FP8, 1), (FP8_DS_MLA, 4), (FLAT, 4), (TILED16, 4)])
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

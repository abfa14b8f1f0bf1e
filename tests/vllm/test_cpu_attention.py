"""Scores, top-k and sparse attention on CPU against float64, written out token by token."""

from __future__ import annotations

import math

import pytest
import torch

from dsafuse.vllm.cpu import attention, formats

ONE = torch.ones(())


@pytest.fixture(params=[1 << 24, 1])
def slices(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens at once, and one at a time."""
    monkeypatch.setattr(attention, "SLICE_ELEMENTS", request.param)


@pytest.mark.parametrize(("tokens", "length", "count"), [(1, 1, 4), (5, 5, 4), (3, 20, 8), (20, 20, 64), (1, 30, 30)])
@pytest.mark.usefixtures("slices")
def test_choose_takes_the_largest_scores_that_are_visible(tokens: int, length: int, count: int) -> None:
    query, weights = torch.randn(tokens, 4, 128), torch.randn(tokens, 4)
    keys = torch.randn(length, 128)
    chosen = attention.choose(query, weights, keys, count)
    assert chosen.shape == (tokens, count)
    dots = torch.einsum("thd,sd->ths", query.double(), keys.double()).clamp(min=0)
    score = (dots * weights.double()[..., None]).sum(1)
    for token in range(tokens):
        visible = length - tokens + token + 1
        best = score[token, :visible].topk(min(count, visible)).indices
        expected = sorted(best.tolist(), reverse=True)
        assert chosen[token].tolist() == expected + [-1] * (count - len(expected))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.usefixtures("slices")
def test_attend_is_softmax_over_the_chosen_rows(kv_cache_dtype: str) -> None:
    tokens, heads, count, block_size, scale = 6, 3, 5, 16, 0.07
    dtype = torch.float32 if kv_cache_dtype == "auto" else torch.uint8
    cache = torch.zeros(8, block_size, 656 if kv_cache_dtype == "fp8_ds_mla" else 576, dtype=dtype)
    k_scale = torch.tensor(0.5)
    formats.write_mla(torch.randn(128, 512), torch.randn(128, 64), cache, torch.arange(128), kv_cache_dtype, k_scale)
    if kv_cache_dtype == "auto":
        cache[7] = math.nan  # nobody chooses it; position 0 of the second request, where -1 is clamped to, lies there
    query = torch.randn(tokens, heads, 576)
    tables = torch.tensor([[3, 1, 6], [7, 5, 0]])
    request = torch.tensor([0, 0, 0, 1, 1, 1])
    chosen = torch.full((tokens, count), -1, dtype=torch.int32)
    chosen[0] = torch.tensor([40, 33, 16, 2, 0])
    chosen[1, :3] = torch.tensor([47, 20, 1])
    chosen[3, :2] = torch.tensor([31, 16])
    chosen[4, 0] = 40

    out = attention.attend(query, cache, chosen, tables[request], scale, kv_cache_dtype, k_scale)

    for token in range(tokens):
        positions = [p for p in chosen[token].tolist() if p >= 0]
        if not positions:
            assert not out[token].any()
            continue
        rows = torch.stack(
            [
                formats.read_mla(
                    cache,
                    tables[request[token], p // block_size],
                    torch.tensor(p % block_size),
                    kv_cache_dtype,
                    k_scale,
                )
                for p in positions
            ]
        ).double()
        weight = torch.softmax(query[token].double() @ rows.T * scale, dim=-1)
        torch.testing.assert_close(out[token].double(), weight @ rows[:, :512], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.usefixtures("slices")
def test_a_prefill_that_reads_each_row_once_is_the_same(
    kv_cache_dtype: str, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the rows gathered for each token, which the test above compares with float64."""
    tokens, heads, count, block_size = 40, 3, 16, 16
    width, dtype = (656, torch.uint8) if kv_cache_dtype == "fp8_ds_mla" else (576, torch.uint8)
    if kv_cache_dtype == "auto":
        dtype = torch.float32
    cache = torch.zeros(8, block_size, width, dtype=dtype)
    formats.write_mla(torch.randn(128, 512), torch.randn(128, 64), cache, torch.arange(128), kv_cache_dtype, ONE)
    tables = torch.tensor([[3, 1, 6], [7, 5, 0]])[torch.tensor([0] * tokens + [1] * tokens + [0])]
    query = torch.randn(len(tables), heads, 576)
    chosen = torch.full((len(tables), count), -1, dtype=torch.int32)
    for row in range(2 * tokens):
        at = row % tokens
        some = torch.randperm(at + 1)[:count]
        chosen[row, : len(some)] = some.to(torch.int32)
    chosen[5] = -1
    chosen[-1, 0] = 12
    if broken and kv_cache_dtype == "auto":
        cache[5, 2] = math.inf  # position 18 of the second request
        chosen[tokens : 2 * tokens][chosen[tokens : 2 * tokens] == 18] = 17
    calls = []
    whole = attention._attend_whole
    monkeypatch.setattr(attention, "_attend_whole", lambda *args: calls.append(whole(*args)) or calls[-1])
    out = attention.attend(query, cache, chosen, tables, 0.07, kv_cache_dtype, ONE)
    gathered = attention._attend_chosen(query, cache, chosen, tables, 0.07, kv_cache_dtype, ONE)
    torch.testing.assert_close(out, gathered, rtol=1e-5, atol=1e-5)
    given = [each is not None for each in calls]
    assert given == [True, not broken or kv_cache_dtype != "auto"]

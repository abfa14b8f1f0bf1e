"""The query's memory: one buffer for a model, none shared between engines, one for each micro-batch."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsafuse.vllm.buffers import QueryBuffer, query_buffer

CPU = torch.device("cpu")


def config(layers: dict[str, Any] | None = None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(num_ubatches=0),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
        compilation_config=SimpleNamespace(static_forward_context={} if layers is None else layers),
    )


def test_layers_of_a_model_share_and_two_engines_do_not() -> None:
    engine, other = config(), config()
    first = query_buffer(engine, 4, torch.bfloat16)
    assert query_buffer(engine, 4, torch.bfloat16) is first
    assert query_buffer(other, 4, torch.bfloat16) is not first
    # A draft with fewer heads, or with another cache format, has a buffer of its own.
    assert query_buffer(engine, 2, torch.bfloat16) is not first
    assert query_buffer(engine, 4, torch.float8_e4m3fn) is not first


def test_the_memory_goes_with_the_last_layer() -> None:
    from dsafuse.vllm import buffers

    gc.collect()  # of tests before
    before, engine = len(buffers._SHARED), config()
    made = query_buffer(engine, 4, torch.bfloat16)
    assert len(buffers._SHARED) == before + 1
    del made
    gc.collect()
    assert len(buffers._SHARED) == before


def test_rows_are_zero_at_one_address_and_apart_for_each_micro_batch() -> None:
    buffer = QueryBuffer(8, 4, torch.bfloat16, 2)
    rows = buffer.rows(3, 0, CPU)
    assert rows.shape == (3, 4, 576)
    assert not rows.any()
    rows[:, :2] = 1
    again = buffer.rows(8, 0, CPU)
    assert again.data_ptr() == rows.data_ptr()
    assert again[:3, :2].all()
    assert not again[:, 2:].any()
    assert not buffer.rows(8, 1, CPU).any()


@pytest.mark.parametrize(("micro_batches", "expected"), [(0, 1), (2, 2)])
def test_vllms_number_of_micro_batches(micro_batches: int, expected: int) -> None:
    """It is 0 where there is no dual-batch overlap."""
    engine = config()
    engine.parallel_config.num_ubatches = micro_batches
    assert query_buffer(engine, 4, torch.bfloat16).shape == (expected, 8, 4, 576)


def test_more_tokens_than_vllm_batches_are_an_error() -> None:
    with pytest.raises(ValueError, match="tokens must be at most max_num_batched_tokens 8, got 9"):
        QueryBuffer(8, 4, torch.bfloat16).rows(9, 0, CPU)


def test_rows_are_made_at_the_first_call() -> None:
    """A request may come before any warm-up: its rows are zero where nobody writes, as after one."""
    rows = QueryBuffer(8, 4, torch.bfloat16).rows(3, 0, CPU)
    assert rows.shape == (3, 4, 576)
    assert not rows.any()


def test_zeros_are_not_made_inside_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured before any call without one"):
        QueryBuffer(8, 4, torch.bfloat16).rows(1, 0, torch.device("cuda"))

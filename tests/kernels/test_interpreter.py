"""The interpreter: what it gets wrong by itself, what the correction makes of it, and that it harms nothing else."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from dsafuse.kernels import interpreter
from dsafuse.numerics import FP8_FORMATS
from tests.inputs import EVERY_OP, FN, FNUZ, OPS, assert_same_memory, call_of, mla_call, run, seeded

TRITON_DTYPES = {
    FN: (tl.float8e4nv, ml_dtypes.float8_e4m3fn),
    FNUZ: (tl.float8e4b8, ml_dtypes.float8_e4m3fnuz),
    torch.bfloat16: (tl.bfloat16, ml_dtypes.bfloat16),
    torch.float16: (tl.float16, np.float16),
}


def cast_kernel(x_ptr, y_ptr, COUNT: tl.constexpr, DTYPE: tl.constexpr, BITS: tl.constexpr):
    o = tl.arange(0, COUNT)
    tl.store(y_ptr + o, tl.load(x_ptr + o).to(DTYPE).to(BITS, bitcast=True))


def interpreted_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What an interpreted kernel makes of fp32 values, as codes."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        kernel = triton.jit(cast_kernel)
    bits, tl_bits = (torch.uint8, tl.uint8) if dtype.itemsize == 1 else (torch.int16, tl.int16)
    y = torch.zeros(x.shape, dtype=bits)
    kernel[(1,)](x, y, COUNT=x.numel(), DTYPE=TRITON_DTYPES[dtype][0], BITS=tl_bits)
    return y.view(dtype)


def test_triton_still_needs_the_correction() -> None:
    """Fails once Triton casts rightly by itself: then drop `corrected_casts`."""
    assert float(interpreted_cast(torch.tensor([7.95]), FN).float()) == 4.0  # the carry is lost: 8.0 is right
    assert float(interpreted_cast(torch.tensor([1 + 2.0**-8 + 2.0**-9]), torch.bfloat16)) == 1.0  # truncated


@pytest.mark.parametrize(
    ("value", "dtype", "want"),
    [(7.95, FN, 8.0), (1 + 2.0**-8 + 2.0**-9, torch.bfloat16, 1 + 2.0**-7), (1 + 2.0**-8, torch.bfloat16, 1.0)],
    ids=str,
)
def test_corrected_casts_round_to_nearest_even(value: float, dtype: torch.dtype, want: float) -> None:
    with interpreter.corrected_casts():
        assert float(interpreted_cast(torch.tensor([value]), dtype).float()) == want


@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_corrected_casts_of_random_values_are_those_of_ml_dtypes(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=seeded(5)) * torch.exp2(torch.randint(-12, 8, (4096,), generator=seeded(6)))
    if dtype in FP8_FORMATS:
        x = x.clamp(-FP8_FORMATS[dtype].max, FP8_FORMATS[dtype].max)
    with interpreter.corrected_casts():
        got = interpreted_cast(x, dtype)
    want = x.numpy().astype(TRITON_DTYPES[dtype][1])
    assert np.array_equal(got.view(torch.uint8).numpy(), want.view(np.uint8))


@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
def test_corrected_casts_of_every_bf16_value_are_those_of_ml_dtypes(dtype: torch.dtype) -> None:
    limit = FP8_FORMATS[dtype].max
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every.nan_to_num(nan=0.0, posinf=limit, neginf=-limit).clamp(-limit, limit)
    with interpreter.corrected_casts():
        got = interpreted_cast(every, dtype)
    want = every.numpy().astype(TRITON_DTYPES[dtype][1])
    assert np.array_equal(got.view(torch.uint8).numpy(), want.view(np.uint8))


@pytest.mark.parametrize("dtype", [FN, FNUZ], ids=str)
def test_corrected_casts_write_the_canonical_nan(dtype: torch.dtype) -> None:
    with interpreter.corrected_casts():
        codes = interpreted_cast(torch.tensor([float("nan"), -float("nan")]), dtype).view(torch.uint8)
    assert codes.tolist() == [FP8_FORMATS[dtype].nan_byte] * 2


def test_the_correction_ends_with_its_block_even_when_the_block_raises() -> None:
    original = triton_interpreter._convert_float

    def block() -> None:
        with interpreter.corrected_casts():
            assert triton_interpreter._convert_float is not original
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert triton_interpreter._convert_float is original


def test_running_the_interpreter_leaves_tritons_casts_alone() -> None:
    original = triton_interpreter._convert_float
    run("mla", "interpreter", mla_call(1, 1))
    assert triton_interpreter._convert_float is original


def test_interpreted_and_compiled_kernels_live_side_by_side() -> None:
    interpreted = interpreter.interpreted_kernels()
    from dsafuse.kernels import grids, roles, tiles

    assert isinstance(interpreted.prepare, InterpretedFunction)
    assert isinstance(grids.prepare, JITFunction)
    for module in (tiles, roles, grids):
        assert sys.modules[module.__name__] is module
    assert isinstance(roles.latent_q, JITFunction)
    assert isinstance(tiles.rotate, JITFunction)
    assert not triton.knobs.runtime.interpret
    assert interpreted is interpreter.interpreted_kernels()


@pytest.mark.parametrize("first", ["compiled", "interpreted"])
def test_whichever_is_imported_first_both_are_what_they_say(first: str) -> None:
    names = [f"dsafuse.kernels.{name}" for name in interpreter._MODULES]
    before = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    package = sys.modules["dsafuse.kernels"]
    shorts = {name: package.__dict__.pop(name) for name in interpreter._MODULES if name in package.__dict__}
    load = interpreter.interpreted_kernels.__wrapped__
    try:
        if first == "compiled":
            from dsafuse.kernels import grids

            interpreted = load()
            assert sys.modules["dsafuse.kernels.grids"] is grids
        else:
            interpreted = load()
            from dsafuse.kernels import grids
        assert isinstance(grids.prepare, JITFunction)
        assert isinstance(interpreted.prepare, InterpretedFunction)
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(before)
        package.__dict__.update(shorts)


class Counted:
    """A kernel that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grids.append(grid)
        return self.kernel[grid]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    kernels = interpreter.interpreted_kernels()
    counter = Counted(kernels.prepare)
    monkeypatch.setattr(kernels, "prepare", counter)
    return counter


HEAD_BLOCKS = {"mla": 2, "indexer": 2, "qk": 4, "latents": 0, "queries": 4}
"""Programs of a token's heads, 17 of each family: two blocks for each query role."""

KEY_ROWS = {"mla": (4,), "indexer": (4,), "qk": (4, 4), "latents": (4, 4, 2), "queries": ()}
"""Tokens of a program of each other role: indexer keys, latent rows, q_c rows. Four tokens' programs are a group."""


@pytest.mark.parametrize("op", EVERY_OP)
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_an_op_is_one_launch(op: str, tokens: int, counted: Counted) -> None:
    run(op, "interpreter", call_of(op, tokens, 17))
    grid = -(-tokens // 4) * (sum(4 // rows for rows in KEY_ROWS[op]) + 4 * HEAD_BLOCKS[op])
    assert counted.grids == [(grid,)]


@pytest.mark.parametrize("op", EVERY_OP)
def test_no_tokens_are_no_launch(op: str, counted: Counted) -> None:
    run(op, "interpreter", call_of(op, 0))
    assert counted.grids == []


@pytest.mark.parametrize("op", OPS)
def test_one_token_after_another_gives_what_one_launch_gives(op: str) -> None:
    call = call_of(op, 3, slot_mapping=torch.tensor([7, -1, 2]))
    want = run(op, "interpreter", call)
    rows = ("q_nope", "q_pe", "kv_c", "k_pe", "q", "k", "weights", "positions", "slot_mapping", "q_out", "weights_out")
    for token in range(3):
        one = {name: v[token : token + 1] if name in rows and v is not None else v for name, v in call.items()}
        OPS[op].with_provider("interpreter")(**one)
    assert_same_memory(call, want)

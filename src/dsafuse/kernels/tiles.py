"""Device functions below the roles: pair tiles, casts, scales. Twins of `dsafuse.numerics`.

A *pair tile* is a row of 64 values as two tiles [ROWS, 32] = (x1, x2), where RoPE rotates x1[i] with x2[i].
Interleaved rows are read whole and split, neox rows as two halves: both keep a pair in one thread, so that
rotation, maximum and store need no exchange between threads. Unrotated dims use the same tiles, so that all
values of a row share one register layout.
"""

import triton
import triton.language as tl
from triton.language.standard import _elementwise_max, _sum_combine

from dsafuse import layouts, numerics

HALF = tl.constexpr(layouts.ROPE_DIM // 2)
ROPE = tl.constexpr(layouts.ROPE_DIM)
FLT_MAX = tl.constexpr(numerics.FLT_MAX)
FP8_MAX = tl.constexpr({getattr(tl, fmt.triton_name): fmt.max for fmt in numerics.FP8_FORMATS.values()})
"""The largest magnitude that is ever stored in an fp8 format, by its element type."""


# tl.sum and tl.max are jitted at Triton's own import, which the interpreter can't enter; tl.reduce is a builtin.
@triton.jit
def row_sum(x):
    return tl.reduce(x, 1, _sum_combine)


@triton.jit
def row_sum_in_order(x):
    """row_sum of [ROWS, 32] in one order, whether a thread has one column of a row or two: neighbours first.

    The columns of a thread are added before those of other threads, so that else a sum's last bit would show the plan.
    """
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return row_sum(even + odd)


@triton.jit
def row_max(x):
    return tl.reduce(x, 1, _elementwise_max)


@triton.jit
def load_row_tile(base, offsets, mask, ALIGN: tl.constexpr):
    """Load [ROWS, COLS] where every row starts at a multiple of ALIGN bytes."""
    return tl.load(tl.multiple_of(base + offsets, (1, ALIGN)), mask=mask)


@triton.jit
def store_row_tile(base, offsets, value, mask, ALIGN: tl.constexpr):
    """Store [ROWS, COLS] where every row starts at a multiple of ALIGN bytes."""
    tl.store(tl.multiple_of(base + offsets, (1, ALIGN)), value, mask=mask)


@triton.jit
def load_pairs(base, row_offsets, mask, NEOX: tl.constexpr, ALIGN: tl.constexpr):
    """The 64 values at base + row_offsets[ROWS, 1] as a pair tile, in their own dtype."""
    if NEOX:
        columns = row_offsets + tl.arange(0, HALF)[None, :]
        x1 = load_row_tile(base, columns, mask, ALIGN)
        x2 = load_row_tile(base, columns + HALF, mask, ALIGN)
    elif row_offsets.shape[0] == 1:
        # A lone row has a value or less for each thread: two strided loads cost less than an exchange.
        columns = row_offsets + 2 * tl.arange(0, HALF)[None, :]
        x1, x2 = tl.load(base + columns, mask=mask), tl.load(base + columns + 1, mask=mask)
    else:
        x = load_row_tile(base, row_offsets + tl.arange(0, ROPE)[None, :], mask, ALIGN)
        x1, x2 = tl.split(tl.reshape(x, (x.shape[0], HALF, 2)))
    return x1, x2


@triton.jit
def store_pairs(base, row_offsets, x1, x2, mask, NEOX: tl.constexpr, ALIGN: tl.constexpr):
    """Inverse of load_pairs."""
    if NEOX:
        columns = row_offsets + tl.arange(0, HALF)[None, :]
        store_row_tile(base, columns, x1, mask, ALIGN)
        store_row_tile(base, columns + HALF, x2, mask, ALIGN)
    elif row_offsets.shape[0] == 1:
        columns = row_offsets + 2 * tl.arange(0, HALF)[None, :]
        tl.store(base + columns, x1, mask=mask)
        tl.store(base + columns + 1, x2, mask=mask)
    else:
        x = tl.reshape(tl.join(x1, x2), (x1.shape[0], ROPE))
        store_row_tile(base, row_offsets + tl.arange(0, ROPE)[None, :], x, mask, ALIGN)


@triton.jit
def wait_for_grid_before(PDL: tl.constexpr):
    """Under programmatic dependent launch: wait until what the grid before this one wrote is visible.

    Every program does so before it reads or writes memory, and one that returns early before it returns: else a later
    grid could run before an earlier one's writes are visible. Work on addresses comes before, and takes no time.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_grid_start(PDL: tl.constexpr):
    """Under programmatic dependent launch: let the next grid start.

    No load crosses it, so that it says what is in flight together: a role asks for all that needs no other load, then
    calls it, then reads the rope table, whose row is known by the position. Left to itself, ptxas asks for part of the
    rows behind the table, which is to wait for the position: 5 to 11 % at decode (docs/performance.md).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_angles(table_ptr, table_stride, max_position, position, ALIGN: tl.constexpr):
    """cos and sin [ROWS, 32] fp32 of a position or of positions [ROWS, 1], which are clamped into the table."""
    position = tl.minimum(tl.maximum(position.to(tl.int64), 0), max_position - 1)
    columns = position * table_stride + tl.arange(0, HALF)[None, :]
    cos = load_row_tile(table_ptr, columns, None, ALIGN)
    sin = load_row_tile(table_ptr, columns + HALF, None, ALIGN)
    return cos.to(tl.float32), sin.to(tl.float32)


@triton.jit
def rotate(x1, x2, cos, sin):
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


@triton.jit
def round_pairs(x1, x2, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """What a store in DTYPE and a load would make of fp32 values, where ROUND says so."""
    if ROUND:
        return x1.to(DTYPE).to(tl.float32), x2.to(DTYPE).to(tl.float32)
    return x1, x2


@triton.jit
def reciprocal(scale):
    """Correctly rounded 1 / scale; a zero scale stays finite, NaN stays NaN."""
    return tl.clamp(tl.div_rn(1.0, scale), -FLT_MAX, FLT_MAX, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divide(x, inverse):
    """x / y in fp32, of the fp64 `inverse` 1 / y: correctly rounded wherever it is 2**-126 or more.

    The roundings of inverse and product move it by less than 2**-52 of itself, and the nearest midpoint of two fp32
    numbers is more than 2**-49 of it away (docs/numerics.md, section 6). Below 2**-126 its last bit may be off, which
    no fp8 code shows. tl.div_rn has a branch on NVIDIA, of 130 ns, that every zero takes and that keeps a thread's
    divisions in line (docs/performance.md).
    """
    return (x.to(tl.float64) * inverse).to(tl.float32)


@triton.jit
def to_fp8(x, FP8: tl.constexpr, SIGNED_NAN: tl.constexpr):
    """Clamped, nearest even, one NaN. AMD's conversions do not saturate, and an overflow would become NaN."""
    MOST: tl.constexpr = FP8_MAX[FP8]
    if SIGNED_NAN:
        # The conversion would keep a NaN's sign. No dearer there: AMD's clamp passes over NaN, and one that does not
        # is this selection, too.
        return tl.where(x == x, tl.clamp(x, -MOST, MOST), float("nan")).to(FP8)
    return tl.clamp(x, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL).to(FP8)


@triton.jit
def bounded(amax, FLOOR: tl.constexpr):
    """max(amax, FLOOR); FLT_MAX bounds an infinite amax."""
    return tl.minimum(tl.maximum(amax, FLOOR), FLT_MAX)


@triton.jit
def power_of_two_scale(amax, FP8: tl.constexpr):
    """The smallest power of two >= amax / most, which fp32 rounds, and its inverse (amax and scale normal, > 0).

    most is FP8's maximum. No division: amax / most <= 2**k says amax <= most * 2**k, which a subtraction of the bits
    of the two decides for every k. Rounding hides nothing, since the quotient of the next fp32 above most * 2**k is
    over 2**k by more than half a unit in its last place.
    """
    most = tl.full((1,), FP8_MAX[FP8], tl.float32).to(tl.int32, bitcast=True)
    k = (amax.to(tl.int32, bitcast=True) - most + 0x7FFFFF) >> 23
    return ((127 + k) << 23).to(tl.float32, bitcast=True), ((127 - k) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rounded_scale(amax, FP8: tl.constexpr):
    """amax / FP8's maximum in fp32 (at least 2**-126), and its inverse in fp64, by which `divide` divides."""
    scale = divide(amax, 1.0 / FP8_MAX[FP8])
    return scale, 1.0 / scale.to(tl.float64)


@triton.jit
def quantise_rows(
    x1, x2, y1, y2, FLOOR: tl.constexpr, UE8M0: tl.constexpr, FP8: tl.constexpr, SIGNED_NAN: tl.constexpr
):
    """Two pair tiles of the same rows to fp8, one scale a row [ROWS]. maximum() passes over NaN."""
    largest = tl.maximum(tl.maximum(tl.abs(x1), tl.abs(x2)), tl.maximum(tl.abs(y1), tl.abs(y2)))
    amax = bounded(row_max(largest), FLOOR)
    if UE8M0:
        scale, inverse = power_of_two_scale(amax, FP8)
        factor = inverse[:, None]
        x1, x2, y1, y2 = x1 * factor, x2 * factor, y1 * factor, y2 * factor
    else:
        scale, inverse = rounded_scale(amax, FP8)
        factor = inverse[:, None]
        x1, x2, y1, y2 = divide(x1, factor), divide(x2, factor), divide(y1, factor), divide(y2, factor)
    return (
        to_fp8(x1, FP8, SIGNED_NAN),
        to_fp8(x2, FP8, SIGNED_NAN),
        to_fp8(y1, FP8, SIGNED_NAN),
        to_fp8(y2, FP8, SIGNED_NAN),
        scale,
    )


@triton.jit
def load_slot(slots_ptr, slot_count, token):
    """The slot of a token or of tokens [ROWS, 1]; -1 without one."""
    return tl.load(slots_ptr + token, mask=token < slot_count, other=-1)


@triton.jit
def live_slot(slot, capacity):
    """(slot, live) of what load_slot returned: a slot outside the cache is not live, and becomes 0."""
    slot = slot.to(tl.int64)
    live = (slot >= 0) & (slot < capacity)
    # A cache has fewer than 2**31 slots, and 32-bit division is several times cheaper than 64-bit.
    return tl.where(live, slot, 0).to(tl.int32), live

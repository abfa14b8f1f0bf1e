"""The roles on the device: what one program prepares. Each is the twin of the oracle of its name in ops.roles.

Addresses are 64-bit. ALIGN is 16 where every row of every input and query output starts at a multiple of 16
bytes, else 1; caches carry an alignment of their own, since block_size 1 puts an indexer row at 132 bytes.
"""

import triton
import triton.language as tl

from dsafuse import layouts, numerics
from dsafuse.kernels.tiles import (
    FP8_MAX,
    bounded,
    divide,
    let_next_grid_start,
    live_slot,
    load_angles,
    load_pairs,
    load_row_tile,
    load_slot,
    power_of_two_scale,
    quantise_rows,
    reciprocal,
    rotate,
    round_pairs,
    rounded_scale,
    row_max,
    row_sum,
    row_sum_in_order,
    store_pairs,
    store_row_tile,
    to_fp8,
    wait_for_grid_before,
)

LATENT = tl.constexpr(layouts.LATENT_DIM)
LATENT_TILE = tl.constexpr(layouts.LATENT_TILE)
ROPE = tl.constexpr(layouts.ROPE_DIM)
INDEX = tl.constexpr(layouts.INDEX_DIM)
DS_SCALE_BYTES = tl.constexpr(layouts.FP8_DS_MLA.offset_bytes("scale"))
DS_ROPE_BYTES = tl.constexpr(layouts.FP8_DS_MLA.offset_bytes("rope"))
KEY_SCALE_BYTES = tl.constexpr(layouts.FLAT.offset_bytes("scale"))
TILE_TOKENS = tl.constexpr(layouts.TILED16.fields[0].tile.tokens)
TILE_BYTES = tl.constexpr(layouts.TILED16.fields[0].tile.bytes)
INDEX_Q_FLOOR = tl.constexpr(numerics.INDEX_Q_FLOOR[numerics.Rounding.SPLIT])
INDEX_Q_FLOOR_FP32 = tl.constexpr(numerics.INDEX_Q_FLOOR[numerics.Rounding.FP32])
INDEX_K_FLOOR = tl.constexpr(numerics.INDEX_K_FLOOR)
DS_MLA_FLOOR = tl.constexpr(numerics.DS_MLA_FLOOR[numerics.ScaleRule.UE8M0])
DS_MLA_FLOOR_FP32 = tl.constexpr(numerics.DS_MLA_FLOOR[numerics.ScaleRule.FP32])


@triton.jit
def latent_q(
    token,
    head_block,
    q_nope_ptr,
    q_nope_stride_token,
    q_nope_stride_head,
    q_pe_ptr,
    q_pe_stride_token,
    q_pe_stride_head,
    positions_ptr,
    table_ptr,
    table_stride,
    max_position,
    q_out_ptr,
    q_out_stride_token,
    q_out_stride_head,
    q_scale_ptr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NEOX: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_HEADS heads of one token: concat([q_nope], rotate(q_pe)), optionally over q_scale."""
    head = (head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)  # [BLOCK_HEADS, 1]
    mask = None if HEADS % BLOCK_HEADS == 0 else head < HEADS
    column = tl.arange(0, LATENT)[None, :]
    nope_rows = token * q_nope_stride_token + head * q_nope_stride_head
    pe_rows = token * q_pe_stride_token + head * q_pe_stride_head
    out_rows = token * q_out_stride_token + head * q_out_stride_head
    wait_for_grid_before(PDL)
    position = tl.load(positions_ptr + token)
    if q_nope_ptr is not None:
        nope = load_row_tile(q_nope_ptr, nope_rows + column, mask, ALIGN)  # [BLOCK_HEADS, 512]
    x1, x2 = load_pairs(q_pe_ptr, pe_rows, mask, NEOX, ALIGN)  # [BLOCK_HEADS, 32] each
    if q_scale_ptr is not None:
        scale = tl.load(q_scale_ptr)
    let_next_grid_start(PDL)
    cos, sin = load_angles(table_ptr, table_stride, max_position, position, ALIGN)
    dtype = x1.dtype
    x1, x2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin)
    if q_scale_ptr is not None:
        inverse = reciprocal(scale)
        x1, x2 = round_pairs(x1, x2, dtype, ROUND)
        if q_nope_ptr is not None:
            nope = to_fp8(nope.to(tl.float32) * inverse, FP8, SIGNED_NAN)
        x1, x2 = to_fp8(x1 * inverse, FP8, SIGNED_NAN), to_fp8(x2 * inverse, FP8, SIGNED_NAN)
    else:
        x1, x2 = x1.to(dtype), x2.to(dtype)
    if q_nope_ptr is not None:
        store_row_tile(q_out_ptr, out_rows + column, nope, mask, ALIGN)
        out_rows += LATENT
    store_pairs(q_out_ptr, out_rows, x1, x2, mask, NEOX, ALIGN)


@triton.jit
def rms_norm(x, weight, eps, WIDTH: tl.constexpr):
    """(x / sqrt(mean(x * x) + eps)) * weight of each row, fp32; WIDTH counts a row's real elements."""
    if WIDTH & (WIDTH - 1) == 0:
        mean_square = row_sum(x * x)[:, None] * (1.0 / WIDTH)  # the same bits, without a division
    else:
        mean_square = tl.div_rn(row_sum(x * x), 1.0 * WIDTH)[:, None]
    return x * tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps)) * weight


@triton.jit
def clear_rows(token, here, topk_ptr, topk_stride, TOPK: tl.constexpr, ALIGN: tl.constexpr):
    """-1 in the rows of top-k indices of tokens [ROWS, 1], as far as they are `here`."""
    BLOCK: tl.constexpr = triton.next_power_of_2(TOPK)
    entry = tl.arange(0, BLOCK)[None, :]
    cleared = tl.full((token.shape[0], BLOCK), -1, tl.int32)
    store_row_tile(topk_ptr, token * topk_stride + entry, cleared, here & (entry < TOPK), ALIGN)


@triton.jit
def clear_topk(token, tokens, topk_ptr, topk_stride, TOPK: tl.constexpr, ALIGN: tl.constexpr, PDL: tl.constexpr):
    """-1 in the rows of top-k indices of tokens [ROWS, 1]."""
    wait_for_grid_before(PDL)
    let_next_grid_start(PDL)
    clear_rows(token, token < tokens, topk_ptr, topk_stride, TOPK, ALIGN)


@triton.jit
def norm_q(
    token,
    tokens,
    q_c_ptr,
    q_c_stride,
    weight_ptr,
    eps,
    q_c_out_ptr,
    q_c_out_stride,
    topk_ptr,
    topk_stride,
    WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """RMSNorm of the q_c rows of tokens [ROWS, 1]; with TOPK, -1 in their rows of top-k indices."""
    here = token < tokens
    BLOCK: tl.constexpr = triton.next_power_of_2(WIDTH)
    column = tl.arange(0, BLOCK)[None, :]
    inside = None if BLOCK == WIDTH else column < WIDTH
    mask = here if BLOCK == WIDTH else here & inside
    rows = token * q_c_stride
    wait_for_grid_before(PDL)
    x = load_row_tile(q_c_ptr, rows + column, mask, ALIGN)
    weight = load_row_tile(weight_ptr, column, inside, ALIGN)
    let_next_grid_start(PDL)
    if TOPK:
        clear_rows(token, here, topk_ptr, topk_stride, TOPK, ALIGN)
    wide = x.to(tl.float32)
    if BLOCK != WIDTH:
        wide = tl.where(inside, wide, 0.0)
    y = rms_norm(wide, weight.to(tl.float32), eps, WIDTH)
    store_row_tile(q_c_out_ptr, token * q_c_out_stride + column, y.to(q_c_out_ptr.dtype.element_ty), mask, ALIGN)


@triton.jit
def store_latent_rows(
    latent,
    x1,
    x2,
    slot,
    live,
    cache_ptr,
    cache_stride_block,
    cache_stride_row,
    k_scale,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_UE8M0: tl.constexpr,
    NEOX: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
):
    """Write the live MLA cache rows from their latents (activation dtype or fp32) and rotated fp32 pairs.

    latent [ROWS, 512]; x1, x2 [ROWS, 32]; slot, live [ROWS, 1]. k_scale: a scalar, for layout fp8 alone.
    """
    row = (slot // BLOCK_SIZE).to(tl.int64) * cache_stride_block + (slot % BLOCK_SIZE) * cache_stride_row
    column = tl.arange(0, LATENT)[None, :]
    if LAYOUT == "plain":
        dtype: tl.constexpr = cache_ptr.dtype.element_ty
        store_row_tile(cache_ptr, row + column, latent.to(dtype), live, CACHE_ALIGN)
        store_pairs(cache_ptr, row + LATENT, x1.to(dtype), x2.to(dtype), live, NEOX, CACHE_ALIGN)
    else:
        bytes_ptr = cache_ptr.to(tl.pointer_type(tl.uint8))
        wide = latent.to(tl.float32)
        if LAYOUT == "fp8":
            inverse = reciprocal(k_scale)
            scaled = wide * inverse
            code1 = to_fp8(x1 * inverse, FP8, SIGNED_NAN).to(tl.uint8, bitcast=True)
            code2 = to_fp8(x2 * inverse, FP8, SIGNED_NAN).to(tl.uint8, bitcast=True)
            store_pairs(bytes_ptr, row + LATENT, code1, code2, live, NEOX, CACHE_ALIGN)
        else:
            ROWS: tl.constexpr = latent.shape[0]
            TILES: tl.constexpr = LATENT // LATENT_TILE
            tiles = tl.reshape(wide, (ROWS * TILES, LATENT_TILE))
            # The floor is one of the scale: at FP8's maximum times it, the scale is it, or the power of two above it.
            FLOOR: tl.constexpr = DS_MLA_FLOOR if TILE_UE8M0 else DS_MLA_FLOOR_FP32
            amax = bounded(row_max(tl.abs(tiles)), FLOOR * FP8_MAX[FP8])
            if TILE_UE8M0:
                scale, inverse = power_of_two_scale(amax, FP8)
                tiles = tiles * inverse[:, None]
            else:
                scale, inverse = rounded_scale(amax, FP8)
                tiles = divide(tiles, inverse[:, None])
            scaled = tl.reshape(tiles, (ROWS, LATENT))
            scale_ptr = (bytes_ptr + row + DS_SCALE_BYTES).to(tl.pointer_type(tl.float32))
            tl.store(scale_ptr + tl.arange(0, TILES)[None, :], tl.reshape(scale, (ROWS, TILES)), mask=live)
            rope_ptr = (bytes_ptr + row + DS_ROPE_BYTES).to(tl.pointer_type(tl.bfloat16))
            store_pairs(rope_ptr, slot * 0, x1.to(tl.bfloat16), x2.to(tl.bfloat16), live, NEOX, CACHE_ALIGN)
        codes = to_fp8(scaled, FP8, SIGNED_NAN).to(tl.uint8, bitcast=True)
        store_row_tile(bytes_ptr, row + column, codes, live, CACHE_ALIGN)


@triton.jit
def latent_kv(
    token,
    tokens,
    kv_c_ptr,
    kv_c_stride,
    k_pe_ptr,
    k_pe_stride,
    positions_ptr,
    table_ptr,
    table_stride,
    max_position,
    cache_ptr,
    cache_stride_block,
    cache_stride_row,
    slots_ptr,
    slot_count,
    capacity,
    k_scale_ptr,
    norm_weight_ptr,
    norm_eps,
    kv_c_out_ptr,
    kv_c_out_stride,
    k_pe_out_ptr,
    k_pe_out_stride,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_UE8M0: tl.constexpr,
    NEOX: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of the MLA cache for tokens [ROWS, 1]: concat([rms_norm](kv_c), rotate(k_pe)) as LAYOUT stores it."""
    # All loads come before the first store, so that they are in flight together.
    here = token < tokens
    column = tl.arange(0, LATENT)[None, :]
    kv_rows = token * kv_c_stride
    pe_rows = token * k_pe_stride
    wait_for_grid_before(PDL)
    position = tl.load(positions_ptr + token, mask=here)
    kv_c = load_row_tile(kv_c_ptr, kv_rows + column, here, ALIGN)
    k1, k2 = load_pairs(k_pe_ptr, pe_rows, here, NEOX, ALIGN)
    slot = load_slot(slots_ptr, slot_count, token)
    k_scale = tl.load(k_scale_ptr) if LAYOUT == "fp8" else None
    if norm_weight_ptr is not None:
        weight = load_row_tile(norm_weight_ptr, column, None, ALIGN)
    let_next_grid_start(PDL)
    slot, live = live_slot(slot, capacity)
    cos, sin = load_angles(table_ptr, table_stride, max_position, position, ALIGN)
    x1, x2 = rotate(k1.to(tl.float32), k2.to(tl.float32), cos, sin)
    x1, x2 = round_pairs(x1, x2, k1.dtype, ROUND)
    if norm_weight_ptr is not None:
        normed = rms_norm(kv_c.to(tl.float32), weight.to(tl.float32), norm_eps, LATENT)
        latent = normed.to(kv_c.dtype) if ROUND else normed
    else:
        latent = kv_c
    if kv_c_out_ptr is not None:
        store_row_tile(kv_c_out_ptr, token * kv_c_out_stride + column, latent.to(kv_c.dtype), here, ALIGN)
    if k_pe_out_ptr is not None:
        store_pairs(k_pe_out_ptr, token * k_pe_out_stride, x1.to(k1.dtype), x2.to(k1.dtype), here, NEOX, ALIGN)
    store_latent_rows(
        latent,
        x1,
        x2,
        slot,
        live,
        cache_ptr,
        cache_stride_block,
        cache_stride_row,
        k_scale,
        BLOCK_SIZE,
        LAYOUT,
        TILE_UE8M0,
        NEOX,
        FP8,
        SIGNED_NAN,
        CACHE_ALIGN,
    )


@triton.jit
def index_q(
    token,
    head_block,
    q_ptr,
    q_stride_token,
    q_stride_head,
    weights_ptr,
    weights_stride,
    positions_ptr,
    table_ptr,
    table_stride,
    max_position,
    q_out_ptr,
    q_out_stride_token,
    q_out_stride_head,
    weights_out_ptr,
    weights_out_stride,
    weights_scale,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NEOX: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_HEADS indexer heads of one token: rotate, quantise per head, fold the scales into the weights."""
    head = (head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)
    mask = None if HEADS % BLOCK_HEADS == 0 else head < HEADS
    q_rows = token * q_stride_token + head * q_stride_head
    out_rows = token * q_out_stride_token + head * q_out_stride_head
    weight_rows = token * weights_stride + head
    wait_for_grid_before(PDL)
    position = tl.load(positions_ptr + token)
    x1, x2 = load_pairs(q_ptr, q_rows, mask, NEOX, ALIGN)
    y1, y2 = load_pairs(q_ptr, q_rows + ROPE, mask, NEOX, ALIGN)
    weights = tl.load(weights_ptr + weight_rows, mask=mask)  # [BLOCK_HEADS, 1]
    let_next_grid_start(PDL)
    cos, sin = load_angles(table_ptr, table_stride, max_position, position, ALIGN)
    dtype = x1.dtype
    x1, x2 = rotate(x1.to(tl.float32), x2.to(tl.float32), cos, sin)
    x1, x2 = round_pairs(x1, x2, dtype, ROUND)
    x1, x2, y1, y2, scale = quantise_index_heads(
        x1, x2, y1.to(tl.float32), y2.to(tl.float32), ROUND, UE8M0, FP8, SIGNED_NAN
    )
    store_pairs(q_out_ptr, out_rows, x1, x2, mask, NEOX, ALIGN)
    store_pairs(q_out_ptr, out_rows + ROPE, y1, y2, mask, NEOX, ALIGN)
    folded = (weights.to(tl.float32) * scale[:, None]) * weights_scale
    tl.store(weights_out_ptr + token * weights_out_stride + head, folded, mask=mask)


@triton.jit
def quantise_index_heads(
    x1, x2, y1, y2, ROUND: tl.constexpr, UE8M0: tl.constexpr, FP8: tl.constexpr, SIGNED_NAN: tl.constexpr
):
    """Indexer query heads [HEADS, 32] x 4 to fp8, one scale a head: the floor is that of the rounding."""
    FLOOR: tl.constexpr = INDEX_Q_FLOOR if ROUND else INDEX_Q_FLOOR_FP32
    return quantise_rows(x1, x2, y1, y2, FLOOR, UE8M0, FP8, SIGNED_NAN)


@triton.jit
def load_parameters(ptr, NEOX: tl.constexpr):
    """The 128 weights or biases of a layer norm as two pair tiles, in their own dtype."""
    one = tl.arange(0, 1)[:, None]
    x1, x2 = load_pairs(ptr, one, None, NEOX, 1)
    y1, y2 = load_pairs(ptr, one + ROPE, None, NEOX, 1)
    return x1, x2, y1, y2


@triton.jit
def layer_norm(x1, x2, y1, y2, weight, bias, eps):
    """((x - mean) / sqrt(var + eps)) * weight + bias over a row of 128 in two pair tiles; two passes, fp32 out."""
    x1, x2, y1, y2 = x1.to(tl.float32), x2.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32)
    mean = row_sum_in_order((x1 + x2) + (y1 + y2))[:, None] * (1.0 / INDEX)
    x1, x2, y1, y2 = x1 - mean, x2 - mean, y1 - mean, y2 - mean
    variance = row_sum_in_order((x1 * x1 + x2 * x2) + (y1 * y1 + y2 * y2))[:, None] * (1.0 / INDEX)
    r = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    return (
        x1 * r * weight[0].to(tl.float32) + bias[0].to(tl.float32),
        x2 * r * weight[1].to(tl.float32) + bias[1].to(tl.float32),
        y1 * r * weight[2].to(tl.float32) + bias[2].to(tl.float32),
        y2 * r * weight[3].to(tl.float32) + bias[3].to(tl.float32),
    )


@triton.jit
def store_tiled_pairs(base, row, FIRST: tl.constexpr, x1, x2, mask, NEOX: tl.constexpr, ALIGN: tl.constexpr):
    """store_pairs of bytes FIRST to FIRST + 63 of rows [ROWS, 1] into blocks of tiles; FIRST is at a tile's edge."""
    tile = row // TILE_TOKENS * (TILE_TOKENS * INDEX) + row % TILE_TOKENS * TILE_BYTES
    pair = tl.arange(0, ROPE // 2)[None, :]
    byte = FIRST + pair if NEOX else FIRST + 2 * pair
    place = tile + byte // TILE_BYTES * (TILE_TOKENS * TILE_BYTES) + byte % TILE_BYTES
    if NEOX:
        # The second half lies whole tiles behind the first.
        store_row_tile(base, place, x1, mask, ALIGN)
        store_row_tile(base, place + ROPE // 2 * TILE_TOKENS, x2, mask, ALIGN)
    else:
        tl.store(base + place, x1, mask=mask)
        tl.store(base + place + 1, x2, mask=mask)


@triton.jit
def store_index_rows(
    x1,
    x2,
    y1,
    y2,
    slot,
    live,
    cache_ptr,
    cache_stride_block,
    LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
):
    """Quantise prepared keys (fp32 pair tiles: rotary dims, the rest) and write the live ones; slot, live [ROWS, 1]."""
    c1, c2, d1, d2, scale = quantise_rows(x1, x2, y1, y2, INDEX_K_FLOOR, UE8M0, FP8, SIGNED_NAN)
    c1, c2 = c1.to(tl.uint8, bitcast=True), c2.to(tl.uint8, bitcast=True)
    d1, d2 = d1.to(tl.uint8, bitcast=True), d2.to(tl.uint8, bitcast=True)
    bytes_ptr = cache_ptr.to(tl.pointer_type(tl.uint8))
    block = (slot // BLOCK_SIZE).to(tl.int64) * cache_stride_block
    row = slot % BLOCK_SIZE
    if LAYOUT == "tiled16":
        store_tiled_pairs(bytes_ptr + block, row, 0, c1, c2, live, NEOX, CACHE_ALIGN)
        store_tiled_pairs(bytes_ptr + block, row, ROPE, d1, d2, live, NEOX, CACHE_ALIGN)
    else:
        values = block + row * INDEX
        store_pairs(bytes_ptr, values, c1, c2, live, NEOX, CACHE_ALIGN)
        store_pairs(bytes_ptr, values + ROPE, d1, d2, live, NEOX, CACHE_ALIGN)
    scale_ptr = (bytes_ptr + block + BLOCK_SIZE * KEY_SCALE_BYTES).to(tl.pointer_type(tl.float32))
    tl.store(scale_ptr + row, scale[:, None], mask=live)


@triton.jit
def index_k(
    token,
    tokens,
    k_ptr,
    k_stride,
    norm_weight_ptr,
    norm_bias_ptr,
    eps,
    positions_ptr,
    table_ptr,
    table_stride,
    max_position,
    cache_ptr,
    cache_stride_block,
    slots_ptr,
    slot_count,
    capacity,
    LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows of the indexer cache for tokens [ROWS, 1]: layer norm, rotate, quantise."""
    here = token < tokens
    rows = token * k_stride
    wait_for_grid_before(PDL)
    position = tl.load(positions_ptr + token, mask=here)
    k1, k2 = load_pairs(k_ptr, rows, here, NEOX, ALIGN)
    k3, k4 = load_pairs(k_ptr, rows + ROPE, here, NEOX, ALIGN)
    slot = load_slot(slots_ptr, slot_count, token)
    weight, bias = load_parameters(norm_weight_ptr, NEOX), load_parameters(norm_bias_ptr, NEOX)
    let_next_grid_start(PDL)
    slot, live = live_slot(slot, capacity)
    cos, sin = load_angles(table_ptr, table_stride, max_position, position, ALIGN)
    x1, x2, y1, y2 = layer_norm(k1, k2, k3, k4, weight, bias, eps)
    x1, x2 = round_pairs(x1, x2, k1.dtype, ROUND)
    y1, y2 = round_pairs(y1, y2, k1.dtype, ROUND)
    x1, x2 = rotate(x1, x2, cos, sin)
    x1, x2 = round_pairs(x1, x2, k1.dtype, ROUND)
    store_index_rows(
        x1,
        x2,
        y1,
        y2,
        slot,
        live,
        cache_ptr,
        cache_stride_block,
        LAYOUT,
        BLOCK_SIZE,
        NEOX,
        UE8M0,
        FP8,
        SIGNED_NAN,
        CACHE_ALIGN,
    )

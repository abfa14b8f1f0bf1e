"""Kernels of the unfused chains: the steps that an engine launches one by one, from the roles' own functions."""

import triton
import triton.language as tl

from dsafuse.kernels.grids import kernel, rows_at, wait_for_inputs
from dsafuse.kernels.roles import (
    LATENT,
    ROPE,
    layer_norm,
    load_parameters,
    norm_q,
    quantise_index_heads,
    store_index_rows,
    store_latent_rows,
)
from dsafuse.kernels.tiles import (
    live_slot,
    load_angles,
    load_pairs,
    load_row_tile,
    load_slot,
    reciprocal,
    rotate,
    store_pairs,
    store_row_tile,
    to_fp8,
)


@triton.jit
def head_rows(head_block, HEADS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Heads [BLOCK_HEADS, 1] of a block, and which of them exist."""
    head = (head_block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None].to(tl.int64)
    return head, head < HEADS


@triton.jit
def rotate_row(x_ptr, x_rows, out_ptr, out_rows, angles, mask, NEOX: tl.constexpr, ALIGN: tl.constexpr):
    """Rotate 64 values of each row into a contiguous tensor, in its dtype."""
    x1, x2 = load_pairs(x_ptr, x_rows, mask, NEOX, ALIGN)
    y1, y2 = rotate(x1.to(tl.float32), x2.to(tl.float32), angles[0], angles[1])
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    store_pairs(out_ptr, out_rows, y1.to(dtype), y2.to(dtype), mask, NEOX, 16)


@kernel
def rotate_heads_and_key(
    q_ptr,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    k_ptr,
    k_stride: tl.int64,
    q_out_ptr,
    k_out_ptr,
    positions_ptr,
    table_ptr,
    table_stride: tl.int64,
    max_position: tl.int32,
    KEY: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    NEOX: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """RoPE of 64 dims of the one key (KEY = 1) and of every head (HEADS > 0), into contiguous tensors."""
    wait_for_inputs(PDL)
    PARTS: tl.constexpr = KEY + (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    token = (program // PARTS).to(tl.int64)
    part = program % PARTS
    angles = load_angles(table_ptr, table_stride, max_position, tl.load(positions_ptr + token), ALIGN)
    if KEY:
        if part == 0:
            one = tl.arange(0, 1)[:, None]
            rotate_row(k_ptr, token * k_stride + one, k_out_ptr, token * ROPE + one, angles, None, NEOX, ALIGN)
    if HEADS:
        if part >= KEY:
            head, mask = head_rows(part - KEY, HEADS, BLOCK_HEADS)
            source = token * q_stride_token + head * q_stride_head
            rotate_row(q_ptr, source, q_out_ptr, (token * HEADS + head) * ROPE, angles, mask, NEOX, ALIGN)


@kernel
def concat_query(
    q_nope_ptr,
    q_nope_stride_token: tl.int64,
    q_nope_stride_head: tl.int64,
    q_rot_ptr,
    query_ptr,
    query_stride_token: tl.int64,
    query_stride_head: tl.int64,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """query = concat(q_nope, q_rot) in the dtype of query."""
    wait_for_inputs(PDL)
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    token = (program // HEAD_BLOCKS).to(tl.int64)
    head, mask = head_rows(program % HEAD_BLOCKS, HEADS, BLOCK_HEADS)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    column = tl.arange(0, LATENT)[None, :]
    rope_column = tl.arange(0, ROPE)[None, :]
    nope = load_row_tile(q_nope_ptr, token * q_nope_stride_token + head * q_nope_stride_head + column, mask, ALIGN)
    rotated = load_row_tile(q_rot_ptr, (token * HEADS + head) * ROPE + rope_column, mask, 16)
    rows = token * query_stride_token + head * query_stride_head
    store_row_tile(query_ptr, rows + column, nope.to(dtype), mask, ALIGN)
    store_row_tile(query_ptr, rows + LATENT + rope_column, rotated.to(dtype), mask, ALIGN)


@kernel
def quantise_query(
    query_ptr,
    q_scale_ptr,
    q_out_ptr,
    q_out_stride_token: tl.int64,
    q_out_stride_head: tl.int64,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """q_out = fp8(query / q_scale); query is contiguous."""
    wait_for_inputs(PDL)
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    token = (program // HEAD_BLOCKS).to(tl.int64)
    head, mask = head_rows(program % HEAD_BLOCKS, HEADS, BLOCK_HEADS)
    inverse = reciprocal(tl.load(q_scale_ptr))
    column = tl.arange(0, LATENT)[None, :]
    rope_column = LATENT + tl.arange(0, ROPE)[None, :]
    source = (token * HEADS + head) * (LATENT + ROPE)
    target = token * q_out_stride_token + head * q_out_stride_head
    latent = load_row_tile(query_ptr, source + column, mask, 16).to(tl.float32)
    rope = load_row_tile(query_ptr, source + rope_column, mask, 16).to(tl.float32)
    store_row_tile(q_out_ptr, target + column, to_fp8(latent * inverse, FP8, SIGNED_NAN), mask, ALIGN)
    store_row_tile(q_out_ptr, target + rope_column, to_fp8(rope * inverse, FP8, SIGNED_NAN), mask, ALIGN)


@kernel
def write_latent(
    kv_c_ptr,
    kv_c_stride: tl.int64,
    k_rot_ptr,
    cache_ptr,
    cache_stride_block: tl.int64,
    cache_stride_row: tl.int64,
    slots_ptr,
    slot_count: tl.int32,
    capacity: tl.int32,
    k_scale_ptr,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    TILE_UE8M0: tl.constexpr,
    NEOX: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """kv_cache[slot] = quantise(concat(kv_c, k_rot))."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    slot, live = live_slot(load_slot(slots_ptr, slot_count, token), capacity)
    x1, x2 = load_pairs(k_rot_ptr, token * ROPE, None, NEOX, 16)
    latent = load_row_tile(kv_c_ptr, token * kv_c_stride + tl.arange(0, LATENT)[None, :], None, ALIGN)
    store_latent_rows(
        latent,
        x1.to(tl.float32),
        x2.to(tl.float32),
        slot,
        live,
        cache_ptr,
        cache_stride_block,
        cache_stride_row,
        tl.load(k_scale_ptr) if LAYOUT == "fp8" else None,
        BLOCK_SIZE,
        LAYOUT,
        TILE_UE8M0,
        NEOX,
        FP8,
        SIGNED_NAN,
        CACHE_ALIGN,
    )


@kernel
def norm_key(
    k_ptr,
    k_stride: tl.int64,
    tokens: tl.int32,
    weight_ptr,
    bias_ptr,
    eps: tl.float32,
    k_norm_ptr,
    ROWS: tl.constexpr,
    NEOX: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """k_norm = layer_norm(k), summed over the pairs of NEOX first; ROWS as the fused kernel's, for its layout."""
    wait_for_inputs(PDL)
    token = rows_at(tl.program_id(0) * ROWS, ROWS)
    here = token < tokens
    rows = token * k_stride
    k1, k2 = load_pairs(k_ptr, rows, here, NEOX, ALIGN)
    k3, k4 = load_pairs(k_ptr, rows + ROPE, here, NEOX, ALIGN)
    weight, bias = load_parameters(weight_ptr, NEOX), load_parameters(bias_ptr, NEOX)
    x1, x2, y1, y2 = layer_norm(k1, k2, k3, k4, weight, bias, eps)
    dtype: tl.constexpr = k_norm_ptr.dtype.element_ty
    out = token * (2 * ROPE)
    store_pairs(k_norm_ptr, out, x1.to(dtype), x2.to(dtype), here, NEOX, 16)
    store_pairs(k_norm_ptr, out + ROPE, y1.to(dtype), y2.to(dtype), here, NEOX, 16)


@kernel
def quantise_index_query(
    q_ptr,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    q_rot_ptr,
    q_out_ptr,
    q_out_stride_token: tl.int64,
    q_out_stride_head: tl.int64,
    scales_ptr,
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
    """(q_out, scales) = quantise(concat(q_rot, rest of q)), one scale a head."""
    wait_for_inputs(PDL)
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    token = (program // HEAD_BLOCKS).to(tl.int64)
    head, mask = head_rows(program % HEAD_BLOCKS, HEADS, BLOCK_HEADS)
    heads = program % HEAD_BLOCKS * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    x1, x2 = load_pairs(q_rot_ptr, (token * HEADS + head) * ROPE, mask, NEOX, 16)
    y1, y2 = load_pairs(q_ptr, token * q_stride_token + head * q_stride_head + ROPE, mask, NEOX, ALIGN)
    x1, x2, y1, y2 = x1.to(tl.float32), x2.to(tl.float32), y1.to(tl.float32), y2.to(tl.float32)
    c1, c2, d1, d2, scale = quantise_index_heads(x1, x2, y1, y2, ROUND, UE8M0, FP8, SIGNED_NAN)
    out = token * q_out_stride_token + head * q_out_stride_head
    store_pairs(q_out_ptr, out, c1, c2, mask, NEOX, ALIGN)
    store_pairs(q_out_ptr, out + ROPE, d1, d2, mask, NEOX, ALIGN)
    tl.store(scales_ptr + token * HEADS + heads, scale, mask=heads < HEADS)


@kernel
def fold_weights(
    weights_ptr,
    weights_stride: tl.int64,
    scales_ptr,
    weights_scale: tl.float32,
    weights_out_ptr,
    weights_out_stride: tl.int64,
    elements: tl.int64,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """weights_out = (weights * scales) * weights_scale; scales are contiguous."""
    wait_for_inputs(PDL)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, head, mask = element // HEADS, element % HEADS, element < elements
    weights = tl.load(weights_ptr + token * weights_stride + head, mask=mask).to(tl.float32)
    folded = (weights * tl.load(scales_ptr + element, mask=mask)) * weights_scale
    tl.store(weights_out_ptr + token * weights_out_stride + head, folded, mask=mask)


@kernel
def write_key(
    k_norm_ptr,
    k_rot_ptr,
    cache_ptr,
    cache_stride_block: tl.int64,
    slots_ptr,
    slot_count: tl.int32,
    capacity: tl.int32,
    LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """kv_cache[slot] = quantise(concat(k_rot, rest of k_norm)), one scale a row."""
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    slot, live = live_slot(load_slot(slots_ptr, slot_count, token), capacity)
    x1, x2 = load_pairs(k_rot_ptr, token * ROPE, None, NEOX, 16)
    y1, y2 = load_pairs(k_norm_ptr, token * (2 * ROPE) + ROPE, None, NEOX, 16)
    store_index_rows(
        x1.to(tl.float32),
        x2.to(tl.float32),
        y1.to(tl.float32),
        y2.to(tl.float32),
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


@kernel
def normalise(
    x_ptr,
    x_stride: tl.int64,
    weight_ptr,
    eps: tl.float32,
    out_ptr,
    out_stride: tl.int64,
    WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = rms_norm(x), a row for each program."""
    token = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)[:, None]
    tokens = tl.num_programs(0)
    norm_q(token, tokens, x_ptr, x_stride, weight_ptr, eps, out_ptr, out_stride, None, 0, WIDTH, 0, ALIGN, PDL)

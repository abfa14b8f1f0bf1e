"""Kernels: grids that hand programs to roles. A key row has a program of its own, the first of its token.

Nothing but constexprs is specialised: not the token count, not strides, not alignment. One more variant of each
configuration exists, for inputs whose rows do not start at multiples of 16 bytes (ALIGN = 1).
"""

import inspect

import triton
import triton.language as tl

from dsafuse.kernels.roles import index_k, index_q, latent_kv, latent_q


def kernel(fn):
    """triton.jit that specialises on constexpr parameters alone."""
    runtime = [p.name for p in inspect.signature(fn).parameters.values() if p.annotation is not tl.constexpr]
    return triton.jit(fn, do_not_specialize=runtime, do_not_specialize_on_alignment=runtime)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Under programmatic dependent launch: wait for the grid before this one, then let the next one start.

    Every program waits first, those that return early included: one that had not would let a later grid run
    before an earlier one's writes are visible.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def mla(
    q_nope_ptr,
    q_nope_stride_token: tl.int64,
    q_nope_stride_head: tl.int64,
    q_pe_ptr,
    q_pe_stride_token: tl.int64,
    q_pe_stride_head: tl.int64,
    kv_c_ptr,
    kv_c_stride: tl.int64,
    k_pe_ptr,
    k_pe_stride: tl.int64,
    cache_ptr,
    cache_stride_block: tl.int64,
    cache_stride_row: tl.int64,
    slots_ptr,
    slot_count: tl.int64,
    capacity: tl.int64,
    positions_ptr,
    table_ptr,
    table_stride: tl.int64,
    max_position: tl.int64,
    q_scale_ptr,
    k_scale_ptr,
    q_out_ptr,
    q_out_stride_token: tl.int64,
    q_out_stride_head: tl.int64,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LAYOUT: tl.constexpr,
    NEOX: tl.constexpr,
    QUERY_FP8: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """`fused_qk_rope_concat_and_cache_mla`. Grid: tokens x (key row, head blocks)."""
    wait_for_inputs(PDL)
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    token = (program // (1 + HEAD_BLOCKS)).to(tl.int64)
    part = program % (1 + HEAD_BLOCKS)
    if part == 0:
        latent_kv(
            token,
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
            BLOCK_SIZE,
            LAYOUT,
            NEOX,
            FP8,
            FP8_MAX,
            ROUND,
            ALIGN,
            CACHE_ALIGN,
        )
    else:
        latent_q(
            token,
            part - 1,
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
            HEADS,
            BLOCK_HEADS,
            NEOX,
            QUERY_FP8,
            FP8,
            FP8_MAX,
            ROUND,
            ALIGN,
        )


@kernel
def indexer(
    q_ptr,
    q_stride_token: tl.int64,
    q_stride_head: tl.int64,
    weights_ptr,
    weights_stride: tl.int64,
    k_ptr,
    k_stride: tl.int64,
    cache_ptr,
    cache_stride_block: tl.int64,
    slots_ptr,
    slot_count: tl.int64,
    capacity: tl.int64,
    norm_weight_ptr,
    norm_bias_ptr,
    positions_ptr,
    table_ptr,
    table_stride: tl.int64,
    max_position: tl.int64,
    weights_scale: tl.float32,
    eps: tl.float32,
    q_out_ptr,
    q_out_stride_token: tl.int64,
    q_out_stride_head: tl.int64,
    weights_out_ptr,
    weights_out_stride: tl.int64,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """`indexer_qk_rope_quant_and_cache`. Grid: tokens x (key row, head blocks)."""
    wait_for_inputs(PDL)
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    token = (program // (1 + HEAD_BLOCKS)).to(tl.int64)
    part = program % (1 + HEAD_BLOCKS)
    if part == 0:
        index_k(
            token,
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
            BLOCK_SIZE,
            NEOX,
            UE8M0,
            FP8,
            FP8_MAX,
            ROUND,
            ALIGN,
            CACHE_ALIGN,
        )
    else:
        index_q(
            token,
            part - 1,
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
            HEADS,
            BLOCK_HEADS,
            NEOX,
            UE8M0,
            FP8,
            FP8_MAX,
            ROUND,
            ALIGN,
        )

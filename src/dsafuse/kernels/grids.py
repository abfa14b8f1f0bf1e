"""The one kernel behind every op: a grid that hands programs to the roles that the op has.

Nothing but constexprs is specialised: not the token count, not strides, not alignment. One more variant of each
configuration exists, for inputs whose rows do not start at multiples of 16 bytes (ALIGN = 1).
"""

import inspect

import triton
import triton.language as tl

from dsafuse.kernels.roles import index_k, index_q, latent_kv, latent_q, norm_q


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
def prepare(
    positions_ptr,
    tokens: tl.int32,
    # both latent roles
    table_ptr,
    table_stride: tl.int64,
    max_position: tl.int32,
    # latent_q
    q_nope_ptr,
    q_nope_stride_token: tl.int64,
    q_nope_stride_head: tl.int64,
    q_pe_ptr,
    q_pe_stride_token: tl.int64,
    q_pe_stride_head: tl.int64,
    q_out_ptr,
    q_out_stride_token: tl.int64,
    q_out_stride_head: tl.int64,
    q_scale_ptr,
    # latent_kv
    kv_c_ptr,
    kv_c_stride: tl.int64,
    k_pe_ptr,
    k_pe_stride: tl.int64,
    cache_ptr,
    cache_stride_block: tl.int64,
    cache_stride_row: tl.int64,
    slots_ptr,
    slot_count: tl.int32,
    capacity: tl.int32,
    k_scale_ptr,
    kv_norm_weight_ptr,
    kv_norm_eps: tl.float32,
    kv_c_out_ptr,
    kv_c_out_stride: tl.int64,
    k_pe_out_ptr,
    k_pe_out_stride: tl.int64,
    # norm_q
    q_c_ptr,
    q_c_stride: tl.int64,
    q_norm_weight_ptr,
    q_norm_eps: tl.float32,
    q_c_out_ptr,
    q_c_out_stride: tl.int64,
    topk_ptr,
    topk_stride: tl.int64,
    # both index roles
    index_table_ptr,
    index_table_stride: tl.int64,
    index_max_position: tl.int32,
    # index_q
    index_q_ptr,
    index_q_stride_token: tl.int64,
    index_q_stride_head: tl.int64,
    weights_ptr,
    weights_stride: tl.int64,
    weights_scale: tl.float32,
    index_q_out_ptr,
    index_q_out_stride_token: tl.int64,
    index_q_out_stride_head: tl.int64,
    weights_out_ptr,
    weights_out_stride: tl.int64,
    # index_k
    index_k_ptr,
    index_k_stride: tl.int64,
    index_norm_weight_ptr,
    index_norm_bias_ptr,
    index_eps: tl.float32,
    index_cache_ptr,
    index_cache_stride_block: tl.int64,
    index_slots_ptr,
    index_slot_count: tl.int32,
    index_capacity: tl.int32,
    # which roles there are, and how they are cut
    INDEX_ROWS: tl.constexpr,
    LATENT_KV: tl.constexpr,
    NORM_Q: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_BLOCK_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    # formats
    LAYOUT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_NORM: tl.constexpr,
    NEOX: tl.constexpr,
    QUERY_FP8: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    INDEX_LAYOUT: tl.constexpr,
    INDEX_BLOCK_SIZE: tl.constexpr,
    INDEX_NEOX: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    INDEX_CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: for each group of tokens one program for all their indexer keys, then the programs of each token:
    one for each latent row, one for each block of heads. Without indexer keys a group is one token.

    The GPU starts a program in 1.2 ns (H200), which is what a prefill of lone key rows would cost.
    """
    wait_for_inputs(PDL)
    GROUP: tl.constexpr = INDEX_ROWS if INDEX_ROWS else 1
    KEYS: tl.constexpr = 1 if INDEX_ROWS else 0
    FIRST_NORM_Q: tl.constexpr = LATENT_KV
    FIRST_INDEX_Q: tl.constexpr = FIRST_NORM_Q + NORM_Q
    FIRST_LATENT_Q: tl.constexpr = FIRST_INDEX_Q + (INDEX_HEADS + INDEX_BLOCK_HEADS - 1) // INDEX_BLOCK_HEADS
    PARTS: tl.constexpr = FIRST_LATENT_Q + (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    program = tl.program_id(0)
    group = program // (KEYS + GROUP * PARTS)
    work = program % (KEYS + GROUP * PARTS) - KEYS  # -1: the group's keys
    first = group * GROUP
    if GROUP > 1:
        behind = tl.maximum(work, 0) // PARTS
        if first + behind >= tokens:
            return
        part = tl.where(work < 0, -1, work % PARTS)
        token = (first + behind).to(tl.int64)
    else:
        part = work
        token = first.to(tl.int64)
    # From the last role to the first, each with an end of its own, and bounds alone: then a compiler sees a tree, and
    # reads a role's arguments inside its branch. Branches that joined again, or tests for one part, kept all of
    # prepare_qk's 90 words of arguments in scalar registers on gfx942 and gfx950, and spilled some.
    if HEADS:
        if part >= FIRST_LATENT_Q:
            latent_q(
                token,
                part - FIRST_LATENT_Q,
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
                SIGNED_NAN,
                ROUND,
                ALIGN,
            )
            return
    if INDEX_HEADS:
        if part >= FIRST_INDEX_Q:
            index_q(
                token,
                part - FIRST_INDEX_Q,
                index_q_ptr,
                index_q_stride_token,
                index_q_stride_head,
                weights_ptr,
                weights_stride,
                positions_ptr,
                index_table_ptr,
                index_table_stride,
                index_max_position,
                index_q_out_ptr,
                index_q_out_stride_token,
                index_q_out_stride_head,
                weights_out_ptr,
                weights_out_stride,
                weights_scale,
                INDEX_HEADS,
                INDEX_BLOCK_HEADS,
                INDEX_NEOX,
                UE8M0,
                FP8,
                FP8_MAX,
                SIGNED_NAN,
                ROUND,
                ALIGN,
            )
            return
    if NORM_Q:
        if part >= FIRST_NORM_Q:
            norm_q(
                token,
                q_c_ptr,
                q_c_stride,
                q_norm_weight_ptr,
                q_norm_eps,
                q_c_out_ptr,
                q_c_out_stride,
                topk_ptr,
                topk_stride,
                Q_WIDTH,
                TOPK,
                ALIGN,
            )
            return
    if LATENT_KV:
        if part >= 0:
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
                kv_norm_weight_ptr,
                kv_norm_eps,
                kv_c_out_ptr,
                kv_c_out_stride,
                k_pe_out_ptr,
                k_pe_out_stride,
                BLOCK_SIZE,
                LAYOUT,
                KV_NORM,
                NEOX,
                FP8,
                FP8_MAX,
                SIGNED_NAN,
                ROUND,
                ALIGN,
                CACHE_ALIGN,
            )
            return
    if INDEX_ROWS:
        index_k(
            (first + tl.arange(0, INDEX_ROWS)[:, None]).to(tl.int64),
            tokens,
            index_k_ptr,
            index_k_stride,
            index_norm_weight_ptr,
            index_norm_bias_ptr,
            index_eps,
            positions_ptr,
            index_table_ptr,
            index_table_stride,
            index_max_position,
            index_cache_ptr,
            index_cache_stride_block,
            index_slots_ptr,
            index_slot_count,
            index_capacity,
            INDEX_LAYOUT,
            INDEX_BLOCK_SIZE,
            INDEX_NEOX,
            UE8M0,
            FP8,
            FP8_MAX,
            SIGNED_NAN,
            ROUND,
            ALIGN,
            INDEX_CACHE_ALIGN,
        )

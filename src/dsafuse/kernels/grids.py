"""The one kernel behind every op: a grid that hands programs to the roles that the op has.

Nothing but constexprs is specialised: not the token count, not strides, not alignment. One more variant of each
configuration exists, for inputs whose rows do not start at multiples of 16 bytes (ALIGN = 1).
"""

import inspect

import triton
import triton.language as tl

from dsafuse.kernels.roles import clear_topk, index_k, index_q, latent_kv, latent_q, norm_q
from dsafuse.kernels.tiles import let_next_grid_start, wait_for_grid_before


def kernel(fn):
    """triton.jit that specialises on constexpr parameters alone."""
    runtime = [p.name for p in inspect.signature(fn).parameters.values() if p.annotation is not tl.constexpr]
    return triton.jit(fn, do_not_specialize=runtime, do_not_specialize_on_alignment=runtime)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """What a kernel without roles begins with: wait for the grid before it, and let the next one start."""
    wait_for_grid_before(PDL)
    let_next_grid_start(PDL)


@triton.jit
def programs_of(tokens, ROWS: tl.constexpr):
    """How many programs of ROWS tokens take care of some tokens; none where ROWS is 0."""
    return (tokens + ROWS - 1) // ROWS if ROWS else 0


@triton.jit
def rows_at(first, ROWS: tl.constexpr):
    """The tokens [ROWS, 1] from `first` on."""
    return (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)


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
    # clear_topk
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
    GROUP: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    LATENT_ROWS: tl.constexpr,
    NORM_ROWS: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_BLOCK_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    # formats
    LAYOUT: tl.constexpr,
    TILE_UE8M0: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NEOX: tl.constexpr,
    Q_WIDTH: tl.constexpr,
    TOPK: tl.constexpr,
    INDEX_LAYOUT: tl.constexpr,
    INDEX_BLOCK_SIZE: tl.constexpr,
    INDEX_NEOX: tl.constexpr,
    UE8M0: tl.constexpr,
    FP8: tl.constexpr,
    SIGNED_NAN: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGN: tl.constexpr,
    CACHE_ALIGN: tl.constexpr,
    INDEX_CACHE_ALIGN: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: for each GROUP of tokens the programs of its indexer keys, its latent rows, its q_c rows, its indexer heads
    and its heads, in this order. GROUP = 0: all tokens are one group. Rows of top-k indices are cleared by the programs
    of the q_c rows, and by programs in their place where the op has none.

    *_ROWS: tokens of one program of a role, a power of two that divides GROUP; 0 for a role that the op lacks. The GPU
    starts a program in 1.2 ns (H200), which is what a prefill of lone rows would cost.
    """
    span = GROUP if GROUP else tokens
    HEAD_BLOCKS: tl.constexpr = (HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    INDEX_BLOCKS: tl.constexpr = (INDEX_HEADS + INDEX_BLOCK_HEADS - 1) // INDEX_BLOCK_HEADS
    first_latent = programs_of(span, INDEX_ROWS)
    first_norm = first_latent + programs_of(span, LATENT_ROWS)
    first_index_q = first_norm + programs_of(span, NORM_ROWS)
    first_latent_q = first_index_q + span * INDEX_BLOCKS
    work = tl.program_id(0)
    first = 0
    if GROUP:
        programs = first_latent_q + span * HEAD_BLOCKS
        first = work // programs * GROUP
        work = work % programs
    # Each branch waits for the grid before, the roles when they have their addresses.
    # From the last role to the first, each with an end of its own, and bounds alone: then a compiler sees a tree, and
    # reads a role's arguments inside its branch. Branches that joined again, or tests for one part, kept all of
    # prepare_qk's 90 words of arguments in scalar registers on gfx942 and gfx950, and spilled some.
    if HEADS:
        if work >= first_latent_q:
            token = (first + (work - first_latent_q) // HEAD_BLOCKS).to(tl.int64)
            if token >= tokens:
                wait_for_grid_before(PDL)
                return
            latent_q(
                token,
                (work - first_latent_q) % HEAD_BLOCKS,
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
                FP8,
                SIGNED_NAN,
                ROUND,
                ALIGN,
                PDL,
            )
            return
    if INDEX_HEADS:
        if work >= first_index_q:
            token = (first + (work - first_index_q) // INDEX_BLOCKS).to(tl.int64)
            if token >= tokens:
                wait_for_grid_before(PDL)
                return
            index_q(
                token,
                (work - first_index_q) % INDEX_BLOCKS,
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
                SIGNED_NAN,
                ROUND,
                ALIGN,
                PDL,
            )
            return
    if NORM_ROWS:
        if work >= first_norm:
            token = rows_at(first + (work - first_norm) * NORM_ROWS, NORM_ROWS)
            if Q_WIDTH:
                norm_q(
                    token,
                    tokens,
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
                    PDL,
                )
            else:
                clear_topk(token, tokens, topk_ptr, topk_stride, TOPK, ALIGN, PDL)
            return
    if LATENT_ROWS:
        if work >= first_latent:
            latent_kv(
                rows_at(first + (work - first_latent) * LATENT_ROWS, LATENT_ROWS),
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
                kv_norm_weight_ptr,
                kv_norm_eps,
                kv_c_out_ptr,
                kv_c_out_stride,
                k_pe_out_ptr,
                k_pe_out_stride,
                BLOCK_SIZE,
                LAYOUT,
                TILE_UE8M0,
                NEOX,
                FP8,
                SIGNED_NAN,
                ROUND,
                ALIGN,
                CACHE_ALIGN,
                PDL,
            )
            return
    if INDEX_ROWS:
        index_k(
            rows_at(first + work * INDEX_ROWS, INDEX_ROWS),
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
            SIGNED_NAN,
            ROUND,
            ALIGN,
            INDEX_CACHE_ALIGN,
            PDL,
        )

"""Launch plans: how the work of a call is cut into programs, a frozen table with the reason of each row."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsafuse.ops.config import Config, IndexQ, LatentQ
from dsafuse.registry import Arguments
from dsafuse.target import Target


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """How a grid is cut: query heads of one program of a query role, tokens of one of each other role, its threads."""

    block_heads: int
    rope_block_heads: int
    """Where the query is its rotary part alone."""
    index_block_heads: int
    index_rows: int
    latent_rows: int
    norm_rows: int
    """Of q_c, of top-k indices, or of both."""
    group: int
    """Tokens whose programs stand together in the grid; 0: role after role, over all tokens."""
    threads: int


_ONE = LaunchPlan(
    block_heads=4,
    rope_block_heads=32,
    index_block_heads=16,
    index_rows=4,
    latent_rows=1,
    norm_rows=1,
    group=0,
    threads=64,
)

WORK = {
    (False, False, False): "latents",
    (False, False, True): "latents",
    (True, False, False): "attention",
    (False, True, True): "indexer",
    (True, True, False): "queries",
    (True, True, True): "queries and keys",
}
"""What a call does, by whether it has attention's heads, the indexer's heads, the indexer's keys."""

# By vendor, and by the work of a call; for any number of tokens, so that this compiles nothing.
#
# nvidia: measured on an H200, 2026-11-29 and -30 (docs/performance.md has what each choice costs). A program has to
# move 6 KB or more, since the GPU starts one in 1.2 ns, and of the cuts that do, the one with the least mean time from
# 1 token to 16,384, cold and warm, stands here. Role after role, the longest chain, that of the indexer keys, first.
# Against other plans:
#
#   attention         4.7 % less time on average than the best by token count, two to four an op, of the kernel as it
#                     was; 3 % more at 128 tokens and 128 heads
#   indexer           5.1 % less than those; up to 4 % more at 1,024 and 2,048 tokens. Two keys would give 2 % up to 64
#                     tokens, and cost 3 to 7 % at 16,384
#   queries           7.6 % less than those; up to 3 % more from 256 tokens on
#   queries and keys  as much on average as 4 query heads, 16 indexer heads and 2 warps, and 0.1 to 0.4 us less up to 64
#                     tokens between an engine's GEMMs; 12 % more at 128 tokens warm, 2 % at 16,384 (16/32 heads)
#   latents           5 % less than with 8 keys, 7 % less than with lone rows for few tokens and two of all for many.
#                     Lone latent rows are a second wave of programs at 1,024 tokens. Its tokens' programs stand
#                     together: what is written at one time, half of it rows of top-k indices, is then near in memory
#
# A thread has one column of a key's row or two, in each of them: with more, its sums would be in another order than the
# other ops' (tiles.row_sum_in_order).
#
# amd: not measured, for want of an AMD GPU, but read in the code that is compiled for it (docs/codegen.md). One wave of
# 64 on gfx9: no barrier and no shared memory, and every query and latent access is 8 bytes or wider; with 128 threads
# indexer heads and latent rows were stored by 4 bytes. 8 heads and not 4, for the same with their 64 rotary dims.
#
# cpu: interpreted programs cost by the program, not by the element.
PLANS: dict[str, dict[str, LaunchPlan]] = {
    "nvidia": {
        "latents": replace(_ONE, index_rows=2, latent_rows=2, group=16),
        "attention": replace(_ONE, block_heads=8, latent_rows=4, threads=128),
        "indexer": _ONE,
        "queries": replace(_ONE, threads=128),
        "queries and keys": replace(_ONE, block_heads=8, index_block_heads=32, latent_rows=4, threads=128),
    },
    "amd": dict.fromkeys(WORK.values(), replace(_ONE, block_heads=8, group=4)),
    "cpu": dict.fromkeys(WORK.values(), replace(_ONE, block_heads=16, latent_rows=4, norm_rows=2, group=4, threads=32)),
}


def plan_of(target: Target, config: Config) -> LaunchPlan:
    """The plan of a target for what a call has to do."""
    return PLANS[target.vendor][WORK[bool(config.latent_q), bool(config.index_q), bool(config.index_k)]]


def grid_of(arguments: Arguments, config: Config, plan: LaunchPlan) -> tuple[int]:
    """Programs of the launch, as `grids.prepare` cuts the tokens' work."""
    tokens = len(arguments["positions"])
    span = plan.group or tokens
    programs = sum(-(-span // rows) for rows in rows_of(config, plan).values() if rows)
    programs += sum(span * -(-role.heads // block_of(role, plan)) for role in (config.index_q, config.latent_q) if role)
    return (-(-tokens // span) * programs,)


def rows_of(config: Config, plan: LaunchPlan) -> dict[str, int]:
    """Tokens of one program of each role that has no heads, by the constant that says so; 0 for an absent role."""
    return {
        "INDEX_ROWS": plan.index_rows if config.index_k else 0,
        "LATENT_ROWS": plan.latent_rows if config.latent_kv else 0,
        "NORM_ROWS": plan.norm_rows if config.norm_q or config.clear_topk else 0,
    }


def block_of(role: LatentQ | IndexQ, plan: LaunchPlan) -> int:
    """Heads of one program of a query role."""
    if isinstance(role, IndexQ):
        return head_block(plan.index_block_heads, role.heads)
    return head_block(plan.block_heads if role.nope else plan.rope_block_heads, role.heads)


def head_block(most: int, heads: int) -> int:
    """Heads of one program: `most`, or the power of two that holds them all if that is less."""
    return min(most, 1 << max(heads - 1, 0).bit_length())

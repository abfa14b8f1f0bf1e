"""What a call has to move: every input read once and every output written once, role by role."""

from __future__ import annotations

from dsafuse.check.caches import caches_of
from dsafuse.check.cases import DTYPES, Case
from dsafuse.check.inputs import TOPK_WIDTHS, query_dtype, query_width
from dsafuse.layouts import INDEX_DIM, LATENT_DIM, QUERY_DIM, ROPE_DIM


def bytes_moved(case: Case) -> int:
    """Bytes of one call. Weights of norms and scales, a few KB that every token shares, do not count."""
    roles, activation = case.roles, DTYPES[case.activation].itemsize
    token = DTYPES[case.positions].itemsize
    if {"latent_q", "latent_kv"} & roles:
        token += ROPE_DIM * DTYPES[case.table].itemsize
    if {"index_q", "index_k"} & roles:
        token += ROPE_DIM * DTYPES[case.index_table].itemsize
    for cache in caches_of(case):
        token += cache.slots.itemsize + cache.layout.row_bytes(DTYPES[case.activation])
    if "latent_q" in roles:
        token += query_width(case) * case.heads * (activation + query_dtype(case).itemsize)
    if "latent_kv" in roles:
        token += QUERY_DIM * activation
        if case.normed and case.key_outs == "given":
            token += (LATENT_DIM + ROPE_DIM) * activation
    if "index_q" in roles:
        token += case.index_heads * (INDEX_DIM * (activation + 1) + DTYPES[case.weights].itemsize + 4)
    if "index_k" in roles:
        token += INDEX_DIM * activation
    if "norm_q" in roles:
        token += 2 * case.q_width * activation
    if "clear_topk" in roles:
        token += 4 * TOPK_WIDTHS[case.topk]
    return case.tokens * token

"""The mathematics of sparse MLA in torch: index scores, top-k, attention over the chosen rows.

For query token t with index query q[t, h], head weights w[t, h] and index keys k[s], s <= position(t):

    score(t, s) = sum_h w[t, h] * max(q[t, h] . k[s], 0)
    chosen(t)   = the index_topk positions s with the largest score
    out[t, h]   = sum_s softmax_s(scale * query[t, h] . row[s]) * row[s][:512]      s over chosen(t)

All of it in fp32. Tokens are taken in slices, so that the intermediate tensors stay small.
"""

from itertools import pairwise

import torch

from dsafuse.vllm.cpu import formats

# Elements of the largest intermediate tensor: 64 MiB in fp32.
SLICE_ELEMENTS = 1 << 24


def choose(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """The positions that each query token attends to.

    Args:
        query: [tokens, heads, 128]; the last tokens of one request. fp8 is read as its value: the scale of a
            head is in its weight already.
        weights: [tokens, heads].
        keys: [length, 128]; all keys of the request, length >= tokens.
        count: how many are chosen.
    Returns:
        [tokens, count] int32; positions in descending order, then -1 where fewer than count are visible.
    """
    tokens, heads, _ = query.shape
    length = keys.shape[0]
    chosen = torch.full((tokens, count), -1, dtype=torch.int32)
    step = max(1, SLICE_ELEMENTS // max(1, heads * length))
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        dots = torch.einsum("thd,sd->ths", query[first:last].float(), keys)
        score = torch.einsum("ths,th->ts", dots.relu_(), weights[first:last].float())
        position = torch.arange(length - tokens + first, length - tokens + last)
        hidden = torch.arange(length)[None, :] > position[:, None]
        score = score.masked_fill(hidden, float("-inf"))
        best, index = score.topk(min(count, length), dim=-1)
        index = index.masked_fill(best == float("-inf"), -1)
        chosen[first:last, : index.shape[1]] = index.sort(dim=-1, descending=True).values.to(torch.int32)
    return chosen


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    chosen: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> torch.Tensor:
    """Attention of each token over its chosen rows of the paged cache.

    Args:
        query: [tokens, heads, 576].
        kv_cache: [blocks, block_size, width].
        chosen: [tokens, count] positions inside the token's request; negative means none.
        block_table: [tokens, blocks of the token's request].
        scale: softmax scale.
    Returns:
        [tokens, heads, 512] in query's dtype; zero for a token that has nothing chosen.
    """
    out = query.new_empty((*query.shape[:2], formats.LATENT))
    first = 0
    for tokens in _same_request(block_table):
        part = slice(first, first + tokens)
        first += tokens
        arguments = query[part], kv_cache, chosen[part], block_table[part], scale, kv_cache_dtype, k_scale
        length = int(chosen[part].max()) + 1 if chosen[part].numel() else 0
        # A prefill's tokens choose the same rows again and again: then each row is read once.
        often = tokens * chosen.shape[1] > 2 * length > 0
        done = _attend_whole(*arguments, length) if often else None
        out[part] = _attend_chosen(*arguments) if done is None else done
    return out


def _same_request(block_table: torch.Tensor) -> list[int]:
    """Lengths of the runs of equal rows: whose tables are equal read the same memory."""
    if not len(block_table):
        return []
    changes = (block_table[1:] != block_table[:-1]).any(-1).nonzero().flatten() + 1
    edges = [0, *changes.tolist(), len(block_table)]
    return [end - start for start, end in pairwise(edges)]


def _attend_whole(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    chosen: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    length: int,
) -> torch.Tensor | None:
    """Attend over the first `length` rows of one request under a mask. None if a row is not finite: a weight of zero
    would not silence it.
    """
    tokens, heads, _ = query.shape
    position = torch.arange(length)
    block = block_table[0][position // kv_cache.shape[1]].long()
    rows = formats.read_mla(kv_cache, block, position % kv_cache.shape[1], kv_cache_dtype, k_scale)
    if not rows.isfinite().all():
        return None
    out = query.new_empty((tokens, heads, formats.LATENT))
    step = max(1, SLICE_ELEMENTS // (heads * length))
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        # One column more, for the -1 of what is not there.
        index = chosen[part].long() % (length + 1)
        hidden = torch.ones(len(index), length + 1, dtype=torch.bool).scatter_(1, index, False)[:, None, :length]
        logits = (query[part].float() @ rows.T * scale).masked_fill_(hidden, float("-inf"))
        weight = torch.softmax(logits, dim=-1).masked_fill_(hidden.all(-1, keepdim=True), 0.0)
        out[part] = (weight @ rows[:, : formats.LATENT]).to(out.dtype)
    return out


def _attend_chosen(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    chosen: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> torch.Tensor:
    """Attend over rows gathered for each token."""
    tokens, heads, width = query.shape
    count, block_size = chosen.shape[1], kv_cache.shape[1]
    out = query.new_empty((tokens, heads, formats.LATENT))
    step = max(1, SLICE_ELEMENTS // (count * width))
    for first in range(0, tokens, step):
        part = slice(first, min(first + step, tokens))
        visible = chosen[part] >= 0
        position = chosen[part].clamp(min=0).long()
        block = block_table[part].gather(1, position // block_size).long()
        rows = formats.read_mla(kv_cache, block, position % block_size, kv_cache_dtype, k_scale)
        logits = torch.einsum("thc,tkc->thk", query[part].float(), rows) * scale
        logits = logits.masked_fill(~visible[:, None, :], float("-inf"))
        weight = torch.softmax(logits, dim=-1)
        # A token with nothing visible has a softmax of NaN; its true result is an empty sum. Rows that are
        # not visible may hold anything, NaN included, and a weight of zero would not silence that.
        weight = weight.masked_fill(~visible.any(dim=-1)[:, None, None], 0.0)
        latent = rows[..., : formats.LATENT].masked_fill(~visible[..., None], 0.0)
        out[part] = torch.einsum("thk,tkc->thc", weight, latent).to(out.dtype)
    return out

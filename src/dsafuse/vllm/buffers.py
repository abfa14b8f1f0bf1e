"""Memory of queries, and of keys that are attended densely: shared by a model's layers, one for each micro-batch."""

from typing import Any
from weakref import WeakValueDictionary

import torch

from dsafuse.layouts import QUERY_DIM


class QueryBuffer:
    """[tokens, heads, 576] for each micro-batch, zeroed when it is made and at one address ever after, for CUDA graphs.

    heads may be more than a layer has, for kernels that want 64 or 128: nobody writes these rows, so they stay zero.
    The memory is taken at the first call, which in vLLM is the profiling run: so vLLM counts it before it sizes its
    caches, and it lies outside the pool that sleeping frees. tokens is vLLM's max_num_batched_tokens.
    """

    def __init__(self, tokens: int, heads: int, dtype: torch.dtype, micro_batches: int = 1) -> None:
        self.shape = (micro_batches, tokens, heads, QUERY_DIM)
        self.dtype = dtype
        self._made: torch.Tensor | None = None

    def rows(self, tokens: int, micro_batch: int, device: torch.device) -> torch.Tensor:
        """[tokens, heads, 576]: the first rows of a micro-batch's buffer."""
        if self._made is None:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "dsafuse: a CUDA graph is captured before any call without one: the query buffer's zeros would "
                    "be replayed; run the model once before capture, as vLLM's warm-up does"
                )
            self._made = torch.zeros(self.shape, dtype=self.dtype, device=device)
        if tokens > self.shape[1]:
            raise ValueError(f"dsafuse: tokens must be at most max_num_batched_tokens {self.shape[1]}, got {tokens}")
        return self._made[micro_batch, :tokens]


_SHARED: "WeakValueDictionary[tuple[int, int, int, torch.dtype], QueryBuffer]" = WeakValueDictionary()


def query_buffer(config: Any, heads: int, dtype: torch.dtype) -> QueryBuffer:
    """The buffer of the model whose layers are being built: a draft has its backbone's if heads and dtype agree.

    Layers hold it; it goes with the last of them. Two engines in one process share nothing: they may run at the same
    time, and what tells them apart is the table in which vLLM keeps each engine's layers.
    """
    tokens = int(config.scheduler_config.max_num_batched_tokens)
    key = (id(config.compilation_config.static_forward_context), tokens, heads, dtype)
    made = _SHARED.get(key)
    if made is None:
        made = _SHARED[key] = QueryBuffer(tokens, heads, dtype, max(1, config.parallel_config.num_ubatches))
    return made

"""Fused query and key preparation for DeepSeek Sparse Attention."""

from dsafuse.ops.indexer import indexer_qk_rope_quant_and_cache
from dsafuse.ops.mla import fused_qk_rope_concat_and_cache_mla
from dsafuse.ops.seams import prepare_latents, prepare_qk, prepare_queries
from dsafuse.warming import warm_up

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "fused_qk_rope_concat_and_cache_mla",
    "indexer_qk_rope_quant_and_cache",
    "prepare_latents",
    "prepare_qk",
    "prepare_queries",
    "warm_up",
]

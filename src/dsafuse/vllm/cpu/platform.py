"""vLLM's CPU platform, which also accepts sparse attention."""

from typing import Any

from vllm.logger import init_logger
from vllm.platforms.cpu import CpuPlatform

logger = init_logger("vllm.dsafuse")

BACKEND = "dsafuse.vllm.cpu.backend.TorchSparseMLABackend"
# The indexer's GPU kernels know blocks of 64 tokens; there is no reason to differ.
BLOCK_SIZE = 64
DSA_MODEL_TYPES = ("deepseek_v32", "glm_moe_dsa", "deepseek_mtp")


class DsaCpuPlatform(CpuPlatform):
    """CpuPlatform, and: a torch backend for sparse MLA; no needless limits on DSA models.

    Remove when vLLM's CPU build serves DeepSeek-V3.2 itself.
    """

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """The path of the attention backend: ours for sparse layers, vLLM's choice for all others."""
        if not attn_selector_config.use_sparse:
            path: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            return path
        reason = why_not_sparse(attn_selector_config)
        if reason is not None:
            raise NotImplementedError(f"Sparse attention on CPU: {reason}.")
        return BACKEND

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """What vLLM does for a CPU, less the limits of its dense MLA kernel for DSA models."""
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
            cache.block_size if cache.user_specified_block_size else BLOCK_SIZE,
        )
        super().check_and_update_config(vllm_config)
        if not is_dsa(vllm_config.model_config):
            return
        # CpuPlatform fits every MLA model to its dense kernel: blocks of 16, no chunked prefill, no prefix
        # caching. The torch backend has none of these limits, so what was asked for is put back.
        (
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
            cache.block_size,
        ) = asked
        _turn_off_rotary_custom_op(vllm_config.compilation_config.custom_ops)


def is_dsa(model_config: Any) -> bool:
    """Whether a model has DeepSeek Sparse Attention as V3.2 and GLM-5 do (V4 has kernels of its own)."""
    if model_config is None or not model_config.use_mla:
        return False
    config = model_config.hf_text_config
    return getattr(config, "model_type", None) in DSA_MODEL_TYPES and hasattr(config, "index_topk")


def why_not_sparse(selector: Any) -> str | None:
    """Why the torch backend cannot serve a sparse layer, or None."""
    from dsafuse.vllm.cpu.backend import KV_CACHE_DTYPES

    if not selector.use_mla:
        return "only MLA layers are served, got a layer without MLA"
    if selector.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
        return f"kv_cache_dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {selector.kv_cache_dtype}"
    if selector.head_size != 576:
        return f"head_size must be 576 (512 latent and 64 rotary), got {selector.head_size}"
    return None


def _turn_off_rotary_custom_op(custom_ops: list[str]) -> None:
    """vLLM 0.32's CPU rotary kernel is wrong on strided input, which is what MLA gives it.

    On the views of a wider GEMM output it errs by up to 7.8, silently; the torch form is right. Remove when
    `RotaryEmbedding.forward_cpu` equals `forward_native` on a strided query.
    """
    if "+rotary_embedding" in custom_ops:
        logger.warning(
            "custom_ops asks for +rotary_embedding: vLLM's CPU kernel rotates strided input wrongly, so "
            "this model's un-fused layers will be wrong."
        )
    elif "-rotary_embedding" not in custom_ops:
        custom_ops.append("-rotary_embedding")

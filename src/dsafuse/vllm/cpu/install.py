"""Puts the CPU pieces in place. Nothing here concerns the fused ops: both arms of a comparison need it.

What is touched, why, and when it can go: docs/vllm.md, "What each hook touches".
"""

from dsafuse.vllm import host


def install() -> list[str]:
    """Install once per process. Returns why not, one sentence each; an empty list means done."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.model_executor.models import deepseek_v2

    from dsafuse.vllm.cpu.backend import TorchIndexerBackend
    from dsafuse.vllm.cpu.indexer import TorchSparseAttnIndexer, per_token_group_quant_fp8

    key = "SparseAttnIndexer"
    holder = op_registry_oot.get(key)
    if holder is TorchSparseAttnIndexer:
        return []
    if holder is not None:
        return [host.taken(key, holder)]
    CustomOp.register_oot(name=key)(TorchSparseAttnIndexer)
    deepseek_v2.DeepseekV32IndexerCache.get_attn_backend = lambda self: TorchIndexerBackend
    deepseek_v2.per_token_group_quant_fp8 = per_token_group_quant_fp8
    return []

"""vLLM attention backends over the torch mathematics: sparse MLA, and the indexer's key cache.

Both share one metadata class. Every token takes the sparse path, prefill and decode alike, so there is no
split of the batch and no workspace; chunked prefill and prefix caching need nothing special.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)

from dsafuse.vllm.cpu import attention, formats

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")


@dataclass
class TorchDsaMetadata(AttentionMetadata):
    """What one step needs to know about its batch."""

    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    # vLLM's shared MLA code splits a batch by these. All tokens count as decode: one path for all.
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int = 0
    prefill: None = None
    decode: None = None


class TorchDsaMetadataBuilder(AttentionMetadataBuilder):
    """Copies the common metadata, and adds the request that each token belongs to."""

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The metadata of one step."""
        common = common_attn_metadata
        tokens_of = common.query_start_loc_cpu[1:] - common.query_start_loc_cpu[:-1]
        requests = torch.repeat_interleave(torch.arange(len(tokens_of)), tokens_of.long())
        return TorchDsaMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            seq_lens=common.seq_lens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            req_id_per_token=requests,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
        )


class _TorchDsaBackend(AttentionBackend):
    """What the two backends have in common."""

    @staticmethod
    def get_metadata_cls() -> type[TorchDsaMetadata]:
        """The metadata of a step."""
        return TorchDsaMetadata

    @staticmethod
    def get_builder_cls() -> type[TorchDsaMetadataBuilder]:
        """Who builds it."""
        return TorchDsaMetadataBuilder

    @classmethod
    def is_mla(cls) -> bool:
        """Yes: one latent row for each token."""
        return True

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any, which vLLM reads from an empty list."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any block size."""
        return [MultipleOf(1)]


class TorchSparseMLABackend(_TorchDsaBackend):
    """Sparse MLA over plain, per-tensor fp8 and fp8_ds_mla caches."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """The backend's name in vLLM's log."""
        return "DSAFUSE_TORCH_SPARSE_MLA"

    @staticmethod
    def get_impl_cls() -> "type[TorchSparseMLAImpl]":
        """The class that vLLM makes for each layer."""
        return TorchSparseMLAImpl

    @classmethod
    def is_sparse(cls) -> bool:
        """Yes: it attends to the rows of the top-k buffer."""
        return True


class TorchIndexerBackend(_TorchDsaBackend):
    """Names the metadata of the indexer's cache. The work is done in `dsafuse.vllm.cpu.indexer`."""

    @staticmethod
    def get_name() -> str:
        """The backend's name in vLLM's log."""
        return "DSAFUSE_TORCH_INDEXER"

    @staticmethod
    def get_impl_cls() -> Any:
        """Never asked for."""
        raise NotImplementedError("an indexer cache has no attention of its own")


class TorchSparseMLAImpl(MLAAttentionImpl, SharedTopkIndicesBuffer):
    """Sparse MLA for one layer; the indexer's choice comes through the shared top-k buffer."""

    is_sparse = True
    supports_dense_mha_prefill = False
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: object | None = None,
        **mla_sizes: Any,  # the ranks and head dims of the layer; the mathematics reads them off its tensors
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Asked of every sparse impl by vLLM's wrapper, for overlapping streams. A CPU has one."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        """Write the step's keys, rotated already; the un-fused arm comes here, the fused one does not."""
        if kv_cache.numel() == 0:  # before the caches exist, when vLLM measures memory
            return
        k_pe = k_pe.reshape(k_pe.shape[0], -1)
        formats.write_mla(kv_c_normed, k_pe, kv_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale)

    def forward_mqa(
        self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend; q is [tokens, heads, 576] or the pair of its latent and rotary parts."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        tokens = query.shape[0]
        assert self.topk_indices_buffer is not None
        out = attention.attend(
            query,
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer[:tokens],
            attn_metadata.block_table[attn_metadata.req_id_per_token[:tokens]],
            self.scale,
            self.kv_cache_dtype,
            layer._k_scale,
        )
        return out, None

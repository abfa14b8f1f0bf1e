"""Which layers the fused ops may take. Each gate is a function that says why not, in a sentence, or None.

Everything that vLLM's own path does and the fused path does not re-state is a gate here. Attributes that every layer
of a tested vLLM has are in a table, which is asked first; those that a version may lack are read with the default that
means "not there".
"""

from collections.abc import Callable
from typing import Any

import torch

from dsafuse import switches
from dsafuse.layouts import INDEX_DIM, LATENT_DIM, ROPE_DIM
from dsafuse.vllm import host

# vLLM's words for a quantised MLA cache, and the layout that each means. 16- and 32-bit caches are "plain".
MLA_LAYOUTS = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
_PLAIN_WORDS = {"float16": torch.float16, "bfloat16": torch.bfloat16}

# Attention backends whose forward_mqa was read, and how it takes the query: as "one" tensor, or as the "pair" of its
# latent and rotary parts.
QUERY_FORMS = {
    "FLASHMLA_SPARSE": "one",
    "FLASH_ATTN_MLA_SPARSE": "pair",
    "FLASHINFER_MLA_SPARSE": "one",
    "DSAFUSE_TORCH_SPARSE_MLA": "one",
    "FLASH_ATTN_MLA": "one",
    "FLASHMLA": "one",
    "FLASHINFER_MLA": "one",
    "TRITON_MLA": "one",
    "CPU_MLA": "one",
}

# What gates and plans read of every layer. A layer without one was built by something else than was read.
LAYER_ATTRIBUTES = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "num_heads",
    "rotary_emb",
    "mla_attn.layer_name",
    "mla_attn.kv_cache_dtype",
    "mla_attn.attn_backend",
    "mla_attn.impl.supports_quant_query_input",
    "mla_attn.use_direct_call",
    "mla_attn.use_pcp",
)
INDEXER_ATTRIBUTES = (
    "indexer_rope_emb",
    "indexer.head_dim",
    "indexer.rope_dim",
    "indexer.quant_block_size",
    "indexer.scale_fmt",
    "indexer.n_head",
    "indexer.n_head_scale",
    "indexer.softmax_scale",
    "indexer.k_norm.eps",
    "indexer.k_cache",
    "indexer.indexer_op.topk_indices_buffer",
)

# Ours that read the batch from vLLM's forward context. A piecewise CUDA graph must split at them.
SPLITTING_OPS = (
    "dsafuse::qk_prepare",
    "dsafuse::mla_attend",
    "dsafuse::mla_prepare_and_attend",
    "dsafuse::indexer_prepare",
)

Gate = Callable[[Any, Any], str | None]


def fp8_dtype() -> torch.dtype:
    """The fp8 format of this platform: e4m3fnuz on gfx942, else e4m3fn."""
    from vllm.platforms import current_platform

    dtype: torch.dtype = current_platform.fp8_dtype()
    return dtype


def device() -> torch.device:
    """Where this process runs its layers."""
    from vllm.platforms import current_platform

    return torch.device(current_platform.device_type)


def rope_style(rotary: Any) -> str:
    """The pairing of a rotary module, as dsafuse names it."""
    return "neox" if rotary.is_neox_style else "interleaved"


def quantised_query(attention: Any) -> bool:
    """Whether the attention backend wants its query in fp8, as vLLM's own path decides it."""
    return MLA_LAYOUTS.get(attention.kv_cache_dtype) == "fp8" and bool(attention.impl.supports_quant_query_input)


def why_not_mla(wrapper: Any, config: Any) -> list[str]:
    """Every reason against fusing this layer's MLA preparation; none means it may be fused.

    A dense MLA layer (DeepSeek-V3, R1) is asked no more than a sparse one: its decodes take the same path, and its
    prefills vLLM's own, which the attention op leaves to vLLM for both.
    """
    if (missing := why_not_attributes(wrapper, config)) is not None:  # the gates below ask for them
        return [missing]
    return _ask((why_not_asked("mla"), *_EITHER, *_MLA), wrapper, config)


def why_not_indexer(wrapper: Any, config: Any) -> list[str]:
    """Every reason against fusing this layer's indexer preparation."""
    if not wrapper.is_sparse:
        return ["dense MLA: there is no indexer"]
    if wrapper.indexer is None:
        return ["this layer uses another layer's top-k and has no indexer"]
    for gate in (why_not_indexer_class, why_not_attributes, why_not_indexer_attributes):
        if (strange := gate(wrapper, config)) is not None:
            return [strange]
    return _ask((why_not_asked("indexer"), *_EITHER, *_INDEXER), wrapper, config)


def _ask(gates: tuple[Gate, ...], wrapper: Any, config: Any) -> list[str]:
    return [reason for gate in gates if (reason := gate(wrapper, config)) is not None]


def why_not_asked(op: str) -> Gate:
    """The gate of DSAFUSE_OPS for one op."""

    def gate(wrapper: Any, config: Any) -> str | None:
        ops = switches.current().ops
        return None if op in ops else f"DSAFUSE_OPS must contain {op}, got {','.join(sorted(ops))!r}"

    return gate


def why_not_attributes(wrapper: Any, config: Any) -> str | None:
    """What the other gates and the plan read must be there."""
    return _missing(wrapper, LAYER_ATTRIBUTES)


def why_not_indexer_attributes(wrapper: Any, config: Any) -> str | None:
    """The same of the indexer."""
    return _missing(wrapper, INDEXER_ATTRIBUTES)


def _missing(holder: Any, paths: tuple[str, ...]) -> str | None:
    for path in paths:
        found = holder
        for name in path.split("."):
            if not hasattr(found, name):
                return f"the layer must have {path}, got one without"
            found = getattr(found, name)
    return None


def why_not_query_path(wrapper: Any, config: Any) -> str | None:
    """The fused path begins with q_a, norm, q_b, each on its own."""
    if wrapper.q_lora_rank is None:
        return "q_lora_rank must be set, got None"
    if getattr(wrapper, "fuse_qkv_rmsnorm", False):
        return "fuse_qkv_rmsnorm must be off, got True (the two norms are one kernel of vLLM's)"
    return None


def why_not_llama_4_scaling(wrapper: Any, config: Any) -> str | None:
    """That scaling comes after the rotation, so it would fall between the parts of one op."""
    found = getattr(config.model_config.hf_text_config, "llama_4_scaling", None)
    return None if found is None else f"llama_4_scaling must be absent, got {found}"


def why_not_positions(wrapper: Any, config: Any) -> str | None:
    """The ops take one position for each token."""
    if getattr(config.model_config, "uses_mrope", False):
        return "positions must be one number a token, got a model with multimodal RoPE"
    return None


def why_not_parallel(wrapper: Any, config: Any) -> str | None:
    """Context parallelism gathers queries or keys between preparation and cache."""
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            return f"{name} must be 1, got {size}"
    attention = wrapper.mla_attn
    built_for_it = getattr(wrapper, "dcp_q_replicate", False) or getattr(attention, "dcp_manager", None) is not None
    if built_for_it or attention.use_pcp:
        return "context parallelism must be off, got a layer that is built for it"
    return None


def why_not_graph(wrapper: Any, config: Any) -> str | None:
    """Our ops read the batch from vLLM's forward context: inside a piecewise CUDA graph that is frozen.

    So the graph must be split at them. `join_compilation` sees to it where vLLM splits at its own attention ops;
    breakable graphs are interrupted at ours as at vLLM's.
    """
    compilation = config.compilation_config
    mode = getattr(compilation, "cudagraph_mode", None)
    if mode is None or not mode.requires_piecewise_compilation() or breakable_graphs():
        return None
    if not compilation.splitting_ops:
        return f"splitting_ops must name attention ops with piecewise CUDA graphs, got {compilation.splitting_ops!r}"
    return None


def why_not_cache_key(wrapper: Any, config: Any) -> str | None:
    """The plan changes the compiled graph, so it must be part of the key under which vLLM keeps that."""
    found = config.additional_config
    if isinstance(found, dict):
        return None
    return f"additional_config must be a dict, which the plan can join as a key of vLLM's compile cache, got {found!r}"


def why_not_lora(wrapper: Any, config: Any) -> str | None:
    """W_UK_T, which makes the query, is computed from kv_b_proj when weights are loaded: no adapter is in it."""
    if getattr(config, "lora_config", None) is not None:
        return "lora_config must be None, got adapters (the absorbed query would leave out one on kv_b_proj)"
    return None


def breakable_graphs() -> bool:
    """Whether vLLM's CUDA graphs are interrupted at attention ops when they are captured."""
    from vllm import envs

    return bool(envs.VLLM_USE_BREAKABLE_CUDAGRAPH)


def join_compilation(config: Any, text: str) -> None:
    """Tell vLLM's compilation of a fused layer: where to split the graph, and what tells this graph from others.

    Both are read when the model is first called, after all its layers are built. `splitting_ops` is empty where vLLM
    does not split, and then stays so. `additional_config` is part of `VllmConfig.compute_hash`.
    """
    splitting = config.compilation_config.splitting_ops
    if splitting:
        splitting.extend(op for op in SPLITTING_OPS if op not in splitting)
    known = config.additional_config.setdefault("dsafuse", [])
    if text not in known:
        known.append(text)


def _why_not_rotary(name: str, rotary: Any, dims: int) -> str | None:
    """The ops rotate by a table; only modules that do no more than that may be replaced by it."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import DeepseekScalingRotaryEmbedding

    if rotary is None:
        return f"{name} must be present, got None"
    plain = (RotaryEmbedding.forward_native, DeepseekScalingRotaryEmbedding.forward_native)
    if getattr(type(rotary), "forward_native", None) not in plain:
        return f"{name} must rotate by table lookup alone, got {type(rotary).__name__}"
    if rotary.rotary_dim != dims:
        return f"{name} must rotate {dims} dims, got {rotary.rotary_dim}"
    return None


def why_not_mla_rotary(wrapper: Any, config: Any) -> str | None:
    """The rotation of q_pe and k_pe."""
    return _why_not_rotary("rotary_emb", wrapper.rotary_emb, wrapper.qk_rope_head_dim)


def why_not_indexer_rotary(wrapper: Any, config: Any) -> str | None:
    """The rotation of the indexer's query and key."""
    return _why_not_rotary("indexer_rotary_emb", wrapper.indexer_rope_emb, wrapper.qk_rope_head_dim)


def why_not_mla_sizes(wrapper: Any, config: Any) -> str | None:
    """The sizes that every DSA model has."""
    if (wrapper.kv_lora_rank, wrapper.qk_rope_head_dim) != (LATENT_DIM, ROPE_DIM):
        return (
            f"kv_lora_rank and qk_rope_head_dim must be {LATENT_DIM} and {ROPE_DIM}, got "
            f"{wrapper.kv_lora_rank} and {wrapper.qk_rope_head_dim}"
        )
    return None


def why_not_kv_cache_dtype(wrapper: Any, config: Any) -> str | None:
    """The cache must have a layout that dsafuse writes."""
    word = wrapper.mla_attn.kv_cache_dtype
    activation = config.model_config.dtype
    if word == "auto" or word in MLA_LAYOUTS or _PLAIN_WORDS.get(word) == activation:
        return None
    return f"kv_cache_dtype must be auto, {activation}, fp8, fp8_e4m3 or fp8_ds_mla, got {word}"


def why_not_absorb(wrapper: Any, config: Any) -> str | None:
    """The absorbed query must come from vLLM's plain bmm, which the fused path re-states."""
    attention = wrapper.mla_attn
    for name in ("is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled", "is_amx_bmm_enabled"):
        if getattr(attention, name, False):
            return f"{name} must be off, got True (another bmm makes the query)"
    if getattr(attention, "calculate_kv_scales", False):
        return "calculate_kv_scales must be off, got True (the scales come from rotated keys, which are not there yet)"
    padded = getattr(attention, "q_pad_num_heads", None)
    return None if padded is None else f"q_pad_num_heads must be None, got {padded}"


def why_not_attention(wrapper: Any, config: Any) -> str | None:
    """The step behind the op must be sparse attention over the written cache, and no other."""
    attention = wrapper.mla_attn
    backend = attention.attn_backend.get_name()
    if backend not in QUERY_FORMS:
        return f"the attention backend must be one of {', '.join(QUERY_FORMS)}, got {backend}"
    if (difference := host.query_difference(backend)) is not None:
        return f"the attention backend must take its query as it did when that was read, got {backend}: {difference}"
    if attention.use_direct_call:
        return "attention must be an opaque op on this platform, got a direct call"
    if getattr(attention, "hisparse_cache", None) is not None:
        return "hisparse must be off, got a layer with a hisparse cache"
    return None


def query_heads(attention: Any, heads: int) -> int:
    """How many heads wide the query must be for the backend's kernels, `heads` included.

    FlashMLA's sparse kernels take 64 or 128. Its backend pads with a copy; a query that has the width already is
    taken as it is. For other backends, and if FlashMLA's is not as it was, the query has no padding.
    """
    impl = attention.impl
    if type(impl).__name__ != "FlashMLASparseImpl" or host.flashmla_differences():
        return heads
    if attention.kv_cache_dtype == "fp8_ds_mla":
        return int(impl.fp8_decode_padded_heads)
    padding = int(impl.prefill_padding)
    return heads if heads % padding == 0 else padding


def why_vllm_clears(wrapper: Any) -> str | None:
    """Why vLLM's indexer op clears its top-k rows itself; None if it can be told that the launch before it has."""
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer

    op = wrapper.indexer.indexer_op
    dtype = getattr(op.topk_indices_buffer, "dtype", None)
    if dtype != torch.int32:
        return f"topk_indices_buffer must be torch.int32, got {dtype}"
    if hasattr(op, "forward_on_cleared_rows"):  # dsafuse's own, on CPU builds
        return None
    if (found := type(op)) is not SparseAttnIndexer:
        return f"the indexer's op must be vLLM's SparseAttnIndexer, got {found.__module__}.{found.__qualname__}"
    if (platform := host.platform()) != "cuda":
        return f"the platform must be cuda, whose op takes skip_topk_buffer_clear, got {platform}"
    return "; ".join(host.scoring_differences()) or None


def why_not_indexer_class(wrapper: Any, config: Any) -> str | None:
    """Other models bring indexers with other mathematics."""
    from vllm.model_executor.models.deepseek_v2 import Indexer

    found = type(wrapper.indexer)
    if found is not Indexer:
        return f"the indexer must be {Indexer.__module__}.Indexer, got {found.__module__}.{found.__qualname__}"
    return None


def why_not_indexer_sizes(wrapper: Any, config: Any) -> str | None:
    """One scale for a whole head."""
    indexer = wrapper.indexer
    sizes, right = (indexer.head_dim, indexer.rope_dim, indexer.quant_block_size), (INDEX_DIM, ROPE_DIM, INDEX_DIM)
    if sizes != right:
        wanted = "{}, {} and {}".format(*right)
        return f"head_dim, rope_dim and quant_block_size must be {wanted}, got {', '.join(map(str, sizes))}"
    if indexer.scale_fmt not in ("ue8m0", None):
        return f"scale_fmt must be ue8m0 or None, got {indexer.scale_fmt}"
    return None


def why_not_indexer_cache(wrapper: Any, config: Any) -> str | None:
    """The key cache must have the flat layout, one key a token."""
    op = wrapper.indexer.indexer_op
    if getattr(op, "use_fp4_cache", False):
        return "the indexer cache must be fp8, got fp4"
    if getattr(wrapper.indexer.k_cache, "uses_shuffled_layout", False):
        return "the indexer cache must have layout flat, got the shuffled one of AMD's kernels"
    ratio = getattr(op, "compress_ratio", 1)
    return None if ratio == 1 else f"compress_ratio must be 1, got {ratio}"


_EITHER: tuple[Gate, ...] = (
    why_not_query_path,
    why_not_llama_4_scaling,
    why_not_positions,
    why_not_parallel,
    why_not_lora,
    why_not_graph,
    why_not_cache_key,
)
_MLA: tuple[Gate, ...] = (
    why_not_mla_rotary,
    why_not_mla_sizes,
    why_not_kv_cache_dtype,
    why_not_absorb,
    why_not_attention,
)
_INDEXER: tuple[Gate, ...] = (
    why_not_indexer_sizes,
    why_not_indexer_rotary,
    why_not_indexer_cache,
)

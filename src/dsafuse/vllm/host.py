"""What the installed vLLM is: which versions and platforms were tested, and a probe of every symbol that is touched.

A hook into another program's insides is right only as long as these look as they did when it was written.
So the probe compares signatures, and for the methods whose bodies the bridge re-states or relies on also the
source. On any difference nothing is installed, and the difference is said.
"""

import hashlib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Tested:
    """One vLLM and platform on which the plugin installs something.

    minor: such as "0.32". platform: vLLM's `current_platform.device_type` for CPUs ("cpu"), else "cuda" or "rocm".
    path: which hook serves the DSA models there: "wrapper" (dsafuse.vllm.wrapper) or "model" (dsafuse.vllm.model_path).
    ran: what was run there.
    dense: whether dense MLA models (DeepSeek-V3, R1) were compared there too, token by token: only then does the
        wrapper path take them.
    """

    minor: str
    platform: str
    path: str
    ran: str
    dense: bool = False


TESTED = (
    Tested("0.26", "cuda", "wrapper", "one H200, vLLM 0.26.0, torch 2.11: docs/vllm.md, Tested", dense=True),
    Tested("0.32", "cpu", "wrapper", "vLLM's CPU build 0.32.0: tests/vllm and dsafuse demo", dense=True),
    # What stands between the two functions is vLLM's own, so that none of these needs a GPU to be right; docs/vllm.md.
    Tested("0.32", "cuda", "model", "its model code on the CPU build; its two functions against ours on one H200"),
    Tested("0.32", "rocm", "model", "its model code on the CPU build; no AMD GPU"),
    Tested("0.33", "cuda", "model", "its model code on 0.32's CPU extension; its two functions on one H200"),
    Tested("0.33", "rocm", "model", "its model code on 0.32's CPU extension; no AMD GPU"),
)


@dataclass(frozen=True)
class Symbol:
    """One thing of vLLM's that is used.

    parameters: names of a function's parameters, in order; None if it is no function of interest.
    source: start of the sha256 of a function's source, where the bridge re-states or relies on its body.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    source: str | None = None

    def difference(self) -> str | None:
        """In what the installed vLLM differs, as a sentence, or None.

        None stands for nothing: vLLM's platforms answer with it where they lack an attribute.
        """
        where = f"{self.module}.{self.name}"
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"{where} is missing ({error})"
        if found is None:
            return f"{where} is missing (it is None)"
        if self.parameters is not None:
            if not callable(found):
                return f"{where} is a {type(found).__name__}, expected a function"
            parameters = tuple(inspect.signature(found).parameters)
            if parameters != self.parameters:
                return f"{where} takes ({', '.join(parameters)}), expected ({', '.join(self.parameters)})"
        if self.source is not None:
            digest = source_digest(found)
            if digest != self.source:
                return f"{where} has another body (sha256 {digest}, expected {self.source})"
        return None


def source_digest(function: Any) -> str:
    """The start of the sha256 of the source text of a function, or of the function inside a Triton kernel."""
    return hashlib.sha256(inspect.getsource(getattr(function, "fn", function)).encode()).hexdigest()[:16]


def words(text: str) -> tuple[str, ...]:
    """A list of parameter names, written as one line."""
    return tuple(text.split())


_LAYERS = "vllm.model_executor.layers."
_WRAPPER = "MultiHeadLatentAttentionWrapper."
_TORCH_UTILS = "vllm.utils.torch_utils"
_BACKENDS = "vllm.v1.attention.backends.mla."
_FLASHMLA = _BACKENDS + "flashmla_sparse"
_WRAPPER_ARGUMENTS = (
    "self hidden_size num_heads scale qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank kv_lora_rank "
    "mla_modules cache_config quant_config prefix skip_topk"
)


def _reads(module: str, impl: str, source: str) -> Symbol:
    """The method of an attention backend that takes the query."""
    return Symbol(_BACKENDS + module, f"{impl}.forward_mqa", source=source)


# On either path: one row of vLLM's table of models is pointed at dsafuse.vllm.lazy, and a layer's plan asks for the
# platform and for its blocks.
SHARED_SYMBOLS = (
    Symbol("vllm.model_executor.models.registry", "_VLLM_MODELS"),
    Symbol("vllm.model_executor.models.registry", "_resolve_module_name", ("mod_relname",)),
    Symbol("vllm.platforms", "current_platform.device_type"),
    Symbol("vllm.platforms", "current_platform.fp8_dtype", ()),
    Symbol("vllm.platforms", "current_platform.is_cuda", ()),
    Symbol("vllm.platforms", "current_platform.has_device_capability"),
    # Takes a block size and a list of backends; later vLLMs also specs, which may be left out.
    Symbol("vllm.v1.worker.utils", "select_common_block_size"),
    Symbol("vllm.v1.worker.ubatching", "dbo_current_ubatch_id", (), source="47414ec14161297f"),
    Symbol("vllm.utils.deep_gemm", "__name__"),  # the module; what is asked for in it may be lacking
)

_EVERY_WRAPPER = (
    *SHARED_SYMBOLS,
    Symbol("vllm.model_executor.custom_op", "PluggableLayer.register_oot"),
    Symbol("vllm.model_executor.custom_op", "op_registry_oot"),
    Symbol(
        "vllm.model_executor.models.deepseek_v2",
        "Indexer.forward",
        words("self hidden_states qr positions rotary_emb"),
        source="9529cbb9196c3d1b",
    ),
    Symbol(_LAYERS + "attention.mla_attention", "MLAAttention._v_up_proj", words("self x out")),
    Symbol(
        _LAYERS + "attention.mla_attention",
        "MLACommonBaseImpl.forward_mha",
        words("self q kv_c_normed k_pe kv_c_and_k_pe_cache attn_metadata k_scale output output_scale"),
    ),
    Symbol(_LAYERS + "attention.mla_attention", "unified_mla_attention_with_output"),
    Symbol(
        _LAYERS + "sparse_attn_indexer",
        "SparseAttnIndexer.forward_native",
        words("self hidden_states q_quant k weights"),
    ),
    Symbol(_LAYERS + "attention.attention", "get_attention_context", ("layer_name",)),
    Symbol(_LAYERS + "attention.kv_transfer_utils", "maybe_transfer_kv_layer", ("func",)),
    Symbol("vllm.compilation.breakable_cudagraph", "eager_break_during_capture", ("fn",)),
    Symbol("vllm.config", "get_current_vllm_config"),
    # Our ops join splitting_ops, and the plan joins additional_config, which compute_hash reads.
    Symbol("vllm.config", "CompilationConfig.set_splitting_ops_for_v1"),
    Symbol("vllm.config", "VllmConfig.compute_hash"),
    Symbol("vllm.envs", "VLLM_USE_BREAKABLE_CUDAGRAPH"),
    Symbol(_LAYERS + "rotary_embedding.base", "RotaryEmbedding.forward_native", source="083c343f9bd4cb49"),
    Symbol(
        _LAYERS + "rotary_embedding.deepseek_scaling_rope",
        "DeepseekScalingRotaryEmbedding.forward_native",
        source="9e837c492acd6ded",
    ),
    Symbol(_TORCH_UTILS, "LayerNameType"),
    Symbol(_TORCH_UTILS, "_encode_layer_name", ("layer_name",)),
    Symbol(_TORCH_UTILS, "_resolve_layer_name", ("layer_name",)),
    Symbol(
        _TORCH_UTILS,
        "direct_register_custom_op",
        words("op_name op_func mutates_args fake_impl target_lib dispatch_key tags"),
    ),
)

# The wrapper path, by minor version.
WRAPPER_SYMBOLS: Mapping[str, tuple[Symbol, ...]] = {
    "0.26": (
        *_EVERY_WRAPPER,
        Symbol(_LAYERS + "mla", _WRAPPER + "__init__", words(_WRAPPER_ARGUMENTS)),
        Symbol(
            _LAYERS + "mla",
            _WRAPPER + "forward",
            words("self positions hidden_states llama_4_scaling"),
            source="3af8fa04e0814b1e",
        ),
        Symbol(
            _LAYERS + "attention.mla_attention",
            "MLAAttention.forward",
            words("self q kv_c_normed k_pe output_shape"),
            source="db7487cb4e80faec",
        ),
        Symbol(_LAYERS + "attention.mla_attention", "MLAAttention.forward_impl", source="a9ef73ff120d8e2c"),
    ),
    "0.32": (
        *_EVERY_WRAPPER,
        Symbol(
            _LAYERS + "mla",
            _WRAPPER + "__init__",
            words(
                f"{_WRAPPER_ARGUMENTS} non_causal_multi_token_decode allow_short_prefill_indexer_scoring_skip "
                "fuse_qkv_rmsnorm"
            ),
        ),
        Symbol(
            _LAYERS + "mla",
            _WRAPPER + "forward",
            words("self positions hidden_states llama_4_scaling"),
            source="5d22cac766538458",
        ),
        Symbol(
            _LAYERS + "attention.mla_attention",
            "MLAAttention.forward",
            words("self q kv_c_normed k_pe output_shape q_dcp_replicated"),
            source="a563be16e8be793e",
        ),
        Symbol(_LAYERS + "attention.mla_attention", "MLAAttention.forward_impl", source="ad9c09b706d72ea4"),
        Symbol(_LAYERS + "attention.mla_attention", "MLAAttention._use_sparse_mha", words("self attn_metadata")),
    ),
}

# How each attention backend takes its query was read from these bodies (`gates.QUERY_FORMS`), by minor version. Looked
# at for the backend that a layer has, and no other: some import what is not installed.
QUERY_SYMBOLS: Mapping[str, Mapping[str, Symbol]] = {
    "0.26": {
        "FLASHMLA_SPARSE": _reads("flashmla_sparse", "FlashMLASparseImpl", "49d7cc246e06cc27"),
        "FLASH_ATTN_MLA_SPARSE": _reads("flashattn_mla_sparse", "FlashAttnMLASparseImpl", "febca0a953c4614b"),
        "FLASHINFER_MLA_SPARSE": _reads("flashinfer_mla_sparse", "FlashInferMLASparseImpl", "3c9ea37da4ed2258"),
        "FLASH_ATTN_MLA": _reads("flashattn_mla", "FlashAttnMLAImpl", "048fc9a2e5a87ed5"),
        "FLASHMLA": _reads("flashmla", "FlashMLAImpl", "0d571f4574009876"),
        "FLASHINFER_MLA": _reads("flashinfer_mla", "FlashInferMLAImpl", "1bdb06e9668da163"),
        "TRITON_MLA": _reads("triton_mla", "TritonMLAImpl", "4b1d8782920276e8"),
    },
    "0.32": {"CPU_MLA": _reads("cpu_mla", "CPUMLAImpl", "eb14aa75d4dfccc3")},
}

# How vLLM's writers of an fp8_ds_mla cache scale a tile, by minor version: dsafuse writes what it stands in for. 0.26:
# concat_and_cache_ds_mla in C++, and `fused_norm_rope`, whose amax * (1 / 448) is at most a last place off; later
# `fused_norm_rope`, which is a power of two.
TILE_SCALE_RULES: Mapping[str, str] = {"0.26": "fp32", "0.32": "ue8m0", "0.33": "ue8m0"}

# FlashMLA's sparse backend, where its kernels want 64 or 128 query heads and it pads with a copy. Given a query of the
# padded width, and told that it has so many heads, it copies nothing: that is read from these bodies. On a difference
# the query is written unpadded and the backend pads as always.
FLASHMLA_SYMBOLS: Mapping[str, tuple[Symbol, ...]] = {
    "0.26": (
        QUERY_SYMBOLS["0.26"]["FLASHMLA_SPARSE"],
        Symbol(_FLASHMLA, "FlashMLASparseImpl._forward_bf16_kv", source="064ddd24cfeb572b"),
        Symbol(_FLASHMLA, "FlashMLASparseImpl._bf16_flash_mla_kernel", source="ed169be94992feec"),
        Symbol(_FLASHMLA, "FlashMLASparseImpl._fp8_flash_mla_kernel", source="17f0d602d44dc9a3"),
        Symbol(_FLASHMLA, "FlashMLASparseImpl._forward_fp8_kv_mixed_batch", source="f72411d307271d11"),
        Symbol(_FLASHMLA, "FlashMLASparseImpl._forward_fp8_kv_separate_prefill_decode", source="7f335a52205db98b"),
    ),
}

# vLLM's indexer op behind a launch that has cleared its top-k rows (`scoring`): the call that is re-stated, and that
# the op fills these rows and no others, unless it is told so. On a difference it fills them, as always.
SCORING_SYMBOLS: Mapping[str, tuple[Symbol, ...]] = {
    "0.26": (
        Symbol(
            _LAYERS + "sparse_attn_indexer",
            "SparseAttnIndexer.forward_cuda",
            words("self hidden_states q_quant k weights"),
            source="d4a8e38365be20d1",
        ),
        Symbol(
            _LAYERS + "sparse_attn_indexer",
            "sparse_attn_indexer",
            words(
                "hidden_states k_cache_prefix kv_cache q_quant q_scale k weights quant_block_size scale_fmt "
                "topk_tokens head_dim max_model_len total_seq_lens topk_indices_buffer skip_k_cache_insert use_pcp "
                "use_fp4_cache dcp_rank dcp_world_size cp_kv_cache_interleave_size skip_topk_buffer_clear"
            ),
            source="45bbaa90b079136b",
        ),
    ),
}

CPU_SYMBOLS = (
    Symbol("vllm.forward_context", "get_forward_context", ()),
    Symbol("vllm.model_executor.custom_op", "CustomOp.register_oot"),
    Symbol(
        _LAYERS + "sparse_attn_indexer",
        "SparseAttnIndexer.forward_cpu",
        words("self hidden_states q_quant k weights"),
    ),
    Symbol("vllm.model_executor.models.deepseek_v2", "DeepseekV32IndexerCache.get_attn_backend", ("self",)),
    Symbol(
        "vllm.model_executor.models.deepseek_v2",
        "per_token_group_quant_fp8",
        words("x group_size eps dtype column_major_scales tma_aligned_scales out_q use_ue8m0"),
    ),
    Symbol(_LAYERS + "attention.sparse_mla_attention", "SharedTopkIndicesBuffer.init_topk_indices_buffer"),
    Symbol("vllm.v1.attention.backend", "MLAAttentionImpl.forward_mqa"),
    Symbol("vllm.v1.attention.backend", "AttentionBackend"),
    Symbol("vllm.v1.attention.backend", "AttentionCGSupport.NEVER"),
    Symbol("vllm.v1.attention.backend", "AttentionMetadata"),
    Symbol("vllm.v1.attention.backend", "AttentionMetadataBuilder"),
    Symbol("vllm.v1.attention.backend", "MultipleOf"),
)


def differences(symbols: tuple[Symbol, ...]) -> list[str]:
    """Every symbol that is not as it was when the bridge was written, one sentence each."""
    return [text for symbol in symbols if (text := symbol.difference()) is not None]


def minor(version: str) -> str:
    """Such as "0.32" of "0.32.0+cpu"."""
    return ".".join(version.split(".")[:2])


def version() -> str:
    """The installed vLLM's version."""
    import vllm

    return str(vllm.__version__)


def platform() -> str:
    """The kind of device that this vLLM serves: "cpu", "cuda", "rocm", or vLLM's device type for any other."""
    from vllm.platforms import current_platform

    for name, asked in (("cpu", "is_cpu"), ("cuda", "is_cuda"), ("rocm", "is_rocm")):
        if getattr(current_platform, asked)():
            return name
    return str(current_platform.device_type)


def row(version_: str | None = None, platform_: str | None = None) -> Tested | str:
    """The row of TESTED for a vLLM and platform, the installed ones by default; or why there is none."""
    found = minor(version_ or version()), platform_ or platform()
    for each in TESTED:
        if (each.minor, each.platform) == found:
            return each
    rows = ", ".join(f"{each.minor} on {each.platform}" for each in TESTED)
    return f"vLLM and its platform must be one of those tested ({rows}), got {version_ or version()} on {found[1]}"


def _of_version(symbols: Mapping[str, tuple[Symbol, ...]], purpose: str) -> list[str]:
    """The differences from the symbols of the installed version; that there are none for it is one."""
    found = symbols.get(minor(version()))
    if found is None:
        return [f"vLLM must be one of {', '.join(symbols)} for {purpose}, got {version()}"]
    return differences(found)


def wrapper_differences() -> list[str]:
    """In what the installed vLLM differs from what the wrapper path was written for."""
    return _of_version(WRAPPER_SYMBOLS, "the wrapper path")


@cache
def flashmla_differences() -> tuple[str, ...]:
    """In what FlashMLA's sparse backend differs from what the padded query was written for."""
    return tuple(_of_version(FLASHMLA_SYMBOLS, "a padded query"))


@cache
def scoring_differences() -> tuple[str, ...]:
    """In what vLLM's indexer op differs from what its call on cleared rows was written for."""
    return tuple(_of_version(SCORING_SYMBOLS, "cleared top-k rows"))


@cache
def query_difference(backend: str) -> str | None:
    """In what an attention backend takes its query otherwise than it did when that was read, or None.

    dsafuse's own, on CPU builds, is not asked.
    """
    if backend.startswith("DSAFUSE_"):
        return None
    symbol = QUERY_SYMBOLS.get(minor(version()), {}).get(backend)
    return f"it was not read in vLLM {minor(version())}" if symbol is None else symbol.difference()


def tile_scale_rule() -> str:
    """scale_rule of the installed vLLM, which must be one of those tested."""
    return TILE_SCALE_RULES[minor(version())]


def taken(key: str, holder: Any) -> str:
    """Another plugin holds a hook that only one can hold."""
    return f"the hook {key!r} is already held by {holder.__module__}.{holder.__qualname__}, another plugin"

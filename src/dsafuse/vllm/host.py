"""What the installed vLLM is: tested versions, and a probe of every symbol that the bridge touches.

A hook into another program's insides is right only as long as these look as they did when it was written.
So the probe compares signatures, and for the methods whose bodies the bridge re-states also the source.
On any difference nothing is installed, and the difference is said.
"""

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from typing import Any

# Minor versions on which tests/vllm passed, and what was run there.
TESTED = {"0.32": "CPU build 0.32.0"}

GPU_MODELS = (
    "on GPUs vLLM 0.32 serves these models with classes of their own, fused in tree, which do not pass the "
    "MLA wrapper; see docs/vllm.md for choosing the generic class"
)


@dataclass(frozen=True)
class Symbol:
    """One thing of vLLM's that is used.

    parameters: names of a function's parameters, in order; None if it is no function of interest.
    source: start of the sha256 of a method's source, where the bridge re-states its body.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None = None
    source: str | None = None

    def difference(self) -> str | None:
        """In what the installed vLLM differs, as a sentence, or None."""
        where = f"{self.module}.{self.name}"
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"{where} is missing ({error})"
        if self.parameters is not None:
            parameters = tuple(inspect.signature(found).parameters)
            if parameters != self.parameters:
                return f"{where} takes ({', '.join(parameters)}), expected ({', '.join(self.parameters)})"
        if self.source is not None:
            digest = source_digest(found)
            if digest != self.source:
                return f"{where} has another body (sha256 {digest}, expected {self.source})"
        return None


def source_digest(function: Any) -> str:
    """The start of the sha256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


_LAYERS = "vllm.model_executor.layers."
_TORCH_UTILS = "vllm.utils.torch_utils"

WRAPPER_SYMBOLS = (
    Symbol("vllm.model_executor.custom_op", "PluggableLayer.register_oot"),
    Symbol("vllm.model_executor.custom_op", "op_registry_oot"),
    Symbol(
        _LAYERS + "mla",
        "MultiHeadLatentAttentionWrapper.__init__",
        (
            "self",
            "hidden_size",
            "num_heads",
            "scale",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "q_lora_rank",
            "kv_lora_rank",
            "mla_modules",
            "cache_config",
            "quant_config",
            "prefix",
            "skip_topk",
            "non_causal_multi_token_decode",
            "allow_short_prefill_indexer_scoring_skip",
            "fuse_qkv_rmsnorm",
        ),
    ),
    Symbol(
        _LAYERS + "mla",
        "MultiHeadLatentAttentionWrapper.forward",
        ("self", "positions", "hidden_states", "llama_4_scaling"),
        source="5d22cac766538458",
    ),
    Symbol(
        "vllm.model_executor.models.deepseek_v2",
        "Indexer.forward",
        ("self", "hidden_states", "qr", "positions", "rotary_emb"),
        source="9529cbb9196c3d1b",
    ),
    Symbol(
        _LAYERS + "attention.mla_attention",
        "MLAAttention.forward",
        ("self", "q", "kv_c_normed", "k_pe", "output_shape", "q_dcp_replicated"),
        source="a563be16e8be793e",
    ),
    Symbol(_LAYERS + "attention.mla_attention", "MLAAttention.forward_impl", source="ad9c09b706d72ea4"),
    Symbol(_LAYERS + "attention.mla_attention", "MLAAttention._v_up_proj", ("self", "x", "out")),
    Symbol(_LAYERS + "attention.mla_attention", "unified_mla_attention_with_output"),
    Symbol(_LAYERS + "attention.attention", "get_attention_context", ("layer_name",)),
    Symbol(_LAYERS + "attention.kv_transfer_utils", "maybe_transfer_kv_layer", ("func",)),
    Symbol("vllm.compilation.breakable_cudagraph", "eager_break_during_capture", ("fn",)),
    Symbol("vllm.config", "get_current_vllm_config"),
    Symbol("vllm.forward_context", "get_forward_context", ()),
    Symbol(_LAYERS + "rotary_embedding.base", "RotaryEmbedding.forward_native"),
    Symbol(_LAYERS + "rotary_embedding.deepseek_scaling_rope", "DeepseekScalingRotaryEmbedding.forward_native"),
    Symbol(_TORCH_UTILS, "LayerNameType"),
    Symbol(_TORCH_UTILS, "_encode_layer_name", ("layer_name",)),
    Symbol(_TORCH_UTILS, "_resolve_layer_name", ("layer_name",)),
    Symbol(_TORCH_UTILS, "is_quantized_kv_cache"),
    Symbol(
        _TORCH_UTILS,
        "direct_register_custom_op",
        ("op_name", "op_func", "mutates_args", "fake_impl", "target_lib", "dispatch_key", "tags"),
    ),
)

CPU_SYMBOLS = (
    Symbol("vllm.model_executor.custom_op", "CustomOp.register_oot"),
    Symbol(
        _LAYERS + "sparse_attn_indexer",
        "SparseAttnIndexer.forward_cpu",
        ("self", "hidden_states", "q_quant", "k", "weights"),
    ),
    Symbol("vllm.model_executor.models.deepseek_v2", "DeepseekV32IndexerCache.get_attn_backend", ("self",)),
    Symbol(
        "vllm.model_executor.models.deepseek_v2",
        "per_token_group_quant_fp8",
        (
            "x",
            "group_size",
            "eps",
            "dtype",
            "column_major_scales",
            "tma_aligned_scales",
            "out_q",
            "use_ue8m0",
        ),
    ),
    Symbol(_LAYERS + "attention.sparse_mla_attention", "SharedTopkIndicesBuffer.init_topk_indices_buffer"),
    Symbol("vllm.v1.attention.backend", "MLAAttentionImpl.forward_mqa"),
)


def differences(symbols: tuple[Symbol, ...]) -> list[str]:
    """Every symbol that is not as it was when the bridge was written, one sentence each."""
    return [text for symbol in symbols if (text := symbol.difference()) is not None]


def minor(version: str) -> str:
    """Such as "0.32" of "0.32.0+cpu"."""
    return ".".join(version.split(".")[:2])


def why_not_version(version: str | None = None) -> str | None:
    """Why this vLLM version is not one that was tested, or None."""
    if version is None:
        import vllm

        version = str(vllm.__version__)
    if minor(version) in TESTED:
        return None
    return f"vLLM must be one of {', '.join(TESTED)} (tested), got {version}"


def taken(key: str, holder: Any) -> str:
    """Another plugin holds a hook that only one can hold."""
    return f"the hook {key!r} is already held by {holder.__module__}.{holder.__qualname__}, another plugin"

"""Which vLLM has the two functions, where, and how everything looked that their replacements rely on."""

from collections.abc import Mapping
from dataclasses import dataclass

from dsafuse.vllm.host import Symbol, minor, words

_MODEL = "vllm.models.deepseek_v32"


@dataclass(frozen=True)
class Path:
    """One vLLM and platform.

    kernels: the module that defines the functions.
    module, layer: the module that calls them, and its attention class.
    cutedsl: whether `fused_q` may choose a CuTeDSL kernel.
    """

    kernels: str
    module: str
    layer: str
    symbols: tuple[Symbol, ...]
    cutedsl: bool = True


_Q = words(
    "positions q_pe q_pe_cos_sin_cache index_q index_q_cos_sin_cache ql_nope q_scale index_weights "
    "index_weights_softmax_scale index_weights_head_scale has_indexer index_rope_interleave quantize_mqa"
)
_NORM_ROPE = (
    "positions q_c q_rms_norm_w q_rms_eps kv_c kv_rms_norm_w kv_rms_eps k_pe k_rope_cos_sin_cache index_k "
    "index_k_layer_norm_w index_k_layer_norm_bias index_k_layer_norm_eps index_k_rope_cos_sin_cache "
    "topk_indices_buffer "
)
_CACHES = (
    "slot_mapping indexer_slot_mapping indexer_k_cache indexer_cache_shuffled mla_kv_cache mla_kv_cache_dtype "
    "mla_k_scale has_indexer index_rope_interleave q_c_out kv_c_out k_pe_out index_k_out"
)


def _functions(module: str, options: str, sources: str) -> tuple[Symbol, ...]:
    """The two functions and what they launch; sources: digests in the order of the names."""
    names = ("fused_norm_rope", "fused_q", "_fused_norm_rope_kernel", "_fused_q_kernel",
             "_fp8_ue8m0_quantize", "_fp8_quant_and_cache_write", "_rms_norm", "_get_cos_sin")  # fmt: skip
    parameters = {"fused_norm_rope": words(_NORM_ROPE + options), "fused_q": _Q}
    return tuple(
        Symbol(module, name, parameters.get(name), source) for name, source in zip(names, words(sources), strict=True)
    )


def _callers(module: str, layer: str, **sources: str) -> tuple[Symbol, ...]:
    """The attention class's methods that call the functions or read what they leave."""
    return tuple(Symbol(module, f"{layer}.{method}", source=source) for method, source in sources.items())


_NVIDIA, _AMD = f"{_MODEL}.attention", f"{_MODEL}.amd.rocm"
_AMD_SHUFFLED = Symbol(_AMD, "DeepseekV32ROCmIndexerCache.uses_shuffled_layout.fget", source="c6e54b089f446b57")
_COMMON = {
    "0.32": _functions(
        f"{_MODEL}.common.kernels",
        _CACHES,
        "8aa2c665c6ec45de e202d9937bed0159 b731b412c5293a1e ffdfb49880d64f69 ef029564914bdc57 6cabd43faf1a31b1 "
        "133538bb96bde020 3d84a2189179a96a",
    ),
    "0.33": _functions(
        f"{_MODEL}.common.kernels",
        f"{_CACHES} skip_scale",
        "77aa16f845737a91 e202d9937bed0159 fb6767a51bc8b2dd ffdfb49880d64f69 ef029564914bdc57 a66d5073cc0648ee "
        "133538bb96bde020 3d84a2189179a96a",
    ),
}


def _nvidia(version: str, **sources: str) -> Path:
    callers = _callers(_NVIDIA, "DeepseekV32Attention", __init__="a7b24ce4d99e0809", **sources)
    return Path(f"{_MODEL}.common.kernels", _NVIDIA, "DeepseekV32Attention", _COMMON[version] + callers)


def _amd(version: str, **sources: str) -> Path:
    base = _callers(_NVIDIA, "DeepseekV32Attention", __init__="a7b24ce4d99e0809")
    callers = _callers(
        _AMD,
        "DeepseekV32MLAAttention",
        __init__="1862b2866af11983",
        forward="e3e3e82081ae9790",
        _run_indexer="b094076f19038069",
        _build_q_for_attn="cec3aecca57e6545",
        **sources,
    )
    symbols = (*_COMMON[version], *base, *callers, _AMD_SHUFFLED)
    return Path(f"{_MODEL}.common.kernels", _AMD, "DeepseekV32MLAAttention", symbols)


PATHS: Mapping[tuple[str, str], Path] = {
    ("0.26", "cuda"): Path(
        f"{_MODEL}.nvidia.kernels",
        f"{_MODEL}.nvidia.attention",
        "DeepseekV32Attention",
        _functions(
            f"{_MODEL}.nvidia.kernels",
            "slot_mapping indexer_k_cache mla_kv_cache mla_kv_cache_dtype mla_k_scale has_indexer "
            "index_rope_interleave q_c_out",
            "f4ece3c009cce8f2 e59d83875f62c849 b916fbcc46652e90 3923e8bb79c64539 a16fe318583ae3a5 b7bbf6329d5fe608 "
            "133538bb96bde020 3d84a2189179a96a",
        )
        + _callers(
            f"{_MODEL}.nvidia.attention",
            "DeepseekV32Attention",
            __init__="ff5b7fa568e1faa5",
            _fused_attention="5e8b34ec2e54ba0c",
        ),
        cutedsl=False,
    ),
    ("0.32", "cuda"): _nvidia(
        "0.32",
        forward="2a4ccc9532b4034a",
        _should_prepare_mqa_query="bc8a1a3eb54798be",
        _sparse_indexer_and_attn="81f3c69caa44718c",
    ),
    ("0.32", "rocm"): _amd("0.32", _fused_attention="ff63f4fba22637da"),
    ("0.33", "cuda"): _nvidia(
        "0.33",
        forward="9a56898869b40f89",
        _should_prepare_mqa_query="bc8a1a3eb54798be",
        _sparse_indexer_and_attn="72439f088e75d4db",
    ),
    ("0.33", "rocm"): _amd("0.33", _fused_attention="6e16df2c4fca3996"),
}


def of(version: str, platform: str) -> Path | str:
    """The path of a vLLM and platform, or why there is none."""
    found = PATHS.get((minor(version), platform))
    if found is not None:
        return found
    rows = ", ".join(f"{minor_} on {platform_}" for minor_, platform_ in PATHS)
    return f"vLLM and its platform must be one of those read for this path ({rows}), got {version} on {platform}"

"""The vLLM plugin: dsafuse's fused preparation inside DeepSeek-V3.2 and GLM-5 models.

Two entry points. `register` (group vllm.general_plugins) sends the DSA architectures through
`dsafuse.vllm.lazy`, which installs the hooks when vLLM resolves the model class; until then nothing of vLLM's
models is imported or touched. `platform_plugin` (group vllm.platform_plugins) gives CPU builds, and only
these, a platform that accepts sparse attention. See docs/vllm.md.

Importing this module does not import vLLM.
"""

import logging

# vLLM shows what is logged under its own name, at its own level.
logger = logging.getLogger("vllm.dsafuse")

# Architectures that vLLM 0.32 runs as DeepSeek Sparse Attention, and the names under which `lazy` offers them.
ARCHITECTURES = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
_LAZY = "dsafuse.vllm.lazy"
_PLATFORM = "dsafuse.vllm.cpu.platform.DsaCpuPlatform"


def platform_plugin() -> str | None:
    """vLLM's platform entry point: our CPU platform if vLLM would choose its plain CPU platform, else None.

    An active plugin wins over the built-in platforms, so it must stay out of the way of all others: GPUs, and
    CPU builds for which vLLM has a special platform (Zen).
    """
    from vllm.platforms import cpu_platform_plugin

    builtin = cpu_platform_plugin()
    return _PLATFORM if builtin == "vllm.platforms.cpu.CpuPlatform" else None


def register() -> None:
    """vLLM's general entry point, called in every process, perhaps more than once. Never raises.

    It registers strings only. Importing a model or a layer here would be too early: vLLM decides about
    breakable CUDA graphs when `layers.mla` is imported, from a variable that VllmConfig sets later.
    """
    try:
        reason = _route()
    except Exception:  # an exception out of register() would end the engine
        logger.exception("dsafuse: could not register; vLLM's own code runs.")
        return
    if reason is not None:
        logger.info("dsafuse: not installed: %s.", reason)


def _route() -> str | None:
    """Send the architectures to the lazy module. Returns why not, or None."""
    from vllm.platforms import current_platform

    from dsafuse.vllm import host

    reason = host.why_not_version()
    if reason is not None:
        return reason
    if not current_platform.is_cpu():
        return host.GPU_MODELS
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{_LAZY}:{architecture}")
    return None


def stats() -> "dict[str, dict[str, int]]":
    """Calls in this process, per op: {"mla": {"fused": 24, "fallback": 0}, "indexer": {...}}.

    Counted where the op runs. Under torch.compile a fallback is not counted, and the replay of a CUDA graph
    runs no Python: there the numbers are those of tracing and capture. With vLLM's multiprocessing the engine
    is another process, whose numbers these are not.
    """
    from dsafuse.vllm.counters import CALLS

    return {op: dict(calls) for op, calls in CALLS.items()}

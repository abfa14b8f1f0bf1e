"""The vLLM plugin: dsafuse's fused preparation inside DeepSeek-V3.2 and GLM-5 models.

Two entry points. `register` (group vllm.general_plugins) sends the DSA architectures through
`dsafuse.vllm.lazy`, which installs the hooks when vLLM resolves the model class; until then nothing of vLLM's
models is imported or touched. Drafts need no row of their own: the hooks are there when their target is built.
`platform_plugin` (group vllm.platform_plugins) gives CPU builds, and only these, a platform that accepts sparse
attention. See docs/vllm.md.

Importing this module does not import vLLM.
"""

import logging

from dsafuse import switches

# vLLM shows what is logged under its own name, at its own level.
logger = logging.getLogger("vllm.dsafuse")

# Architectures that vLLM runs as DeepSeek Sparse Attention, and the names under which `lazy` offers them.
ARCHITECTURES: tuple[str, ...] = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
# With dense MLA: the MLA fusion of the wrapper path applies to them, too, where `host.TESTED` says so.
DENSE_ARCHITECTURES: tuple[str, ...] = ("DeepseekV3ForCausalLM",)
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
    """vLLM's general entry point, called in every process, perhaps more than once.

    It registers strings only. Importing a model or a layer here would be too early: vLLM decides about
    breakable CUDA graphs when `layers.mla` is imported, from a variable that VllmConfig sets later.

    An exception out of here would end the engine, whatever model it serves. So there is none, but for
    DSAFUSE_MODE=strict where vLLM's table of models could not be written to.
    """
    try:
        mode = switches.current().mode
    except ValueError as error:
        logger.error("dsafuse: not installed, vLLM's own code runs: %s.", error)
        return
    try:
        reason = _route(mode)
    except Exception:
        if mode == "strict":
            raise
        logger.exception("dsafuse: could not register; vLLM's own code runs.")
        return
    if reason is not None:
        logger.info("dsafuse: not installed: %s.", reason)


def _route(mode: str) -> str | None:
    """Send the architectures to the lazy module. Returns why not, or None.

    With "strict" they are sent there even where nothing can be installed: the module raises the reason when a DSA
    model is resolved, and no other model is troubled.
    """
    from dsafuse.vllm import host

    row = host.row()
    architectures = ARCHITECTURES
    if isinstance(row, str):
        if mode != "strict":
            return row
    elif mode == "off":
        if row.platform != "cpu":  # on a CPU build the DSA models do not run without support from here
            return "DSAFUSE_MODE=off"
    elif row.dense:
        architectures += DENSE_ARCHITECTURES
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in architectures:
        ModelRegistry.register_model(architecture, f"{_LAZY}:{architecture}@{host.version()}")
    return None


def stats() -> "dict[str, dict[str, int]]":
    """Calls in this process, per op: {"mla": {"fused": 24, "fallback": 0}, "indexer": {...}, "prepare_qk": {...}}.

    `counters` has the meaning of each. Counted where the op runs. Under torch.compile a refused layer's fallback is
    not counted, and the replay of a CUDA graph runs no Python: there the numbers are those of capture. With vLLM's
    multiprocessing the layers are in other processes, whose numbers these are not: `WorkerExtension` asks there.
    """
    from dsafuse.vllm.counters import CALLS

    return {op: dict(calls) for op, calls in CALLS.items()}


class WorkerExtension:
    """For vLLM's option worker_extension_cls: what a worker's plugin did, asked from outside.

    llm = LLM(model, worker_extension_cls="dsafuse.vllm.WorkerExtension")
    llm.collective_rpc("dsafuse_stats"), llm.collective_rpc("dsafuse_plans")        # one answer a worker
    """

    def dsafuse_stats(self) -> "dict[str, dict[str, int]]":
        """As `stats`, in this worker."""
        return stats()

    def dsafuse_plans(self) -> "dict[str, str]":
        """Layer name -> what was decided for it and why."""
        from dsafuse.vllm import plan

        return {name: str(made) for name, made in plan.PLANS.items()}

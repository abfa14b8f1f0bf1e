"""The vLLM plugin: dsafuse's fused preparation inside DeepSeek-V3.2 and GLM-5 models.

Two entry points. `register` (group vllm.general_plugins) sends the DSA architectures through
`dsafuse.vllm.lazy`, which installs the hooks when vLLM resolves the model class; until then nothing of vLLM's
models is imported or touched. Drafts need no row of their own: the hooks are there when their target is built.
`platform_plugin` (group vllm.platform_plugins) gives CPU builds, and only these, a platform that accepts sparse
attention. See docs/vllm.md.

Importing this module does not import vLLM.
"""

import logging
import os
from functools import cache

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


STRICT_STOPS = "DSAFUSE_MODE=strict, and not installed: "
"""How the error begins that keeps a DSA model from starting; the reasons follow."""


def register() -> None:
    """vLLM's general entry point, called in every process, perhaps more than once.

    It registers strings only. Importing a model or a layer here would be too early: vLLM decides about
    breakable CUDA graphs when `layers.mla` is imported, from a variable that VllmConfig sets later.

    An exception out of here would end the engine, whatever model it serves. So there is none, but for
    DSAFUSE_MODE=strict where vLLM could not be asked, or its table of models not be written to: no DSA model could be
    told from others then. Where it is another switch that has a wrong value, strict still sends the DSA architectures
    to `lazy`, which raises it.

    From 0.32 on this may run before vLLM has set up its log: only warnings and errors are sure to be seen.
    """
    mode, wrong = chosen()
    if wrong is not None:
        say_wrong(mode, wrong)
        if mode == "strict":
            _send(ARCHITECTURES)
        return
    try:
        reason = _route(mode)
    except Exception as error:
        if mode == "strict":
            raise
        logger.exception("dsafuse: not installed: %s: %s.", type(error).__name__, error)
        return
    if reason is not None:
        logger.log(logging.INFO if mode == "off" else logging.WARNING, "dsafuse: not installed: %s.", reason)


def chosen() -> tuple[str, str | None]:
    """The mode, and what is wrong: where a switch has a wrong value "strict" stays, and any other mode is "off"."""
    try:
        return switches.current().mode, None
    except ValueError as error:
        return "strict" if os.environ.get("DSAFUSE_MODE") == "strict" else "off", str(error)


@cache
def say_wrong(mode: str, wrong: str) -> None:
    """That a switch has a wrong value: one line of error in a process, whoever asks."""
    then = "a DSA model does not start" if mode == "strict" else "vLLM's own code runs"
    logger.error("dsafuse: not installed, %s: %s.", then, wrong)


def routed(mode: str) -> tuple[str, ...] | str:
    """The architectures that are sent to the lazy module in a mode; or why none is.

    With "strict" they are sent there even where nothing can be installed: the module raises the reason when a DSA
    model is resolved, and no other model is troubled.
    """
    from dsafuse.vllm import host

    row = host.row()
    if isinstance(row, str):
        return ARCHITECTURES if mode == "strict" else row
    if mode == "off":  # on a CPU build the DSA models do not run without support from here
        return ARCHITECTURES if row.platform == "cpu" else "DSAFUSE_MODE=off"
    return ARCHITECTURES + DENSE_ARCHITECTURES if row.dense else ARCHITECTURES


def _route(mode: str) -> str | None:
    """Send a mode's architectures to the lazy module. Returns why not, or None."""
    architectures = routed(mode)
    if isinstance(architectures, str):
        return architectures
    _send(architectures)
    return None


def _send(architectures: tuple[str, ...]) -> None:
    """To the lazy module, in vLLM's table of models."""
    from vllm.model_executor.models.registry import ModelRegistry

    from dsafuse.vllm import host

    for architecture in architectures:
        ModelRegistry.register_model(architecture, f"{_LAZY}:{architecture}@{host.version()}")


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

"""Where vLLM finds the DSA model classes. Importing this module installs the hooks.

vLLM imports it when it resolves a model class: in the worker, after VllmConfig is final. A process that
serves no DSA model never imports it. The classes are vLLM's own.
"""

from typing import Any

from dsafuse import switches
from dsafuse.vllm import ARCHITECTURES, host, logger


def _install() -> list[str]:
    """Install what applies here. Returns what is not installed and why, one sentence each."""
    from vllm.platforms import current_platform

    problems: list[str] = []
    mode = switches.current().mode  # a value that it does not know raises, and says so
    if current_platform.is_cpu():
        found = host.differences(host.CPU_SYMBOLS)
        if not found:
            from dsafuse.vllm.cpu import install

            found = install.install()
        problems += [f"CPU support: {text}" for text in found]
    if mode == "off":
        return problems  # as chosen: vLLM's own model code, and nothing to report
    found = host.differences(host.WRAPPER_SYMBOLS)
    if not found:
        from dsafuse.vllm import wrapper

        found = wrapper.install()
    problems += [f"fused preparation: {text}" for text in found]
    if problems and mode == "strict":
        raise RuntimeError("DSAFUSE_MODE=strict, and not installed: " + "; ".join(problems))
    return problems


for _problem in _install():
    logger.warning("dsafuse: not installed: %s.", _problem)


def __getattr__(name: str) -> Any:
    """The model class of an architecture: what vLLM itself would have used on a CPU."""
    if name not in ARCHITECTURES:
        raise AttributeError(name)
    from vllm.model_executor.models import deepseek_v2

    vllm_class = {"DeepseekV32ForCausalLM": "DeepseekV3ForCausalLM"}.get(name, name)
    return getattr(deepseek_v2, vllm_class)

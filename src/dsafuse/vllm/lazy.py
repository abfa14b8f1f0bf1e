"""Where vLLM finds the DSA model classes. Importing this module installs the hooks.

vLLM imports it when it resolves a model class: in the worker, after VllmConfig is final. A process that
serves no DSA model never imports it. The classes are vLLM's own.
"""

import importlib
from typing import Any

from dsafuse.vllm import ARCHITECTURES, DENSE_ARCHITECTURES, STRICT_STOPS, chosen, host, logger


def _wrapper_path() -> list[str]:
    found = host.wrapper_differences()
    if not found:
        from dsafuse.vllm import wrapper

        found = wrapper.install()
    return found


def _model_path() -> list[str]:
    """Hooks for vLLM's own fused model classes. The package looks at its symbols itself."""
    found: list[str] = importlib.import_module("dsafuse.vllm.model_path").install()
    return found


_PATHS = {"wrapper": _wrapper_path, "model": _model_path}


def _install() -> list[str]:
    """Install what applies here. Returns what is not installed and why, one sentence each."""
    problems: list[str] = []
    mode, wrong = chosen()
    if wrong is not None:  # `register` sends nobody here then, but under strict
        raise RuntimeError(f"{STRICT_STOPS}{wrong}")
    row = host.row()
    if isinstance(row, str):
        problems.append(row)
    else:
        if row.platform == "cpu":
            found = host.differences(host.CPU_SYMBOLS)
            if not found:
                from dsafuse.vllm.cpu import install

                found = install.install()
            problems += [f"CPU support: {text}" for text in found]
        if mode == "off":
            return problems  # as chosen: vLLM's own model code, and nothing to report
        problems += [f"fused preparation: {text}" for text in _PATHS[row.path]()]
    if problems and mode == "strict":
        raise RuntimeError(STRICT_STOPS + "; ".join(problems))
    return problems


for _problem in _install():
    logger.warning("dsafuse: not installed: %s.", _problem)


def __getattr__(name: str) -> Any:
    """The model class of an architecture: what vLLM itself would have used here, from its own table.

    What follows an "@" in the name is for vLLM's cache of facts about model classes, which is kept by name: it must
    not outlive an upgrade of vLLM.
    """
    architecture = name.split("@")[0]
    if architecture not in ARCHITECTURES + DENSE_ARCHITECTURES:
        raise AttributeError(name)
    from vllm.model_executor.models import registry

    module, class_name = registry._VLLM_MODELS[architecture]
    return getattr(importlib.import_module(registry._resolve_module_name(module)), class_name)

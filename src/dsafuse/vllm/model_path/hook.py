"""Installing the functions, and planning each layer when it is built."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from dsafuse.vllm import gates, host
from dsafuse.vllm.model_path import plan
from dsafuse.vllm.model_path.functions import Functions
from dsafuse.vllm.model_path.symbols import Path

NAMES = ("fused_norm_rope", "fused_q")


def install(path: Path) -> list[str]:
    """Replace the functions in the namespace of the attention class, and wrap its constructor. Returns why not."""
    kernels, module = importlib.import_module(path.kernels), importlib.import_module(path.module)
    if isinstance(getattr(module.fused_q, "__self__", None), Functions):
        return []
    for name in NAMES:
        holder = getattr(module, name)
        if holder is not getattr(kernels, name):
            return [host.taken(f"{path.module}.{name}", holder)]
    functions = Functions(kernels.fused_norm_rope, kernels.fused_q, gates.fp8_dtype(), host.tile_scale_rule())
    for name in NAMES:
        setattr(module, name, getattr(functions, name))
    layer = getattr(module, path.layer)
    layer.__init__ = _planned(layer.__init__, functions, path)
    return []


def _planned(init: Callable[..., None], functions: Functions, path: Path) -> Callable[..., None]:
    @functools.wraps(init)
    def build(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        init(self, vllm_config, *args, **kwargs)
        plan.build(self, vllm_config, functions, path)

    return build

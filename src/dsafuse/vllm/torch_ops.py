"""Registering the bridge's torch ops: in dsafuse's namespace, through a library object of our own."""

from collections.abc import Callable
from typing import Any

import torch

# An op lives as long as the library object that defined it; this one lives as long as the module.
_LIBRARY = torch.library.Library("dsafuse", "FRAGMENT")


def define(name: str, body: Callable[..., Any], fake: Callable[..., Any], mutates: list[str]) -> None:
    """Register an op that reads vLLM's forward context and is opaque to torch.compile.

    Its layer name must be annotated `LayerNameType`: with torch 2.11 and newer a layer name is an opaque
    value, not a str, and a str annotation fails at the first call.
    """
    from vllm.utils.torch_utils import direct_register_custom_op

    direct_register_custom_op(name, body, mutates_args=mutates, fake_impl=fake, target_lib=_LIBRARY)

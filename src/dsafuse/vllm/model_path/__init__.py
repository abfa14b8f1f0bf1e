"""The hook for vLLM's own fused DSA model: our two seam ops in place of its two functions.

From 0.32 on vLLM serves these models on GPUs with `vllm.models.deepseek_v32`, whose attention class prepares queries
and keys by `fused_norm_rope` and `fused_q`.

What is touched, why, and when it can go: docs/vllm-model-path.md, "What is touched".

Nothing of vLLM's body is re-stated, and nothing between the two calls changes: GEMMs, eager breaks, short dense
prefills and graphs are vLLM's. vLLM compiles no class of this model by torch.compile, so nothing here is traced.
"""

import importlib
from typing import Any


def install(platform: str | None = None) -> list[str]:
    """Put the functions in place, once per process. Returns why not, one sentence each; an empty list means done.

    Args:
        platform: whose attention class, "cuda" or "rocm"; that of this process by default.
    """
    from dsafuse.vllm import host
    from dsafuse.vllm.model_path import symbols

    found = symbols.of(host.version(), platform or host.platform())
    if isinstance(found, str):
        return [found]
    differences = host.differences((*host.SHARED_SYMBOLS, *found.symbols))
    if differences:
        return differences
    from dsafuse.vllm.model_path import hook

    return hook.install(found)


def __getattr__(name: str) -> Any:
    """The class of `vllm.models.deepseek_v32`, its functions replaced.

    For `model_class_overrides`, where vLLM's default is another model, as it is in 0.26.
    Raises RuntimeError with the reasons if DSAFUSE_MODE=strict and they can't be, or if another switch has a wrong
    value beside it; in other modes that is an error in the log, and the functions are vLLM's own.
    """
    from dsafuse.vllm import ARCHITECTURES, STRICT_STOPS, chosen, logger, say_wrong

    if name not in ARCHITECTURES:
        raise AttributeError(name)
    mode, wrong = chosen()
    problems = [wrong] if wrong else [] if mode == "off" else install()
    if problems and mode == "strict":
        raise RuntimeError(STRICT_STOPS + "; ".join(problems))
    if wrong:
        say_wrong(mode, wrong)
    else:
        for problem in problems:
            logger.warning("dsafuse: not installed: %s.", problem)
    # One class serves both architectures.
    return importlib.import_module("vllm.models.deepseek_v32").DeepseekV32ForCausalLM

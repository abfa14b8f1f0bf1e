"""What the plugin would decide for a model, without weights, caches or memory of a GPU: `dsafuse explain --vllm`.

    python -m dsafuse.vllm.foresee < question.json

The question is {"model": folder, "kv_cache_dtype": word, "changes": to config.json, "mtp": bool}. vLLM's own config is
made from the folder and its own model class is built on torch's meta device, with the plugin at work. So the layers
that the gates look at are the real ones, and there are no second sentences: what is printed is what a worker would
log. Standard output gets one JSON object, vLLM's log goes to standard error.

A rank of a tensor-parallel model is built as a model with its share of the heads: nothing else that a plan looks at
is divided.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dsafuse import stopping, switches
from dsafuse.vllm import logger, routed

ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

WEIGHT_FORMATS = ("quantization_config", "compression_config")
"""Where config.json says what weights hold. No plan looks at it, and a CPU lacks vLLM's kernels for some."""


class Unforeseen(Exception):
    """vLLM could not build the model; the message has its last words."""


def ask(model: Path, kv_cache_dtype: str, tp: int, *, mtp: bool = False) -> dict[str, Any]:
    """What `foresee` finds, in a process of its own: vLLM's state is not for the caller's; and whether vLLM "starts".

    Raises ValueError if the model's heads can't be shared by `tp` ranks, Unforeseen if vLLM can't build the model.
    """
    heads = read_config(model / "config.json").get("num_attention_heads")
    share: dict[str, int] = {}
    if tp != 1:
        if not isinstance(heads, int) or tp < 1 or heads % tp:
            raise ValueError(f"tp: got {tp}, expected a divisor of {heads} heads")
        share = {"num_attention_heads": heads // tp, "num_key_value_heads": heads // tp}
    question = {"model": str(model.resolve()), "kv_cache_dtype": kv_cache_dtype, "changes": share, "mtp": mtp}
    done = subprocess.run(
        [sys.executable, "-m", "dsafuse.vllm.foresee"],
        input=json.dumps(question),
        env={**os.environ, **ENVIRONMENT, **_mode()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Unforeseen(stopping.last_words("vLLM could not build this model", done.stderr))
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "starts": not (found["strict_raises"] and switches.current().mode == "strict")}


def read_config(path: Path) -> dict[str, Any]:
    """What a model's config.json says. Raises ValueError for a file that is none."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {type(found).__name__}, expected a JSON object")
    return found


def _mode() -> dict[str, str]:
    # strict would raise the first refusal; all of them are to be said.
    return {"DSAFUSE_MODE": "auto"} if switches.current().mode == "strict" else {}


def foresee(model: str, kv_cache_dtype: str, changes: dict[str, Any], mtp: bool) -> dict[str, Any]:
    """Build the model and report: vLLM, platform, and one entry for each kind of layer, in the order of layers.

    strict_raises: whether DSAFUSE_MODE=strict would not let it start. That is so where a layer is refused, and where
    something is not installed, if `lazy` is asked for the model: `register` says so beside any other model, too.

    changes: to config.json. mtp: with a draft of the model's MTP layers.
    """
    import torch
    import vllm
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    from dsafuse.vllm import plan

    said = _NotInstalled()
    logger.addHandler(said)
    logger.setLevel(logging.INFO)  # from 0.32 on vLLM sets its own loggers' only when its plugins have spoken
    given = read_config(Path(model) / "config.json")
    left_out = [name for name in WEIGHT_FORMATS if name in given] if current_platform.is_cpu() else []
    config = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=kv_cache_dtype,
        hf_overrides=changes | dict.fromkeys(left_out),
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if mtp else None,
    ).create_engine_config()
    with tempfile.TemporaryDirectory() as place, set_current_vllm_config(config):
        _alone(Path(place) / "store")
        init_workspace_manager(torch.device("meta"))  # backends for GPUs take their buffers from it when they are built
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config=config)
            if mtp:
                initialize_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        # An executor asks this when the layers are built: some backends take other blocks than vLLM's default.
        current_platform.update_block_size_for_backend(config)
    kinds: dict[str, dict[str, Any]] = {}
    for found in plan.PLANS.values():
        kinds.setdefault(str(found), {"says": str(found), "layers": [], **found.as_dict()})["layers"].append(
            found.layer
        )
    refused = any(map(plan.refusals, plan.PLANS.values()))
    sent = config.model_config.architecture in routed("strict")
    return {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "not_installed": ["DSAFUSE_MODE=off"] if switches.current().mode == "off" else said.reasons,
        "left_out": left_out,
        "block_size": config.cache_config.block_size,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kinds": list(kinds.values()),
        "strict_raises": refused or (sent and bool(said.reasons)),
    }


class _NotInstalled(logging.Handler):
    """Hears what the plugin logs when it does not install something."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        _, found, reason = record.getMessage().partition("dsafuse: not installed: ")
        if found and reason not in self.reasons:
            self.reasons.append(reason)


def _alone(store: Path) -> None:
    """vLLM's process groups, with this process alone in each."""
    from vllm.distributed import parallel_state

    parallel_state.init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    parallel_state.initialize_model_parallel()


def main() -> None:
    """Answer the question on standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(json.dumps(foresee(**json.load(sys.stdin))) + "\n")
    answers.close()


if __name__ == "__main__":
    main()

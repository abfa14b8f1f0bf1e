"""What the plugin would decide for a model, without weights, caches or memory of a GPU: `dsafuse explain --vllm`.

    python -m dsafuse.vllm.foresee < question.json

The question is {"model": folder, "kv_cache_dtype": word, "changes": to config.json, "mtp": bool}. vLLM's own config is
made from the folder and its own model class is built on torch's meta device, with the plugin at work. So the layers
that the gates look at are the real ones, and there are no second sentences: what is printed is what a worker would
log. Standard output gets one JSON object, vLLM's log goes to standard error.

A rank of a tensor-parallel model is built as a model with its share of the heads: nothing else that a plan looks at
is divided. Of a multimodal model the language model alone is built: no plan looks at the rest, and some of it needs
weights when it is built.
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
from dsafuse.models import WEIGHT_FORMATS
from dsafuse.vllm import ARCHITECTURES, DENSE_ARCHITECTURES, logger, routed

ENVIRONMENT = {
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "index_n_heads")
"""What config.json must not have less than one of, if it has it. vLLM builds a model of nothing without a word."""

_META = "meta tensor"
"""In every error of torch's that says so."""


class Unforeseen(Exception):
    """vLLM could not build the model, or not without weights; the message has its last words."""


def ask(model: Path, kv_cache_dtype: str, tp: int, *, mtp: bool = False) -> dict[str, Any]:
    """What `foresee` finds, in a process of its own: vLLM's state is not for the caller's; and whether vLLM "starts".

    Raises ValueError if the model's heads can't be shared by `tp` ranks, or if it has no MTP layers for `mtp`;
    Unforeseen if vLLM can't build the model.
    """
    config = read_config(model / "config.json")
    share: dict[str, int] = {}
    if tp != 1:
        heads = config.get("num_attention_heads")
        if heads is None:
            raise ValueError(f"tp: got {tp}, expected num_attention_heads in config.json, which it divides")
        if tp < 1 or heads % tp:
            raise ValueError(f"tp: got {tp}, expected a divisor of {heads} heads")
        share = {"num_attention_heads": heads // tp, "num_key_value_heads": heads // tp}
    named = config.get("architectures")
    if mtp and isinstance(named, list) and any(each in named for each in ARCHITECTURES + DENSE_ARCHITECTURES):
        layers = config.get("num_nextn_predict_layers")  # where it is missing vLLM takes one layer for granted
        if not _counts(layers):
            raise ValueError(f"mtp: got num_nextn_predict_layers {layers!r} in config.json, expected 1 or more")
    question = {"model": str(model.resolve()), "kv_cache_dtype": kv_cache_dtype, "changes": share, "mtp": mtp}
    done = subprocess.run(
        [sys.executable, "-m", "dsafuse.vllm.foresee"],
        input=json.dumps(question),
        env={**os.environ, **ENVIRONMENT, **_mode()},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        what = "vLLM could not build this model"
        if _META in done.stderr:
            what = "not foreseen: vLLM's class of this model needs weights when it is built, and here it gets none"
        raise Unforeseen(stopping.last_words(what, done.stderr))
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "starts": not (found["strict_raises"] and switches.current().mode == "strict")}


def read_config(path: Path) -> dict[str, Any]:
    """What a model's config.json says. Raises ValueError for a file that is none, and for one with wrong COUNTS."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path}: got {type(found).__name__}, expected a JSON object")
    for name in COUNTS:
        if name in found and not _counts(found[name]):
            raise ValueError(f"{path}: {name}: got {found[name]!r}, expected a positive integer")
    return found


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _mode() -> dict[str, str]:
    # strict would raise the first refusal; all of them are to be said.
    return {"DSAFUSE_MODE": "auto"} if switches.current().mode == "strict" else {}


def foresee(model: str, kv_cache_dtype: str, changes: dict[str, Any], mtp: bool) -> dict[str, Any]:
    """Build the model and report: vLLM, platform, and one entry for each kind of layer, in the order of layers.

    strict_raises: whether DSAFUSE_MODE=strict would not let it start. That is so where a layer is refused, and where
    something is not installed, if `lazy` is asked for the model: `register` says so beside any other model, too. Where
    `register` itself fails, no model starts; where vLLM does not load the plugin, nothing of it can stop one.

    changes: to config.json. mtp: with a draft of the model's MTP layers.
    """
    import vllm
    from vllm.platforms import current_platform

    from dsafuse.vllm import plan

    said = _NotInstalled()
    logger.addHandler(said)
    unloaded = _why_not_loaded()
    if unloaded is not None:
        said.reasons.append(unloaded)
    given = read_config(Path(model) / "config.json")
    # No plan looks at how weights are held, and a CPU lacks vLLM's kernels for some formats.
    left_out = [name for name in WEIGHT_FORMATS if name in given] if current_platform.is_cpu() else []
    try:
        config = _build(model, kv_cache_dtype, changes | dict.fromkeys(left_out), mtp)
    except Exception as error:
        if not said.reasons:
            raise
        raise RuntimeError(f"not installed: {'; '.join(said.reasons)}; then {type(error).__name__}: {error}") from error
    if unloaded is None and switches.current().mode == "off":
        said.reasons.insert(0, "DSAFUSE_MODE=off")
    kinds: dict[str, dict[str, Any]] = {}
    for found in plan.PLANS.values():
        kinds.setdefault(str(found), {"says": str(found), "layers": [], **found.as_dict()})["layers"].append(
            found.layer
        )
    refused = any(map(plan.refusals, plan.PLANS.values()))
    return {
        "vllm": vllm.__version__,
        "platform": current_platform.device_type,
        "not_installed": said.reasons,
        "left_out": left_out,
        "block_size": config.cache_config.block_size,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kinds": list(kinds.values()),
        "strict_raises": unloaded is None
        and (refused or said.failed or (bool(said.reasons) and config.model_config.architecture in routed("strict"))),
    }


def _why_not_loaded() -> str | None:
    """Why vLLM does not load the plugin here, asked as vLLM does; None if it does."""
    from vllm import envs
    from vllm.plugins import load_plugins_by_group

    if "dsafuse" in load_plugins_by_group("vllm.general_plugins"):
        return None
    if envs.VLLM_PLUGINS is not None and "dsafuse" not in envs.VLLM_PLUGINS:
        return f"VLLM_PLUGINS is {','.join(envs.VLLM_PLUGINS)!r}, which leaves dsafuse out"
    return "vLLM finds no entry point of dsafuse's, which pip install makes"


def _build(model: str, kv_cache_dtype: str, changes: dict[str, Any], mtp: bool) -> Any:
    """vLLM's config of the model, whose layers have been built and planned."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker.workspace import init_workspace_manager

    config = EngineArgs(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=kv_cache_dtype,
        language_model_only=True,
        hf_overrides=changes,
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
    return config


class _NotInstalled(logging.Handler):
    """Hears what the plugin logs when it does not install what it was asked for, and whether `register` failed."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.reasons: list[str] = []
        self.failed = False

    def emit(self, record: logging.LogRecord) -> None:
        _, found, reason = record.getMessage().partition("dsafuse: not installed: ")
        if found:
            self.failed |= record.exc_info is not None
            self.reasons += [text for text in [reason.removesuffix(".")] if text not in self.reasons]


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

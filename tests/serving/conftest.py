"""A plan over fakes, and what they leave behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsafuse.serving import run
from dsafuse.serving.grid import cells
from dsafuse.serving.run import Plan

FAKE = (sys.executable, str(Path(__file__).with_name("fake_vllm.py")))
FACTS = {
    "dsafuse": "0.1.0", "commit": "abc", "clean": True, "torch": "2.11", "triton": "3.6", "vllm": "0.26.0",
    "gpu": "NVIDIA H200", "driver": "580", "gpus": ["NVIDIA H200"], "memory_bytes": [[140 << 30, 141 << 30]],
}  # fmt: skip
CONFIG = {
    "kv_lora_rank": 512, "index_topk": 2048, "num_attention_heads": 16, "num_hidden_layers": 2,
    "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the machine is said to be; may be changed."""
    found = dict(FACTS)
    monkeypatch.setattr(run, "facts", lambda gpus: dict(found))
    return found


@pytest.fixture
def plan(tmp_path: Path, facts: dict[str, Any]) -> Plan:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "out").mkdir()
    return Plan(
        model=model,
        cells=cells([16], [8], [1, 2]),
        repeats=2,
        in_turn=False,
        vllm=FAKE,
        client=(*FAKE, "client"),
        start_seconds=30.0,
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Path]:
    """Say how the fakes behave; returns the file with their process ids."""

    def behave(**how: Any) -> Path:
        pids = tmp_path / "pids"
        monkeypatch.setenv("FAKE", json.dumps({"pids": str(pids), "calls": str(tmp_path / "calls"), **how}))
        return pids

    return behave


def alive(pids: Path) -> list[int]:
    """Which of these processes are still there; zombies of ours are not."""
    found = []
    for pid in map(int, pids.read_text().split() if pids.exists() else ()):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (ProcessLookupError, FileNotFoundError):
            continue
        if state != "Z":
            found.append(pid)
    return found


def changed(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, **changes)

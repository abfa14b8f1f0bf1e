"""Tasks of lm-eval, answered over vLLM's OpenAI endpoint by both arms: `dsafuse eval --lm-eval gsm8k`.

Each arm is a `vllm serve`, one after the other, and lm-eval a process that asks it (`local-completions`). The server
tokenises, so only tasks that generate text are served, not those that score given answers. What is compared is
lm-eval's own verdict on every sample, for every filter and metric whose values are 0 and 1.

A server's steps are not counted here. What shows that its arm is fused is what the plugin says of each kind of layer
when the model is built: a plan is made once and frozen, and one refused kind of DSA layer ends the run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsafuse import installed
from dsafuse.accuracy.evaluate import MODES, Cell
from dsafuse.accuracy.model import Model
from dsafuse.accuracy.paired import SIGNIFICANT, Paired, paired
from dsafuse.check.environment import environment
from dsafuse.serving.grid import OFF, ON
from dsafuse.serving.process import Process, end_all
from dsafuse.serving.server import Server, free_ports, vllm_command, why_not_an_arm
from dsafuse.stopping import held
from dsafuse.vllm.arms import FUSED, UNFUSED

OUR_TASKS = Path(__file__).with_name("lm_tasks")
SERVERS = {UNFUSED: OFF, FUSED: ON}
assert SERVERS.keys() == MODES.keys()

# How a plan of `dsafuse.vllm.plan` words it.
OWN_CODE = "vLLM's own code"
NO_INDEXER = f"{OWN_CODE} (this layer uses another layer's top-k and has no indexer)"

Doing = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is asked. tasks: lm-eval's names, and dsafuse_recall and dsafuse_arithmetic. serve: of `vllm serve`."""

    model: Model
    tasks: tuple[str, ...]
    cells: tuple[Cell, ...]
    limit: int | None = None
    context: int = 384
    seed: int = 0
    concurrent: int = 64
    serve: tuple[str, ...] = ()
    seconds: float = 3600.0


Samples = dict[tuple[str, str, str], dict[int, tuple[float, str]]]
"""By task, filter and metric: for each document, the metric's value, and what was answered."""


@dataclass(frozen=True)
class Compared:
    """Both arms of one cell on one task, as one filter and metric of lm-eval's see it."""

    cell: Cell
    task: str
    filter: str
    metric: str
    paired: Paired

    @property
    def ok(self) -> bool:
        """Whether the arms differ by no more than chance."""
        return self.paired.p >= SIGNIFICANT

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        names = {"task": self.task, "filter": self.filter, "metric": self.metric}
        cell = {"kv_cache_dtype": self.cell.kv_cache_dtype, "draft_tokens": self.cell.drafts}
        return {**cell, **names, "ok": self.ok, **self.paired.record()}


def why_not_here() -> str | None:
    """Why lm-eval can't be asked in this environment, or None."""
    reason = installed.why_not("lm_eval")
    return reason and f"{reason}; `pip install 'lm-eval[api]>=0.4.11'` does it (the extra `eval`)"


def run(request: Request, doing: Doing = lambda text: None) -> list[Compared]:
    """Serve and ask. Raises RuntimeError where an arm is not the arm that it should be, or has no samples, and
    `serving.process.Ended` where a process ended that should not have.
    """
    compared = []
    deadline = time.monotonic() + request.seconds
    with tempfile.TemporaryDirectory(prefix="dsafuse-lm-eval-") as place:
        for number, cell in enumerate(request.cells):
            arms: dict[str, Samples] = {}
            for name in MODES:
                folder = Path(place) / f"{number}-{SERVERS[name]}"
                folder.mkdir()
                doing(f"{cell}, {name}")
                arms[name] = answer(request, cell, name, folder, deadline)
            compared += pair(cell, arms[UNFUSED], arms[FUSED])
    return compared


def pair(cell: Cell, unfused: Samples, fused: Samples) -> list[Compared]:
    """Compare samples by document, for every metric whose values are 0 and 1 in both arms.

    Raises RuntimeError if there is none, or the arms answered other documents.
    """
    if unfused.keys() != fused.keys():
        raise RuntimeError(f"{cell}: lm-eval reported {sorted(unfused)} un-fused and {sorted(fused)} fused")
    found = []
    for key, before in unfused.items():
        after = fused[key]
        if before.keys() != after.keys():
            raise RuntimeError(f"{cell}: {key[0]}: {len(before)} documents un-fused, {len(after)} fused, not the same")
        if all(value in (0, 1) for arm in (before, after) for value, _ in arm.values()):
            arms = ([(bool(arm[at][0]), arm[at][1]) for at in sorted(before)] for arm in (before, after))
            found.append(Compared(cell, *key, paired(*arms)))
    if not found:
        raise RuntimeError(f"{cell}: no metric of lm-eval's is a verdict on a document, got {sorted(unfused)}")
    return found


def answer(request: Request, cell: Cell, name: str, folder: Path, deadline: float) -> Samples:
    """One arm of one cell: start its server, let lm-eval ask it, and read what lm-eval wrote."""
    port = free_ports(1)[0]
    processes: list[Process] = []
    try:
        with held():
            server = Server(SERVERS[name], vllm_command(), server_arguments(request, cell), port, folder / "server.log")
            processes.append(server)
        while not server.ready():
            _sleep(deadline)
        plans = server.plans()
        reason = why_not_an_arm(server.arm, plans, server.log) or why_refused(plans)
        if reason is not None:
            raise RuntimeError(reason)
        environment = {**os.environ, "OPENAI_API_KEY": "none", "TOKENIZERS_PARALLELISM": "false"}
        command = client_command(request, server.url, folder)
        with held():
            client = Process("lm-eval", command, environment, folder / "lm-eval.log")
            processes.insert(0, client)
        while (code := client.exit_code) is None:
            server.check()
            _sleep(deadline)
        if code:
            client.check()  # raises, with the end of its log
    finally:
        with held():
            end_all(processes)
    return read_samples(folder)


def why_refused(plans: Sequence[str]) -> str | None:
    """What the plugin refused of a DSA layer, by what it said; None if nothing. A layer without an indexer is none."""
    refused = [plan for plan in plans if plan.startswith("DSA layer") and OWN_CODE in plan.replace(NO_INDEXER, "")]
    return f"not every DSA layer is fused: {'; '.join(refused)}" if refused else None


def _sleep(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError("the time limit passed")
    time.sleep(1.0)


def server_arguments(request: Request, cell: Cell) -> list[str]:
    """Arguments of `vllm serve` for a cell; the same for both arms."""
    arguments = [str(request.model.directory.resolve()), "--served-model-name", request.model.name]
    arguments += ["--kv-cache-dtype", cell.kv_cache_dtype, "--seed", "0", "--no-enable-prefix-caching"]
    if cell.drafts:
        draft = {"method": "mtp", "num_speculative_tokens": cell.drafts}
        arguments += ["--speculative-config", json.dumps(draft)]
    return [*arguments, *request.serve]


def client_command(request: Request, url: str, folder: Path) -> list[str]:
    """What asks: lm-eval's command line. Prompts go as text, and the server's tokenizer reads them."""
    model = {
        "model": request.model.name,
        "base_url": f"{url}/v1/completions",
        "num_concurrent": request.concurrent,
        "tokenizer_backend": "None",
        "tokenized_requests": False,
    }
    # Our two tasks are made, not loaded: this tells them how many problems, how long, and from which seed.
    metadata = {"seed": request.seed, "count": request.limit or 200, "context_tokens": request.context}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in model.items())]
    command += ["--tasks", ",".join(request.tasks), "--include_path", str(OUR_TASKS)]
    command += ["--metadata", json.dumps(metadata), "--seed", str(request.seed)]
    command += ["--output_path", str(folder / "samples"), "--log_samples"]
    return [*command, *(["--limit", str(request.limit)] if request.limit else [])]


def read_samples(folder: Path) -> Samples:
    """lm-eval's samples_*.jsonl."""
    found: Samples = {}
    for path in sorted((folder / "samples").rglob("samples_*.jsonl")):
        task = path.name.removeprefix("samples_").rsplit("_", 1)[0]
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            for metric in sample["metrics"]:
                documents = found.setdefault((task, sample["filter"], metric), {})
                documents[sample["doc_id"]] = (sample[metric], json.dumps(sample["filtered_resps"]))
    return found


def record(request: Request, compared: Sequence[Compared], problems: Sequence[str]) -> dict[str, Any]:
    """A run as JSON has it."""
    return {
        "ok": bool(compared) and not problems and all(each.ok for each in compared),
        "model": request.model.name,
        "tasks": list(request.tasks),
        "serve": list(request.serve),
        "lm_eval": [each.record() for each in compared],
        "problems": list(problems),
        "environment": environment(),
    }

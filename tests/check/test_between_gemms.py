"""benchmarks/between_gemms.py without a GPU: it says so, and a tiny layer of it is proven as a real one is."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from benchmarks import between_gemms
from benchmarks.between_gemms import LAYERS, LAYOUTS, REPLAYS, Sizes, stack, unlike_the_oracle

from dsafuse import switches

CPU = torch.device("cpu")
TINY = Sizes(hidden=64, q_lora=32, intermediate=256)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tiny_layer_is_proven_and_one_wrong_byte_is_seen(layout: str) -> None:
    x, layers = stack((2, 2), layout, 3, CPU, TINY)

    def step() -> None:
        for layer in layers:
            assert layer(x, True).isfinite().all()

    def spoilt() -> None:
        step()
        cache = layers[1].written["kv_cache"].view(torch.uint8)
        cache[0, 0, 0] ^= 1

    with switches.override(provider="split"):
        assert unlike_the_oracle(layers, step) == []
        assert unlike_the_oracle(layers, spoilt) == ["layer 1, kv_cache: 1 bytes are not the oracle's"]
        assert unlike_the_oracle(layers, lambda: None) != []


def test_without_the_call_a_layer_leaves_all_that_it_would_write() -> None:
    x, layers = stack((2, 2), "plain", 3, CPU, TINY)
    for tensor in layers[0].written.values():
        tensor.zero_()
    assert layers[0](x, False).shape == x.shape
    assert not any(tensor.view(torch.uint8).any() for tensor in layers[0].written.values())


def test_durations_are_those_of_the_kernel_behind_the_first_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = (REPLAYS + 1) * LAYERS
    events = [{"cat": "kernel", "name": "prepare", "ts": f"{i}.5", "dur": i} for i in reversed(range(launches))]
    others = [{"cat": "kernel", "name": "prepare_more", "ts": 0, "dur": 99}, {"name": "prepare", "ts": 0}]

    class Trace(nullcontext):
        def __enter__(self) -> Trace:
            return self

        def export_chrome_trace(self, path: str) -> None:
            Path(path).write_text(json.dumps({"traceEvents": others + events}))

    monkeypatch.setattr(between_gemms, "profile", lambda activities: Trace())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert between_gemms.durations(lambda: None) == list(range(LAYERS, launches))
    events.pop()
    with pytest.raises(RuntimeError, match=f"got {launches - 1} launches"):
        between_gemms.durations(lambda: None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would run")
def test_it_refuses_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert between_gemms.main(["--tokens", "1", "--out", str(out)]) == 1
    assert "needs a GPU" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("text", ["0", "-1", "12801", "x", "1,2"])
def test_a_token_count_that_cannot_be_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        between_gemms.main(["--tokens", text])
    assert stopped.value.code == 2
    assert f"'{text}'" in capsys.readouterr().err

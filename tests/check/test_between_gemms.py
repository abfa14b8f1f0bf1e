"""benchmarks/between_gemms.py without a GPU: it says so, and a tiny layer of it is proven as a real one is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks import between_gemms
from benchmarks.between_gemms import BLOCK_SIZE, FP8, LAYERS, LAYOUTS, REPLAYS, Layer, Sizes, stack, unlike_the_oracle

from dsafuse import switches
from dsafuse.check.compare import SMALL_SET
from dsafuse.check.timing import interleaved
from dsafuse.layouts import FLAT, INDEX_DIM, ROPE_DIM

CPU = torch.device("cpu")
TINY = Sizes(hidden=64, q_lora=32, intermediate=256)


Spoiling = Callable[[Layer], object]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small caches, and the same draws each time."""
    monkeypatch.setattr(between_gemms, "BLOCKS", 8)
    torch.manual_seed(0)


def step_of(x: torch.Tensor, layers: Sequence[Layer], spoil: Spoiling = lambda layer: None) -> Callable[[], None]:
    """One step, behind which the last layer's results are spoilt."""

    def step() -> None:
        for layer in layers:
            assert layer(x, True).isfinite().all()
        spoil(layers[-1])

    return step


def index_rows(layer: Layer, name: str) -> torch.Tensor:
    """A field of the indexer's cache, uint8 [tokens, bytes], a copy."""
    slots = layer.arguments["index_slot_mapping"]
    return FLAT.load_rows(layer.arm.tensors["index_kv_cache"], name, torch.bfloat16, slots)


def store(layer: Layer, name: str, rows: torch.Tensor) -> None:
    slots = layer.arguments["index_slot_mapping"]
    FLAT.store_rows(layer.arm.tensors["index_kv_cache"], name, torch.bfloat16, slots, rows)


def moved(layer: Layer, count: int) -> None:
    """So many codes of the first key, none of them rotated, a code further from 0."""
    rows = index_rows(layer, "key")
    where = ((rows[0] & 0x7F) < 0x70).nonzero().flatten()
    rows[0, where[where >= ROPE_DIM][:count]] += 1
    store(layer, "key", rows)


def first_key(layer: Layer, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rows = index_rows(layer, "key")
    rows[0, -1] = change(rows[0, -1])
    store(layer, "key", rows)


def scaled(layer: Layer, halved: bool) -> None:
    """The first key's scale doubled; or all of it as another scale, and half of the codes, would say it."""
    scales = index_rows(layer, "scale").view(torch.float32)
    scales[0] *= 2
    store(layer, "scale", scales.view(torch.uint8))
    if halved:
        codes = index_rows(layer, "key").view(FP8).float()
        codes[0] /= 2
        store(layer, "key", codes.to(FP8).view(torch.uint8))


def stray(layer: Layer) -> None:
    """One byte in a block that no token has."""
    cache = layer.arm.tensors["index_kv_cache"]
    foreign = set(range(len(cache))) - set((layer.arguments["index_slot_mapping"] // BLOCK_SIZE).tolist())
    cache[foreign.pop(), 0, 0] ^= 1


def byte_of(name: str) -> Spoiling:
    def spoil(layer: Layer) -> None:
        layer.arm.tensors[name].view(torch.uint8)[0].flatten()[0] ^= 1

    return spoil


def canary(layer: Layer) -> None:
    layer.arm.buffers["index_kv_cache"][-1] ^= 1


SPOILINGS: dict[str, tuple[Spoiling, str]] = {
    "a byte of the MLA cache": (byte_of("kv_cache"), "kv_cache: 1 bytes differ"),
    "a byte of the query": (byte_of("q_out"), "q_out: 1 bytes differ"),
    "a byte of a row to clear": (byte_of("topk_indices"), "topk_indices: 1 bytes differ"),
    "a doubled scale": (lambda layer: scaled(layer, halved=False), "index_kv_cache.key"),
    "another scale for one value": (lambda layer: scaled(layer, halved=True), "index_kv_cache: 1 of 3 scales"),
    "a flipped sign": (lambda layer: first_key(layer, lambda code: (code | 0x30) ^ 0x80), "index_kv_cache.key"),
    "a NaN code": (lambda layer: first_key(layer, lambda code: code | 0x7F), "index_kv_cache.key"),
    "a stray byte in a foreign block": (stray, "index_kv_cache: 1 bytes differ"),
    "a byte behind the cache": (canary, "index_kv_cache: 1 bytes differ"),
    "more codes than a rounding moves": (
        lambda layer: moved(layer, SMALL_SET + 1),
        f"{SMALL_SET + 1} of {3 * INDEX_DIM} normed elements",
    ),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tiny_layer_is_proven_and_no_step_is_not(layout: str) -> None:
    x, layers = stack((2, 2), layout, 3, CPU, TINY)
    with switches.override(provider="split"):
        assert unlike_the_oracle(layers, step_of(x, layers)) == []
        assert unlike_the_oracle(layers, step_of(x, layers, lambda layer: moved(layer, SMALL_SET))) == []
        assert len({note.split(",")[0] for note in unlike_the_oracle(layers, lambda: None)}) == LAYERS
        found = unlike_the_oracle(layers, step_of(x, layers, byte_of("kv_cache")))
        assert found[0].startswith(f"layer {LAYERS - 1}, kv_cache: 1 bytes differ")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("spoiling", SPOILINGS)
def test_what_is_spoilt_in_the_last_layer_is_seen(spoiling: str) -> None:
    spoil, note = SPOILINGS[spoiling]
    x, layers = stack((2, 2), "fp8_ds_mla-fp32", 3, CPU, TINY)
    with switches.override(provider="split"):
        found = unlike_the_oracle(layers, step_of(x, layers, spoil))
    assert any(one.startswith(f"layer {LAYERS - 1}, {note}") for one in found), found
    assert all(one.startswith(f"layer {LAYERS - 1}, ") for one in found)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_what_its_layout_is_called_and_its_tokens_have_slots_of_their_own(layout: str) -> None:
    _, layers = stack((2, 2), layout, 64, CPU, TINY)
    for layer in layers:
        arguments = layer.arguments
        kv_layout, _, scale_rule = layout.partition("-")
        assert (arguments["kv_layout"], arguments["scale_rule"]) == (kv_layout, scale_rule or "ue8m0")
        assert (arguments["q_out"].dtype == FP8) == (layout == "fp8")
        for name in ("slot_mapping", "index_slot_mapping"):
            assert len(set(arguments[name].tolist())) == 64


@pytest.mark.usefixtures("small")
def test_without_the_call_a_layer_leaves_all_that_it_would_write() -> None:
    x, layers = stack((2, 2), "plain", 3, CPU, TINY)
    for tensor in layers[0].arm.tensors.values():
        tensor.zero_()
    assert layers[0](x, False).shape == x.shape
    assert not any(tensor.view(torch.uint8).any() for tensor in layers[0].arm.tensors.values())


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("wrong", [[], ["layer 0, q_out"]])
def test_a_cell_is_timed_with_the_call_and_without_it_once_it_is_proven(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    layer_call = Layer.__call__

    def call(layer: Layer, x: torch.Tensor, prepare: bool) -> torch.Tensor:
        made.append(prepare)
        return layer_call(layer, x, prepare)

    class Timer:
        def __init__(self, calls: Sequence[Callable[[], object]], device: torch.device, launches: int) -> None:
            self.calls = calls

        def replay_us(self) -> float:
            """Not a time: how many calls of the op a replay makes."""
            made.clear()
            for one in self.calls:
                one()
            assert len(made) == LAYERS
            return float(sum(made))

    monkeypatch.setattr(Layer, "__call__", call)
    monkeypatch.setattr(between_gemms, "GraphTimer", Timer)
    monkeypatch.setattr(between_gemms, "Sizes", lambda: TINY)
    monkeypatch.setitem(between_gemms.HEADS, "2/2", (2, 2))
    monkeypatch.setattr(between_gemms, "interleaved", partial(interleaved, rounds=2))
    monkeypatch.setattr(between_gemms, "durations", lambda replay: [replay()])
    if wrong:
        monkeypatch.setattr(between_gemms, "unlike_the_oracle", lambda layers, step: wrong)
    with switches.override(provider="split"):
        row = between_gemms.measured("2/2", "plain", 3, CPU)
    cell = {"heads": "2/2", "layout": "plain", "tokens": 3}
    if wrong:
        assert row == {**cell, "unproven": wrong}
        return
    assert row.keys() == {*cell, "layer_us", "prepare_us"}
    assert {name: spread["median_us"] for name, spread in row["layer_us"].items()} == {"with": LAYERS, "without": 0}
    assert row["prepare_us"]["median_us"] == LAYERS


@pytest.mark.parametrize(
    ("seconds", "unproven", "reached", "code"), [("300", 0, 2, 0), ("300", 1, 2, 1), ("300", 2, 2, 1), ("0", 0, 0, 1)]
)
def test_main_tells_by_exit_code_and_file_what_it_has_proven(
    seconds: str, unproven: int, reached: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(heads: str, layout: str, tokens: int, device: torch.device) -> dict[str, object]:
        return {"tokens": tokens, **({"unproven": ["bytes"]} if tokens == unproven else {})}

    monkeypatch.setattr(between_gemms, "measured", measured)
    monkeypatch.setattr(between_gemms, "environment", lambda: {"commit": "of the checkout", "clean": True})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    out = tmp_path / "out.json"
    out.write_text('{"rows": ["of an older run"]}')
    options = ["--tokens", "1", "1", "2", "--heads", "16/64", "--layout", "plain", "--seconds", seconds]
    assert between_gemms.main([*options, "--commit", "stated", "--out", str(out)]) == code
    record = json.loads(out.read_text())
    assert record["rows"] == [measured("16/64", "plain", tokens, CPU) for tokens in (1, 2)][:reached]
    assert record["unreached"] == 2 - reached
    assert record["environment"] == {"commit": "stated", "clean": None}


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


@pytest.mark.parametrize(
    ("option", "text"),
    [
        *(("--tokens", text) for text in ("0", "-1", "12801", "x", "1,2")),
        *(("--seconds", text) for text in ("-1", "nan", "inf", "x")),
    ],
)
def test_a_value_that_cannot_be_is_refused_before_any_work(
    option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        between_gemms.main([option, text])
    assert stopped.value.code == 2
    assert f"'{text}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("no/such/folder/file.json", "there is no directory"),
        (".", "is a directory"),
        ("link", "there is no directory"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_as_a_value_is_before_any_work(
    place: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "file.json")
    with pytest.raises(SystemExit) as stopped:
        between_gemms.main(["--out", str(tmp_path / place)])
    assert stopped.value.code == 2
    assert f"error: --out: {tmp_path / place}: {why}" in capsys.readouterr().err

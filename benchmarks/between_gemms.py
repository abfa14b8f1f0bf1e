"""`prepare_qk` between the GEMMs of DeepSeek-V3.2's layers, in one CUDA graph, as an engine launches it.

    python benchmarks/between_gemms.py [--tokens 1 8] [--heads 128/64] [--layout fp8_ds_mla-fp32] [--out FILE]

`dsafuse bench` times launches of one kernel behind one another. Here hundreds of MB of weights and the other kernels
of a layer pass between two launches. Exits 1 without a GPU, and if a cell was not proven or not reached; 2 for an
option that can't be.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.functional import rms_norm, silu
from torch.profiler import ProfilerActivity, profile

from dsafuse import prepare_qk
from dsafuse.check.cases import PREPARE_QK, Case
from dsafuse.check.compare import Arm, compare
from dsafuse.check.document import dump
from dsafuse.check.environment import environment, of_commit, why_no_gpu
from dsafuse.check.inputs import Inputs
from dsafuse.check.memory import Memory
from dsafuse.check.timing import GraphTimer, Launch, Spread, interleaved
from dsafuse.cli.files import why_not_writable
from dsafuse.layouts import FLAT, INDEX_DIM, LATENT_DIM, MLA_LAYOUTS, QUERY_DIM, ROPE_DIM
from dsafuse.models import MODELS

MODEL = MODELS["deepseek-v3.2"]
NOPE = MODEL.qk_nope_head_dim
"""Of a query before W_UK, and of a head's value, which o_proj reads."""
KERNEL = "prepare"
LAYERS, REPLAYS, BLOCKS, BLOCK_SIZE, POSITIONS = 4, 8, 200, 64, 4096
TOKENS = (1, 2, 4, 8, 16, 32, 64)
HEADS = {"128/64": (128, 64), "16/32": (16, 32), "16/64": (16, 64)}
"""Attention heads and indexer heads of a rank: DeepSeek-V3.2's; GLM-5.x's on four GPUs; DeepSeek-V3.2's on eight."""

FP8 = torch.float8_e4m3fn
LAYOUTS = {
    "plain": ("plain", "ue8m0", torch.bfloat16),
    "fp8": ("fp8", "ue8m0", FP8),
    "fp8_ds_mla-ue8m0": ("fp8_ds_mla", "ue8m0", torch.bfloat16),
    "fp8_ds_mla-fp32": ("fp8_ds_mla", "fp32", torch.bfloat16),
}
"""(layout of the MLA cache, rule of its tile scales, dtype of the query) by the name that --layout takes."""
WHAT = (
    f"prepare_us: CUPTI's duration of the kernel in {LAYERS} layers x {REPLAYS} replays of one CUDA graph; "
    "layer_us: that graph's time by events, a layer, with the call and, captured apart, without it, in turn"
)


@dataclass(frozen=True)
class Sizes:
    """Widths that no argument of the op tells. Source: DeepSeek-V3.2's config.json."""

    hidden: int = 7168
    q_lora: int = MODEL.q_lora_rank
    intermediate: int = 18432


class Layer:
    """One dense layer without its attention, whose result is stood in for by a part of the prepared query.

    Attention heads, o_proj and the MLP are those of one tensor-parallel rank; `shared`: arguments of all layers.
    """

    def __init__(self, heads: int, index_heads: int, layout: str, shared: dict[str, Any], sizes: Sizes) -> None:
        kv_layout, scale_rule, query = LAYOUTS[layout]
        tokens, device = len(shared["positions"]), shared["positions"].device
        inner = sizes.intermediate * heads // MODEL.heads
        self.heads, self.index_heads, self.q_lora = heads, index_heads, sizes.q_lora
        self.case = Case(
            op=PREPARE_QK, tokens=tokens, heads=heads, index_heads=index_heads, topk="wide",
            layout=kv_layout, tile_scale_rule=scale_rule, block_size=BLOCK_SIZE, index_block_size=BLOCK_SIZE,
        )  # fmt: skip

        def weight(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02)

        self.fused_a = weight(sizes.hidden, sizes.q_lora + QUERY_DIM)
        self.q_b = weight(sizes.q_lora, heads * (NOPE + ROPE_DIM))
        self.wq_b = weight(sizes.q_lora, index_heads * INDEX_DIM)
        self.wk = weight(sizes.hidden, INDEX_DIM)
        self.weights_proj = weight(sizes.hidden, index_heads)
        self.w_uk = weight(heads, NOPE, LATENT_DIM)
        self.o_proj = weight(heads * NOPE, sizes.hidden)
        self.gate_up, self.down = weight(sizes.hidden, 2 * inner), weight(inner, sizes.hidden)
        plain = kv_layout == "plain"
        kv_row = MLA_LAYOUTS[kv_layout].row_bytes() // (2 if plain else 1)
        self.outputs = {
            "kv_cache": ((BLOCKS, BLOCK_SIZE, kv_row), torch.bfloat16 if plain else torch.uint8),
            "index_kv_cache": ((BLOCKS, BLOCK_SIZE, FLAT.row_bytes()), torch.uint8),
            "q_out": ((tokens, heads, QUERY_DIM), query),
            "index_q_out": ((tokens, index_heads, INDEX_DIM), FP8),
            "index_weights_out": ((tokens, index_heads), torch.float32),
            "topk_indices": ((tokens, MODEL.index_topk), torch.int32),
        }
        self.device = device
        self.arm = self.poisoned()
        self.arguments: dict[str, Any] = {
            **shared,
            **self.arm.tensors,
            "kv_layout": kv_layout,
            "scale_rule": scale_rule,
            "index_norm_weight": torch.randn(INDEX_DIM, device=device),
            "index_norm_bias": torch.randn(INDEX_DIM, device=device),
            "index_weights_scale": (INDEX_DIM * index_heads) ** -0.5,
        }

    def poisoned(self) -> Arm:
        """All that the op writes, between canaries; the same random bytes each time."""
        memory = Memory(self.device, seed=0)
        return Arm({name: memory.tensor(name, *kind) for name, kind in self.outputs.items()}, memory.buffers)

    def __call__(self, x: torch.Tensor, prepare: bool) -> torch.Tensor:
        """x [tokens, hidden] of the next layer. `arguments` keeps what the last call with `prepare` was handed."""
        tokens, heads = len(x), self.heads
        hidden = rms_norm(x, x.shape[-1:])
        q_c, kv_c, k_pe = (hidden @ self.fused_a).split((self.q_lora, LATENT_DIM, ROPE_DIM), dim=-1)
        q_c = rms_norm(q_c, q_c.shape[-1:])
        index_k, index_weights = hidden @ self.wk, hidden @ self.weights_proj
        index_q = (q_c @ self.wq_b).view(tokens, self.index_heads, INDEX_DIM)
        q = (q_c @ self.q_b).view(tokens, heads, NOPE + ROPE_DIM)
        q_nope = torch.bmm(q[..., :NOPE].transpose(0, 1), self.w_uk).transpose(0, 1)
        if prepare:
            self.arguments |= {"q_nope": q_nope, "q_pe": q[..., NOPE:], "kv_c": kv_c, "k_pe": k_pe}
            self.arguments |= {"index_q": index_q, "index_k": index_k, "index_weights": index_weights}
            prepare_qk(**self.arguments)
        value = self.arm.tensors["q_out"][..., :NOPE].to(torch.bfloat16).reshape(tokens, heads * NOPE)
        x = x + value @ self.o_proj
        gate, up = (rms_norm(x, x.shape[-1:]) @ self.gate_up).chunk(2, dim=-1)
        return x + (silu(gate) * up) @ self.down


def stack(
    heads: tuple[int, int], layout: str, tokens: int, device: torch.device, sizes: Sizes
) -> tuple[torch.Tensor, list[Layer]]:
    """Tokens of as many requests, each with a slot and a position of its own, and the layers."""
    table = torch.randn(POSITIONS, ROPE_DIM, device=device).to(torch.bfloat16)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, device=device)[:tokens]
    shared = {
        "positions": torch.randint(POSITIONS, (tokens,), device=device),
        **dict.fromkeys(("slot_mapping", "index_slot_mapping"), slots),
        **dict.fromkeys(("cos_sin_cache", "index_cos_sin_cache"), table),
        **dict.fromkeys(("q_scale", "k_scale"), torch.full((1,), 0.25, device=device)),
    }
    x = torch.randn(tokens, sizes.hidden, device=device).to(torch.bfloat16)
    return x, [Layer(*heads, layout, shared, sizes) for _ in range(LAYERS)]


def unlike_the_oracle(layers: Sequence[Layer], step: Launch) -> list[str]:
    """What one step leaves elsewise than the oracle does on the inputs that the step made, as `verify` compares it.

    Whole buffers, random before. No scale of an indexer's key may move: a step has too few rows for `verify`'s rate.
    """
    expected = [layer.poisoned() for layer in layers]
    for layer, theirs in zip(layers, expected):
        for name, buffer in theirs.buffers.items():
            layer.arm.buffers[name].copy_(buffer)
    step()
    wrong = []
    for number, (layer, theirs) in enumerate(zip(layers, expected)):
        prepare_qk.with_provider("oracle")(**{**layer.arguments, **theirs.tensors})
        inputs = Inputs(layer.arguments, layer.arguments, Memory(layer.device, seed=0))
        found = compare(layer.case, inputs, layer.arm, theirs)
        notes = found.notes + found.over_rates()
        if found.norm_rows_off:
            notes.append(f"index_kv_cache: {found.norm_rows_off} of {found.norm_rows} scales are not the oracle's")
        wrong += [f"layer {number}, {note}" for note in notes]
    return wrong


def durations(replay: Launch) -> list[float]:
    """Microseconds of each launch of the kernel, as CUPTI has them. The first replay is under way as CUPTI starts."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPLAYS + 1):
            replay()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "kernel" and event["name"] == KERNEL]
    if len(found) != (REPLAYS + 1) * LAYERS:
        expected = f"{REPLAYS + 1} replays of {LAYERS}"
        raise RuntimeError(f"{KERNEL}: got {len(found)} launches in the profile, expected {expected}")
    return [float(event["dur"]) for event in sorted(found, key=lambda event: float(event["ts"]))[LAYERS:]]


def measured(heads: str, layout: str, tokens: int, device: torch.device) -> dict[str, Any]:
    """The cell's row; where its bytes are not proven, what is wrong with them stands in the place of times."""
    x, layers = stack(HEADS[heads], layout, tokens, device, Sizes())
    row: dict[str, Any] = {"heads": heads, "layout": layout, "tokens": tokens}

    def timer(prepare: bool) -> GraphTimer:
        return GraphTimer([lambda layer=layer: layer(x, prepare) for layer in layers], device, launches=1)

    with_call, without = timer(True), timer(False)
    if wrong := unlike_the_oracle(layers, with_call.replay_us):
        return {**row, "unproven": wrong}
    whole = interleaved({"with": with_call, "without": without})
    row["layer_us"] = {name: asdict(spread) for name, spread in whole.items()}
    return {**row, "prepare_us": asdict(Spread.of(durations(with_call.replay_us)))}


def count(text: str) -> int:
    """A token count."""
    if not text.isdecimal() or not 1 <= int(text) <= BLOCKS * BLOCK_SIZE:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer from 1 to {BLOCKS * BLOCK_SIZE}")
    return int(text)


def seconds(text: str) -> float:
    """A budget."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds from 0 on")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if every cell was proven and timed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=count, nargs="+", default=TOKENS, help="of a step")
    parser.add_argument("--heads", choices=HEADS, nargs="+", default=list(HEADS)[:2])
    parser.add_argument("--layout", choices=LAYOUTS, nargs="+", default=list(LAYOUTS))
    parser.add_argument("--seconds", type=seconds, default=300, help="start no cell after them; default: %(default)s")
    parser.add_argument("--commit", help="the commit under test, if it is not the checkout's")
    parser.add_argument("--out", type=Path, help="write JSON to this file")
    options = parser.parse_args(argv)
    if options.out is not None and (reason := why_not_writable(options.out)):
        parser.error(f"--out: {options.out}: {reason}")
    if reason := why_no_gpu("between_gemms"):
        sys.stderr.write(reason + "\n")
        return 1
    began, device, rows = time.monotonic(), torch.device("cuda", torch.cuda.current_device()), []
    cells = list(dict.fromkeys(product(options.heads, options.layout, options.tokens)))
    record = {
        "what": WHAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": of_commit(environment(), options.commit),
        "rows": rows,
    }

    def save() -> None:
        if options.out is not None:
            dump(options.out, {**record, "unreached": len(cells) - len(rows)})

    save()  # an older file must not pass for this run's
    torch.manual_seed(0)
    for cell in cells:
        if time.monotonic() - began >= options.seconds:
            sys.stderr.write(f"{len(cells) - len(rows)} of {len(cells)} cells were not reached\n")
            break
        rows.append(measured(*cell, device))
        sys.stdout.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.flush()
        save()
    return 1 if len(rows) < len(cells) or any("unproven" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

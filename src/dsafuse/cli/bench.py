"""`dsafuse bench`: fused against split, beside copy bandwidth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from dsafuse.check import records
from dsafuse.check.bench import HEADS, TOKENS, UnprovenError, bench_case, bench_one
from dsafuse.check.timing import copy_bandwidth, empty_kernel_us
from dsafuse.cli import output
from dsafuse.cli.arguments import Ops, counts, op_names

MAX_TOKENS = 65536
MAX_HEADS = 256
DEFAULT_TOKENS = ",".join(map(str, TOKENS))
DEFAULT_HEADS = ",".join(f"{heads}/{index_heads}" for heads, index_heads in HEADS)


def bench(
    op: Ops = None,
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = DEFAULT_TOKENS,
    heads: Annotated[str, typer.Option(help="Attention heads/indexer heads, separated by commas.")] = DEFAULT_HEADS,
    seed: Annotated[int, typer.Option(help="Seed of all inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the run to this JSON file, too.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit under test, where no checkout tells it.")] = None,
    json: output.Json = False,
) -> None:
    """Time fused against split in replayed CUDA graphs and eagerly, each row after verify has passed for it."""
    names, token_counts, head_pairs = op_names(op), counts("--tokens", tokens, 1, MAX_TOKENS), _head_pairs(heads)
    if not 0 <= seed < 2**31:
        output.refuse(f"--seed: got {seed}, expected an integer from 0 to {2**31 - 1}")
    if not torch.cuda.is_available():
        output.refuse("bench needs a GPU, and torch sees none on this machine")
    device = torch.device("cuda", torch.cuda.current_device())
    cases = [bench_case(name, t, pair) for name in names for pair in head_pairs for t in token_counts]
    copied, empty = copy_bandwidth(device), empty_kernel_us(device)
    rows: list[records.Row] = []
    with output.progress() as bar:
        task = bar.add_task("bench", total=len(cases))
        for case in cases:
            bar.update(task, description=f"bench {case.op} T={case.tokens} H={case.heads}")
            try:
                rows += bench_one(case, seed, device, copied)
            except UnprovenError as unproven:
                typer.echo(f"not timed, since verify failed: {unproven}", err=True)
                raise typer.Exit(1) from None
            bar.advance(task)
    run = records.Run.of(rows, copied, empty, commit)
    if out is not None:
        run.write(out)
    if json:
        output.print_json(run.record())
        return
    output.say(records.origin(run))
    output.table(None, records.TABLE_HEADER, records.table(rows))


def _head_pairs(text: str) -> list[tuple[int, int]]:
    pairs = []
    for part in text.split(","):
        both = part.strip().split("/")
        if len(both) != 2 or not all(n.isdecimal() and 1 <= int(n) <= MAX_HEADS for n in both):
            output.refuse(f"--heads: got {part!r}, expected pairs as 128/64, each from 1 to {MAX_HEADS}")
        pairs.append((int(both[0]), int(both[1])))
    return pairs

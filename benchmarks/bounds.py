"""What bounds the kernels on this GPU: the tables of docs/performance.md, measured again.

A grid that only starts, a chain of loads, and grids that only move an op's bytes; timed as `dsafuse bench` does it.
Exits 1 without a GPU.
"""

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.language.standard import _sum_combine

from dsafuse.check import timing
from dsafuse.check.bench import bench_case
from dsafuse.check.cases import INDEXER, MLA, PREPARE_LATENTS
from dsafuse.check.environment import why_no_gpu
from dsafuse.check.traffic import bytes_moved
from dsafuse.kernels.grids import wait_for_inputs

PROGRAMS = (1, 132, 528, 1152, 2304, 4352, 8704, 17408)
SETS = 40
CUTS = ((256, 1), (256, 2), (512, 2), (512, 4), (1024, 2), (1024, 4), (2048, 4), (2048, 8))
"""(int32 elements of a tile, warps of a program)."""

OPS = (
    (MLA, (16, 32), 2, 1, (8, 64, 256, 1024, 2048)),
    (MLA, (128, 64), 2, 1, (8, 32, 64)),
    (INDEXER, (128, 64), 2, 1, (8, 64, 256, 1024, 2048)),
    (INDEXER, (16, 32), 2, 1, (8, 64, 256, 1024, 2048)),
    (PREPARE_LATENTS, (128, 64), 2, 5, (8, 64, 256, 512, 1024, 2048)),
)
"""(op, heads, tiles that a program reads, tiles that it writes, token counts): bf16 in and fp8 out is 2 to 1."""

Launch = Callable[[], object]


@triton.jit
def start(PDL: tl.constexpr):
    """Nothing."""
    wait_for_inputs(PDL)


@triton.jit
def chase(next_ptr, out_ptr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    """DEPTH loads, each of which gives the address of the next."""
    wait_for_inputs(PDL)
    at = tl.program_id(0).to(tl.int64)
    for _ in tl.static_range(DEPTH):
        at = tl.load(next_ptr + at)
    tl.store(out_ptr + tl.program_id(0), at)


@triton.jit
def move(source_ptr, target_ptr, READS: tl.constexpr, WRITES: tl.constexpr, ELEMENTS: tl.constexpr, PDL: tl.constexpr):
    """READS tiles in, WRITES tiles out; all loads are in flight at once."""
    wait_for_inputs(PDL)
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, ELEMENTS)[None, :]
    row = tl.arange(0, READS)[:, None]
    x = tl.load(tl.multiple_of(source_ptr + (program * READS + row) * ELEMENTS + column, (1, 16)))
    folded = tl.reduce(x, 0, _sum_combine)[None, :]
    for tile in tl.static_range(WRITES):
        place = tl.multiple_of(target_ptr + (program * WRITES + tile) * ELEMENTS + column, (1, 16))
        tl.store(place, folded if tile == 0 else tl.full((1, ELEMENTS), -1, tl.int32))


def say(*words: object) -> None:
    """A line."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def timed(calls: dict[str, list[Launch]], device: torch.device, state: str, touched: int = 1) -> dict[str, str]:
    """Median microseconds of one launch, by name, fastest first."""
    launches = timing.effort(touched).launches
    timers = {name: timing.GraphTimer(each, device, launches, warm=state == "warm") for name, each in calls.items()}
    found = timing.interleaved(timers)
    return {name: f"{found[name].median_us:.2f}" for name in sorted(found, key=lambda name: found[name].median_us)}


def movers(op: str, heads: tuple[int, int], reads: int, writes: int, tokens: int, device: torch.device) -> None:
    """Every cut of a grid that moves what the op moves, with a cold L2 and, where inputs fit into it, a warm one."""
    total = bytes_moved(bench_case(op, tokens, heads))
    sets = max(4, min(SETS, timing.sets_needed(total, device)))
    rows = [(total // 4 * share // (reads + writes) + 65536) // 64 * 64 for share in (reads, writes)]
    source = torch.randint(-9, 9, (sets, rows[0]), dtype=torch.int32, device=device)
    target = torch.empty((sets, rows[1]), dtype=torch.int32, device=device)

    def call(i: int, elements: int, warps: int) -> Launch:
        programs = max(1, round(total / (4 * elements * (reads + writes))))
        options = {"READS": reads, "WRITES": writes, "ELEMENTS": elements, "PDL": True}
        return lambda: move[(programs,)](source[i], target[i], **options, num_warps=warps, launch_pdl=True)

    for state, count in (("cold", sets), ("warm", 4)):
        if state == "cold" or tokens <= 512:
            calls = {f"{4 * e} B x {w} warps": [call(i, e, w) for i in range(count)] for e, w in CUTS}
            say(op, f"{heads[0]}/{heads[1]}", f"T={tokens}", state, timed(calls, device, state, total))


def main() -> int:
    """Print it all."""
    if reason := why_no_gpu("bounds"):
        sys.stderr.write(reason + "\n")
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    for dependent in (True, False):
        options = {"PDL": dependent, "num_warps": 2} | ({"launch_pdl": True} if dependent else {})
        starts = {str(n): [lambda n=n, o=options: start[(n,)](**o)] for n in PROGRAMS}
        say("programs,", "waiting:" if dependent else "not waiting:", timed(starts, device, "warm"))
    size = 1 << 24
    links = torch.randint(0, size - SETS * 65536, (size,), device=device)
    out = torch.empty(1, dtype=torch.int64, device=device)

    def chain(depth: int, i: int) -> Launch:
        return lambda: chase[(1,)](links[i * 65536 :], out, DEPTH=depth, PDL=True, num_warps=1, launch_pdl=True)

    for state, count in (("cold", SETS), ("warm", 4)):
        chains = {f"{depth} loads": [chain(depth, i) for i in range(count)] for depth in range(4)}
        say("chain,", state, timed(chains, device, state))
    for op, heads, reads, writes, counts in OPS:
        for tokens in counts:
            movers(op, heads, reads, writes, tokens, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`dsafuse bench`: fused against split and against peers, beside copy bandwidth and an empty launch."""

from __future__ import annotations

import math
import time
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import torch
import typer

from dsafuse.check import plot as plots
from dsafuse.check import tables
from dsafuse.check.arms import BenchArm, arm_names, arms_of
from dsafuse.check.bench import (
    FORMS,
    HEADS,
    L2_STATES,
    TOKENS,
    Cell,
    Yardsticks,
    bench_case,
    bench_cell,
    form_of,
    label,
)
from dsafuse.check.bound import counted
from dsafuse.check.cases import Case
from dsafuse.check.environment import why_no_gpu
from dsafuse.check.records import Row, Run, Unproven, named, origin
from dsafuse.check.targets import HEAD_PAIR, NEAR, Target, cells_near, not_measured, read_targets
from dsafuse.check.targets import check as check_targets
from dsafuse.check.timing import copy_bandwidth, empty_kernel_us
from dsafuse.cli import files, output
from dsafuse.cli.arguments import Ops, counts, natural, one_of, op_names, op_order
from dsafuse.stopping import interrupted

MAX_TOKENS = 65536
MAX_HEADS = 256
PICTURES = (".png", ".pdf", ".svg")
DEFAULT_TOKENS = ",".join(map(str, TOKENS))
NEAR_CAPTURES = 3
"""How often the graphs of a cell are captured again whose value lies near a target."""
DEFAULT_HEADS = ",".join(f"{heads}/{index_heads}" for heads, index_heads in HEADS)


def bench(
    op: Ops = None,
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = DEFAULT_TOKENS,
    heads: Annotated[str, typer.Option(help="Attention heads/indexer heads, separated by commas.")] = DEFAULT_HEADS,
    arms: Annotated[str | None, typer.Option(help="Such as fused,split; default: all but compiled.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Only with nothing in L2.")] = False,
    warm: Annotated[bool, typer.Option("--warm", help="Only with inputs in L2.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of all inputs.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the run to this JSON file, too.")] = None,
    read: Annotated[Path | None, typer.Option(help="Show this recorded run; nothing is timed.")] = None,
    check: Annotated[Path | None, typer.Option(help="Hold the run against this TOML table of targets.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw time against tokens into this .png, .pdf or .svg file.")
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, ops by token counts.")] = False,
    commit: Annotated[str | None, typer.Option(help="The commit under test, if it is not the checkout's.")] = None,
    json: output.Json = False,
) -> None:
    """Time arms in replayed CUDA graphs and eagerly, each after its results at that very shape have been proven."""
    names, token_counts, head_pairs = op_names(op), counts("--tokens", tokens, 1, MAX_TOKENS), _head_pairs(heads)
    asked = _arms(arms)
    if not 0 <= seed < 2**31:
        output.refuse(f"--seed: got {seed}, expected an integer from 0 to {2**31 - 1}")
    targets = [] if check is None else files.read("--check", check, _read_targets)
    if plot is not None and (reason := plots.why_not()):
        output.refuse(f"--plot: {reason}")
    if plot is not None and plot.suffix.lower() not in PICTURES:
        output.refuse(f"--plot: got {plot}, expected a name that ends in one of {', '.join(PICTURES)}")
    files.check_writable("--plot", plot)
    files.check_writable("--out", out)
    states = [state for state, only in zip(L2_STATES, (cold, warm)) if only or cold == warm]
    if read is not None:
        run = files.read("--read", read, _read_run)
    else:
        calls = [(name, form) for form, (ops, _) in FORMS.items() for name in names if name in ops]
        cases = [bench_case(name, t, pair, form) for name, form in calls for pair in head_pairs for t in token_counts]
        run = _timed(cases, asked, states, seed, commit, targets, out)
    if out is not None:
        with output.refusing(f"--out: {out}"):
            run.write(out)
    if plot is not None and run.rows:
        with output.refusing(f"--plot: {plot}"):
            plots.plot(run, plot)
    missed = _show(run, targets, as_json=json, as_markdown=states if markdown else [])
    raise typer.Exit(1 if missed or run.unproven or run.unreached else 0)


def _timed(
    cases: list[Case],
    asked: tuple[str, ...] | None,
    states: list[str],
    seed: int,
    commit: str | None,
    targets: list[Target],
    out: Path | None,
) -> Run:
    """Time every case; then those near a target again, longer, whichever side they were on: that is what counts.

    What there is goes to `out` after each group of cells, and when a signal ends the run.
    """
    if reason := why_no_gpu("bench"):
        output.refuse(reason)
    began = time.monotonic()
    device = torch.device("cuda", torch.cuda.current_device())
    arms: dict[str, list[BenchArm]] = {}
    absent: dict[str, str] = {}
    for name in dict.fromkeys(case.op for case in cases):
        arms[name], missing = arms_of(name, asked)
        absent.update(missing)
    yardsticks = Yardsticks(copy_bandwidth(device), empty_kernel_us(device))
    cells: dict[Case, Cell] = {}
    near: list[Case] | None = None
    """Those timed again; unknown until all have been timed once."""
    repeated: set[Case] = set()

    def run_so_far() -> Run:
        rows = [row for cell in cells.values() for row in cell.rows]
        failed = [entry for cell in cells.values() for entry in cell.unproven]
        run = Run.of(rows, yardsticks.copy_bytes_per_s, yardsticks.empty_us, commit, failed, absent)
        return replace(run, unreached=len(cases) - len(cells) + len(near or ()) - len(repeated))

    def keep(said: str) -> None:
        bar.console.print(f"[{time.monotonic() - began:4.0f} s] {said}", markup=False, soft_wrap=True, highlight=False)
        if out is not None:
            with output.refusing(f"--out: {out}"):
                run_so_far().write(out)

    def time_groups(some: list[Case], captures: int) -> None:
        again = ", again" if captures > 1 else ""
        for (op, form, heads), group in groupby(some, lambda case: (case.op, form_of(case), label(case))):
            counts = []
            for case in group:
                bar.update(task, description=f"bench {case.op} T={case.tokens} H={heads}{again}")
                cells[case] = bench_cell(case, arms[op], states, seed, device, yardsticks, captures)
                if captures > 1:
                    repeated.add(case)
                for entry in cells[case].unproven:
                    bar.console.print(f"not timed, since it is not proven: {entry}", markup=False, soft_wrap=True)
                counts.append(str(case.tokens))
                bar.advance(task)
            keep(f"{named(op, form)} {heads}{again}: T = {', '.join(counts)}")

    with output.progress() as bar, interrupted():
        task = bar.add_task("bench", total=len(cases))
        try:
            keep(f"arms loaded: {', '.join(dict.fromkeys(arm.name for some in arms.values() for arm in some))}")
            time_groups(cases, 1)
            close = cells_near(check_targets(run_so_far(), targets))
            near = [case for case in cases if (case.op, label(case), form_of(case), case.tokens) in close]
            bar.update(task, total=len(cases) + len(near))
            time_groups(near, NEAR_CAPTURES)
        except KeyboardInterrupt:
            keep("interrupted")
    return run_so_far()


def _show(run: Run, targets: list[Target], *, as_json: bool, as_markdown: list[str]) -> bool:
    """Print a run, as Markdown for some states of the L2; whether any target was missed."""
    findings = check_targets(run, targets)
    missed = [finding for finding in findings if finding.state == "misses"]
    if as_json:
        said = [{"state": f.state, "tokens": f.tokens, "value": f.value, "target": str(f.target)} for f in findings]
        output.print_json({**run.record(), "targets": said})
        return bool(missed)
    if as_markdown:
        for state in as_markdown:
            if any(row.l2 == state for row in run.rows):
                output.say(tables.markdown(run, state))
    else:
        output.say(origin(run))
        output.table(None, tables.HEADER, tables.lines(run))
    again = {(row.call, row.heads, row.tokens) for row in run.rows if row.captures > 1}
    if again:
        output.say(f"{len(again)} cells lay within {NEAR:.0%} of a target; they were timed again, on several captures")
    if run.unreached:
        output.say(f"INCOMPLETE: the run was cut short, {run.unreached} cells before its end")
    for arm, reason in run.absent.items():
        output.say(f"{arm} was not timed: {reason}")
    for entry in run.unproven:
        output.say(f"UNPROVEN {entry}")
    for finding in missed:
        output.say(f"MISSED {finding}")
    for finding in findings:
        if finding.state == "argued":
            output.say(f"ARGUED {finding}")
    for text in not_measured(findings):
        output.say(f"NOT MEASURED {text}")
    if targets:
        output.say(f"targets by cell: {counted([finding.state for finding in findings])}")
    return bool(missed)


def _arms(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    return tuple(one_of("--arms", part.strip(), arm_names()) for part in text.split(","))


def _read_targets(path: Path) -> list[Target]:
    targets = read_targets(path)
    files.check_types(path, *targets)
    return targets


def _read_run(path: Path) -> Run:
    """A recorded run, its ops in the order in which they are shown, whatever it was when they were timed."""
    run = Run.read(path)
    files.check_types(path, run, *run.rows, *run.unproven)
    rows, unproven = ([(f"{name}[{n}]", each) for n, each in enumerate(getattr(run, name))] for name in CELLS)
    for where, record in (("run", run), *rows, *unproven):
        _hold(f"{path}: {where}", record)
    return replace(
        run,
        rows=tuple(sorted(run.rows, key=lambda row: op_order(row.op))),
        unproven=tuple(sorted(run.unproven, key=lambda entry: op_order(entry.op))),
    )


CELLS = ("rows", "unproven")
CHOICES = {"form": tuple(FORMS), "l2": L2_STATES}


def _hold(where: str, record: Run | Row | Unproven) -> None:
    """Refuse what no run measures: a time or count of 0 or less, an unknown form, L2 state or pair of heads."""
    for f in fields(record):
        key, value = f.name, getattr(record, f.name)
        least = "0 or more" if key == "unreached" else "more than 0"
        if type(value) in (int, float) and not (0 < value < math.inf or (value == 0 and key == "unreached")):
            raise ValueError(f"{where}.{key}: got {value}, expected {least}")
        if key in CHOICES and value not in CHOICES[key]:
            raise ValueError(f"{where}.{key}: got {value!r}, expected one of {', '.join(CHOICES[key])}")
        if key == "heads" and not HEAD_PAIR.fullmatch(value):
            raise ValueError(f"{where}.heads: got {value!r}, expected a pair as 128/64")


def _head_pairs(text: str) -> list[tuple[int, int]]:
    pairs = []
    for part in text.split(","):
        both = [natural(count) or 0 for count in part.strip().split("/")]
        if len(both) != 2 or not all(1 <= count <= MAX_HEADS for count in both):
            output.refuse(f"--heads: got {part!r}, expected pairs as 128/64, each from 1 to {MAX_HEADS}")
        pairs.append((both[0], both[1]))
    return pairs

"""`dsafuse verify`: every provider against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from dsafuse.check import verify as checks
from dsafuse.check.cases import Case
from dsafuse.check.environment import environment, of_commit
from dsafuse.check.sets import SETS
from dsafuse.cli import files, output
from dsafuse.cli.arguments import Ops, device_named, one_of, op_names
from dsafuse.dispatch import PROVIDERS

MAX_SEED = 2**31 - 1
SHOWN_REASONS = 4


def verify(
    op: Ops = None,
    device: Annotated[str | None, typer.Option(help="cpu, or cuda for CUDA and ROCm; default: a GPU if any.")] = None,
    cases: Annotated[str, typer.Option(help="quick or full.")] = "quick",
    seed: Annotated[int, typer.Option(help="Seed of all inputs.")] = 0,
    provider: Annotated[str | None, typer.Option(help="Only this one; default: all that accept.")] = None,
    case: Annotated[str | None, typer.Option(help="Only this case, by the name that a failure prints.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write what --json prints to this file, too.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit under test, if it is not the checkout's.")] = None,
    json: output.Json = False,
) -> None:
    """Run every provider against the oracle, and compare bytes: outputs, caches, and all that was not to change."""
    names, where = op_names(op), device_named(device)
    one_of("--cases", cases, SETS)
    if not 0 <= seed <= MAX_SEED:
        output.refuse(f"--seed: got {seed}, expected an integer from 0 to {MAX_SEED}")
    if provider is not None:
        one_of("--provider", provider, PROVIDERS)
    files.check_writable("--out", out)
    selected = checks.plan(names, cases, where) if case is None else _named(names, case, op)
    results = _run(selected, None if provider is None else [provider], seed, where)
    summaries = checks.summarise(results)
    failed = [result for result in results if result.status == "failed"]
    idle = provider is not None and all(result.status == "declined" for result in results)
    ok = not idle and all(summary.ok for summary in summaries)
    record = {
        "ok": ok,
        "device": str(where),
        "cases": cases if case is None else case,
        "seed": seed,
        "environment": of_commit(environment(), commit),
        "summary": [_record(summary) for summary in summaries],
        "failures": [result.record() for result in failed],
    }
    if out is not None:
        with output.refusing(f"--out: {out}"):
            out.write_text(output.to_json(record) + "\n", encoding="utf-8")
    if json:
        output.print_json(record)
    else:
        _print(summaries, failed)
        if idle:
            output.say(f"nothing was verified: {provider} declined every case")
    raise typer.Exit(0 if ok else 1)


def _named(names: list[str], case: str, op: list[str] | None) -> list[Case]:
    if not op or len(names) != 1:
        output.refuse("--case: expected exactly one OP before it, since a case belongs to an op")
    fields = [part.partition("=")[0] for part in case.split(",")]
    for field in fields:
        if fields.count(field) > 1:
            output.refuse(f"--case: got {field!r} {fields.count(field)} times, expected every field once")
    if not case.isascii():
        output.refuse(f"--case: got {case!r}, expected ASCII")
    try:
        return [Case.named(names[0], case)]
    except ValueError as error:
        output.refuse(f"--case: {str(error).removeprefix('case: ')}")


def _run(selected: list[Case], providers: list[str] | None, seed: int, device: torch.device) -> list[checks.Result]:
    results: list[checks.Result] = []
    with output.progress() as bar:
        task = bar.add_task("verify", total=len(selected))
        done: set[tuple[str, str]] = set()
        for result in checks.verify(selected, providers, seed, device):
            results.append(result)
            if result.status == "failed":
                bar.console.print(f"FAILED {result.how} {result.call}", markup=False, soft_wrap=True)
                for reason in result.reasons[:SHOWN_REASONS]:
                    bar.console.print(f"  {reason}", markup=False, soft_wrap=True)
            done.add((result.op, result.case))
            bar.update(task, completed=len(done), description=f"verify {result.op}")
    return results


def _record(summary: checks.Summary) -> dict[str, object]:
    c = summary.comparison
    return {
        "op": summary.op,
        "provider": summary.provider,
        "how": summary.how,
        "ok": summary.ok,
        "passed": summary.passed,
        "failed": summary.failed,
        "declined": summary.declined,
        "reasons": summary.reasons,
        "faults": summary.faults(),
        "bytes_compared": c.bytes_compared,
        "mismatching_bytes": c.mismatching_bytes,
        "code_distance": c.code_distance,
        "norm_elements": c.norm_elements,
        "norm_elements_off": c.norm_elements_off,
        "norm_rows": c.norm_rows,
        "norm_rows_off": c.norm_rows_off,
        "error": summary.error,
        "split_error": summary.split_error,
        "seconds": round(summary.seconds, 3),
    }


def _print(summaries: list[checks.Summary], failed: list[checks.Result]) -> None:
    header = (
        "op", "provider", "how", "passed", "failed", "declined", "bytes compared", "mismatching", "code distance",
        "normed one code off", "normed rows rescaled", "max error", "split's", "s",
    )  # fmt: skip
    rows = []
    for s in summaries:
        c = s.comparison
        keys = f"{c.norm_elements_off} of {c.norm_elements}" if c.norm_elements else "-"
        norm_rows = f"{c.norm_rows_off} of {c.norm_rows}" if c.norm_rows else "-"
        errors = (f"{s.error:.3g}", f"{s.split_error:.3g}") if s.how == "eager" and s.passed else ("-", "-")
        counted = (str(s.passed), str(s.failed), str(s.declined), str(c.bytes_compared), str(c.mismatching_bytes))
        rows.append(
            (s.op, s.provider, s.how, *counted, str(c.code_distance), keys, norm_rows, *errors, f"{s.seconds:.1f}")
        )
    output.table(None, header, rows)
    for s in summaries:
        for reason in s.reasons:
            output.say(f"{s.op}: {s.provider} declined: {reason}")
        for fault in s.faults():
            output.say(f"FAULT {s.op} on {s.provider} ({s.how}): {fault}")
    if failed:
        output.say(f"{len(failed)} failed; to reproduce:")
        for result in failed:
            output.say(f"  {result.call}")

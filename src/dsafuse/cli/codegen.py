"""`dsafuse codegen`: what the compiler makes of every kernel, for GPUs that need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsafuse import installed
from dsafuse.check import codegen as logic
from dsafuse.cli import files, output
from dsafuse.cli.arguments import one_of, op_names
from dsafuse.target import Target

COMPILED = tuple(name for name in Target.names() if Target.named(name).gpu and Target.named(name).fp8)
"""Targets with an fp8 format; elsewhere there is next to nothing to compile."""

HEADER = (
    *("target", "op", "variant", "kernel", "heads", "registers", "scalar", "spills", "shared"),
    *("loads, count x bytes", "stores", "fp8", "fma", "instructions", "an element"),
)


def codegen(
    target: Annotated[str, typer.Option(help="Targets, separated by commas.")] = ",".join(logic.TARGETS),
    op: Annotated[str | None, typer.Option(help="Ops, separated by commas; all of them by default.")] = None,
    check: Annotated[
        Path | None, typer.Option(help="Hold the code against this file of floors; exit 1 if short.")
    ] = None,
    record: Annotated[Path | None, typer.Option(help="Write what is found to this file, as floors.")] = None,
    json: output.Json = False,
) -> None:
    """Compile every kernel at production shapes without a GPU; registers, spills, access widths, instructions."""
    targets = [one_of("--target", name, COMPILED) for name in target.split(",")]
    ops = op_names(op.split(",") if op is not None else None)
    files.check_writable("--record", record)
    if reason := installed.why_not("triton"):
        output.refuse(f"codegen needs triton: {reason}")
    from dsafuse.check.floors import Floors, write

    floors = files.read("--check", check, Floors.read) if check is not None else None
    wanted = logic.kernels(targets, ops)
    found: list[logic.Report] = []
    with output.progress() as bar:
        task = bar.add_task("codegen", total=len(wanted))
        for kernel, reports in logic.reports(wanted):
            bar.update(task, description=f"codegen {kernel.target} {kernel.op}", advance=1)
            found += reports
    if record is not None:
        with output.refusing(f"--record: {record}"):
            write(found, record)
    misses = [(report, floors.misses(report)) for report in found] if floors is not None else []
    short = [f"{_name(report)}: {miss}" for report, sentences in misses for miss in sentences]
    if json:
        output.print_json({"kernels": [report.record() for report in found], "misses": short})
    else:
        output.table(None, HEADER, [_row(report) for report in found])
        for line in short:
            output.say(line)
        if floors is not None:
            output.say(f"floors: {sum(not sentences for _, sentences in misses)} of {len(found)} kernels hold")
    if short:
        raise typer.Exit(1)


def _name(report: logic.Report) -> str:
    heads = f"{report.heads}/{report.index_heads}"
    return f"{report.target} {report.op} {report.variant} {report.kernel} {heads}"


def _row(report: logic.Report) -> list[str]:
    return [
        *(report.target, report.op, report.variant, report.kernel, f"{report.heads}/{report.index_heads}"),
        *(_or_dash(report.registers), _or_dash(report.scalar_registers), f"{report.spills}+{report.scalar_spills}"),
        *(str(report.shared_bytes), _widths(report.loads), _widths(report.stores), str(report.fp8_conversions)),
        *(str(report.fused_multiply_adds), f"{report.instructions} {report.assembly}"),
        f"{report.instructions_per_element:.1f}",
    ]


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _widths(widths: dict[int, int]) -> str:
    return " ".join(f"{count}x{width}" for width, count in sorted(widths.items(), reverse=True))

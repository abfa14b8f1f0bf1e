"""How commands speak: tables on standard output, progress and one-line errors on standard error, JSON alone."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import IO, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def out() -> Console:
    """Standard output; as wide as its lines where it is no terminal, so that nothing is cut from a log."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=240)


def say(text: str) -> None:
    """A line on standard output."""
    out().print(text, markup=False)


def print_json(value: Any) -> None:
    """One JSON document, and nothing else, on standard output. NaN and infinity become null."""
    typer.echo(json.dumps(_finite(value), indent=1, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def table(title: str | None, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output."""
    drawn = Table(*header, title=title, title_justify="left")
    for row in rows:
        drawn.add_row(*(_plain(cell) for cell in row))
    out().print(drawn)


def _plain(text: str) -> str:
    """Text in which rich sees no markup."""
    return text.replace("[", r"\[")


def progress() -> Progress:
    """A progress bar on standard error."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def refuse(message: object) -> NoReturn:
    """One line on standard error, exit code 2: a value out of range, or something that is not there."""
    complain(message)
    raise typer.Exit(2)


def complain(message: object) -> None:
    """One line on standard error; nothing where that can't be written either, since nowhere is left to say so."""
    try:
        typer.echo(" ".join(str(message).split()), err=True)
    except OSError:
        discard(sys.stderr)


def why(error: OSError) -> str:
    """What the operating system says, without number and file name."""
    return error.strerror or str(error)


def discard(stream: IO[str] | None) -> None:
    """Let what a stream that can't be written still holds go nowhere: Python would fail at it again when it exits."""
    if stream is not None and stream in (sys.__stdout__, sys.__stderr__):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

"""How commands speak: tables on standard output, progress and one-line errors on standard error, JSON alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

STDOUT = "standard output"

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def out() -> Console:
    """Standard output; as wide as its lines where it is no terminal, so that nothing is cut from a log."""
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, soft_wrap=True, width=240)


def say(text: str) -> None:
    """A line on standard output."""
    with refusing(STDOUT):
        out().print(text, markup=False)


def print_json(value: Any) -> None:
    """One JSON document, and nothing else, on standard output."""
    with refusing(STDOUT):
        typer.echo(to_json(value))


def to_json(value: Any) -> str:
    """A JSON document. NaN and infinity become null."""
    return json.dumps(_finite(value), indent=1, default=str, allow_nan=False)


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
    with refusing(STDOUT):
        out().print(drawn)


def _plain(text: str) -> str:
    """Text in which rich sees no markup."""
    return text.replace("[", r"\[")


def progress() -> Progress:
    """A progress bar on standard error; none where that is no terminal."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


def refuse(message: object) -> NoReturn:
    """One line on standard error, exit code 2: a value out of range, or something that is not there."""
    complain(message)
    raise typer.Exit(2)


def complain(message: object) -> None:
    """One line on standard error; nothing where that can't be written either, since nowhere is left to say so."""
    with suppress(OSError):
        typer.echo(" ".join(str(message).split()), err=True)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Refuse what the operating system does not let us do with a file; but for a pipe whose reader has left."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        refuse(f"{what}: {why(error)}")


def why(error: OSError) -> str:
    """What the operating system says, without number and file name."""
    return error.strerror or str(error)

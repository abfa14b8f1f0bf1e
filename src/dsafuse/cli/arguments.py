"""Values that several commands take, checked: each refusal is one line that names value and choices."""

from __future__ import annotations

import shlex
from typing import Annotated

import torch
import typer

from dsafuse.check.cases import ROLES
from dsafuse.cli.output import refuse

Ops = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Names of ops; all of them by default.")]

MAX_DIGITS = 18


def op_names(names: list[str] | None = None) -> list[str]:
    """The ops meant, each once, in the order of ROLES, in which every command has them."""
    for name in names or []:
        one_of("OP", name, ROLES)
    return [name for name in ROLES if not names or name in names]


def op_order(name: str) -> int:
    """The place of an op in that order; behind all others, where a recorded run has an op of another version."""
    return list(ROLES).index(name) if name in ROLES else len(ROLES)


def one_of(what: str, value: str, choices: object) -> str:
    """`value`, one of the choices."""
    listed = [str(choice) for choice in choices]  # type: ignore[attr-defined]
    if value not in listed:
        refuse(f"{what}: got {value!r}, expected one of {', '.join(listed)}")
    return value


def device_named(name: str | None) -> torch.device:
    """The device meant: a GPU if there is one, unless a name says otherwise."""
    here = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda" if here else "cpu")
    kind, colon, text = name.partition(":")
    one_of("--device", kind, ("cpu", "cuda"))
    index = natural(text) if colon else 0
    if index is None or (kind == "cpu" and index > 0):
        refuse(f"--device: got {name!r}, expected cpu, cuda or cuda:INDEX")
    if kind == "cuda" and not here:
        refuse(f"--device: got {name!r}, but torch {torch.__version__} sees no GPU on this machine")
    if kind == "cuda" and index >= torch.cuda.device_count():
        refuse(f"--device: got {name!r}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device(kind, index) if colon else torch.device(kind)


def words(what: str, text: str) -> tuple[str, ...]:
    """Arguments of a command line in one text, as a shell takes it apart."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        refuse(f"{what}: got {text!r}: {error}")


def natural(text: str) -> int | None:
    """The number that ASCII digits write, not so many that torch or Python would balk; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def counts(what: str, text: str, low: int, high: int) -> list[int]:
    """A comma-separated list of integers from low to high."""
    values = []
    for part in text.split(","):
        value = natural(part.strip())
        if value is None or not low <= value <= high:
            refuse(f"{what}: got {part!r}, expected integers from {low} to {high}, separated by commas")
        values.append(value)
    return values

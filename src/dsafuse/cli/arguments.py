"""Values that several commands take, checked: each refusal is one line that names value and choices."""

from __future__ import annotations

from typing import Annotated

import torch
import typer

import dsafuse
from dsafuse.cli.output import refuse
from dsafuse.registry import OPS

Ops = Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Names of ops; all of them by default.")]

assert dsafuse.__version__  # importing the package is what fills OPS


def op_names(names: list[str] | None) -> list[str]:
    """The ops meant."""
    for name in names or []:
        one_of("OP", name, OPS)
    return list(names or OPS)


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
    kind, _, index = name.partition(":")
    one_of("--device", kind, ("cpu", "cuda"))
    if index and not index.isdecimal():
        refuse(f"--device: got {name!r}, expected cpu, cuda or cuda:INDEX")
    if kind == "cuda" and not here:
        refuse(f"--device: got {name!r}, but torch {torch.__version__} sees no GPU on this machine")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        refuse(f"--device: got {name!r}, but there are {torch.cuda.device_count()} GPUs")
    return torch.device(name)


def counts(what: str, text: str, low: int, high: int) -> list[int]:
    """A comma-separated list of integers from low to high."""
    values = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not low <= int(part) <= high:
            refuse(f"{what}: got {part!r}, expected integers from {low} to {high}, separated by commas")
        values.append(int(part))
    return values

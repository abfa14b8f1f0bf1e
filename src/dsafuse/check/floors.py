"""What compiled kernels must not fall below: a recorded file of floors and ceilings, and the check against it."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

from dsafuse.check.codegen import Report

_WORDS = ("target", "op", "variant", "kernel")
_KEY = (*_WORDS, "heads", "index_heads")
_NEVER = ("spills", "scalar_spills", "fused_multiply_adds")
_AT_LEAST = ("load_bytes_16", "store_bytes_8", "fp8_conversions")
_AT_MOST = ("registers", "scalar_registers", "shared_bytes", "instructions")
_DOCUMENT: dict[str, tuple[tuple[type, ...], str]] = {
    "triton": ((str,), "a version"),
    "slack": ((int, float), "a number"),
    "kernel": ((list,), "an array of tables"),
}

_HEAD = """\
# What `dsafuse codegen` must find again, written by `dsafuse codegen --record`; docs/codegen.md explains the columns.
# No kernel at all may spill a register or fuse a multiply-add. Floors: load_bytes_16 and store_bytes_8, what a thread
# moves by loads of 16 bytes and by stores of 8 or more, and fp8_conversions, those in hardware. Ceilings, with
# `slack`: registers, scalar_registers, shared_bytes, instructions; they are a compiler's own, and hold for the Triton
# named here alone.
"""


@dataclass(frozen=True, slots=True)
class Floors:
    """A recorded file."""

    triton: str
    slack: float
    kernels: dict[tuple[Any, ...], dict[str, int]]

    @staticmethod
    def read(path: Path) -> Floors:
        """The floors of a file that `write` has written. Raises ValueError for a file that it can't have."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: {error}") from None
        for name, (kind, what) in _DOCUMENT.items():
            if name not in document:
                raise ValueError(f"{path}: got no {name}, expected {what}")
            if type(document[name]) not in kind:
                raise ValueError(f"{path}: got {name}={document[name]!r:.60}, expected {what}")
        if not document["slack"] > 0:
            raise ValueError(f"{path}: got slack={document['slack']}, expected more than 0")
        kernels: dict[tuple[Any, ...], dict[str, int]] = {}
        for number, entry in enumerate(document["kernel"], 1):
            where = f"{path}, kernel {number}"
            key, floors = _entry(where, entry)
            if key in kernels:
                raise ValueError(f"{where}: is there twice")
            kernels[key] = floors
        return Floors(document["triton"], document["slack"], kernels)

    def misses(self, report: Report) -> list[str]:
        """What a kernel's code falls short of, a sentence each."""
        facts = _facts(report)
        found = [f"{name}: got {facts[name]}, expected none" for name in _NEVER if facts[name]]
        recorded = self.kernels.get(_key(report))
        if recorded is None:
            return [*found, "no floor is recorded for it"]
        for name in _AT_LEAST:
            if facts[name] < recorded[name]:
                found.append(f"{name}: got {facts[name]}, expected at least {recorded[name]}")
        if self.triton == triton.__version__:
            for name in _AT_MOST:
                if name in recorded and name in facts and facts[name] > recorded[name] * self.slack:
                    found.append(f"{name}: got {facts[name]}, expected at most {recorded[name]} and a slack")
        return found


def write(reports: Iterable[Report], path: Path, slack: float = 1.05) -> None:
    """Record what was found as floors and ceilings, a line for each kernel."""
    lines = [f'{_HEAD}triton = "{triton.__version__}"\nslack = {slack}\n\nkernel = [']
    for report in reports:
        facts = _facts(report)
        entry = dict(zip(_KEY, _key(report))) | {name: facts[name] for name in _AT_LEAST + _AT_MOST if name in facts}
        cells = (
            f'{name} = "{value}"' if isinstance(value, str) else f"{name} = {value}" for name, value in entry.items()
        )
        lines.append(f"  {{ {', '.join(cells)} }},")
    path.write_text("\n".join([*lines, "]\n"]), encoding="utf-8")


def _entry(where: str, entry: Any) -> tuple[tuple[Any, ...], dict[str, int]]:
    """One kernel of a file: which it is, and its floors and ceilings. Ceilings may be absent."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: got {entry!r:.60}, expected a table")
    known = (*_KEY, *_AT_LEAST, *_AT_MOST)
    if unknown := sorted(set(entry) - set(known)):
        raise ValueError(f"{where}: got {', '.join(unknown)}, expected some of {', '.join(known)}")
    if absent := [name for name in (*_KEY, *_AT_LEAST) if name not in entry]:
        raise ValueError(f"{where}: got no {', '.join(absent)}")
    for name, value in entry.items():
        kind = str if name in _WORDS else int
        if type(value) is not kind:
            raise ValueError(f"{where}: got {name}={value!r:.60}, expected {kind.__name__}")
    return tuple(entry[name] for name in _KEY), {name: entry[name] for name in known if name in entry.keys() - _KEY}


def _key(report: Report) -> tuple[Any, ...]:
    return tuple(getattr(report, name) for name in _KEY)


def _facts(report: Report) -> dict[str, int]:
    """The numbers that floors are about; those that this machine can't tell are left out."""
    facts = {
        **{name: getattr(report, name) for name in (*_NEVER, "fp8_conversions", *_AT_MOST)},
        "load_bytes_16": sum(width * count for width, count in report.loads.items() if width >= 16),
        "store_bytes_8": sum(width * count for width, count in report.stores.items() if width >= 8),
    }
    if report.assembly == "ptx":
        facts["instructions"] = None  # those recorded are of SASS
    return {name: value for name, value in facts.items() if value is not None}

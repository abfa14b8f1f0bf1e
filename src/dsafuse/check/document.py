"""Records and tables of targets in files: written whole, and read with each field of its type."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

Kinds = type | tuple[type, ...]
NONE = type(None)
LARGEST = 2**63 - 1
"""Of integers: JSON sets no bound, but what calculates and draws does."""


def load(path: Path) -> Any:
    """A JSON document. Raises ValueError for other text, an integer beyond 64 bits, and half a surrogate pair."""
    document = json.loads(path.read_text(), parse_int=_integer)
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"got {error.object[error.start]!a} in a text, which is no character") from None
    return document


def dump(path: Path, document: Any) -> None:
    """Write JSON, in one step where it can be: who is cut off meanwhile leaves the file before."""
    path = Path(os.path.realpath(path))
    text = json.dumps(document, indent=1) + "\n"
    if path.exists() and not (path.is_file() and os.access(path.parent, os.W_OK)):
        path.write_text(text)
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def targets(path: Path, known: Collection[str]) -> list[tuple[str, dict[str, Any]]]:
    """The [[target]] tables of a TOML file, each with the words for its place. ValueError for none, or another key."""
    try:
        entries = tomllib.loads(path.read_text()).get("target", [])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: got no [[target]], expected at least one")
    found = [(f"{path}, target {number}", entry) for number, entry in enumerate(entries, 1)]
    for where, entry in found:
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: got {entry!r:.60}, expected a table")
        if unknown := sorted(set(entry) - set(known)):
            raise ValueError(f"{where}: got {', '.join(unknown)}, expected some of {', '.join(sorted(known))}")
    return found


def _integer(digits: str) -> int:
    # Twenty are more than 64 bits hold, and int() itself takes no more than some thousands.
    if len(digits) > 20 or abs(int(digits)) > LARGEST:
        raise ValueError(f"got an integer of {len(digits.lstrip('-'))} digits, expected one of 64 bits")
    return int(digits)


def entry(data: Any, name: str, kinds: Kinds, where: str = "") -> Any:
    """data[name], held to its type."""
    place = f"{where}.{name}" if where else name
    if not isinstance(data, dict):
        raise ValueError(f"{where or 'the file'}: got {data!r:.60}, expected an object")
    if name not in data:
        raise ValueError(f"{place} is missing")
    value = data[name]
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        names = " or ".join("null" if kind is NONE else kind.__name__ for kind in allowed)
        raise ValueError(f"{place}: got {value!r:.60}, expected {names}")
    return value


def words(data: Any, name: str, where: str = "") -> list[str]:
    """data[name], a list of texts."""
    found: list[str] = entry(data, name, list, where)
    if not all(isinstance(word, str) for word in found):
        raise ValueError(f"{where}.{name}: got {found!r:.60}, expected a list of str".lstrip("."))
    return found


def number(data: Any, name: str, where: str) -> float:
    """data[name], a number of 0 or more."""
    found: float = entry(data, name, (int, float), where)
    if not 0 <= found < math.inf:
        raise ValueError(f"{where}.{name}: got {found}, expected a number of 0 or more")
    return found


def natural(data: Any, name: str, where: str, least: int = 0) -> int:
    """data[name], an integer of `least` or more."""
    found: int = entry(data, name, int, where)
    if found < least:
        raise ValueError(f"{where}.{name}: got {found}, expected {least} or more".lstrip("."))
    return found

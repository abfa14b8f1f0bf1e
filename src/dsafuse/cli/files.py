"""Files that commands read and write: looked at before any work, and one line where one can't be had."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from dsafuse.cli.output import refuse, refusing, why

T = TypeVar("T")


def read(option: str, path: Path, reader: Callable[[Path], T]) -> T:
    """What `reader` makes of a file. All that it can raise for one, and for tables that are none, is refused."""
    if not os.path.exists(path):
        refuse(f"{option}: got {path}, expected a file")
    try:
        with refusing(f"{option}: {path}"):
            return reader(path)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as error:
        text = str(error) or type(error).__name__
        refuse(f"{option}: {text}" if text.startswith(f"{path}") else f"{option}: {path}: {text}")


def why_not_writable(path: Path) -> str | None:
    """Why a file could not be written, before there is anything to write; None if it could."""
    try:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            folder = Path(os.path.realpath(path)).parent
            if not folder.is_dir():
                return f"there is no directory {folder}"
            tempfile.TemporaryFile(dir=folder).close()
            return None
    except OSError as error:
        return why(error)
    if stat.S_ISDIR(mode):
        return "is a directory, expected a file"
    return None if os.access(path, os.W_OK) else "can't be written"


def check_writable(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written."""
    if path is not None and (reason := why_not_writable(path)):
        refuse(f"{option}: {path}: {reason}")


def check_types(path: Path, *records: Any) -> None:
    """Hold the fields of dataclasses that came from a file to their annotations. Raises ValueError."""
    for record in records:
        hints = get_type_hints(type(record))
        for f in fields(record):
            value = getattr(record, f.name)
            if not _fits(value, hints[f.name]):
                raise ValueError(f"{path}: got {f.name}={value!r:.60}, expected {f.type}")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is what an annotation says; of dataclasses inside, only which they are."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        kinds = arguments[:1] * len(value) if arguments[-1] is Ellipsis and isinstance(value, tuple) else arguments
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if origin is Mapping:
        return isinstance(value, Mapping) and all(map(_fits, value.values(), [arguments[1]] * len(value)))
    if is_dataclass(hint) or hint is bool:
        return isinstance(value, hint)  # type: ignore[arg-type]
    kinds = (int, float) if hint is float else (hint,)
    return isinstance(value, kinds) and not isinstance(value, bool)

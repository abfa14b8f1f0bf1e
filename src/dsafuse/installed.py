"""Which packages could be imported, told without importing them."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec


def spec_of(package: str) -> ModuleSpec | str:
    """Where a package would be imported from; or why it is not there to be imported."""
    try:
        return importlib.util.find_spec(package) or f"{package} is not installed"
    except ModuleNotFoundError as error:  # what stands before the last dot
        return f"{package} is not installed: {error}"
    except ValueError:  # so Python says that a module was put into sys.modules by hand, and has no spec
        return f"{package} is not there: what sys.modules has under this name is a stand-in without a spec"


def why_not(package: str) -> str | None:
    """Why a package is not there to be imported; None if it is."""
    found = spec_of(package)
    return found if isinstance(found, str) else None

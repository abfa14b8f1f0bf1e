"""docs/vllm.md names a test for each case that may go wrong: it must be there."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs/vllm.md"


def test_every_test_that_the_documentation_names_is_there() -> None:
    """`file.py::test`, or `::test` of the file named last."""
    file, named = "", 0
    for found, test in re.findall(r"`(test_\w+\.py)?::(test_\w+)`", DOCUMENT.read_text()):
        file = found or file
        assert f"\ndef {test}(" in (HERE / file).read_text(), f"{file}::{test}"
        named += 1
    assert named >= 15

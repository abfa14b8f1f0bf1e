"""The scripts of benchmarks/ that need a GPU say so in one line where there is none."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from benchmarks import bounds, sanitize


@pytest.mark.parametrize("script", [bounds, sanitize])
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: ModuleType
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main() == 1
    name = script.__name__.rpartition(".")[2]
    expected = f"{name} needs a GPU, and torch {torch.__version__} sees none on this machine\n"
    assert capsys.readouterr() == ("", expected)

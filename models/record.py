"""Keep what a run of models.train left: python -m models.record RUN --gpu NAME --commit COMMIT [--ship].

Writes benchmarks/results/GPU-DATE-train-FAMILY-seedN.json (what was asked, what came out, the log) and the table of
runs in models/README.md. With --ship, models/FAMILY becomes this run: its checkpoint, and the record as training.json.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from models import train
from models.families import CONFIGS

ROOT = Path(__file__).parents[1]
# Logged steps before the switch to sparse attention whose coverage is recorded: one step's alone scatters by 0.02.
BEFORE = 5
HEAD = (
    "| run | `models/` of | minutes | steps | coverage at the switch | recall, % | arithmetic, % |\n"
    + 7 * "|---"
    + "|\n"
)
TABLE = re.compile(rf"(?<=\n\n){re.escape(HEAD)}(?:\|.*\n)*")


def record(run: Path, gpu: str, commit: str, date: str) -> dict[str, Any]:
    """One run. `commit` is that of models/train.py; `switch`: the logged steps between which attention became sparse,
    and the least and the largest coverage of the last five dense ones; `not_measured`: accuracies that a run cut short
    lacks."""
    metrics = json.loads((run / "metrics.json").read_text())
    log = json.loads((run / "log.json").read_text())
    given = asked(metrics)
    steps = [entry for entry in log if "coverage" in entry]
    dense = [entry for entry in steps if not entry["sparse"]]
    first = next(entry for entry in steps if entry["sparse"])
    covered = [rounded(entry["coverage"]) for entry in dense[-BEFORE:]]
    absent = [name for name in asked_for(metrics["accuracy"]) if name not in metrics["accuracy"]]
    return {
        "recorded": date,
        "gpu": gpu,
        "torch": metrics["torch"],
        "commit": commit,
        "arguments": ["OUT" if word == str(given.out) else word for word in metrics["arguments"]],
        "steps": metrics["steps"],
        "seconds": round(metrics["seconds"], 1),
        "switch": {"between_steps": [dense[-1]["step"], first["step"]], "coverage": [min(covered), max(covered)]},
        "problems_each": given.problems,
        **({"not_measured": absent} if absent else {}),
        "accuracy": metrics["accuracy"],
        "log": [{name: rounded(value) for name, value in entry.items()} for entry in log],
    }


def asked(found: dict[str, Any]) -> argparse.Namespace:
    """The arguments of a recorded run."""
    return train.options().parse_args(found["arguments"])


def asked_for(accuracy: dict[str, Any]) -> list[str]:
    """Names of all measures of a run: every task at every context in every arm that it got to."""
    words = zip(*(name.split(" ", 2) for name in accuracy), strict=True)
    return [" ".join(each) for each in itertools.product(*map(dict.fromkeys, words))]


def rounded(value: float) -> float:
    """Four digits; whole numbers as they are."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def written(found: dict[str, Any]) -> str:
    """JSON with a line for every measure and every entry of the log."""
    text = json.dumps({**found, "accuracy": "ACCURACY", "log": "LOG"}, indent=1)
    measures = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in found["accuracy"].items())
    entries = ",\n".join(f"  {json.dumps(entry)}" for entry in found["log"])
    return text.replace('"ACCURACY"', f"{{\n{measures}\n }}").replace('"LOG"', f"[\n{entries}\n ]") + "\n"


def runs(root: Path = ROOT) -> list[tuple[dict[str, Any], bool]]:
    """Every recorded run, and whether models/ ships what it made: those first."""
    shipped = [json.loads((root / "models" / family / "training.json").read_text()) for family in CONFIGS]
    kept = [json.loads(path.read_text()) for path in sorted((root / "benchmarks/results").glob("*-train-*.json"))]
    return [(found, True) for found in shipped] + [(found, False) for found in kept if found not in shipped]


def table(root: Path = ROOT) -> str:
    """The runs in Markdown: accuracies are the least over contexts and arms, and of how many if some are missing."""
    text = HEAD
    for found, shipped in runs(root):
        given = asked(found)
        covered = found.get("switch", {}).get("coverage")
        cells = [
            f"`{given.family}`, seed {given.seed}{', shipped' * shipped}",
            found["commit"],
            f"{given.minutes:g}",
            f"{found['steps']:,}",
            f"{covered[0]:.2f} to {covered[1]:.2f}" if covered else "not measured",
            *(least(found["accuracy"], task) for task in ("recall", "arithmetic")),
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text


def least(accuracy: dict[str, Any], task: str) -> str:
    """A cell of the table: the least share of right answers in one task, in percent."""
    shares = [part["accuracy"] for name, part in accuracy.items() if name.startswith(task)]
    of = sum(name.startswith(task) for name in asked_for(accuracy))
    return f"{100 * min(shares):.1f}" + (f" ({len(shares)} of {of})" if len(shares) < of else "")


def main(arguments: list[str], root: Path = ROOT) -> None:
    """Write the record and the table and, if asked to, ship the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="what models.train had as --out")
    parser.add_argument("--gpu", required=True, help="its name, such as NVIDIA H200")
    parser.add_argument("--commit", required=True, help="of the models/train.py that ran")
    parser.add_argument("--date", default=str(datetime.date.today()))
    parser.add_argument("--ship", action="store_true", help="make this run the checkpoint in models/FAMILY")
    given = parser.parse_args(arguments)
    found = record(given.run, given.gpu, given.commit, given.date)
    of = asked(found)
    name = f"{given.gpu.split()[-1].lower()}-{given.date}-train-{of.family}-seed{of.seed}.json"
    (root / "benchmarks" / "results" / name).write_text(written(found))
    if given.ship:
        shipped = root / "models" / of.family
        shutil.copytree(given.run / "checkpoint", shipped, copy_function=shutil.copyfile, dirs_exist_ok=True)
        (shipped / "training.json").write_text(written(found))
    readme = root / "models" / "README.md"
    text, count = TABLE.subn(lambda _: table(root), readme.read_text())
    if count != 1:
        raise RuntimeError(f"{readme}: expected one table of runs, found {count}")
    readme.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Keep what a run of models.train left: python -m models.record RUN --gpu NAME --commit COMMIT [--ship].

Writes benchmarks/results/GPU-DATE-train-FAMILY-seedN.json (what was asked, what came out, the log) and the table of
runs in models/README.md. With --ship, models/FAMILY becomes this run: its checkpoint, and the record as training.json.
Everything is checked before the first write; what is refused is said in a sentence, with exit status 2.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from models import train
from models.export import CHECKPOINT
from models.families import CONFIGS

ROOT = Path(__file__).parents[1]
# Logged steps before the switch to sparse attention whose coverage is recorded: one step's alone scatters by 0.02.
BEFORE = 5
TASKS = ("recall", "arithmetic")
METRICS = {"arguments", "steps", "seconds", "torch", "accuracy"}
HEAD = (
    "| run | `models/` of | minutes | steps | coverage at the switch | recall, % | arithmetic, % |\n"
    + 7 * "|---"
    + "|\n"
)
TABLE = re.compile(rf"(?<=\n\n){re.escape(HEAD)}(?:\|.*\n)*")


def record(run: Path, gpu: str, commit: str, date: str) -> dict[str, Any]:
    """One run. `commit` is that of models/train.py; `switch`: the logged steps between which attention became sparse,
    and the least and the largest coverage of the last five dense ones; `not_measured`: accuracies that a run cut short
    lacks. ValueError: no measure of a task, or a log that is not dense steps and then sparse ones."""
    metrics, log = read(run / "metrics.json"), read(run / "log.json")
    if missing := sorted(METRICS - metrics.keys()):
        raise ValueError(f"{run / 'metrics.json'}: without {', '.join(missing)}")
    for task in TASKS:
        if not any(name.startswith(task) for name in metrics["accuracy"]):
            raise ValueError(f"{run / 'metrics.json'}: expected a measure of {task}, found {list(metrics['accuracy'])}")
    given = asked(metrics)
    steps = [entry for entry in log if "coverage" in entry]
    dense = list(itertools.takewhile(lambda entry: not entry["sparse"], steps))
    sparse = steps[len(dense) :]
    if not (dense and sparse and all(entry["sparse"] for entry in sparse)):
        found = ", ".join("sparse" if kind else "dense" for kind, _ in itertools.groupby(e["sparse"] for e in steps))
        raise ValueError(f"{run / 'log.json'}: expected steps that are dense, then sparse, found {found or 'none'}")
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
        "switch": {"between_steps": [dense[-1]["step"], sparse[0]["step"]], "coverage": [min(covered), max(covered)]},
        "problems_each": given.problems,
        **({"not_measured": absent} if absent else {}),
        "accuracy": metrics["accuracy"],
        "log": [{name: rounded(value) for name, value in entry.items()} for entry in log],
    }


def read(path: Path) -> Any:
    """A file's JSON. ValueError: not JSON, or a number that is not finite."""

    def refuse(word: str) -> None:
        raise ValueError(f"expected finite numbers, found {word}")

    try:
        return json.loads(path.read_text(), parse_constant=refuse)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


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
    lines = {name: json.dumps(value, indent=1).replace("\n", "\n ") for name, value in found.items()}
    measures = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in found["accuracy"].items())
    entries = ",\n".join(f"  {json.dumps(entry)}" for entry in found["log"])
    lines |= {"accuracy": f"{{\n{measures}\n }}", "log": f"[\n{entries}\n ]"}
    return "{\n" + ",\n".join(f" {json.dumps(name)}: {text}" for name, text in lines.items()) + "\n}\n"


def runs(root: Path = ROOT, new: dict[Path, dict[str, Any]] | None = None) -> list[tuple[dict[str, Any], bool]]:
    """Every recorded run, and whether models/ ships what it made: those first. `new`: records yet to be written."""
    new = new or {}
    ships = [root / "models" / family / "training.json" for family in CONFIGS]
    keeps = sorted({*(root / "benchmarks/results").glob("*-train-*.json"), *new} - {*ships})
    shipped, kept = ([new[path] if path in new else read(path) for path in paths] for paths in (ships, keeps))
    return [(found, True) for found in shipped] + [(found, False) for found in kept if found not in shipped]


def table(root: Path = ROOT, new: dict[Path, dict[str, Any]] | None = None) -> str:
    """The runs in Markdown: accuracies are the least over contexts and arms, and of how many if some are missing."""
    text = HEAD
    for found, shipped in runs(root, new):
        given = asked(found)
        covered = found.get("switch", {}).get("coverage")
        cells = [
            f"`{given.family}`, seed {given.seed}{', shipped' * shipped}",
            found["commit"],
            f"{given.minutes:g}",
            f"{found['steps']:,}",
            f"{covered[0]:.2f} to {covered[1]:.2f}" if covered else "not measured",
            *(least(found["accuracy"], task) for task in TASKS),
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
    # Each becomes a cell of the table or a part of a file's name.
    for name, word in (("gpu", given.gpu.split(" ")[-1]), ("commit", given.commit), ("date", given.date)):
        if not re.fullmatch(r"[\w.-]+", word):
            parser.error(f"--{name} {getattr(given, name)!r}: expected {word!r} to be letters, digits, '.', '-', '_'")
    readme = root / "models" / "README.md"
    try:
        found = record(given.run, given.gpu, given.commit, given.date)
        of = asked(found)
        name = f"{given.gpu.split()[-1].lower()}-{given.date}-train-{of.family}-seed{of.seed}.json"
        kept, shipped = root / "benchmarks" / "results" / name, root / "models" / of.family
        for folder in (kept.parent, shipped):
            if not folder.is_dir():
                raise ValueError(f"{folder}: expected a folder")
        missing = [name for name in CHECKPOINT if given.ship and not (given.run / "checkpoint" / name).is_file()]
        if missing:
            raise ValueError(f"{given.run / 'checkpoint'}: without {', '.join(missing)}")
        rows = table(root, {kept: found, **({shipped / "training.json": found} if given.ship else {})})
        text, count = TABLE.subn(lambda _: rows, readme.read_text())
        if count != 1:
            raise ValueError(f"{readme}: expected one table of runs, found {count}")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    with tempfile.TemporaryDirectory(dir=root / "models", prefix=".record-") as place:
        old, new, kept_part, readme_part = (Path(place) / name for name in ("old", "new", "kept", "readme"))
        kept_part.write_text(written(found))
        readme_part.write_text(text)
        if given.ship:
            new.mkdir()
            shutil.copyfile(kept_part, new / "training.json")
            for name in CHECKPOINT:
                shutil.copyfile(given.run / "checkpoint" / name, new / name)
            try:
                shipped.rename(old)
                new.rename(shipped)
            finally:
                if not shipped.exists():
                    old.rename(shipped)
        kept_part.replace(kept)
        readme_part.replace(readme)


if __name__ == "__main__":
    main(sys.argv[1:])

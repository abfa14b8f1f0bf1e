"""Six faults of the kind that engines have shipped, put into the fused path: who sees them?

    python -m benchmarks.sabotage [MODEL_DIR] [--fault NAME]... [--quick] [--problems 100] [--context 384,2048]
                                  [--at-once 4] [--out FILE]
    python -m benchmarks.sabotage --read FILE

Each fault wraps the fused ops where they are called, by `dsafuse verify` and by vLLM alike: it changes what goes in or
what has come out. The product has no switch for that; the process of the fused arm is started from here. The oracle,
the un-fused chain and the un-fused arm are left alone.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from dsafuse import switches
from dsafuse.check import verify
from dsafuse.check.cases import INDEXER, MLA, PREPARE_QK
from dsafuse.check.environment import environment, of_commit
from dsafuse.cli.files import why_not_writable
from dsafuse.numerics import RopeStyle, rotate
from dsafuse.registry import OPS, Op

if TYPE_CHECKING:
    from dsafuse.accuracy.evaluate import Settings

NONE = "none"
MEMORY = 0.6
"""Of a GPU, for an arm: the shipped models are small, and `verify` may hold some."""

OTHER = {"neox": "interleaved", "interleaved": "neox", "flat": "tiled16", "tiled16": "flat"}


class Role:
    """An op's arguments under the names that a role has for them; an argument that the op lacks is None."""

    def __init__(self, arguments: dict[str, Any], prefix: str) -> None:
        self._arguments, self._prefix = arguments, prefix

    def __getitem__(self, key: str) -> Any:
        return self._arguments.get(self._prefix + key)

    def __setitem__(self, key: str, value: Any) -> None:
        if self[key] is not None:
            self._arguments[self._prefix + key] = value


@dataclass(frozen=True)
class Fault:
    """before: changes the arguments (of the MLA role, of the indexer's). after: changes what the op has written."""

    name: str
    like: str
    before: Callable[[Role, Role], None] = lambda mla, index: None
    after: Callable[[Role], None] = lambda index: None


def other_style(mla: Role, index: Role) -> None:
    """The indexer's rotary pairs are those of the other style."""
    index["rope_style"] = OTHER.get(index["rope_style"])


def rotated_back(mla: Role, index: Role) -> None:
    """k_pe is turned back by its own angle first, so that the op's rotation leaves what the projection gave."""
    key, table, positions = mla["k_pe"], mla["cos_sin_cache"], mla["positions"]
    if key is None or not len(positions):
        return
    rows = table[positions.clamp(0, len(table) - 1)].float()
    cos, sin = rows.chunk(2, dim=-1)
    back = torch.cat([cos, -sin], -1) / (cos * cos + sin * sin).repeat(1, 2)
    flat = key.reshape(len(key), -1).float()
    mla["k_pe"] = rotate(flat, back, RopeStyle(mla["rope_style"])).to(key.dtype).reshape(key.shape)


def next_row(mla: Role, index: Role) -> None:
    """Every key is written one row behind its slot."""
    for role in (mla, index):
        if role["slot_mapping"] is not None:
            slots = role["slot_mapping"]
            role["slot_mapping"] = torch.where(slots >= 0, slots + 1, slots)


def short_norm(mla: Role, index: Role) -> None:
    """weight and bias of the indexer's LayerNorm lose what bf16 can't hold."""
    for key in ("norm_weight", "norm_bias"):
        if index[key] is not None:
            index[key] = index[key].to(torch.bfloat16).to(index[key].dtype)


def other_layout(mla: Role, index: Role) -> None:
    """The op writes the layout that its reader does not read, where a block admits both."""
    if index["kv_cache"] is not None and index["kv_cache"].shape[1] % 16 == 0:
        index["kv_layout"] = OTHER.get(index["kv_layout"])


def unfolded(index: Role) -> None:
    """Head weights lack the scale of their head's query."""
    if index["weights_out"] is not None and index["weights"] is not None:
        weights = index["weights"].float() * index["weights_scale"]
        index["weights_out"][:, : weights.shape[1]] = weights


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(NONE, "the fused path as it is"),
        Fault("wrong indexer rope style", "sgl-project/sglang#30088, vllm-project/vllm#34353", before=other_style),
        Fault("k_pe not rotated", "vllm-project/vllm#43781", before=rotated_back),
        Fault("q scale not folded", "ROCm/aiter#3451", after=unfolded),
        Fault("cache row shifted by one", "slots of another step", before=next_row),
        Fault("LayerNorm parameters in bf16", "ROCm/aiter#3451, ROCm/ATOM#1796", before=short_norm),
        Fault("indexer layout tiled, read flat", "vllm-project/vllm#52109", before=other_layout),
    )
}


@contextmanager
def sabotaged(fault: Fault) -> Iterator[None]:
    """Put a fault into every op for the length of a block. Oracles and the un-fused chain stay as they are."""
    kinds = {type(op) for op in OPS.values()}
    calls = {kind: kind.__call__ for kind in kinds}

    def faulty(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(op: Op[..., Any], *args: Any, **kwargs: Any) -> Any:
            if switches.current().provider == "split":
                return call(op, *args, **kwargs)
            bound = inspect.signature(op.oracle).bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = dict(bound.arguments)
            # The two original fusions have one role each, both under its own names.
            mla = Role({} if op.name == INDEXER else arguments, "")
            fault.before(mla, Role({} if op.name == MLA else arguments, op.index_prefix))
            result = call(op, **arguments)
            results = result if isinstance(result, tuple) else (result,)
            written = {**arguments, **dict(zip(op.output_names, results))}
            fault.after(Role({} if op.name == MLA else written, op.index_prefix))
            return result

        return wrapped

    for kind, call in calls.items():
        kind.__call__ = faulty(call)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, call in calls.items():
            kind.__call__ = call  # type: ignore[method-assign]


def verified(fault: Fault, device: torch.device, quick: bool) -> dict[str, Any]:
    """What `dsafuse verify` says of the ops that vLLM's layers call: failed cases, of how many, and why."""
    provider = "triton" if device.type == "cuda" else "interpreter"
    cases = verify.plan((MLA, INDEXER, PREPARE_QK), "quick", device)
    if quick:
        # A few are enough to see a fault; every sixth keeps all three ops.
        cases = cases[::6]
    with sabotaged(fault):
        results = list(verify.verify(cases, [provider], seed=0, device=device))
    failed = [result for result in results if result.status == "failed"]
    broken = [reason for result in failed for reason in result.reasons if reason.startswith("raised ")]
    if broken:  # the fault is to be seen in what is written, not in an error
        raise RuntimeError(f"{fault.name}: {broken[0]}")
    return {
        "cases": sum(result.status != "declined" for result in results),
        "failed": len(failed),
        "mismatching_bytes": sum(result.comparison.mismatching_bytes for result in results),
        "first": failed[0].reasons[0] if failed else None,
        "call": failed[0].call if failed else None,
    }


def evaluated(names: Sequence[str], settings: Settings) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """What `dsafuse eval` says: the un-fused arm once, and a fused arm for every fault; and which arms ended badly."""
    from rich.console import Console

    from dsafuse.accuracy import evaluate
    from dsafuse.vllm import demo_view
    from dsafuse.vllm.arms import UNFUSED

    asked = evaluate.questions(settings)
    with ExitStack() as stack, demo_view.progress(Console(stderr=True)) as report:
        made: dict[str, Any] = {}
        for name in (UNFUSED, *names):
            logs = stack.enter_context(evaluate.log_folder(settings, name))
            unfused, fused = evaluate.answering_arms(settings, asked, logs)
            made[name] = unfused if name == UNFUSED else fused
            if name != UNFUSED:
                fused.name = name
                fused.command = ["-m", "benchmarks.sabotage", "--arm", name]
        wrong = evaluate.serve_arms(settings, list(made.values()), report)
    found = {}
    for name in names:
        cells = [cell for cell in settings.cells if cell in made[UNFUSED].results and cell in made[name].results]
        compared = [
            evaluate.compare(settings, asked, cell, made[UNFUSED].results[cell], made[name].results[cell])
            for cell in cells
        ]
        found[name] = [each.record() for each in compared]
    return found, wrong


def verdicts(record: dict[str, Any]) -> dict[str, bool]:
    """Who sees a fault: verify; a significant loss of accuracy; answers that differ."""
    from dsafuse.accuracy.paired import SIGNIFICANT

    cells = record.get("eval") or []
    return {
        "verify": record["verify"]["failed"] > 0,
        "accuracy": any(cell["p"] < SIGNIFICANT and cell["lost"] > cell["gained"] for cell in cells),
        "answers": any(cell["differing"] for cell in cells),
    }


def markdown(records: dict[str, dict[str, Any]]) -> str:
    """The table of docs/accuracy.md, from a record's faults."""
    lines = [
        "| fault | `verify`: failed | un-fused, % | fused, % | lost/gained | p | answers differ | accuracy alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, record in records.items():
        v, seen = record["verify"], verdicts(record)
        row = [name, f"{v['failed']} of {v['cases']}"]
        for cell in record.get("eval") or []:
            row += [f"{100 * cell[arm]['accuracy']:.2f}" for arm in ("unfused", "fused")]
            row += [f"{cell['lost']}/{cell['gained']}", f"{cell['p']:.2g}", str(cell["differing"])]
        row += ["-"] * (7 - len(row)) + ["-" if name == NONE else "sees it" if seen["accuracy"] else "sees nothing"]
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def right(record: dict[str, Any]) -> bool:
    """Whether `verify` catches every fault and lets the path as it is pass, which was fused at every step."""
    faults = record["faults"]
    served = record["model"] is None or (not record["problems"] and all(each["eval"] for each in faults.values()))
    passed = not any(cell["problems"] for cell in faults.get(NONE, {}).get("eval", ()))
    return served and passed and all(each["seen_by"]["verify"] == (name != NONE) for name, each in faults.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 if a run is `right`, 1 if not, 2 for arguments that can't be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sabotage", description=__doc__.splitlines()[0])
    parser.add_argument(
        "model", nargs="?", type=Path, help="a folder with a DSA model; without it only verify is asked"
    )
    parser.add_argument("--fault", action="append", choices=list(FAULTS), help="only this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="few cases and few problems")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where verify runs; default: a GPU if there is one")
    parser.add_argument("--problems", type=int, help="problems of each task at each context")
    parser.add_argument("--context", help="tokens of a prompt, separated by commas")
    parser.add_argument("--at-once", type=int, help="arms side by side; default: 2 on a CPU, 1 on a GPU")
    parser.add_argument("--logs", type=Path, help="folder for the arms' logs")
    parser.add_argument("--time-limit", type=float, help="seconds; then arms are stopped, and the run has failed")
    parser.add_argument("--commit", help="the commit under test, if it is not the checkout's")
    parser.add_argument("--read", type=Path, help="print the table of this recorded run")
    parser.add_argument("--out", type=Path, help="write JSON to this file")
    parser.add_argument("--arm", choices=list(FAULTS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.arm:
        from dsafuse.vllm import arm

        with sabotaged(FAULTS[options.arm]):
            arm.main()
        return 0
    if options.read is not None:
        try:
            record = json.loads(options.read.read_text())
            sys.stdout.write(markdown(record["faults"]) + "\n")
        except (OSError, ValueError, LookupError, TypeError) as error:
            parser.error(f"--read: {options.read}: {error}")
        return 0 if right(record) else 1
    if options.out is not None and (reason := why_not_writable(options.out)):
        parser.error(f"--out: {options.out}: {reason}")
    names = options.fault or list(FAULTS)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    settings = None if options.model is None else asked_for(options, parser.error)
    faults: dict[str, dict[str, Any]] = {}
    start = time.monotonic()
    for name in names:
        faults[name] = {"like": FAULTS[name].like, "verify": verified(FAULTS[name], device, options.quick)}
        v = faults[name]["verify"]
        sys.stderr.write(f"verify, {name}: {v['failed']} of {v['cases']} cases failed; {v['first'] or ''}\n")
    sys.stderr.write(f"verify: {time.monotonic() - start:.0f} s\n")
    problems: list[str] = []
    if settings is not None:
        left = max(1.0, settings.seconds - (time.monotonic() - start))
        found, problems = evaluated(names, replace(settings, seconds=left))
        for name, cells in found.items():
            faults[name]["eval"] = cells
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    for each in faults.values():
        each["seen_by"] = verdicts(each)
    record = {
        **(described(settings) if settings else {"model": None}),
        "verify_device": str(device),
        "faults": faults,
        "problems": problems,
        "seconds": time.monotonic() - start,
        "environment": of_commit(environment(), options.commit),
    }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    sys.stdout.write(markdown(faults) + "\n")
    return 0 if right(record) else 1


def asked_for(options: argparse.Namespace, refuse: Callable[[str], NoReturn]) -> Settings:
    """The settings of `dsafuse eval` that the options mean."""
    from dsafuse.accuracy import evaluate
    from dsafuse.accuracy.model import read

    try:
        settings = evaluate.settings_for(read(options.model), [evaluate.Cell("auto")], quick=options.quick)
        changes = {
            "problems": options.problems,
            "contexts": options.context and tuple(map(int, options.context.split(","))),
            "logs": options.logs,
            "seconds": options.time_limit,
            "memory": MEMORY,
        }
        settings = replace(settings, **{key: value for key, value in changes.items() if value is not None})
        evaluate.questions(replace(settings, problems=1))
    except (OSError, ValueError) as error:
        refuse(str(error))
    if options.at_once is None:
        return settings
    if options.at_once < 1:
        refuse(f"--at-once: got {options.at_once}, expected an integer of at least 1")
    cuda = settings.device == "cuda"
    return evaluate.share_gpu(settings, options.at_once) if cuda else replace(settings, at_once=options.at_once)


def described(settings: Settings) -> dict[str, Any]:
    """What was served, as a record has it."""
    names = ("device", "dtype", "provider", "interpret_up_to", "seed", "tasks", "contexts", "problems", "at_once")
    own = {("problems_of_each" if name == "problems" else name): getattr(settings, name) for name in names}
    return {"model": settings.model.name, "index_topk": settings.model.index_topk, **own}


if __name__ == "__main__":
    sys.exit(main())

"""`dsafuse serve-bench`: `vllm serve` with the plugin on and off, under the load of `vllm bench serve`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from dsafuse import installed
from dsafuse.check import plot as check_plot
from dsafuse.check.bound import counted
from dsafuse.cli import files, output
from dsafuse.cli.arguments import counts, natural, one_of, words
from dsafuse.cli.engines import SERVED_KV_CACHE_DTYPES
from dsafuse.serving import memory, tables, targets
from dsafuse.serving import plot as plots
from dsafuse.serving.grid import cells
from dsafuse.serving.process import Ended, Stopped, listening
from dsafuse.serving.record import Record
from dsafuse.serving.run import SCALED, STATE, Changed, Plan, Unusable, measure, prepare, resume

MAX_TOKENS = 1 << 20
MAX_CONCURRENCY = 4096
MAX_REPEATS = 100
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
SERVERS = ("auto", "together", "in-turn")
PICTURES = (".png", ".pdf", ".svg")


def serve_bench(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Folder with config.json and tokenizer; none to --read.")
    ] = None,
    isl: Annotated[str, typer.Option(help="Tokens of a prompt, separated by commas.")] = "1024",
    osl: Annotated[str, typer.Option(help="Tokens of an answer, separated by commas.")] = "256",
    concurrency: Annotated[str, typer.Option(help="Requests in flight, separated by commas.")] = "1,8,32,64",
    repeats: Annotated[int, typer.Option(help="How often each cell is measured in each arm.")] = 3,
    prompts_per_slot: Annotated[int, typer.Option(help="Prompts for each request in flight.")] = 3,
    kv_cache_dtype: Annotated[str, typer.Option(help="The engine's word: auto, fp8, fp8_ds_mla.")] = "auto",
    load_format: Annotated[
        str,
        typer.Option(help="vLLM's word; dummy needs no weights; dummy-scaled: the same, of std 1/sqrt(fan-in)."),
    ] = "auto",
    gpus: Annotated[
        str | None, typer.Option(help="CUDA_VISIBLE_DEVICES of both arms (0), or of off/on (0/1, 0,1/2,3).")
    ] = None,
    servers: Annotated[
        str, typer.Option(help="together, in-turn (all repeats of one, then of the other), or auto: by memory.")
    ] = "auto",
    extra: Annotated[str, typer.Option(help="Further arguments of vllm serve, as one string.")] = "",
    out: Annotated[Path, typer.Option(help="Folder for results, state and logs.")] = Path("serve-bench"),
    go_on: Annotated[bool, typer.Option("--resume", help="Go on with the measurement in --out.")] = False,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds; before they are over all has ended, with what there is.")
    ] = None,
    start_limit: Annotated[float, typer.Option(help="Seconds within which servers must serve.")] = 900.0,
    write_model: Annotated[
        str | None, typer.Option(help="Only write MODEL_DIR: a rank of deepseek-v3.2, for --load-format dummy.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of the model to write: bf16 (if left out), or fp8 in blocks, as published.")
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Of the model to write; 40 if left out.")] = None,
    heads: Annotated[
        int | None, typer.Option(help="Attention heads of the model to write: 16, a rank of 8, if left out.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="The commit under test, if it is not the checkout's.")] = None,
    read: Annotated[
        list[Path] | None, typer.Option(help="Show this recorded measurement, or several; nothing is served.")
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Print one Markdown table over what is read.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw what is read into this .png, .pdf or .svg file.")] = None,
    check: Annotated[Path | None, typer.Option(help="Hold what is read against this TOML table of targets.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    json: output.Json = False,
) -> None:
    """Serve a model with and without the plugin, and compare latencies and throughput over a grid of loads."""
    start = time.monotonic()
    for name, given in (("--weights", weights), ("--layers", layers), ("--heads", heads)):
        if given is not None and write_model is None:
            output.refuse(f"{name}: needs --write-model; a folder's own config.json says what it has")
    if read:
        if model is not None:
            output.refuse(f"MODEL_DIR: got {model}, expected none with --read: nothing is served")
        raise typer.Exit(_show(read, plot, check, as_summary=summary, as_markdown=markdown, as_json=json))
    for name, wanted in (("--summary", summary), ("--plot", plot), ("--check", check)):
        if wanted:
            output.refuse(f"{name}: needs --read, the recorded measurements that it is about")
    if model is None:
        output.refuse("MODEL_DIR: got none, expected a folder with a config.json (or --read)")
    if write_model is not None:
        asked: dict[str, Any] = {"layers": layers, "heads": heads, "weights": weights}
        _write_model(write_model, model, **{name: value for name, value in asked.items() if value is not None})
        return
    for name, value, high in (("--repeats", repeats, MAX_REPEATS), ("--prompts-per-slot", prompts_per_slot, 1000)):
        if not 1 <= value <= high:
            output.refuse(f"{name}: got {value}, expected an integer from 1 to {high}")
    for name, limit in (("--time-limit", time_limit), ("--start-limit", start_limit)):
        if limit is not None and not limit > 0:
            output.refuse(f"{name}: got {limit}, expected seconds, more than 0")
    plan = Plan(
        model=_folder(model),
        cells=cells(
            counts("--isl", isl, 1, MAX_TOKENS),
            counts("--osl", osl, 1, MAX_TOKENS),
            counts("--concurrency", concurrency, 1, MAX_CONCURRENCY),
        ),
        repeats=repeats,
        prompts_per_slot=prompts_per_slot,
        kv_cache_dtype=one_of("--kv-cache-dtype", kv_cache_dtype, SERVED_KV_CACHE_DTYPES),
        load_format=load_format,
        gpus=_gpus(gpus),
        in_turn={"auto": None, "together": False, "in-turn": True}[one_of("--servers", servers, SERVERS)],
        extra=words("--extra", extra),
        start_seconds=start_limit,
        commit=commit,
    )
    from dsafuse.vllm import demo as bridge

    options = [name for name, _ in memory.options(plan.extra)]
    for option in options:
        if option == "--quantization" or option.startswith("-q"):
            output.refuse(f"--extra: has {option}, expected none: config.json says how weights are quantised")
    if load_format == SCALED:
        if "--worker-extension-cls" in options:
            output.refuse(f"--extra: has --worker-extension-cls, which --load-format {SCALED} needs for itself")
        if (reason := memory.why_not_scaled(_config(plan.model))) is not None:
            output.refuse(f"--load-format: {SCALED} has no values for these quantised weights: {reason}")
    stated = "--load-format" in options  # of two the last wins
    if not stated and (patterns := memory.lacking(plan.model, load_format)):
        none = f"MODEL_DIR: {model} has no weights ({' or '.join(patterns)}) for --load-format {load_format}"
        output.refuse(f"{none}; --load-format {SCALED} (or dummy) needs none")
    reason = bridge.why_not_here()
    if reason is not None:
        output.refuse(reason)
    before = _state(out, go_on)
    if load_format in ("dummy", SCALED):
        plan = replace(plan, weight_bytes=_dummy_bytes(plan.model))
    deadline = float("inf") if time_limit is None else start + time_limit
    code, record = _measured(plan, before, out, deadline)
    written = _write(record, out)
    if json:
        output.print_json(record.document())
    elif markdown:
        output.say(tables.markdown(record))
    else:
        _print(record)
        output.say(f"written: {', '.join([str(out / STATE), *written])}; logs beside them")
    raise typer.Exit(code)


def _show(
    paths: list[Path], picture: Path | None, check: Path | None, *, as_summary: bool, as_markdown: bool, as_json: bool
) -> int:
    """Show recorded measurements; exit code 1 if a target is missed."""
    if picture is not None:
        if len(paths) > 1:
            output.refuse(f"--plot: got {len(paths)} files to --read, expected one: a picture is of one measurement")
        if reason := check_plot.why_not():
            output.refuse(f"--plot: {reason}")
        if picture.suffix.lower() not in PICTURES:
            output.refuse(f"--plot: got {picture}, expected a name that ends in one of {', '.join(PICTURES)}")
        files.check_writable("--plot", picture)
    wanted = [] if check is None else files.read("--check", check, targets.read_targets)
    records = [files.read("--read", path, Record.read) for path in paths]
    if picture is not None:
        with output.refusing(f"--plot: {picture}"):
            plots.plot(records[0], picture)
    found = targets.check(records, wanted)
    missed = [finding for finding in found if finding.state == "misses"]
    if as_json:
        said = [{"state": finding.state, "finding": str(finding)} for finding in found]
        output.print_json({"records": [record.document() for record in records], "targets": said})
        return 1 if missed else 0
    if as_summary:
        output.say(tables.summary(records))
    for record in records if not as_summary else ():
        if as_markdown:
            output.say(tables.markdown(record))
        else:
            _print(record)
    for state in ("misses", "argued", "not measured"):
        for finding in found:
            if finding.state == state:
                output.say(f"{state.upper()} {finding}")
    if wanted:
        output.say(f"targets by cell: {counted([finding.state for finding in found])}")
    return 1 if missed else 0


def _write_model(name: str, folder: Path, layers: int = 40, heads: int = 16, weights: str = "bf16") -> None:
    one_of("--write-model", name, ("deepseek-v3.2",))
    if reason := installed.why_not("tokenizers"):
        output.refuse(f"--write-model needs tokenizers, which comes with vLLM: {reason}")
    from dsafuse.vllm import rank

    try:
        with output.refusing(f"MODEL_DIR: {folder}"):
            rank.write(folder, heads, layers, weights)
    except ValueError as error:
        output.refuse(f"--{error}")
    output.say(
        f"written: {folder}, {layers} layers of {name} with {heads} attention heads, for {weights} weights and without "
        f"them; serve it with --load-format {SCALED}"
    )


def _measured(plan: Plan, before: Record | None, out: Path, deadline: float) -> tuple[int, Record]:
    """(exit code, record); says on standard error what went wrong."""
    with listening() as interrupted:
        record = files.read("MODEL_DIR", plan.model / "config.json", lambda _: _prepared(plan))
        if before is not None:
            try:
                record = resume(record, before)
            except Changed as changed:
                output.refuse(f"--resume: {changed}; choose another --out to start anew")
        alive = "one after the other" if record.conditions["in_turn"] else "alive at the same time"
        with output.progress() as bar:
            task = bar.add_task("serve-bench")
            bar.console.print(f"servers {alive}: {record.conditions['in_turn_because']}", markup=False, soft_wrap=True)

            def report(done: int, work: int, doing: str) -> None:
                bar.update(task, completed=done, total=work, description=doing[:100].replace("[", r"\["))

            try:
                measure(plan, record, out, report, deadline, interrupted)
            except (Ended, Unusable) as error:
                bar.console.print(str(error), markup=False, soft_wrap=True)
                return 1, record
            except Stopped as stopped:
                bar.console.print(str(stopped), markup=False, soft_wrap=True)
                return stopped.exit_code, record
    return (0 if record.results else 1), record


def _prepared(plan: Plan) -> Record:
    try:
        return prepare(plan)
    except Unusable as error:
        _fail(error)


def _fail(error: object) -> NoReturn:
    output.complain(error)
    raise typer.Exit(1)


def _state(out: Path, go_on: bool) -> Record | None:
    """What was measured into this folder before, if that is to go on."""
    state = out / STATE
    if go_on:
        return files.read("--resume", state, Record.read)
    if state.exists():
        output.refuse(f"--out: {out} holds a measurement; --resume goes on with it, another folder starts anew")
    with output.refusing(f"--out: {out}"):
        out.mkdir(parents=True, exist_ok=True)
    files.check_writable("--out", state)
    return None


def _write(record: Record, out: Path) -> list[str]:
    """Markdown and, where it can be drawn, the picture, by name; the JSON is there already."""
    table, picture = "serve-bench.md", "serve-bench.png"
    with output.refusing(f"--out: {out}"):
        (out / table).write_text(tables.markdown(record))
        if not any(record.repeats(cell) for cell in record.cells()):
            return [table]
        reason = check_plot.why_not()
        if reason is not None:
            output.complain(f"no picture: {reason}")
            return [table]
        plots.plot(record, out / picture)
    return [table, picture]


def _print(record: Record) -> None:
    output.say(tables.origin(record))
    for plan in tables.plans(record):
        output.say(f"plugin: {plan}")
    if rows := tables.lines(record):
        output.table(None, tables.BRIEF, tables.brief(record))
        output.table(None, tables.HEADER, rows)
    if spans := tables.first(record):
        output.table("until the first token", tables.FIRST, spans)
    for text in tables.compiled(record):
        output.say(f"COMPILED WHILE MEASURED {text}")
    if record.ended != "complete":
        output.say(f"NOT COMPLETE: {record.ended}")


def _folder(model: Path) -> Path:
    if not (model / "config.json").is_file():
        output.refuse(f"MODEL_DIR: got {model}, expected a folder with a config.json")
    if not any((model / name).is_file() for name in TOKENIZERS):
        output.refuse(f"MODEL_DIR: {model} has no tokenizer, which the random prompts need ({' or '.join(TOKENIZERS)})")
    return model.resolve()


def _config(model: Path) -> dict[str, Any]:
    return files.read("MODEL_DIR", model / "config.json", lambda _: memory.read_config(model))


def _dummy_bytes(model: Path) -> int | None:
    """What weights of such a config take on a GPU; None for a family that we can't list."""
    from dsafuse.vllm import checkpoints

    config = _config(model)
    found = memory.quantisation(config) if memory.why_not_scaled(config) is None else None
    try:
        return checkpoints.served_bytes(checkpoints.TinyModel(model.name, config), found)
    except (KeyError, TypeError):
        return None


def _gpus(text: str | None) -> tuple[str | None, str | None]:
    if text is None:
        return None, None
    parts = text.split("/")
    for part in parts:
        if len(parts) > 2 or any(natural(index.strip()) is None for index in part.split(",")):
            output.refuse(f"--gpus: got {text!r}, expected indices as 0 or 0,1 for both arms, or as 0/1 for off/on")
    return parts[0], parts[-1]

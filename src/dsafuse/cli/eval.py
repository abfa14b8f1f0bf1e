"""`dsafuse eval`: accuracy of a DSA model with and without the fused preparation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console

from dsafuse.cli import files, output
from dsafuse.cli.arguments import counts, one_of, words
from dsafuse.cli.engines import SERVED_KV_CACHE_DTYPES
from dsafuse.stopping import interrupted

if TYPE_CHECKING:
    from dsafuse.accuracy.evaluate import Cell, Settings
    from dsafuse.accuracy.harness import Request
    from dsafuse.accuracy.model import Model

MAX_PROBLEMS = 100_000
MAX_DRAFTS = 8
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFTS = ("both", "on", "off")


def evaluate(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL_DIR", help="Folder with config, weights and tokenizer.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems; minutes on a CPU.")] = False,
    problems: Annotated[int | None, typer.Option(help="Problems of each task at each context; 250, quick: 2.")] = None,
    context: Annotated[str | None, typer.Option(help="Tokens of a prompt, separated by commas.")] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="vLLM's words, separated by commas.")] = "auto,fp8",
    mtp: Annotated[str, typer.Option(help="on, off or both, where the model has an MTP layer.")] = "both",
    draft_tokens: Annotated[int, typer.Option(help="Draft tokens of a step, with MTP.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto: float32 on a CPU, bfloat16 on a GPU.")] = "auto",
    graphs: Annotated[
        bool, typer.Option("--graphs", help="CUDA graphs; steps are then not counted one by one.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 0,
    memory: Annotated[float, typer.Option(help="Fraction of the GPU's memory, shared by all engines.")] = 0.9,
    together: Annotated[
        bool, typer.Option("--together", help="Both arms at once on the GPU: for small models. A CPU does so anyway.")
    ] = False,
    time_limit: Annotated[float, typer.Option(help="Seconds; then the run is stopped, and has failed.")] = 3600.0,
    oracle: Annotated[bool, typer.Option("--oracle", help="Compare log-probabilities with transformers, too.")] = False,
    oracle_out: Annotated[
        Path | None, typer.Option(help="Only write both arms' log-probabilities to this file.")
    ] = None,
    oracle_in: Annotated[
        Path | None, typer.Option(help="Only compare such a file with transformers; nothing is served.")
    ] = None,
    lm_eval: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval, over vLLM's endpoint, instead of ours.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Problems of each lm-eval task.")] = None,
    serve: Annotated[str, typer.Option(help="Further arguments of vllm serve, with --lm-eval.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for the arms' logs.")] = None,
    read: Annotated[
        list[Path] | None, typer.Option(help="Print this recorded run in a Markdown table; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write JSON to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown table to this file.")] = None,
    commit: Annotated[str | None, typer.Option(help="The commit under test, if it is not the checkout's.")] = None,
    json: output.Json = False,
) -> None:
    """Answer the same problems with and without the fused preparation, and compare answer by answer."""
    for name, number, high in (
        ("--problems", problems, MAX_PROBLEMS),
        ("--draft-tokens", draft_tokens, MAX_DRAFTS),
        ("--limit", limit, MAX_PROBLEMS),
    ):
        if number is not None and not 1 <= number <= high:
            output.refuse(f"{name}: got {number}, expected an integer from 1 to {high}")
    for name, value, most in (("--memory", memory, 1.0), ("--time-limit", time_limit, float("inf"))):
        if not 0 < value <= most:
            output.refuse(f"{name}: got {value}, expected more than 0" + (" and at most 1" if most == 1 else ""))
    asked = kv_cache_dtype.split(",")
    caches = list(dict.fromkeys(one_of("--kv-cache-dtype", word, SERVED_KV_CACHE_DTYPES) for word in asked))
    one_of("--mtp", mtp, DRAFTS)
    serve_arguments = words("--serve", serve)
    one_of("--dtype", dtype, DTYPES)
    for name, path in (("--out", out), ("--markdown", markdown), ("--oracle-out", oracle_out)):
        files.check_writable(name, path)
    if logs is not None:
        with output.refusing(f"--logs: {logs}"):
            logs.mkdir(parents=True, exist_ok=True)
    if read:
        _recorded(model, read, out, markdown, json)
    if model is None:
        output.refuse("MODEL_DIR: got none, expected a folder with a model, or --read FILE")
    if not model.is_dir():
        output.refuse(f"MODEL_DIR: got {model}, expected a folder")
    # Only this command needs vLLM, transformers and tokenizers.
    from dsafuse.vllm import demo as bridge

    reason = bridge.why_not_here() if oracle_in is None else None
    if reason is not None:
        output.refuse(reason)
    from dsafuse.accuracy import evaluate as evaluation
    from dsafuse.accuracy import harness
    from dsafuse.accuracy import oracle as other
    from dsafuse.accuracy.model import read as read_model
    from dsafuse.check.environment import of_commit

    if oracle or oracle_in is not None:
        reason = other.why_not_here()
        if reason is not None:
            output.refuse(f"{'--oracle' if oracle else '--oracle-in'}: {reason}")
    checkpoint = files.read("MODEL_DIR", model, read_model)
    files.read("MODEL_DIR", model, lambda _: (checkpoint.tokenizer(), checkpoint.weights()))
    if oracle_in is not None:
        served = files.read("--oracle-in", oracle_in, other.Served.read)
        if served.model != checkpoint.name:
            output.refuse(f"--oracle-in: {oracle_in}: is of {served.model}, and MODEL_DIR is {checkpoint.name}")
        files.read(
            "--oracle-in", oracle_in, lambda _: served.check(checkpoint.index_topk, checkpoint.config["vocab_size"])
        )
        for cell in served.cells:
            one_of(f"--oracle-in: {oracle_in}: kv_cache_dtype", cell.kv_cache_dtype, SERVED_KV_CACHE_DTYPES)
        try:
            agreements = other.compare(served, model, "cpu")
        except (OSError, ValueError) as error:
            output.refuse(f"MODEL_DIR: {model}: {error}")
        _finish(other.record(served, agreements), out, markdown, json)
    cells = _cells(checkpoint, caches, mtp, draft_tokens)
    contexts = () if context is None else tuple(counts("--context", context, 1, checkpoint.longest))
    if lm_eval is not None:
        request = harness.Request(
            checkpoint,
            tuple(lm_eval.split(",")),
            cells,
            limit=limit,
            context=contexts[0] if contexts else min(evaluation.default_contexts(checkpoint)),
            seed=seed,
            serve=serve_arguments,
            seconds=time_limit,
        )
        with interrupted():
            record = _through_lm_eval(request)
    else:
        settings = evaluation.settings_for(checkpoint, cells, quick=quick)
        settings = replace(
            settings,
            seed=seed,
            eager=not graphs,
            memory=memory,
            seconds=time_limit,
            logs=logs,
            dtype=settings.dtype if dtype == "auto" else dtype,
            problems=problems or settings.problems,
            contexts=contexts or settings.contexts,
        )
        if together and settings.device == "cuda":
            settings = evaluation.share_gpu(settings, 2)
        try:
            evaluation.questions(replace(settings, problems=1))
        except ValueError as error:
            output.refuse(f"--context: {error}")
        with interrupted():
            if oracle_out is not None:
                _serve_for_oracle(settings, oracle_out, commit)
            record = _ours(settings, oracle)
    record["environment"] = of_commit(record["environment"], commit)
    _finish(record, out, markdown, json)


def _cells(model: Model, words: list[str], mtp: str, draft_tokens: int) -> tuple[Cell, ...]:
    from dsafuse.accuracy.evaluate import Cell

    if mtp == "on" and not model.draft_layers:
        output.refuse(f"--mtp: got on, but {model.directory} has no MTP layer")
    drafts = {"off": [0], "on": [draft_tokens], "both": [0, draft_tokens] if model.draft_layers else [0]}[mtp]
    return tuple(Cell(word, count) for word in words for count in drafts)


def _recorded(model: Path | None, paths: list[Path], out: Path | None, markdown: Path | None, json: bool) -> NoReturn:
    """Show recorded runs in one table: a row for each cell of each."""
    from dsafuse.accuracy import report

    if model is not None:
        output.refuse(f"MODEL_DIR: got {model}, and --read shows recorded runs")
    records = [files.read("--read", path, report.read) for path in paths]
    text = report.summary(records)
    _write(out, output.to_json(records), markdown, text)
    if json:
        output.print_json(records)
    else:
        output.say(text)
    raise typer.Exit(0 if all(record["ok"] for record in records) else 1)


def _ours(settings: Settings, oracle: bool) -> dict[str, Any]:
    """Our tasks, in processes of our own; and the oracle, if it is asked for."""
    from dsafuse.accuracy import evaluate as evaluation
    from dsafuse.vllm import demo_view

    with demo_view.progress(Console(stderr=True)) as report:
        record = evaluation.run(settings, report).record()
    if oracle:
        from dsafuse.accuracy import oracle as other

        with demo_view.progress(Console(stderr=True)) as report:
            try:
                agreements = other.compare(
                    other.serve(settings, report), settings.model.directory, device=settings.device
                )
            except RuntimeError as error:
                record["problems"].append(f"oracle: {error}")
                agreements = []
        record["oracle"] = [each.record() for each in agreements]
        record["ok"] = record["ok"] and bool(agreements) and all(each.ok for each in agreements)
    return record


def _serve_for_oracle(settings: Settings, path: Path, commit: str | None) -> NoReturn:
    """Both arms' log-probabilities to a file: transformers may be asked about them on another machine."""
    from dsafuse.accuracy import oracle as other
    from dsafuse.check.environment import of_commit
    from dsafuse.vllm import demo_view

    try:
        with demo_view.progress(Console(stderr=True)) as report:
            served = other.serve(settings, report)
    except RuntimeError as error:
        output.say(f"FAILED: {error}")
        raise typer.Exit(1) from None
    served = replace(served, environment=of_commit(served.environment, commit))
    with output.refusing(f"--oracle-out: {path}"):
        path.write_text(output.to_json(served.document()) + "\n")
    raise typer.Exit(0)


def _through_lm_eval(request: Request) -> dict[str, Any]:
    """Tasks of lm-eval, over servers."""
    from dsafuse.accuracy import harness
    from dsafuse.serving.process import Ended

    reason = harness.why_not_here()
    if reason is not None:
        output.refuse(f"--lm-eval: {reason}")
    with output.progress() as bar:
        task = bar.add_task("lm-eval", total=None)
        try:
            compared = harness.run(request, lambda text: bar.update(task, description=text))
            problems: list[str] = []
        except (RuntimeError, Ended) as error:
            compared, problems = [], [str(error)]
    return harness.record(request, compared, problems)


def _finish(record: dict[str, Any], out: Path | None, markdown: Path | None, json: bool) -> NoReturn:
    """Write and show what was found; exit code 1 if it is not as it should be."""
    from dsafuse.accuracy import report

    _write(out, output.to_json(record), markdown, report.markdown(record))
    if json:
        output.print_json(record)
    else:
        for title, header, rows in report.tables(record):
            output.table(title, header, rows)
        for line in report.lines(record):
            output.say(line)
    raise typer.Exit(0 if record["ok"] else 1)


def _write(out: Path | None, document: str, markdown: Path | None, text: str) -> None:
    for option, path, content in (("--out", out, document), ("--markdown", markdown, text.rstrip())):
        if path is not None:
            with output.refusing(f"{option}: {path}"):
                path.write_text(content + "\n")

"""`dsafuse eval`: accuracy of a DSA model with and without the fused preparation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dsafuse.cli import files, output
from dsafuse.cli.arguments import counts, one_of, words

if TYPE_CHECKING:
    from dsafuse.accuracy.evaluate import Cell, Settings
    from dsafuse.accuracy.harness import Request
    from dsafuse.accuracy.model import Model

MAX_PROBLEMS = 100_000
MAX_DRAFTS = 8
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DRAFTS = ("both", "on", "off")


def evaluate(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder with config, weights and tokenizer.")],
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
    memory: Annotated[float, typer.Option(help="Fraction of the GPU's memory, shared by all cells.")] = 0.9,
    time_limit: Annotated[float, typer.Option(help="Seconds; then the run is stopped, and has failed.")] = 3600.0,
    oracle: Annotated[bool, typer.Option("--oracle", help="Compare log-probabilities with transformers, too.")] = False,
    lm_eval: Annotated[
        str | None, typer.Option(help="Tasks of lm-eval, over vLLM's endpoint, instead of ours.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Problems of each lm-eval task.")] = None,
    serve: Annotated[str, typer.Option(help="Further arguments of vllm serve, with --lm-eval.")] = "",
    logs: Annotated[Path | None, typer.Option(help="Folder for the arms' logs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write JSON to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write a Markdown table to this file.")] = None,
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
    caches = list(dict.fromkeys(one_of("--kv-cache-dtype", word, KV_CACHE_DTYPES) for word in asked))
    one_of("--mtp", mtp, DRAFTS)
    serve_arguments = words("--serve", serve)
    one_of("--dtype", dtype, DTYPES)
    files.check_writable("--out", out)
    files.check_writable("--markdown", markdown)
    # Only this command needs vLLM and tokenizers.
    from dsafuse.vllm import demo as bridge

    reason = bridge.why_not_here()
    if reason is not None:
        output.refuse(reason)
    from dsafuse.accuracy import evaluate as evaluation
    from dsafuse.accuracy import harness, report
    from dsafuse.accuracy.model import read

    if not model.is_dir():
        output.refuse(f"MODEL_DIR: got {model}, expected a folder")
    checkpoint = files.read("MODEL_DIR", model, read)
    files.read("MODEL_DIR", model, lambda _: checkpoint.tokenizer())
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
        record = _ours(settings, oracle)
    _write(out, markdown, record)
    if json:
        output.print_json(record)
    else:
        for title, header, rows in report.tables(record):
            output.table(title, header, rows)
        for line in report.lines(record):
            output.say(line)
    raise typer.Exit(0 if record["ok"] else 1)


def _cells(model: Model, words: list[str], mtp: str, draft_tokens: int) -> tuple[Cell, ...]:
    from dsafuse.accuracy.evaluate import Cell

    if mtp == "on" and not model.draft_layers:
        output.refuse(f"--mtp: got on, but {model.directory} has no MTP layer")
    drafts = {"off": [0], "on": [draft_tokens], "both": [0, draft_tokens] if model.draft_layers else [0]}[mtp]
    return tuple(Cell(word, count) for word in words for count in drafts)


def _ours(settings: Settings, oracle: bool) -> dict[str, Any]:
    """Our tasks, in processes of our own; and the oracle, if it is asked for."""
    from dsafuse.accuracy import evaluate as evaluation
    from dsafuse.vllm import demo_view

    try:
        evaluation.questions(replace(settings, problems=1))
    except ValueError as error:
        output.refuse(f"--context: {error}")
    with demo_view.progress(Console(stderr=True)) as report:
        record = evaluation.run(settings, report).record()
    if oracle:
        from dsafuse.accuracy import oracle as other

        with demo_view.progress(Console(stderr=True)) as report:
            try:
                agreements = other.run(settings, report)
            except RuntimeError as error:
                record["problems"].append(f"oracle: {error}")
                agreements = []
        record["oracle"] = [each.record() for each in agreements]
        record["ok"] = record["ok"] and bool(agreements) and all(each.ok for each in agreements)
    return record


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


def _write(out: Path | None, markdown: Path | None, record: dict[str, Any]) -> None:
    from dsafuse.accuracy import report

    texts = {"--out": (out, output.to_json(record) + "\n"), "--markdown": (markdown, report.markdown(record))}
    for option, (path, text) in texts.items():
        if path is not None:
            with output.refusing(f"{option}: {path}"):
                path.write_text(text)

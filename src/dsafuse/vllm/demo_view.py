"""How the demonstration looks on a terminal: progress while it runs, tokens side by side when it has."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from dsafuse.vllm.arms import FUSED, UNFUSED, Report
from dsafuse.vllm.demo import CellResult, DemoResult


@contextmanager
def progress(console: Console) -> Iterator[Report]:
    """A bar for each process; yields the function to pass to `demo.run`."""
    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}
        waiting = bars.add_task("", total=None, doing="starting vLLM")

        def report(arm: str, done: int, work: int, doing: str) -> None:
            bars.update(waiting, visible=False)
            if arm not in tasks:
                tasks[arm] = bars.add_task(arm, doing=doing)
            bars.update(tasks[arm], completed=done, total=work, doing=doing)

        yield report


def render(result: DemoResult, console: Console) -> None:
    """Tokens, then what was fused and how fast, then what went wrong."""
    if result.cells:
        console.print(_answers(result) if result.asked else _tokens(result))
        console.print(_work(result))
        for trace in _traces(result):
            console.print(Text(trace, style="dim"))
        console.print(
            "Times are of CPU processes sharing this machine, the fused one interpreting its kernels: they say "
            "nothing about a GPU.",
            style="dim",
        )
        if result.interpret_up_to is not None:
            console.print(
                f"Calls of up to {result.interpret_up_to} tokens are interpreted: short questions, and every decode "
                "step. For the prefill of a longer question the ops' oracles stand in, whose bytes are the same.",
                style="dim",
            )
    for problem in [*result.problems, *(problem for cell in result.cells for problem in cell.problems)]:
        console.print(Text(problem, style="red"))
    count = f"{len(result.cells)} cells in {result.seconds:.0f} s"
    if result.ok:
        console.print(f"Same tokens with and without the fused preparation: {count}.", style="bold green")
    else:
        console.print(f"FAILED: {count}.", style="bold red")


def _answers(result: DemoResult) -> Table:
    table = Table(title="Questions and answers")
    for column in ("model", "cache", "tokens", "question", "right answer", UNFUSED, FUSED, "identical"):
        table.add_column(column, overflow="fold")
    for cell in result.cells:
        said = cell.answers or {UNFUSED: [], FUSED: []}
        rows = zip(result.asked, said[UNFUSED], said[FUSED], cell.unfused.tokens, cell.fused.tokens, strict=True)
        for number, (asked, unfused, fused, *tokens) in enumerate(rows):
            same = Text("yes", style="green") if tokens[0] == tokens[1] else Text("NO", style="bold red")
            answers = [
                Text(text, style="green" if text.strip() == asked.answer else "red") for text in (unfused, fused)
            ]
            first = (cell.cell.model, cell.cell.kv_cache_dtype) if number == 0 else ("", "")
            table.add_row(*first, str(len(asked.tokens)), Text(asked.text), asked.answer, *answers, same)
        table.add_section()
    return table


def _tokens(result: DemoResult) -> Table:
    table = Table(title="Greedy tokens", show_lines=True)
    for column in ("model", "cache", "prompt", "arm", "tokens", "identical"):
        table.add_column(column, overflow="fold")
    for cell in result.cells:
        pairs = zip(result.prompt_tokens, cell.unfused.tokens, cell.fused.tokens, strict=True)
        for length, unfused, fused in pairs:
            same = Text("yes", style="green") if unfused == fused else Text("NO", style="bold red")
            table.add_row(
                cell.cell.model,
                cell.cell.kv_cache_dtype,
                str(length),
                f"{UNFUSED}\n{FUSED}",
                f"{_row(unfused)}\n{_row(fused)}",
                same,
            )
    return table


def _row(tokens: list[int]) -> str:
    return " ".join(f"{token:3d}" for token in tokens)


def _work(result: DemoResult) -> Table:
    table = Table(title="What was fused")
    for column in (
        "model",
        "cache",
        "provider",
        "fused calls",
        "launches a layer",
        f"{UNFUSED} ms/step",
        f"{FUSED} ms/step",
    ):
        table.add_column(column, overflow="fold")
    for cell in result.cells:
        calls = ", ".join(f"{op} {number['fused']}" for op, number in cell.fused.calls.items() if number["fused"])
        table.add_row(
            cell.cell.model,
            cell.cell.kv_cache_dtype,
            ", ".join(cell.providers) or "none",
            calls,
            _launches(cell),
            f"{cell.unfused.decode_step_ms:.0f}",
            f"{cell.fused.decode_step_ms:.0f}",
        )
    return table


def _launches(cell: CellResult) -> str:
    """Such as "2 x 9 -> 2, 1 x 4 -> 1": two layers with all nine steps, one that shares its top-k."""
    counts: dict[tuple[int, int], int] = {}
    for pair in cell.launches.values():
        counts[pair] = counts.get(pair, 0) + 1
    return ", ".join(f"{layers} x {before} -> {after}" for (before, after), layers in counts.items())


def _traces(result: DemoResult) -> list[str]:
    return list(dict.fromkeys(trace for cell in result.cells for trace in cell.traces))

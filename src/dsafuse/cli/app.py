"""The app: one command a file, and one line on standard error for whatever is out of range."""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from dsafuse import switches
from dsafuse.cli import bench, codegen, demo, env, eval, explain, serve_bench, verify
from dsafuse.cli.output import complain, refuse, why

# Typer carries a copy of click since 0.24 or so, and imports it before; the public BadParameter leads to either.
_ClickException: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)


class OneLineErrors(TyperGroup):
    """Says what is wrong with the command line in one line, where typer would draw a box around it."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run, and leave with the command's exit code: 2 for a value out of range."""
        try:
            code = super().main(*args, **{**options, "standalone_mode": False})
        except _ClickException as error:
            complain(error.format_message())  # type: ignore[attr-defined]
            sys.exit(2)
        except OSError as error:  # commands say themselves what they can't read or write; help does not
            complain(f"{error.filename or 'dsafuse'}: {why(error)}")
            sys.exit(2)
        except typer.Abort:
            sys.exit(130)
        sys.exit(code if isinstance(code, int) else 0)


app = typer.Typer(name="dsafuse", cls=OneLineErrors, add_completion=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Fused query and key preparation for DeepSeek Sparse Attention."""
    try:
        switches.current()
    except ValueError as unknown:
        refuse(unknown)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for command in (explain.explain, verify.verify, bench.bench, codegen.codegen, demo.demo, env.env):
    app.command()(command)
app.command(name="serve-bench")(serve_bench.serve_bench)
app.command(name="eval")(eval.evaluate)

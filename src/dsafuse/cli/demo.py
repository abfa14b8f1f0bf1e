"""`dsafuse demo`: small DSA models served by vLLM, un-fused and fused, giving the same answers."""

from __future__ import annotations

import typer
from rich.console import Console

from dsafuse.cli import output
from dsafuse.stopping import interrupted


def demo(json: output.Json = False) -> None:
    """Ask two small models through vLLM with and without the fused preparation, and compare their tokens.

    The shipped checkpoints, where they are (in a clone), answer questions; else seeded ones say what means nothing.
    """
    # Only a few commands need the bridge to vLLM.
    from dsafuse.vllm import demo as bridge
    from dsafuse.vllm import demo_view

    reason = bridge.why_not_here()
    if reason is not None:
        output.refuse(reason)
    from dsafuse.accuracy import shown

    shipped = shown.shipped()
    with demo_view.progress(Console(stderr=True)) as report, interrupted():
        result = bridge.run(report, questions=shown.questions(shipped) if shipped else None)
    if json:
        output.print_json(result.as_dict())
    else:
        with output.refusing(output.STDOUT):
            demo_view.render(result, output.out())
    raise typer.Exit(0 if result.ok else 1)

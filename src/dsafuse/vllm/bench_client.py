"""`vllm bench serve` as one process for many calls: importing vLLM takes longer than a short benchmark.

    python -m dsafuse.vllm.bench_client

Each line of standard input is a JSON list, the arguments of one `vllm bench serve`; each line of standard output is a
JSON object: {"event": "ready"} once, then {"event": "done", "result": what vLLM would have saved} for each call, with
--save-detailed what `shortened` leaves of it. An error is what the server answered, not its HTTP status alone.
What vLLM prints goes to standard error. A call that fails ends the process.
"""

import functools
import json
import os
import sys
from typing import Any

LARGE = ("itls", "generated_texts", "input_lens", "output_lens")
ANSWER_CHARACTERS = 2000


def main() -> None:
    """Answer the calls on standard input until it ends."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # vLLM's client keeps of a refusal the HTTP status alone; its library can be told to raise the rest.
    http = serve.aiohttp

    async def tell(response: Any) -> None:
        if response.status != 200:
            said = (await response.text())[:ANSWER_CHARACTERS]
            raise http.ClientError(f"HTTP {response.status} {response.reason}: {said}")

    http.ClientSession.__init__ = functools.partialmethod(http.ClientSession.__init__, raise_for_status=tell)
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.get_tokenizer = functools.cache(serve.get_tokenizer)
    events.write(json.dumps({"event": "ready"}) + "\n")
    for line in sys.stdin:
        result = serve.main(parser.parse_args(json.loads(line)))
        events.write(json.dumps({"event": "done", "result": shortened(result)}) + "\n")


def shortened(result: dict[str, Any]) -> dict[str, Any]:
    """A result without what is large.

    Of every request it has when it was sent (start_times, since the first) and its ttft (ttfts), in seconds, in the
    order of the prompts; of errors what was raised, without where, once each.
    """
    short = {name: value for name, value in result.items() if name not in LARGE}
    first = min(result["start_times"])
    errors = [error.strip().splitlines()[-1] for error in result["errors"] if error.strip()]
    return {
        **short,
        "start_times": [round(time - first, 4) for time in result["start_times"]],
        "ttfts": [round(time, 4) for time in result["ttfts"]],
        "errors": list(dict.fromkeys(errors)),
    }


if __name__ == "__main__":
    main()

"""`vllm bench serve` as one process for many calls: importing vLLM takes longer than a short benchmark.

    python -m dsafuse.vllm.bench_client

Each line of standard input is a JSON list, the arguments of one `vllm bench serve`; each line of standard output is a
JSON object: {"event": "ready"} once, then {"event": "done", "result": what vLLM would have saved} for each call.
What vLLM prints goes to standard error. A call that fails ends the process.
"""

import functools
import json
import os
import sys


def main() -> None:
    """Answer the calls on standard input until it ends."""
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    serve.get_tokenizer = functools.cache(serve.get_tokenizer)
    events.write(json.dumps({"event": "ready"}) + "\n")
    for line in sys.stdin:
        result = serve.main(parser.parse_args(json.loads(line)))
        events.write(json.dumps({"event": "done", "result": result}) + "\n")


if __name__ == "__main__":
    main()

"""One arm of a comparison: a process that serves a list of cells through vLLM and reports as it goes.

    python -m dsafuse.vllm.arm < job.json

The job on standard input is {"prompts": [[...]], "max_tokens": n, "cells": [{"checkpoint": path,
"kv_cache_dtype": "auto"}, ...]}, with further keys of a cell passed to `vllm.LLM`. Standard output carries one
JSON object a line, and nothing else; vLLM's log goes to standard error. DSAFUSE_* decide what kind of arm it is; the
rest of ENVIRONMENT must be set by who starts the process, since torch reads its number of threads when it is imported.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Event = dict[str, Any]

# What an arm needs in its environment, beside DSAFUSE_*.
ENVIRONMENT: Mapping[str, str] = {
    # One process, so that counters and plans can be read; two of its threads would fight the other arm's.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def serve(cell: Mapping[str, Any], prompts: list[list[int]], max_tokens: int, report: Callable[[Event], None]) -> Event:
    """Build the engine of one cell and generate greedily. Returns tokens, times, calls and plans."""
    from vllm import LLM, SamplingParams

    from dsafuse.vllm import counters, plan, stats

    # vLLM collects garbage at every stage of an engine's life. A walk over all that it imports takes a third of a
    # second, more than the small models do; what is frozen is not walked over. (vLLM thaws it when an engine ends.)
    gc.collect()
    gc.freeze()
    counters.reset()
    plan.PLANS.clear()
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "max_model_len": 512,
        # 8192 tokens. Without it the caches fill VLLM_CPU_KVCACHE_SPACE, and zeroing a GiB takes longer than serving.
        "num_gpu_blocks_override": 128,
        "max_num_seqs": max(2, len(prompts)),
        "seed": 0,
        **{key: value for key, value in cell.items() if key != "checkpoint"},
    }
    llm = LLM(model=str(cell["checkpoint"]), **options)
    report({"event": "loaded"})
    # Profiling runs are over: from here on a count is a step that serves.
    counters.reset()
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, greedy)
    tokens: dict[str, list[int]] = {}
    cached_tokens: dict[str, int] = {}
    step_seconds: list[float] = []
    while llm.llm_engine.has_unfinished_requests():
        start = time.perf_counter()
        for output in llm.llm_engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
            cached_tokens[output.request_id] = output.num_cached_tokens or 0
        step_seconds.append(time.perf_counter() - start)
        report({"event": "step", "step": len(step_seconds), "seconds": step_seconds[-1]})
    result = {
        "tokens": [tokens[str(number)] for number in range(len(prompts))],
        "cached_tokens": [cached_tokens[str(number)] for number in range(len(prompts))],
        "step_seconds": step_seconds,
        "calls": stats(),
        "plans": [layer.as_dict() for layer in plan.PLANS.values()],
    }
    # The next engine needs this one's process groups gone; waiting for the garbage collector would not do, since vLLM
    # keeps an engine out of its sight.
    llm.llm_engine.engine_core.shutdown()
    return result


def main() -> None:
    """Serve the cells of the job on standard input, one after the other."""
    # Libraries print; what they print must not land between the events.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    for number, cell in enumerate(job["cells"]):

        def report(event: Event, number: int = number) -> None:
            events.write(json.dumps({"cell": number, **event}) + "\n")

        report({"event": "start"})
        report({"event": "done", **serve(cell, job["prompts"], job["max_tokens"], report)})


if __name__ == "__main__":
    main()

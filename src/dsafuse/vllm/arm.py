"""One arm of a comparison: a process that serves a list of cells through vLLM and reports as it goes.

    python -m dsafuse.vllm.arm < job.json

The job, a line on standard input, is {"prompts": [[...]], "max_tokens": n, "sampling": {...}, "interpret_up_to": n,
"cells": [{"checkpoint": path, "kv_cache_dtype": "auto"}, ...]}. Further keys of a cell are passed to `vllm.LLM`, those
of sampling, which may be left out, to `vllm.SamplingParams`; interpret_up_to is explained at the function of that name.
Standard output carries one JSON object a line, and nothing else; vLLM's log goes to standard error. DSAFUSE_* decide
what kind of arm it is; the rest of ENVIRONMENT must be set by who starts the process, since torch reads its number of
threads when it is imported. Who starts it as the leader of a session keeps standard input open until it has ended.
"""

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
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

# vLLM's names of what speculative decoding counts.
DRAFTS, ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def serve(
    cell: Mapping[str, Any], prompts: list[list[int]], max_tokens: int, report: Callable[[Event], None], **sampling: Any
) -> Event:
    """Build the engine of one cell and generate greedily. Returns tokens, times, calls, plans and what else was asked.

    With logprobs and prompt_logprobs in sampling, "logprobs" holds for each prompt, and each of its tokens but the
    first and each generated one, the token's log-probability and the likeliest token. Of a cell with a
    speculative_config, "drafts" are vLLM's counts: drafts made, and draft tokens accepted.
    """
    from vllm import LLM, SamplingParams

    from dsafuse.vllm import counters, plan, stats

    # vLLM collects garbage at every stage of an engine's life. A walk over all that it imports takes a third of a
    # second, more than the small models do; what is frozen is not walked over. (vLLM thaws it when an engine ends.)
    gc.collect()
    gc.freeze()
    counters.reset()
    plan.PLANS.clear()
    drafted = cell.get("speculative_config") is not None
    options = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": not drafted,
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
    before = _drafts(llm) if drafted else (0, 0)
    wanted = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False, **sampling}
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, SamplingParams(**wanted))
    outputs: dict[str, Any] = {}
    step_seconds: list[float] = []
    while llm.llm_engine.has_unfinished_requests():
        start = time.perf_counter()
        for output in llm.llm_engine.step():
            outputs[output.request_id] = output
        step_seconds.append(time.perf_counter() - start)
        # A prompt that has ended early owes no more tokens.
        done = sum(max_tokens if each.finished else len(each.outputs[0].token_ids) for each in outputs.values())
        report({"event": "step", "step": len(step_seconds), "seconds": step_seconds[-1], "tokens": done})
    served = [outputs[str(number)] for number in range(len(prompts))]
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in served],
        "cached_tokens": [output.num_cached_tokens or 0 for output in served],
        "step_seconds": step_seconds,
        "calls": stats(),
        "plans": [layer.as_dict() for layer in plan.PLANS.values()],
    }
    if "prompt_logprobs" in sampling:
        result["logprobs"] = [_logprobs(prompt, output) for prompt, output in zip(prompts, served, strict=True)]
    if drafted:
        result["drafts"] = [after - count for after, count in zip(_drafts(llm), before, strict=True)]
    # The next engine needs this one's process groups gone; waiting for the garbage collector would not do, since vLLM
    # keeps an engine out of its sight.
    llm.llm_engine.engine_core.shutdown()
    return result


def _drafts(llm: Any) -> tuple[int, int]:
    """(drafts made, draft tokens accepted) since the process began."""
    counts = {metric.name: int(metric.value) for metric in llm.get_metrics() if metric.name in (DRAFTS, ACCEPTED)}
    return counts.get(DRAFTS, 0), counts.get(ACCEPTED, 0)


def _logprobs(prompt: list[int], output: Any) -> list[tuple[float, int]]:
    """(log-probability, likeliest token) for each token behind the first, of the prompt and of what followed."""
    tokens = [*prompt[1:], *output.outputs[0].token_ids]
    places = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [
        (place[token].logprob, max(place, key=lambda each: place[each].logprob))
        for token, place in zip(tokens, places, strict=True)
    ]


@contextmanager
def interpret_up_to(tokens: int) -> Iterator[dict[str, int]]:
    """Let provider `interpreter` run an op's oracle where a call has more tokens than `tokens`; yields the counts.

    An interpreted kernel takes 20 to 50 ms for a token of a layer, a prompt of 2,000 tokens some minutes; the oracle
    takes 0.1 ms. The two give the same bytes (`dsafuse verify`), and everything around the op is as it was: its plan,
    its arguments, its caches. So prompts beyond index_topk can be served on a CPU, and decode steps still run the
    kernels. Whoever asks for it must say so in what it reports.
    """
    from dsafuse.dispatch import PROVIDERS
    from dsafuse.registry import OPS

    provider = PROVIDERS["interpreter"].load()
    kernels = provider.run
    counts = {"interpreted": 0, "oracle": 0}

    def run(op: str, arguments: dict[str, Any], config: Any) -> None:
        if len(arguments["positions"]) > tokens:
            counts["oracle"] += 1
            OPS[op].oracle(**arguments)
        else:
            counts["interpreted"] += 1
            kernels(op, arguments, config)

    provider.run = run  # type: ignore[attr-defined]
    try:
        yield counts
    finally:
        provider.run = kernels  # type: ignore[attr-defined]


def take_job() -> Any:
    """The job on standard input. The leader of a session ends, with all of its group, when standard input does.

    A signal to the group of who started it does not reach it, and who is killed by one can't end it.
    """
    job = json.loads(sys.stdin.readline())
    if os.getsid(0) == os.getpid():
        threading.Thread(target=_end_with_input, daemon=True).start()
    return job


def _end_with_input() -> None:
    # Not by sys.stdin: at its end Python waits for whoever reads there.
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Serve the cells of the job on standard input, one after the other."""
    # Libraries print; what they print must not land between the events.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = take_job()
    limit, sampling = job.get("interpret_up_to"), job.get("sampling", {})
    for number, cell in enumerate(job["cells"]):

        def report(event: Event, number: int = number) -> None:
            events.write(json.dumps({"cell": number, **event}) + "\n")

        report({"event": "start"})
        with nullcontext() if limit is None else interpret_up_to(limit) as ways:
            result = serve(cell, job["prompts"], job["max_tokens"], report, **sampling)
        report({"event": "done", "ways": ways, **result})


if __name__ == "__main__":
    main()

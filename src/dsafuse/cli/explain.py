"""`dsafuse explain`: per op, who would run it on a target, and why."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dsafuse import installed, switches
from dsafuse.cli import files, output
from dsafuse.cli.arguments import one_of, op_names
from dsafuse.cli.engines import KV_CACHE_DTYPES, SERVED_KV_CACHE_DTYPES, Meaning, meanings
from dsafuse.dispatch import PROVIDERS, Accepted, Decision, Rejected
from dsafuse.layouts import INDEXER_LAYOUTS, MLA_LAYOUTS, CacheLayout
from dsafuse.models import MODELS, ModelShape
from dsafuse.ops.config import ClearTopk, Config, IndexK, IndexQ, LatentKv, LatentQ, NormQ
from dsafuse.ops.indexer import indexer_qk_rope_quant_and_cache
from dsafuse.ops.mla import fused_qk_rope_concat_and_cache_mla
from dsafuse.ops.seams import prepare_latents, prepare_qk, prepare_queries
from dsafuse.registry import OPS
from dsafuse.target import Target

MAX_BLOCK_SIZE = 4096
DEFAULT_MODEL, DEFAULT_TP, DEFAULT_BLOCK_SIZE = "deepseek-v3.2", 8, 64


def explain(
    target: Annotated[str | None, typer.Option(help="Such as gfx942 or sm_90; default: this machine's.")] = None,
    model: Annotated[str | None, typer.Option(help="deepseek-v3.2 (default) or glm-5.2.")] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallelism: divides the attention heads; default 8, with --vllm 1.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="The engine's word: auto, fp8 or fp8_ds_mla.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Tokens in a cache block; default 64.")] = None,
    vllm: Annotated[
        Path | None, typer.Option(metavar="MODEL_DIR", help="Say what the plugin would do with this model, here.")
    ] = None,
    mtp: Annotated[bool, typer.Option("--mtp", help="With --vllm: as served with the model's MTP draft.")] = False,
    json: output.Json = False,
) -> None:
    """Say which provider each op gets on a target, and why, and what the engine's word for a cache means there."""
    if vllm is not None:
        _vllm(vllm, kv_cache_dtype, 1 if tp is None else tp, (target, model, block_size), mtp=mtp, json=json)
        return
    if mtp:
        output.refuse("--mtp: expected --vllm MODEL_DIR with it")
    tp = DEFAULT_TP if tp is None else tp
    block_size = DEFAULT_BLOCK_SIZE if block_size is None else block_size
    where = _target(target)
    shape = MODELS[one_of("--model", model or DEFAULT_MODEL, MODELS)]
    one_of("--kv-cache-dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        output.refuse(f"--block-size: got {block_size}, expected an integer from 1 to {MAX_BLOCK_SIZE}")
    try:
        heads = shape.local_heads(tp)
    except ValueError as error:
        output.refuse(f"--{error}")
    found = [
        (meaning, _decisions(meaning, shape, heads, where, block_size))
        for meaning in meanings(where.arch, kv_cache_dtype, block_size)
    ]
    if json:
        output.print_json(_document(where, shape, tp, heads, kv_cache_dtype, block_size, found))
    else:
        _print(where, shape, tp, heads, kv_cache_dtype, block_size, found)


def _vllm(folder: Path, word: str, tp: int, others: tuple[object, ...], *, mtp: bool, json: bool) -> None:
    """What the plugin would do with a model, by the vLLM that is installed here, on the platform that it finds."""
    for option, value in zip(("--target", "--model", "--block-size"), others):
        if value is not None:
            output.refuse(f"{option}: got {value}, but with --vllm it is what the vLLM that is installed here finds")
    one_of("--kv-cache-dtype", word, SERVED_KV_CACHE_DTYPES)
    if not (folder / "config.json").is_file():
        output.refuse(f"--vllm: got {folder}, expected a folder with a config.json")
    if reason := installed.why_not("vllm"):
        output.complain(f"--vllm: {reason}, and its own classes are what is asked")
        raise typer.Exit(1)
    from dsafuse.vllm import foresee

    files.read("--vllm", folder / "config.json", foresee.read_config)
    try:
        found = foresee.ask(folder, word, tp, mtp=mtp)
    except ValueError as error:
        output.refuse(f"--{error}")
    except foresee.Unforeseen as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    if json:
        output.print_json({"model": str(folder), "kv_cache_dtype": word, "tp": tp, "mtp": mtp, **found})
    else:
        _print_vllm(folder, word, tp, found)
    if not found["starts"]:
        raise typer.Exit(1)


def _print_vllm(folder: Path, word: str, tp: int, found: dict[str, Any]) -> None:
    output.say(
        f"vLLM {found['vllm']} on {found['platform']}, {folder}, tp={tp}: activations {found['dtype']}, "
        f"--kv-cache-dtype {word}, block size {found['block_size']}"
    )
    output.say(f"switches: {_switches()}")
    for name in found["left_out"]:
        output.say(f"left out: {name}, which no plan looks at: on a CPU vLLM lacks kernels for some formats of weights")
    for reason in found["not_installed"]:
        output.say(f"not installed: {reason}")
    if not found["starts"]:
        output.say("DSAFUSE_MODE=strict: vLLM would not start with this model")
    elif not found["kinds"]:
        output.say("no layer passes the plugin's hooks: vLLM's own code runs")
    for kind in found["kinds"]:
        output.say("")
        output.say(f"{len(kind['layers'])} x {kind['says']} [first: {kind['layer']}]")
        for op in kind["ops"]:
            if op["trace"]:
                output.say(op["trace"])


def _target(name: str | None) -> Target:
    try:
        if name is not None:
            return Target.named(name)
        return Target.of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    except ValueError as error:
        output.refuse(f"--{error}" if name is not None else f"{error}; name one with --target")


def _fp8(where: Target) -> torch.dtype:
    """The format that the target converts to; OCP where it has both or none."""
    return torch.float8_e4m3fnuz if where.fp8 == {torch.float8_e4m3fnuz} else torch.float8_e4m3fn


def configs(meaning: Meaning, shape: ModelShape, heads: int, fp8: torch.dtype, block_size: int) -> dict[str, Config]:
    """The static facts of every op's call in a layer with an indexer, as the engine makes it."""
    activation, rope, index_rope = torch.bfloat16, shape.mla_rope_style.value, shape.index_rope_style.value
    query = fp8 if meaning.query == "fp8" else activation
    latent_q = LatentQ(heads, query, rope)
    latent_kv = LatentKv(meaning.layout, block_size, rope)
    index_q = IndexQ(shape.index_heads, index_rope, "ue8m0")
    index_k = IndexK(meaning.indexer, block_size, index_rope, "ue8m0")
    norm_q, clear_topk = NormQ(shape.q_lora_rank), ClearTopk(shape.index_topk)

    def config(**roles: Any) -> Config:
        return Config(activation, fp8, "split", **roles)

    return {
        fused_qk_rope_concat_and_cache_mla.name: config(latent_q=latent_q, latent_kv=latent_kv),
        indexer_qk_rope_quant_and_cache.name: config(index_q=index_q, index_k=index_k),
        prepare_qk.name: config(
            latent_q=latent_q, latent_kv=latent_kv, index_q=index_q, index_k=index_k, clear_topk=clear_topk
        ),
        prepare_latents.name: config(
            norm_q=norm_q, latent_kv=replace(latent_kv, norm=True), index_k=index_k, clear_topk=clear_topk
        ),
        prepare_queries.name: config(latent_q=latent_q, index_q=index_q),
    }


def _decisions(meaning: Meaning, shape: ModelShape, heads: int, where: Target, block_size: int) -> list[Decision]:
    unwritten = _why_unwritten(meaning, block_size)
    called = configs(meaning, shape, heads, _fp8(where), block_size)
    return [
        OPS[name].choose(config, where)
        if unwritten is None or config.index_k is None
        else Decision(name, where.arch, tuple(Rejected(provider, unwritten) for provider in PROVIDERS))
        for name, config in ((name, called[name]) for name in op_names())
    ]


def _why_unwritten(meaning: Meaning, block_size: int) -> str | None:
    """Why nobody could write the backend's indexer cache; None if it can be written."""
    what = f"the indexer cache of {meaning.backend} has layout {meaning.indexer}"
    if meaning.indexer not in INDEXER_LAYOUTS:
        return f"{what}, and this version writes {', '.join(INDEXER_LAYOUTS)}"
    multiple = INDEXER_LAYOUTS[meaning.indexer].block_multiple
    return f"{what}, and block size {block_size} is no multiple of {multiple}" if block_size % multiple else None


Found = list[tuple[Meaning, list[Decision]]]


def _print(where: Target, shape: ModelShape, tp: int, heads: int, word: str, block_size: int, found: Found) -> None:
    formats = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in where.fp8)) or "none"
    output.say(f"target: {where.arch} ({where.vendor}), fp8 formats: {formats}")
    output.say(
        f"model: {shape.name}, tp={tp}: {heads} attention heads (RoPE {shape.mla_rope_style}), "
        f"{shape.index_heads} indexer heads (RoPE {shape.index_rope_style})"
    )
    output.say(f"switches: {_switches()}")
    for meaning, decisions in found:
        output.say("")
        output.say(
            f"--kv-cache-dtype {word} on {where.arch}, backend {meaning.backend}: MLA cache {meaning.layout}, "
            f"query {_query(meaning, where)}, indexer cache {meaning.indexer}, block size {block_size}"
            + (f" ({meaning.note})" if meaning.note else "")
        )
        for decision in decisions:
            output.say(str(decision))
    output.say("")
    for layout in _layouts():
        rows = [
            [str(entry[key]) for key in ("field", "store", "count", "bytes", "offset_bytes")]
            for entry in _fields(layout)
        ]
        planar = ", planar: offsets are per token of a block" if layout.planar else ""
        title = f"{layout.name}: {layout.row_bytes()} bytes a token at 16 bit{planar}"
        output.table(title, ("field", "store", "count", "bytes", "offset"), rows)


def _document(
    where: Target, shape: ModelShape, tp: int, heads: int, word: str, block_size: int, found: Found
) -> dict[str, Any]:
    now = switches.current()
    return {
        "target": {
            "arch": where.arch,
            "vendor": where.vendor,
            "fp8": sorted(str(dtype).removeprefix("torch.") for dtype in where.fp8),
        },
        "model": {
            "name": shape.name,
            "tp": tp,
            "heads": heads,
            "index_heads": shape.index_heads,
            "rope_style": shape.mla_rope_style.value,
            "index_rope_style": shape.index_rope_style.value,
        },
        "kv_cache_dtype": word,
        "block_size": block_size,
        "switches": {"mode": now.mode, "ops": sorted(now.ops), "provider": now.provider},
        "meanings": [
            {
                **asdict(meaning),
                "query": _query(meaning, where),
                "ops": [_decision(decision) for decision in decisions],
            }
            for meaning, decisions in found
        ],
        "layouts": {
            layout.name: {"row_bytes": layout.row_bytes(), "planar": layout.planar, "fields": _fields(layout)}
            for layout in _layouts()
        },
    }


def _decision(decision: Decision) -> dict[str, Any]:
    trace = [
        {"provider": v.provider, "accepted": isinstance(v, Accepted), "reason": getattr(v, "reason", None)}
        for v in decision.trace
    ]
    return {"op": decision.op, "provider": decision.provider, "trace": trace}


def _query(meaning: Meaning, where: Target) -> str:
    dtype = _fp8(where) if meaning.query == "fp8" else torch.bfloat16
    return str(dtype).removeprefix("torch.")


def _switches() -> str:
    now = switches.current()
    return (
        f"DSAFUSE_MODE={now.mode} DSAFUSE_OPS={','.join(sorted(now.ops))} DSAFUSE_PROVIDER={now.provider or '(unset)'}"
    )


def _layouts() -> list[CacheLayout]:
    return [*MLA_LAYOUTS.values(), *INDEXER_LAYOUTS.values()]


def _fields(layout: CacheLayout) -> list[dict[str, Any]]:
    return [
        {
            "field": f.name,
            "store": f.store.value,
            "count": f.count,
            "bytes": f.count * f.store.itemsize(torch.bfloat16),
            "offset_bytes": layout.offset_bytes(f.name),
        }
        for f in layout.fields
    ]

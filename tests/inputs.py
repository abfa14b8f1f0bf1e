"""Hostile inputs for every op, and comparison of everything that a call can reach.

Inputs are views into wider, offset, transposed storage, as an engine's are. Every writable buffer lies between
canaries and starts poisoned. `memory` gives the bytes of all of it: outputs, caches, inputs and what lies around
them, so that one comparison proves what was written and what was not.
"""

from __future__ import annotations

from typing import Any

import torch

import dsafuse

Call = dict[str, Any]

OPS = {"mla": dsafuse.fused_qk_rope_concat_and_cache_mla, "indexer": dsafuse.indexer_qk_rope_quant_and_cache}
"""The two original fusions, of whose roles the others are made."""

SEAMS = {"qk": dsafuse.prepare_qk, "latents": dsafuse.prepare_latents, "queries": dsafuse.prepare_queries}
EVERY_OP = OPS | SEAMS

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
MAX_POSITION = 37


def seeded(seed: int) -> torch.Generator:
    """A generator of its own for each test."""
    return torch.Generator().manual_seed(seed)


def values(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal values whose magnitude differs from row to row, so that scales differ."""
    spread = torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=generator).float())
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def padded(value: torch.Tensor, rows: int = 0, columns: int = 8) -> torch.Tensor:
    """The same values as a slice of a wider buffer: strides and storage offset are not those of a fresh tensor."""
    wide = value.new_zeros(*value.shape[:-1], value.shape[-1] + columns + rows)
    view = wide[..., columns : columns + value.shape[-1]]
    return view.copy_(value)


def transposed(value: torch.Tensor) -> torch.Tensor:
    """[tokens, heads, dim] in the memory order of a batched matmul over heads."""
    return value.transpose(0, 1).contiguous().transpose(0, 1)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """A buffer of 0x5A bytes with 64 such bytes on either side, over which a test sees any stray write."""
    if stride is None:
        stride = tuple(torch.empty(shape, device="meta").stride())
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
    storage = torch.full((reach * dtype.itemsize + 128,), 0x5A, dtype=torch.uint8)
    offset = 64 // dtype.itemsize
    return storage.view(dtype).as_strided(shape, stride, offset)


def rope_table(dtype: torch.dtype = torch.float32, rows: int = MAX_POSITION) -> torch.Tensor:
    """[rows, 64]: cos and sin of position * 10000**(-i / 32), as the models build it."""
    angles = torch.arange(rows).double()[:, None] * 10000.0 ** (-torch.arange(32).double() / 32)
    return padded(torch.cat([angles.cos(), angles.sin()], -1).to(dtype))


def slots_and_positions(tokens: int, capacity: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct slots in no order, about one in four of them negative; int64 slots, int32 positions."""
    slots = torch.randperm(capacity, generator=generator)[:tokens].clone()
    slots[3::4] = -1
    positions = torch.randint(0, MAX_POSITION, (tokens,), generator=generator, dtype=torch.int32)
    if tokens:
        positions[-1] = MAX_POSITION - 1
    return slots, positions


def mla_cache(layout: str, activation: torch.dtype, blocks: int, block_size: int, fp8: torch.dtype) -> torch.Tensor:
    """A guarded cache; rows and blocks of row layouts are padded."""
    width, dtype = {"plain": (576, activation), "fp8": (576, fp8), "fp8_ds_mla": (656, torch.uint8)}[layout]
    return guarded((blocks, block_size, width), dtype, (block_size * (width + 16) + 32, width + 16, 1))


def indexer_cache(blocks: int, block_size: int) -> torch.Tensor:
    """A guarded `flat` cache with space between blocks."""
    return guarded((blocks, block_size, 132), torch.uint8, (block_size * 132 + 12, 132, 1))


def mla_call(
    tokens: int = 5,
    heads: int = 3,
    *,
    activation: torch.dtype = torch.bfloat16,
    layout: str = "fp8_ds_mla",
    query: torch.dtype | None = None,
    fp8: torch.dtype = FN,
    block_size: int = 16,
    seed: int = 0,
    **keywords: Any,
) -> Call:
    """Arguments of `fused_qk_rope_concat_and_cache_mla`; `keywords` replace or add any."""
    g = seeded(seed)
    blocks = -(-(tokens + 4) // block_size) + 1
    slots, positions = slots_and_positions(tokens, blocks * block_size, g)
    k_pe = padded(values((tokens, 64), activation, g))
    query = query or activation
    return {
        "q_nope": transposed(values((tokens, heads, 512), activation, g)),
        "q_pe": padded(values((tokens, heads, 64), activation, g), columns=24),
        "kv_c": padded(values((tokens, 512), activation, g)),
        "k_pe": k_pe if seed % 2 else k_pe[:, None],
        "kv_cache": mla_cache(layout, activation, blocks, block_size, fp8),
        "slot_mapping": slots,
        "positions": positions,
        "cos_sin_cache": rope_table(),
        "kv_layout": layout,
        "q_scale": torch.tensor([0.37]) if query in (FN, FNUZ) else None,
        "k_scale": torch.tensor(0.11) if layout == "fp8" else None,
        "q_out": guarded((tokens, heads + 2, 576), query, ((heads + 2) * 592 + 16, 592, 1)),
        "fp8_dtype": fp8,
        **keywords,
    }


def indexer_call(
    tokens: int = 5,
    heads: int = 3,
    *,
    activation: torch.dtype = torch.bfloat16,
    fp8: torch.dtype = FN,
    block_size: int = 16,
    seed: int = 0,
    **keywords: Any,
) -> Call:
    """Arguments of `indexer_qk_rope_quant_and_cache`; `keywords` replace or add any."""
    g = seeded(seed)
    blocks = -(-(tokens + 4) // block_size) + 1
    slots, positions = slots_and_positions(tokens, blocks * block_size, g)
    projected = values((tokens, 128 + heads + 3), activation, g)  # k and the head weights are slices of one GEMM
    return {
        "q": padded(values((tokens, heads, 128), activation, g)),
        "weights": projected[:, 128 : 128 + heads],
        "k": projected[:, :128],
        "kv_cache": indexer_cache(blocks, block_size),
        "slot_mapping": slots.int(),
        "norm_weight": 1.0 + 0.1 * torch.randn(128, generator=g),
        "norm_bias": 0.1 * torch.randn(128, generator=g),
        "positions": positions.long(),
        "cos_sin_cache": rope_table(),
        "weights_scale": 0.0625 * 1.37,
        "q_out": guarded((tokens, heads + 2, 128), fp8, ((heads + 2) * 144 + 16, 144, 1)),
        "weights_out": guarded((tokens, heads + 1), torch.float32, (heads + 4, 1)),
        "fp8_dtype": fp8,
        **keywords,
    }


MLA_ONLY = ("rope_style", "layout", "query")
INDEX_ONLY = ("scale_rule", "index_rope_style", "index_heads")
SHARED = ("positions", "fp8_dtype", "rounding")
"""Arguments that both families read under one name."""


def topk_rows(tokens: int, topk: int) -> torch.Tensor:
    """Guarded rows of `topk` indices, padded, two more of them than tokens."""
    return guarded((tokens + 2, topk), torch.int32, (topk + 8, 1))


def qk_call(tokens: int = 5, heads: int = 3, *, index: bool = True, topk: int = 0, **options: Any) -> Call:
    """Arguments of `prepare_qk`, out of the builders above; without `index` a layer that has no indexer.

    topk: indices in a row to clear; 0 for no rows.
    """
    mla = mla_call(tokens, heads, **{k: v for k, v in options.items() if k not in INDEX_ONLY})
    if not index:
        return mla
    options = {k: v for k, v in options.items() if k not in MLA_ONLY}
    style = {"rope_style": options.pop("index_rope_style")} if "index_rope_style" in options else {}
    indexer = indexer_call(tokens, options.pop("index_heads", heads), **style, **options)
    mla |= {f"index_{name}": value for name, value in indexer.items() if name not in SHARED}
    return mla | {"topk_indices": topk_rows(tokens, topk)} if topk else mla


def queries_call(tokens: int = 5, heads: int = 3, **options: Any) -> Call:
    """Arguments of `prepare_queries`."""
    keys = ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_layout", "k_scale")
    index_keys = ("index_k", "index_kv_cache", "index_slot_mapping", "index_norm_weight", "index_norm_bias")
    call = qk_call(tokens, heads, **options)
    return {name: value for name, value in call.items() if name not in (*keys, *index_keys)}


def latents_call(tokens: int = 5, heads: int = 3, *, width: int = 192, topk: int = 40, **options: Any) -> Call:
    """Arguments of `prepare_latents`: `width` columns of q_c, `topk` entries of a top-k row; it has no heads."""
    call = qk_call(tokens, heads, **options)
    for name in ("q_nope", "q_pe", "q_out", "q_scale", "index_q", "index_weights", "index_weights_scale"):
        call.pop(name, None)
    for name in ("index_q_out", "index_weights_out"):
        call.pop(name, None)
    g = seeded(options.get("seed", 0) + 1)
    activation = call["kv_c"].dtype
    return call | {
        "q_c": padded(values((tokens, width), activation, g)),
        "q_norm_weight": 1.0 + 0.1 * torch.randn(width, generator=g),
        "q_norm_eps": 1e-6,
        "kv_norm_weight": (1.0 + 0.1 * torch.randn(512, generator=g)).bfloat16(),
        "kv_norm_eps": 1e-5,
        "topk_indices": topk_rows(tokens, topk),
        "q_c_out": guarded((tokens, width), activation, (width + 24, 1)),
        "kv_c_out": guarded((tokens, 512), activation, (520, 1)),
        "k_pe_out": guarded((tokens, 64), activation, (72, 1)),
    }


CALLS = {"mla": mla_call, "indexer": indexer_call, "qk": qk_call, "latents": latents_call, "queries": queries_call}


def call_of(op: str, *args: Any, **keywords: Any) -> Call:
    """The builder of any op."""
    return CALLS[op](*args, **keywords)


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a tensor's storage, as a view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def memory(call: Call) -> dict[str, torch.Tensor]:
    """A copy of every byte that the call's tensors could reach."""
    return {name: storage_bytes(v).clone() for name, v in call.items() if isinstance(v, torch.Tensor)}


def on_cpu(call: Call) -> Call:
    """The call without its tensors on other devices."""
    return {name: v for name, v in call.items() if not isinstance(v, torch.Tensor) or v.device.type == "cpu"}


def twin(call: Call) -> Call:
    """The same call on storage of its own; tensors that shared storage still do."""
    storages: dict[int, torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage().data_ptr()
        if key not in storages:
            storages[key] = storage_bytes(value).clone()
        fresh = torch.empty(0, dtype=value.dtype)
        return fresh.set_(
            storages[key].untyped_storage(), value.storage_offset(), tuple(value.shape), tuple(value.stride())
        )

    return {name: copy(value) for name, value in call.items()}


def run(op: str, provider: str, call: Call) -> Call:
    """Run on a twin and return it: its tensors now hold the results, under the call's own names."""
    done = twin(call)
    EVERY_OP[op].with_provider(provider)(**done)
    return done


def assert_same_memory(got: Call, want: Call, but: tuple[str, ...] = ()) -> None:
    """Every byte equal, poison and canaries included; names the buffer and the first byte that differs.

    Indexer keys have the allowance of docs/numerics.md: their LayerNorm sums in an order of its own.
    """
    for prefix in ("", "index_"):
        needed = (want.get(f"{prefix}norm_weight"), want.get(f"{prefix}kv_cache"))
        if all(tensor is not None for tensor in needed) and f"{prefix}kv_cache" not in but:
            got, want = twin(got), twin(want)
            keys = [
                {name.removeprefix(prefix): value for name, value in call.items() if name.startswith(prefix)}
                for call in (got, want)
            ]
            assert_same_index_keys(*keys)
            for call in keys:
                erase_index_keys(call)
    got_bytes, want_bytes = memory(got), memory(want)
    for name in want_bytes.keys() - set(but):
        different = torch.nonzero(got_bytes[name] != want_bytes[name]).flatten()
        assert not len(different), (
            f"{name}: {len(different)} of {len(want_bytes[name])} bytes differ, first at {int(different[0])}: "
            f"got {int(got_bytes[name][different[0]]):#04x}, want {int(want_bytes[name][different[0]]):#04x}"
        )


def live_slots(call: Call) -> list[int]:
    """The slots that the call writes."""
    capacity = call["kv_cache"].shape[0] * call["kv_cache"].shape[1]
    return [slot for slot in call["slot_mapping"].tolist() if 0 <= slot < capacity]


def assert_same_index_keys(got: Call, want: Call) -> None:
    """At most one code in 10,000 off by one (and one in all); an fp32 scale off by two units in the last place."""
    moved = total = 0
    for slot in live_slots(want):
        layout = want.get("kv_layout", "flat")
        (codes, scale), (want_codes, want_scale) = (indexer_row(call["kv_cache"], slot, layout) for call in (got, want))
        ulps = 2 if want.get("scale_rule") == "fp32" else 0
        assert abs(scale - want_scale) <= ulps * 2.0**-23 * want_scale, f"slot {slot}: scale {scale}, want {want_scale}"
        distance = (ordered(codes) - ordered(want_codes)).abs()
        assert int(distance.max()) <= 1, f"slot {slot}: a code is off by {int(distance.max())}"
        moved += int((distance > 0).sum())
        total += len(codes)
    assert moved <= 1 + 1e-4 * total


def ordered(codes: torch.Tensor) -> torch.Tensor:
    """fp8 codes as integers in the order of their values; -0 and +0 are one."""
    magnitude = (codes & 0x7F).int()
    return torch.where(codes >= 0x80, -magnitude, magnitude)


def erase_index_keys(call: Call) -> None:
    """Zero the rows that the call wrote."""
    for slot in live_slots(call):
        page, places, scale = index_places(call["kv_cache"], slot, call.get("kv_layout", "flat"))
        page[places] = 0
        page[scale] = 0


def cache_row(cache: torch.Tensor, slot: int) -> torch.Tensor:
    """The bytes of one row of an MLA cache."""
    return cache[slot // cache.shape[1], slot % cache.shape[1]].view(torch.uint8)


def index_places(cache: torch.Tensor, slot: int, layout: str = "flat") -> tuple[torch.Tensor, torch.Tensor, slice]:
    """(bytes of the slot's block, where its 128 codes are, where its scale is), by arithmetic apart from layouts.py."""
    block_size = cache.shape[1]
    block, t = divmod(slot, block_size)
    page = cache[block].view(torch.uint8).as_strided((block_size * 132,), (1,))
    d = torch.arange(128)
    places = (
        128 * t + d if layout == "flat" else (t // 16) * 2048 + (d // 16) * 256 + (t % 16) * 16 + d % 16  # tiled16
    )
    start = 128 * block_size + 4 * t
    return page, places, slice(start, start + 4)


def indexer_row(cache: torch.Tensor, slot: int, layout: str = "flat") -> tuple[torch.Tensor, float]:
    """(128 codes, scale) of a slot of an indexer cache."""
    page, places, scale = index_places(cache, slot, layout)
    return page[places], float(page[scale].clone().view(torch.float32))

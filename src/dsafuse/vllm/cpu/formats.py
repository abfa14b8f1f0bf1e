"""Cache bytes, written and read in torch: plain, per-tensor fp8, fp8_ds_mla and the indexer's rows.

Everything here is written apart from dsafuse's own layouts, numerics and ops, on purpose, and must stay so:
it is the other side of the comparison. The un-fused arm writes its caches with these functions, and both
arms read theirs with them, so a fused kernel that put a byte in the wrong place would be read wrongly here
and change the tokens. Shared code would make that proof circular. The tests compare it with float64.
"""

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = float(torch.finfo(FP8).max)
LATENT = 512
ROTARY = 64
# One row of fp8_ds_mla: 512 latent bytes, then one fp32 scale for each 128 of them, then 64 bf16 numbers.
DS_MLA_TILES = 4
# Below this a tile or an index key counts as zero; its scale stays a normal number.
SCALE_FLOOR = 1e-4


def to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Nearest e4m3fn; out of range becomes the largest finite number, as on a GPU."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def power_of_two_above(scale: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that is not below a positive scale."""
    mantissa, exponent = torch.frexp(scale.double())  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(mantissa), exponent).float()


def quantise_groups(
    values: torch.Tensor, amax_floor: float, power_of_two: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 values and one scale for each last axis: values ~ fp8 * scale."""
    wide = values.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=amax_floor) / FP8_MAX
    if power_of_two:
        scale = power_of_two_above(scale)
    return to_fp8(wide / scale), scale.squeeze(-1)


def write_mla(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> None:
    """Write already rotated keys; rows with a negative slot are left out.

    Args:
        kv_c: [tokens, 512], k_pe: [tokens, 64]; at least as many tokens as slots.
        kv_cache: [blocks, block_size, width], written in place.
        slots: [tokens] integer; block * block_size + row.
        kv_cache_dtype: vLLM's word for the cache: "fp8", "fp8_e4m3", "fp8_ds_mla", else plain.
        k_scale: one fp32 element, read for per-tensor fp8 only. Divided by, as vLLM's own writers do.
    """
    live = slots >= 0
    slots = slots[live].long()
    latent, rotary = kv_c[: live.shape[0]][live], k_pe[: live.shape[0]][live]
    if kv_cache_dtype == "fp8_ds_mla":
        rows = _pack_ds_mla(latent, rotary)
    elif kv_cache_dtype.startswith("fp8"):
        rows = to_fp8(torch.cat([latent, rotary], dim=-1).float() / k_scale).view(torch.uint8)
    else:
        rows = torch.cat([latent, rotary], dim=-1).to(kv_cache.dtype)
    if rows.dtype == torch.uint8:
        kv_cache = kv_cache.view(torch.uint8)
    block_size = kv_cache.shape[1]
    kv_cache[slots // block_size, slots % block_size] = rows


def _pack_ds_mla(latent: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    tiles = latent.float().unflatten(-1, (DS_MLA_TILES, LATENT // DS_MLA_TILES))
    # The floor is on the scale here, and on the largest value for index keys: so do vLLM's kernels.
    scale = (tiles.abs().amax(dim=-1, keepdim=True) / FP8_MAX).clamp(min=SCALE_FLOOR)
    scale = power_of_two_above(scale)
    values = to_fp8(tiles / scale).flatten(-2)
    parts = (values, scale.squeeze(-1), rotary.to(torch.bfloat16))
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)


def read_mla(
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    rows: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
) -> torch.Tensor:
    """The keys at (blocks, rows), any shape, as fp32 [..., 576]."""
    if kv_cache_dtype == "fp8_ds_mla":
        packed = kv_cache.view(torch.uint8)[blocks, rows]
        latent, scale, rotary = packed.split([LATENT, 4 * DS_MLA_TILES, 2 * ROTARY], dim=-1)
        values = latent.contiguous().view(FP8).float().unflatten(-1, (DS_MLA_TILES, -1))
        values = values * scale.contiguous().view(torch.float32).unsqueeze(-1)
        return torch.cat([values.flatten(-2), rotary.contiguous().view(torch.bfloat16).float()], dim=-1)
    if kv_cache_dtype.startswith("fp8"):
        # Gathered as bytes: indexing of fp8 tensors is not implemented on every CPU path.
        return kv_cache.view(torch.uint8)[blocks, rows].view(FP8).float() * k_scale
    return kv_cache[blocks, rows].float()


def write_index_keys(keys: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Quantise normed, rotated index keys and write them; rows with a negative slot are left out.

    A block holds the values of all its rows first and then their fp32 scales, so one key lies in two places.

    Args:
        keys: [tokens, 128]; at least as many tokens as slots.
        kv_cache: [blocks, block_size, 132] uint8, contiguous inside a block; written in place.
        slots: [tokens] integer.
    """
    live = slots >= 0
    slots = slots[live].long()
    values, scale = quantise_groups(keys[: live.shape[0]][live], amax_floor=SCALE_FLOOR)
    block_size, dim = kv_cache.shape[1], keys.shape[-1]
    block, row = slots // block_size, slots % block_size
    value_bytes, scale_bytes = _block_views(kv_cache, dim)
    value_bytes[block, row] = values.view(torch.uint8)
    scale_bytes[block, row] = scale.unsqueeze(-1).contiguous().view(torch.uint8)


def read_index_keys(kv_cache: torch.Tensor, blocks: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """The first count keys of a request whose blocks are given in order, as fp32 [count, dim]."""
    value_bytes, scale_bytes = _block_views(kv_cache, dim)
    values = value_bytes[blocks].contiguous().view(FP8).float().flatten(0, 1)
    scale = scale_bytes[blocks].contiguous().view(torch.float32).flatten(0, 1)
    return (values * scale)[:count]


def _block_views(kv_cache: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[blocks, block_size, dim] value bytes and [blocks, block_size, 4] scale bytes of an indexer cache."""
    blocks, block_size, _ = kv_cache.shape
    start, step = kv_cache.storage_offset(), kv_cache.stride(0)
    values = kv_cache.as_strided((blocks, block_size, dim), (step, dim, 1), start)
    scales = kv_cache.as_strided((blocks, block_size, 4), (step, 4, 1), start + block_size * dim)
    return values, scales

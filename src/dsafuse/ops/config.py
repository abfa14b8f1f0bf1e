"""The static facts of a call: which roles it has, and what each is specialised for.

Gates look at them, dispatch caches on them, and a kernel's compile-time constants follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsafuse.layouts import MLA_LAYOUTS
from dsafuse.numerics import FP8_FORMATS


@dataclass(frozen=True, slots=True)
class LatentQ:
    """RoPE(q_pe), [concat with q_nope], optional quantisation."""

    heads: int
    query: torch.dtype
    rope_style: str
    nope: bool = True


@dataclass(frozen=True, slots=True)
class LatentKv:
    """[RMSNorm(kv_c)], RoPE(k_pe), concat, one row of the MLA cache.

    scale_rule: of the tiles; the default where the layout has none.
    """

    layout: str
    block_size: int
    rope_style: str
    norm: bool = False
    scale_rule: str = "ue8m0"


@dataclass(frozen=True, slots=True)
class IndexQ:
    """RoPE, one scale a head, the scale folded into the head weights."""

    heads: int
    rope_style: str
    scale_rule: str


@dataclass(frozen=True, slots=True)
class IndexK:
    """LayerNorm, RoPE, one row of the indexer cache."""

    layout: str
    block_size: int
    rope_style: str
    scale_rule: str


@dataclass(frozen=True, slots=True)
class NormQ:
    """RMSNorm(q_c) of `width`."""

    width: int


@dataclass(frozen=True, slots=True)
class ClearTopk:
    """-1 in the token's row of `width` top-k indices."""

    width: int


@dataclass(frozen=True, slots=True)
class Config:
    """An op as its set of roles; a role that it lacks is None."""

    activation: torch.dtype
    fp8: torch.dtype
    rounding: str
    latent_q: LatentQ | None = None
    latent_kv: LatentKv | None = None
    index_q: IndexQ | None = None
    index_k: IndexK | None = None
    norm_q: NormQ | None = None
    clear_topk: ClearTopk | None = None

    @property
    def families(self) -> frozenset[str]:
        """Which of DSAFUSE_OPS the call belongs to: the families that its roles serve."""
        indexer = {"indexer"} if self.index_q or self.index_k else set()
        return frozenset({"mla"} | indexer if self.latent_q or self.latent_kv else indexer)

    @property
    def fp8_formats(self) -> frozenset[torch.dtype]:
        """The fp8 formats that the call writes."""
        used = {self.latent_q.query} & FP8_FORMATS.keys() if self.latent_q else set()
        in_cache = self.latent_kv is not None and MLA_LAYOUTS[self.latent_kv.layout].has_fp8
        if in_cache or self.index_q or self.index_k:
            used = used | {self.fp8}
        return frozenset(used)


def mla_config(
    heads: int,
    activation: torch.dtype,
    query: torch.dtype,
    layout: str,
    fp8: torch.dtype,
    block_size: int,
    rope_style: str,
    scale_rule: str,
    rounding: str,
) -> Config:
    """Facts of `fused_qk_rope_concat_and_cache_mla`."""
    return Config(
        activation,
        fp8,
        rounding,
        latent_q=LatentQ(heads, query, rope_style),
        latent_kv=LatentKv(layout, block_size, rope_style, scale_rule=scale_rule),
    )


def indexer_config(
    heads: int,
    activation: torch.dtype,
    layout: str,
    fp8: torch.dtype,
    block_size: int,
    rope_style: str,
    scale_rule: str,
    rounding: str,
) -> Config:
    """Facts of `indexer_qk_rope_quant_and_cache`."""
    return Config(
        activation,
        fp8,
        rounding,
        index_q=IndexQ(heads, rope_style, scale_rule),
        index_k=IndexK(layout, block_size, rope_style, scale_rule),
    )

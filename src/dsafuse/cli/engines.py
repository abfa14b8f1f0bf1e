"""What an engine's words mean on a target, as data: which backend reads the MLA cache, in which layout.

`--kv-cache-dtype fp8` is one word for several formats. Which one a layer gets follows from the attention backend,
which follows from the GPU. Source: vLLM 0.32 (its backends' `supported_kv_cache_dtypes` and
`supports_quant_query_input`); read, and on sm_90 also run.
"""

from __future__ import annotations

from dataclasses import dataclass

KV_CACHE_DTYPES = ("auto", "fp8", "fp8_ds_mla")
SERVED_KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla")
"""The words that commands which serve a model pass on."""


@dataclass(frozen=True, slots=True)
class Meaning:
    """One word on one backend."""

    backend: str
    layout: str
    query: str = "activation"
    """activation, or fp8: what the backend wants its query in."""
    indexer: str = "flat"
    """Layout of the indexer cache."""
    note: str = ""


_FLASHMLA_16 = Meaning("FLASHMLA_SPARSE", "plain")
_FLASHMLA_8 = Meaning("FLASHMLA_SPARSE", "fp8_ds_mla", note="656 bytes a token; `fp8` is its alias for fp8_ds_mla")
_SM90_FP8 = Meaning("FLASHINFER_MLA_SPARSE_SM90", "fp8", note="where that backend is chosen: one scale, 16-bit query")
_SM100_16 = Meaning("FLASHINFER_MLA_SPARSE", "plain")
_SM100_FP8 = Meaning("FLASHINFER_MLA_SPARSE", "fp8", query="fp8", note="one scale a tensor; the query is fp8, too")
_SM120 = Meaning("FLASHINFER_MLA_SPARSE_SM120", "fp8_ds_mla", note="the only layout it reads, whatever the word")
_AITER_16 = Meaning("ROCM_AITER_MLA_SPARSE", "plain", indexer="tiled16")
_AITER_8 = Meaning(
    "ROCM_AITER_MLA_SPARSE", "fp8", query="fp8", indexer="tiled16", note="one scale a tensor; the query is fp8, too"
)


def _cpu(layout: str) -> Meaning:
    return Meaning("dsafuse's CPU backend for vLLM", layout, note="torch only, for proof; 16- or 32-bit query")


_SM90 = {"auto": (_FLASHMLA_16,), "fp8": (_FLASHMLA_8, _SM90_FP8), "fp8_ds_mla": (_FLASHMLA_8,)}
_SM100 = {"auto": (_SM100_16, _FLASHMLA_16), "fp8": (_SM100_FP8, _FLASHMLA_8), "fp8_ds_mla": (_FLASHMLA_8,)}
_AMD: dict[str, tuple[Meaning, ...]] = {"auto": (_AITER_16,), "fp8": (_AITER_8,), "fp8_ds_mla": ()}

MEANINGS: dict[str, dict[str, tuple[Meaning, ...]]] = {
    "sm_90": _SM90,
    "sm_100": _SM100,
    "sm_103": _SM100,
    "sm_120": dict.fromkeys(KV_CACHE_DTYPES, (_SM120,)),
    "sm_121": dict.fromkeys(KV_CACHE_DTYPES, (_SM120,)),
    "gfx942": _AMD,
    "gfx950": _AMD,
    "cpu": {word: (_cpu(layout),) for word, layout in zip(KV_CACHE_DTYPES, ("plain", "fp8", "fp8_ds_mla"))},
}

_BY_NAME = {
    word: Meaning("none", layout, note="vLLM has no sparse MLA backend for it; this is dsafuse's layout of that name")
    for word, layout in zip(KV_CACHE_DTYPES, ("plain", "fp8", "fp8_ds_mla"))
}


def meanings(arch: str, word: str, block_size: int) -> tuple[Meaning, ...]:
    """What `word` means on `arch`, the engine's own choice first, else the library's own layout of that name.

    With one token a block, AITER's shuffled indexer cache is the flat one.
    """
    found = MEANINGS.get(arch, {}).get(word) or (_BY_NAME[word],)
    if block_size > 1:
        return found
    return tuple(Meaning(m.backend, m.layout, m.query, "flat", m.note) for m in found)

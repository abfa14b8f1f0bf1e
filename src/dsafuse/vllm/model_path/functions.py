"""Drop-in replacements for vLLM's `fused_norm_rope` and `fused_q`. Nothing here imports vLLM.

A call brings all that decides about it, so each stands for itself: where the layer's plan has not accepted such a call,
or the call has no caches, vLLM's own function runs, and what it leaves behind is what ours would have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dsafuse import prepare_latents, prepare_queries
from dsafuse.vllm import counters

for _op in ("latents", "queries"):
    counters.CALLS.setdefault(_op, {"fused": 0, "fallback": 0})

LAYOUTS = {"fp8": "fp8", "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8_ds_mla"}
"""vLLM's words for a quantised MLA cache, and the layout that each means; a cache of the activations is "plain"."""

Kind = tuple[bool, torch.dtype, Any]
"""What a plan decides about: has_indexer, the activation dtype, and the cache's word or whether the query is packed."""


class Functions:
    """vLLM's two functions, and ours under the same names and signatures.

    Args:
        norm_rope, q: vLLM's.
        fp8_dtype: the fp8 format of this platform.
        scale_rule: of the tiles of fp8_ds_mla, as vLLM's own writes them.

    `latents` and `queries` hold the kinds of call that plans have decided about, and whether ours serve them.
    """

    def __init__(
        self, norm_rope: Callable[..., Any], q: Callable[..., Any], fp8_dtype: torch.dtype, scale_rule: str = "ue8m0"
    ) -> None:
        self.own_norm_rope = norm_rope
        self.own_q = q
        self.fp8_dtype = fp8_dtype
        self.scale_rule = scale_rule
        self.latents: dict[Kind, bool] = {}
        self.queries: dict[Kind, bool] = {}

    def fused_norm_rope(
        self,
        positions: torch.Tensor,
        q_c: torch.Tensor,
        q_rms_norm_w: torch.Tensor,
        q_rms_eps: float,
        kv_c: torch.Tensor,
        kv_rms_norm_w: torch.Tensor,
        kv_rms_eps: float,
        k_pe: torch.Tensor,
        k_rope_cos_sin_cache: torch.Tensor,
        index_k: torch.Tensor | None,
        index_k_layer_norm_w: torch.Tensor | None,
        index_k_layer_norm_bias: torch.Tensor | None,
        index_k_layer_norm_eps: float,
        index_k_rope_cos_sin_cache: torch.Tensor | None,
        topk_indices_buffer: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """The seam before q_b: `prepare_latents`. Returns the normed q_c.

        Without caches it is a profiling run, or a layer whose keys are gathered before they are written, which no plan
        accepts. vLLM guards both caches by the MLA slot; here each has its own, and they are negative together.
        """
        kv_cache, has_indexer = options["mla_kv_cache"], options["has_indexer"]
        word = options["mla_kv_cache_dtype"]
        fused = kv_cache is not None and self.latents.get((has_indexer, q_c.dtype, word), False)
        if kv_cache is not None:
            counters.count("latents", "fused" if fused else "fallback")
        if not fused:
            result: torch.Tensor = self.own_norm_rope(
                positions,
                q_c,
                q_rms_norm_w,
                q_rms_eps,
                kv_c,
                kv_rms_norm_w,
                kv_rms_eps,
                k_pe,
                k_rope_cos_sin_cache,
                index_k,
                index_k_layer_norm_w,
                index_k_layer_norm_bias,
                index_k_layer_norm_eps,
                index_k_rope_cos_sin_cache,
                topk_indices_buffer,
                **options,
            )
            return result
        tokens, slots = len(positions), options["slot_mapping"]
        index: dict[str, Any] = {}
        if has_indexer:
            index_slots = options.get("indexer_slot_mapping")
            index = {
                "index_k": index_k,
                "index_kv_cache": options["indexer_k_cache"],
                "index_slot_mapping": (slots if index_slots is None else index_slots)[:tokens],
                "index_norm_weight": index_k_layer_norm_w,
                "index_norm_bias": index_k_layer_norm_bias,
                "index_eps": index_k_layer_norm_eps,
                "index_cos_sin_cache": index_k_rope_cos_sin_cache,
                "index_rope_style": "interleaved" if options["index_rope_interleave"] else "neox",
                "index_kv_layout": "tiled16" if options.get("indexer_cache_shuffled") else "flat",
                "topk_indices": topk_indices_buffer,
            }
        return prepare_latents(
            q_c,
            kv_c,
            k_pe,
            positions,
            k_rope_cos_sin_cache,
            kv_cache,
            slots[:tokens],
            q_norm_weight=q_rms_norm_w,
            q_norm_eps=q_rms_eps,
            kv_norm_weight=kv_rms_norm_w,
            kv_norm_eps=kv_rms_eps,
            q_c_out=options.get("q_c_out"),
            kv_c_out=options.get("kv_c_out"),
            k_pe_out=options.get("k_pe_out"),
            kv_layout=LAYOUTS.get(word, "plain"),
            k_scale=options["mla_k_scale"],
            scale_rule=self.scale_rule,
            fp8_dtype=self.fp8_dtype,
            rounding="fp32",
            **index,
        )

    def fused_q(
        self,
        positions: torch.Tensor,
        q_pe: torch.Tensor,
        q_pe_cos_sin_cache: torch.Tensor,
        index_q: torch.Tensor | None,
        index_q_cos_sin_cache: torch.Tensor | None,
        ql_nope: torch.Tensor,
        q_scale: torch.Tensor,
        index_weights: torch.Tensor | None,
        index_weights_softmax_scale: float,
        index_weights_head_scale: float,
        has_indexer: bool = True,
        index_rope_interleave: bool = False,
        quantize_mqa: bool = True,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """The seam after q_b: `prepare_queries`. Returns (index query, head weights, MLA query).

        The MLA query is packed in fp8 if `quantize_mqa`, else its rotary part alone: the reader takes ql_nope as it is.
        Without an indexer the first two are None, where vLLM's function returns scratch that nobody reads.
        """
        fused = self.queries.get((has_indexer, q_pe.dtype, quantize_mqa), False)
        counters.count("queries", "fused" if fused else "fallback")
        if not fused:
            result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.own_q(
                positions,
                q_pe,
                q_pe_cos_sin_cache,
                index_q,
                index_q_cos_sin_cache,
                ql_nope,
                q_scale,
                index_weights,
                index_weights_softmax_scale,
                index_weights_head_scale,
                has_indexer=has_indexer,
                index_rope_interleave=index_rope_interleave,
                quantize_mqa=quantize_mqa,
            )
            return result
        index: dict[str, Any] = {}
        if has_indexer:
            index = {
                "index_q": index_q,
                "index_weights": index_weights,
                "index_cos_sin_cache": index_q_cos_sin_cache,
                "index_rope_style": "interleaved" if index_rope_interleave else "neox",
                "index_weights_scale": index_weights_softmax_scale * index_weights_head_scale,
            }
        query, index_query, weights = prepare_queries(
            ql_nope if quantize_mqa else None,
            q_pe,
            positions,
            q_pe_cos_sin_cache,
            q_scale=q_scale if quantize_mqa else None,
            q_dtype=self.fp8_dtype if quantize_mqa else None,
            fp8_dtype=self.fp8_dtype,
            rounding="fp32",
            **index,
        )
        return index_query, weights, query

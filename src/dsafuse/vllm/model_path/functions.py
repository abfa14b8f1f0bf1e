"""Drop-in replacements for vLLM's `fused_norm_rope` and `fused_q`. Nothing here imports vLLM.

A call brings all that decides about it, so each stands for itself: where the layer's plan has not accepted such a call,
or the call has no caches, vLLM's own function runs, and what it leaves behind is what ours would have left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from dsafuse import prepare_latents, prepare_queries
from dsafuse.vllm import counters
from dsafuse.vllm.gates import MLA_LAYOUTS

Kind = tuple[bool, torch.dtype, Any]
"""What a plan decides about: has_indexer, the activation dtype, and the cache's word or whether the query is packed."""


class Functions:
    """vLLM's two functions, and ours under the same names and signatures.

    Args:
        norm_rope, q: vLLM's.
        fp8_dtype: the fp8 format of this platform.
        scale_rule: of the tiles of fp8_ds_mla, as vLLM's own writes them.

    `latents` and `queries` hold the kinds of call that plans have decided about, and whether ours serve them; `layers`,
    the layers that are there, and what `plan` knows of each; `blocks`, by the cache's word, how large blocks will be.
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
        self.layers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.blocks: dict[str, Any] = {}
        self.measuring = False

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
        given = (
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
        )
        self.measuring = options["mla_kv_cache"] is None
        if self.measuring:
            from dsafuse.vllm import rehearsal  # that of a process with vLLM

            rehearsal.rehearse_latents(self, given, options)
            fused = False
        else:
            kind = (options["has_indexer"], q_c.dtype, options["mla_kv_cache_dtype"])
            fused = self.latents.get(kind, False)
            counters.count("latents", "fused" if fused else "fallback")
        if not fused:
            result: torch.Tensor = self.own_norm_rope(*given, **options)
            return result
        return self.norm_rope(given, options)

    def norm_rope(self, given: tuple[Any, ...], options: dict[str, Any]) -> torch.Tensor:
        """`prepare_latents` for such a call."""
        positions, q_c, q_weight, q_eps, kv_c, kv_weight, kv_eps, k_pe, table, *indexed, topk_indices = given
        tokens, slots = len(positions), options["slot_mapping"]
        index: dict[str, Any] = {}
        if options["has_indexer"]:
            index_k, index_weight, index_bias, index_eps, index_table = indexed
            index_slots = options.get("indexer_slot_mapping")
            index = {
                "index_k": index_k,
                "index_kv_cache": options["indexer_k_cache"],
                "index_slot_mapping": (slots if index_slots is None else index_slots)[:tokens],
                "index_norm_weight": index_weight,
                "index_norm_bias": index_bias,
                "index_eps": index_eps,
                "index_cos_sin_cache": index_table,
                "index_rope_style": "interleaved" if options["index_rope_interleave"] else "neox",
                "index_kv_layout": "tiled16" if options.get("indexer_cache_shuffled") else "flat",
                "topk_indices": topk_indices,
            }
        return prepare_latents(
            q_c,
            kv_c,
            k_pe,
            positions,
            table,
            options["mla_kv_cache"],
            slots[:tokens],
            q_norm_weight=q_weight,
            q_norm_eps=q_eps,
            kv_norm_weight=kv_weight,
            kv_norm_eps=kv_eps,
            q_c_out=options.get("q_c_out"),
            kv_c_out=options.get("kv_c_out"),
            k_pe_out=options.get("k_pe_out"),
            kv_layout=MLA_LAYOUTS.get(options["mla_kv_cache_dtype"], "plain"),
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
        given = (
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
        )
        kind = (has_indexer, q_pe.dtype, quantize_mqa)
        fused = self.queries.get(kind, False)
        counters.count("queries", "fused" if fused else "fallback")
        if self.measuring:
            from dsafuse.vllm import rehearsal

            rehearsal.rehearse_queries(self, given, kind, index_rope_interleave)
        if not fused:
            result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = self.own_q(
                *given, has_indexer=has_indexer, index_rope_interleave=index_rope_interleave, quantize_mqa=quantize_mqa
            )
            return result
        return self.q(given, kind, index_rope_interleave)

    def q(
        self, given: tuple[Any, ...], kind: Kind, index_rope_interleave: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
        """`prepare_queries` for such a call."""
        positions, q_pe, table, index_q, index_table, ql_nope, q_scale, index_weights, *index_scales = given
        has_indexer, _, quantize_mqa = kind
        index: dict[str, Any] = {}
        if has_indexer:
            index = {
                "index_q": index_q,
                "index_weights": index_weights,
                "index_cos_sin_cache": index_table,
                "index_rope_style": "interleaved" if index_rope_interleave else "neox",
                "index_weights_scale": index_scales[0] * index_scales[1],
            }
        query, index_query, weights = prepare_queries(
            ql_nope if quantize_mqa else None,
            q_pe,
            positions,
            table,
            q_scale=q_scale if quantize_mqa else None,
            q_dtype=self.fp8_dtype if quantize_mqa else None,
            fp8_dtype=self.fp8_dtype,
            rounding="fp32",
            **index,
        )
        return index_query, weights, query

"""How often each fused op ran, and how often vLLM's own code ran in its place.

mla: the MLA preparation of a call. "fallback" is that of a refused layer.
indexer: the indexer's preparation.
prepare_qk: "fused" where both were done in one launch; "fallback" where both were fused, in several.
dense_prefill: "fused" for a batch with tokens that vLLM attends to densely. Never "fallback".
latents, queries: the two seams of vLLM's own fused model, counted where its functions are replaced (model_path).
"""

CALLS: dict[str, dict[str, int]] = {
    "mla": {"fused": 0, "fallback": 0},
    "indexer": {"fused": 0, "fallback": 0},
    "prepare_qk": {"fused": 0, "fallback": 0},
    "dense_prefill": {"fused": 0, "fallback": 0},
    "latents": {"fused": 0, "fallback": 0},
    "queries": {"fused": 0, "fallback": 0},
}


def count(op: str, way: str) -> None:
    """One more call of an op, "fused" or "fallback"."""
    CALLS[op][way] += 1


def reset() -> None:
    """Start again from zero."""
    for calls in CALLS.values():
        for way in calls:
            calls[way] = 0

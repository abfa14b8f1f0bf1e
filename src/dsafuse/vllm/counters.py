"""How often each fused op ran, and how often vLLM's own code ran in its place."""

CALLS: dict[str, dict[str, int]] = {
    "mla": {"fused": 0, "fallback": 0},
    "indexer": {"fused": 0, "fallback": 0},
}


def count(op: str, way: str) -> None:
    """One more call of an op, "fused" or "fallback"."""
    CALLS[op][way] += 1


def reset() -> None:
    """Start again from zero."""
    for calls in CALLS.values():
        for way in calls:
            calls[way] = 0

"""How often each fused op ran, and how often vLLM's own code ran in its place."""

CALLS: dict[str, dict[str, int]] = {
    "mla": {"fused": 0, "fallback": 0},
    "indexer": {"fused": 0, "fallback": 0},
}


def count(op: str, way: str) -> None:
    CALLS[op][way] += 1


def reset() -> None:
    for calls in CALLS.values():
        for way in calls:
            calls[way] = 0

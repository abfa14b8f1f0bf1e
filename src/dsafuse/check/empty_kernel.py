"""A kernel that does nothing, to tell what a launch costs. Imported only where something is timed."""

import triton


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def empty() -> None:
    """Do nothing."""


def launch_empty() -> None:
    """Launch one program of it."""
    empty[(1,)](num_warps=1)

"""What the servers will run on, asked by a process that is gone before they start.

    python -m dsafuse.serving.facts

Asking torch about a GPU takes memory on it, and `CUDA_VISIBLE_DEVICES` is read once a process: neither is for the
process that starts the servers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from dsafuse.check.environment import environment


def facts() -> dict[str, Any]:
    """The environment, with free and total memory of every visible GPU in bytes."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        **environment(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(count)],
        "memory_bytes": [list(torch.cuda.mem_get_info(index)) for index in range(count)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()) + "\n")

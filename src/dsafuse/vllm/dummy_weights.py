"""Dummy weights of a size that matters: importing this module in a vLLM worker makes the format "dummy" mean them.

vLLM's own are U(-1e-3, 1e-3): attention scores and top-k of such a model are those of noise around zero. Here a tensor
of two or more dimensions is uniform with a standard deviation of 1 / sqrt(its last size), the fan-in, so that
activations keep their size from layer to layer; one of fewer dimensions (norms, biases) is uniform around 1 with a
standard deviation of 0.1. Every tensor starts from the same seed, as vLLM's do: both arms have the same weights.

    vllm serve MODEL_DIR --load-format dummy --worker-extension-cls dsafuse.vllm.dummy_weights.Scaled

is all that it takes: vLLM imports the class in each worker before the model is loaded. Weights of fewer than 16 bits
and integers stay as vLLM makes them.
"""

import math
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from dsafuse.vllm import WorkerExtension, logger

SEED = 1234
VECTOR_DEVIATION = 0.1


class Scaled(WorkerExtension):
    """What vLLM is asked to import; adds to a worker what `dsafuse.vllm.WorkerExtension` does."""


def bounds(shape: torch.Size) -> tuple[float, float]:
    """Of the uniform distribution that a tensor of this shape is filled from."""
    middle, deviation = (0.0, shape[-1] ** -0.5) if len(shape) >= 2 else (1.0, VECTOR_DEVIATION)
    half = math.sqrt(3) * deviation
    return middle - half, middle + half


@register_model_loader("dummy")
class ScaledDummyLoader(DummyModelLoader):
    """vLLM's loader, whose values are then replaced."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill every weight."""
        super().load_weights(model, model_config)
        filled = sum(_fill(tensor) for tensor in model.state_dict(keep_vars=True).values())
        logger.info("dsafuse: dummy weights scaled to 1/sqrt(fan-in): %d tensors.", filled)


@torch.no_grad()
def _fill(tensor: torch.Tensor) -> bool:
    fixed = getattr(tensor, "dummy_weight_value", None) is not None  # vLLM 0.33: a value that the layer asks for
    if fixed or tensor.is_meta or not tensor.is_floating_point() or tensor.element_size() < 2:
        return False
    tensor.uniform_(*bounds(tensor.shape), generator=torch.Generator(tensor.device).manual_seed(SEED))
    return True

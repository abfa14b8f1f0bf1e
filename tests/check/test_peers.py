"""Other people's kernels: what can be proven of their bindings without a GPU, and what each says about itself."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsafuse.check.bench import bench_case
from dsafuse.check.cases import ROLES
from dsafuse.check.peers import compiled, peers, vllm_fused, why_not_importable
from dsafuse.check.reference import errors
from dsafuse.check.working_sets import working_sets
from dsafuse.registry import OPS

CPU = torch.device("cpu")


def vllm_kernels_file():
    """vLLM's kernels file, where its wheel is installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "models/deepseek_v32/common/kernels.py"
    return path if path.exists() else None


def test_every_peer_says_what_it_is():
    assert set(peers()) == {"compiled", "vllm_unfused", "vllm_fused", "flashinfer", "aiter"}
    for name, peer in peers().items():
        assert peer.name == name
        assert peer.ops <= set(OPS)
        assert peer.differs
        assert 0 < peer.allowed("latent_q") < 0.2, "a wrong rotation has an error of 0.2 and more"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so peers may run")
def test_without_a_gpu_none_but_the_compiler_is_available():
    reasons = {name: peer.available() for name, peer in peers().items()}
    assert reasons.pop("compiled") is None
    assert all("GPU" in reason for reason in reasons.values())


def test_a_package_for_another_machine_is_said(tmp_path, monkeypatch):
    (tmp_path / "built_for_another_machine.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "libcuda.so.1 is missing" in why_not_importable("built_for_another_machine")
    assert why_not_importable("json") is None


@pytest.mark.parametrize("op", ROLES)
def test_the_compiled_chain_holds(op):
    case = bench_case(op, 3, (4, 2))
    inputs, sets = working_sets(case, 2, 0, CPU)
    with compiled.PEER.context():
        bounds = [compiled.bind(case, arguments, backend="eager") for arguments in sets]
        for bound in bounds:
            bound.call()
    found = list(errors(case, inputs, bounds[1].outputs()))
    assert {role for role, _ in found} == case.roles
    assert all(error <= compiled.PEER.allowed(role) for role, error in found)


def test_what_the_compiler_sees_is_put_back():
    from dsafuse.ops import roles

    before = roles.write_rows, roles.check_addresses
    with compiled.PEER.context():
        assert roles.write_rows is compiled.write_live_rows
    assert (roles.write_rows, roles.check_addresses) == before


FILE = vllm_kernels_file()

INTERPRETED = """
import sys, torch, dsafuse
from dsafuse.check.bench import bench_case
from dsafuse.check.peers import vllm_fused
from dsafuse.check.reference import errors
from dsafuse.check.working_sets import working_sets
from dsafuse.kernels.interpreter import corrected_casts

assert "vllm" not in sys.modules
for op in ("prepare_latents", "prepare_queries"):
    case = bench_case(op, 3, (4, 2))
    inputs, sets = working_sets(case, 1, 0, torch.device("cpu"))
    bound = vllm_fused.bind(case, sets[0])
    with corrected_casts():
        bound.call()
    found = dict(errors(case, inputs, bound.outputs()))
    assert set(found) == case.roles, found
    assert all(error <= vllm_fused.PEER.allowed(role) for role, error in found.items()), found
    if op == "prepare_latents":
        assert bool((sets[0]["topk_indices"] == -1).all())
assert not [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
print(vllm_fused.version())
"""


@pytest.mark.skipif(FILE is None, reason="vLLM's wheel is not installed")
def test_vllms_kernels_file_alone_loads_and_holds(tmp_path):
    """Its kernels interpreted, bound as on a GPU: arguments, layouts and scales are what we say they are."""
    shutil.copy(FILE, tmp_path / f"{vllm_fused.ALONE}.py")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "its kernels file alone" in done.stdout


OLDER = """
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.import_utils import has_cutedsl
from vllm.utils.torch_utils import direct_register_custom_op, is_quantized_kv_cache

def double(x: torch.Tensor, y: torch.Tensor | None) -> None:
    x.mul_(2)

direct_register_custom_op(op_name="dsafuse_test_double", op_func=double, mutates_args=["x"], dispatch_key="CUDA")

def fused_norm_rope(positions: torch.Tensor, q_c: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    torch.ops.vllm.dsafuse_test_double(q_c, None)
    return q_c
"""


def test_an_older_file_finds_its_ops_and_only_the_options_it_has(tmp_path, monkeypatch):
    (tmp_path / "older_vllm_kernels.py").write_text(OLDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name for name in sys.modules if name.startswith("vllm")}
    module = vllm_fused.load_alone("older_vllm_kernels")
    assert {name for name in sys.modules if name.startswith("vllm")} == before
    monkeypatch.setattr(vllm_fused, "kernels", lambda: module)
    _, (arguments,) = working_sets(bench_case("prepare_latents", 2, (1, 1)), 1, 0, CPU)
    expected = 2 * arguments["q_c"]
    bound = vllm_fused.bind(bench_case("prepare_latents", 2, (1, 1)), arguments)
    bound.call()
    assert torch.equal(bound.outputs()["q_c_out"], expected)
    assert "index_kv_cache" not in bound.outputs(), "one mapping for both caches: the other is not compared"

"""Other people's kernels: what can be proven of their bindings without a GPU, and what each says about itself."""

import importlib
import os
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from dsafuse.check.bench import FORMS, bench_case
from dsafuse.check.cases import ROLES
from dsafuse.check.peers import aiter_triton, compiled, peers, standing_in, vllm_fused, why_not_importable
from dsafuse.check.peers.aiter_triton import FUNCTION
from dsafuse.check.reference import errors
from dsafuse.check.working_sets import working_sets
from dsafuse.registry import OPS

CPU = torch.device("cpu")


def test_every_peer_says_what_it_is():
    assert set(peers()) == {"compiled", "vllm_unfused", "vllm_fused", "vllm_fused_0.26", "flashinfer", "aiter"}
    for name, peer in peers().items():
        assert peer.name == name
        assert peer.ops <= set(OPS)
        assert peer.differs
        assert 0 < peer.allowed("latent_q") < 0.2, "a wrong rotation has an error of 0.2 and more"


@pytest.fixture(autouse=True)
def looked_for_anew():
    """What is on the path is looked for once a process."""
    vllm_fused._found.cache_clear()
    yield
    vllm_fused._found.cache_clear()


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


def counting():
    """A backend that compiles nothing, and the graphs that it was given."""
    graphs = []

    def backend(graph, _examples):
        graphs.append(graph)
        return graph.forward

    return backend, graphs


@pytest.mark.parametrize("op", ROLES)
def test_one_compiled_chain_holds_at_every_token_count(op):
    """More shapes than torch would keep by itself; beyond its limit it goes on uncompiled."""
    (peer,), (backend, graphs) = compiled.PEERS, counting()
    for form in ("wrapper", "model"):
        if op not in FORMS[form][0]:
            continue
        before = len(graphs)
        for tokens in (1, 2, 3, 5, 6, 8, 9, 17, 40, 65, 2):
            case = bench_case(op, tokens, (4, 2), form)
            inputs, sets = working_sets(case, 2, 0, CPU)
            with peer.context():
                for arguments in sets:
                    bound = compiled.bind(case, arguments, backend=backend)
                    bound.call()
            found = list(errors(case, inputs, bound.outputs()))
            assert {role for role, _ in found} == case.roles - {"clear_topk"}
            assert all(error <= peer.allowed(role) for role, error in found)
        assert len(graphs) - before <= 2, "one for a single token, one for all others"
        assert [call for graph in graphs[before:] for call in resized_views(graph)] == []


def resized_views(graph):
    """Calls that view a tensor as a dtype of another size: the compiler refuses one whose last stride it does not know,
    such as that of a scale, [tokens, 1].
    """
    for node in graph.graph.nodes:
        dtypes = [argument for argument in node.args if isinstance(argument, torch.dtype)]
        if node.op == "call_method" and node.target == "view" and dtypes:
            source = node.args[0].meta["example_value"]
            if source.dtype.itemsize != dtypes[0].itemsize:
                yield f"{tuple(source.shape)} of {source.dtype} as {dtypes[0]}"


def test_a_view_as_another_size_would_be_seen():
    backend, graphs = counting()
    torch.compile(lambda x: x.view(torch.uint8), backend=backend, dynamic=True)(torch.ones(3, 1))
    assert len(list(resized_views(graphs[0]))) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_bytes_by_shifts_are_those_of_a_view(dtype):
    values = torch.tensor([[-0.0, 1.5], [float("inf"), float("nan")], [-3.25, 2.0**-9]]).to(dtype)
    assert torch.equal(compiled.as_bytes(values), values.view(torch.uint8))


def test_what_the_compiler_sees_is_put_back():
    from dsafuse.ops import roles

    before = roles.write_rows, roles.check_addresses, torch._dynamo.config.recompile_limit
    with compiled.PEERS[0].context():
        assert roles.write_rows is compiled.write_live_rows
    assert (roles.write_rows, roles.check_addresses, torch._dynamo.config.recompile_limit) == before


def test_a_package_stood_in_for_is_back_afterwards(tmp_path, monkeypatch):
    (tmp_path / "stood_in").mkdir()
    (tmp_path / "stood_in" / "__init__.py").write_text("")
    (tmp_path / "stood_in" / "part.py").write_text("from stood_in import value")
    monkeypatch.syspath_prepend(str(tmp_path))
    whole = importlib.import_module("stood_in")
    other = ModuleType("stood_in")
    other.value, other.__path__ = 3, [str(tmp_path / "stood_in")]
    with standing_in("stood_in", {"stood_in": other}):
        assert importlib.import_module("stood_in.part").value == 3
    assert sys.modules["stood_in"] is whole
    assert "stood_in.part" not in sys.modules


VLLM = [path for origin, path in vllm_fused.files() if origin.startswith("vllm ")]

INTERPRETED = """
import sys, torch, dsafuse
from dsafuse.check.bench import FORMS, bench_case
from dsafuse.check.peers import peers, vllm_fused
from dsafuse.check.reference import errors
from dsafuse.check.working_sets import working_sets
from dsafuse.kernels.interpreter import corrected_casts

arms = {older: peers()[name] for name, older in (("vllm_fused", False), ("vllm_fused_0.26", True))}
arms = {older: arm for older, arm in arms.items() if not isinstance(vllm_fused._found(older), str)}
assert arms
for arm in arms.values():
    print(arm.name, arm.version())
    for form in FORMS:
        for op in ("prepare_latents", "prepare_queries"):
            case = bench_case(op, 3, (4, 2), form)
            inputs, sets = working_sets(case, 1, 0, torch.device("cpu"))
            bound = arm.bind(case, sets[0])
            with corrected_casts():
                bound.call()
            found = dict(errors(case, inputs, bound.outputs()))
            unmeasured = {"clear_topk", *(["index_k"] if arm.name == "vllm_fused_0.26" else [])}
            assert set(found) == case.roles - unmeasured, found
            assert all(error <= arm.allowed(role) for role, error in found.items()), found
            if op == "prepare_latents":
                assert bool((sets[0]["topk_indices"] == -1).all())
assert not [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]
"""


@pytest.mark.skipif(not VLLM, reason="vLLM's wheel is not installed")
def test_vllms_kernels_load_without_vllm_and_hold():
    """Its kernels interpreted, bound as on a GPU: arguments, layouts and scales are what we say they are."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", INTERPRETED],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "vllm_fused 0.32 or later: vllm 0." in done.stdout


OLDER = """
import torch
from vllm.triton_utils import tl, triton

def fused_norm_rope(positions: torch.Tensor, q_c: torch.Tensor, slot_mapping: torch.Tensor) -> torch.Tensor:
    return 2 * q_c
"""


def test_each_arm_takes_the_pair_of_its_own_version(tmp_path, monkeypatch):
    (tmp_path / f"{vllm_fused.ALONE}.py").write_text(OLDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {name for name in sys.modules if name.startswith("vllm")}
    older = peers()["vllm_fused_0.26"]
    assert older.version() == f"0.26 or so: a kernels file alone, {vllm_fused.ALONE}.py"
    assert (vllm_fused._found(older=False) == f"a kernels file alone, {vllm_fused.ALONE}.py, is older") == (not VLLM)
    assert {name for name in sys.modules if name.startswith("vllm")} == before
    case = bench_case("prepare_latents", 2, (1, 1))
    _, (arguments,) = working_sets(case, 1, 0, CPU)
    bound = older.bind(case, arguments)
    bound.call()
    assert torch.equal(bound.outputs()["q_c_out"], 2 * arguments["q_c"]), "it gets only the options that it has"
    assert "index_kv_cache" not in bound.outputs(), "one mapping for both caches: the other is not compared"


def test_a_peer_is_looked_for_once_and_not_for_every_input_set(tmp_path, monkeypatch):
    (tmp_path / f"{vllm_fused.ALONE}.py").write_text(OLDER)
    looks = []
    monkeypatch.setattr(
        vllm_fused, "files", lambda: looks.append(1) or [("a file", tmp_path / f"{vllm_fused.ALONE}.py")]
    )
    case = bench_case("prepare_latents", 2, (1, 1))
    _, sets = working_sets(case, 3, 0, CPU)
    for arguments in sets:
        peers()["vllm_fused_0.26"].bind(case, arguments)
    assert len(looks) == 1


def test_a_kernels_file_that_needs_more_of_vllm_says_what(tmp_path, monkeypatch):
    (tmp_path / f"{vllm_fused.ALONE}.py").write_text("from vllm.triton_utils import no_such_name")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(vllm_fused, "files", lambda: [("a file", tmp_path / f"{vllm_fused.ALONE}.py")])
    assert "no_such_name" in vllm_fused._found(older=True)


def test_aiters_kernel_loads_without_the_rest_of_aiter(tmp_path, monkeypatch):
    folder = tmp_path / "aiter" / "ops" / "triton"
    folder.mkdir(parents=True)
    for package in (tmp_path / "aiter", folder.parent, folder):
        (package / "__init__.py").write_text("raise ImportError('needs HIP')")
    (folder / "fused_kv_cache.py").write_text(f"from aiter.ops.triton.rope import two\ndef {FUNCTION}():\n  return two")
    (folder / "rope.py").write_text("two = 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    aiter_triton._found.cache_clear()
    found = aiter_triton._found(whole=False)
    assert found() == 2
    assert "aiter" not in sys.modules
    assert "needs HIP" in aiter_triton._found(whole=True)
    aiter_triton._found.cache_clear()

"""The faults of benchmarks/sabotage.py: what each does, that `verify` sees all six, and that `eval` sees one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import sabotage
from benchmarks.sabotage import FAULTS, NONE, sabotaged

from dsafuse import fused_qk_rope_concat_and_cache_mla, indexer_qk_rope_quant_and_cache
from dsafuse.registry import OPS
from tests.accuracy.conftest import needs_vllm
from tests.inputs import EVERY_OP, Call, call_of, memory, twin

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", list(FAULTS))
def test_verify_sees_every_fault_and_nothing_else(name: str) -> None:
    seen = sabotage.verified(FAULTS[name], torch.device("cpu"), quick=True)
    assert seen["cases"] >= 18
    assert (seen["failed"] > 0) == (name != NONE)


def test_a_fault_ends_with_its_block() -> None:
    before = [type(op).__call__ for op in OPS.values()]
    with sabotaged(FAULTS["k_pe not rotated"]):
        assert [type(op).__call__ for op in OPS.values()] != before
    assert [type(op).__call__ for op in OPS.values()] == before


def run(name: str, op: Any, call: Call) -> tuple[Any, dict[str, torch.Tensor]]:
    """What a sabotaged op returns, and all that its tensors can reach behind it."""
    call = twin(call)
    with sabotaged(FAULTS[name]):
        returned = op(**call)
    return returned, memory(call)


@pytest.mark.parametrize("op", list(EVERY_OP))
def test_no_fault_changes_nothing(op: str) -> None:
    call = call_of(op)
    _, left = run(NONE, EVERY_OP[op], call)
    own = twin(call)
    EVERY_OP[op](**own)
    assert {name: bytes_.tolist() for name, bytes_ in memory(own).items()} == {
        name: bytes_.tolist() for name, bytes_ in left.items()
    }


def test_a_key_that_is_not_rotated_is_that_of_position_zero() -> None:
    """Up to the rounding of turning back and forth; the query stays as it was."""
    angle = torch.rand(37, 32) * 6
    call = call_of(
        "mla", activation=torch.float32, layout="plain", cos_sin_cache=torch.cat([angle.cos(), angle.sin()], 1)
    )
    ahead = torch.cat([torch.ones(37, 32), torch.zeros(37, 32)], 1)
    query, faulty = run("k_pe not rotated", fused_qk_rope_concat_and_cache_mla, call)
    right_query, right = run(NONE, fused_qk_rope_concat_and_cache_mla, call)
    _, still = run(NONE, fused_qk_rope_concat_and_cache_mla, {**call, "cos_sin_cache": ahead})
    keys = [each["kv_cache"].view(torch.float32) for each in (faulty, still, right)]
    torch.testing.assert_close(keys[0], keys[1], rtol=1e-4, atol=1e-3)
    assert not torch.allclose(keys[0], keys[2], rtol=1e-1, atol=1e-1)
    assert torch.equal(query, right_query)


def test_unfolded_weights_lack_the_scale_of_the_query() -> None:
    call = call_of("indexer")
    (_, weights), _ = run("q scale not folded", indexer_qk_rope_quant_and_cache, call)
    heads = call["weights"].shape[1]
    assert torch.equal(weights[:, :heads], call["weights"].float() * call["weights_scale"])


@needs_vllm
def test_eval_sees_a_fault_and_passes_the_path_as_it_is(seeded: dict[str, Path], tmp_path: Path) -> None:
    """On seeded weights no answer is right; that answers differ is what is seen."""
    out = tmp_path / "sabotage.json"
    faults = [NONE, "k_pe not rotated"]
    command = [sys.executable, "-m", "benchmarks.sabotage", str(seeded["deepseek-v3.2"]), "--quick", "--out", str(out)]
    for name in faults:
        command += ["--fault", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    assert (record["problems"], record["contexts"], record["at_once"]) == ([], [48, 96], 2)
    records = record["faults"]
    assert list(records) == faults
    assert {name: record["seen_by"]["answers"] for name, record in records.items()} == {
        name: name != NONE for name in faults
    }
    for each in records.values():
        calls = each["eval"][0]["fused_calls"]
        assert calls["mla"]["fused"] > 0
        assert calls["mla"]["fallback"] == 0
    read = subprocess.run([*command[:3], "--read", str(out)], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (read.returncode, read.stdout) == (0, done.stdout)


def verdict(failed: int, **cell: object) -> dict[str, Any]:
    """What is recorded of a fault, as far as it decides."""
    fault = {"verify": {"failed": failed}, "eval": [{"p": 1.0, "lost": 0, "gained": 0, "differing": 0, **cell}]}
    return {**fault, "seen_by": sabotage.verdicts(fault)}


def test_a_run_is_right_if_verify_saw_every_fault_and_the_path_as_it_is_passed() -> None:
    sound = {NONE: verdict(0, problems=[]), "k_pe not rotated": verdict(3, problems=["answers differ"])}
    record = {"model": "m", "problems": [], "faults": sound}
    assert sabotage.right(record)
    assert not sabotage.right({**record, "problems": ["the fused arm ended with exit code 1"]})
    assert not sabotage.right({**record, "faults": {**sound, NONE: verdict(1, problems=[])}})
    assert not sabotage.right({**record, "faults": {**sound, NONE: verdict(0, problems=["not fused"])}})
    assert not sabotage.right({**record, "faults": {**sound, "k_pe not rotated": verdict(0, problems=[])}})


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["nowhere"], "nowhere/config.json"),
        (["{m}", "--at-once", "0"], "--at-once: got 0"),
        (["{m}", "--context", "9000"], "context_tokens must be between"),
        (["{m}", "--context", "x"], "invalid literal"),
        (["{m}", "--fault", "gravity"], "invalid choice: 'gravity'"),
        (["--read", "nowhere.json"], "nowhere.json"),
        (["--out", "gone/file.json"], "error: --out: gone/file.json: there is no directory"),
    ],
)
def test_arguments_that_can_not_be_are_refused(
    seeded: dict[str, Path], options: list[str], refusal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sabotage.main([word.format(m=seeded["deepseek-v3.2"]) for word in options])
    assert ended.value.code == 2
    assert refusal in capsys.readouterr().err

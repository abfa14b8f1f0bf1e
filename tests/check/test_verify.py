"""verify() finds a provider that is wrong, says how to reproduce it, and passes the providers that are right."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsafuse import dispatch, split
from dsafuse.check.cases import ROLES, Case
from dsafuse.check.compare import Comparison
from dsafuse.check.inputs import draw_inputs
from dsafuse.check.reference import max_error
from dsafuse.check.verify import ERROR_SLACK, Result, check_case, plan, run_arm, summarise, verify
from dsafuse.registry import OPS
from tests.check.made import EVERY_OP, indexer, latents, mla, qk, queries

CPU = torch.device("cpu")
MLA = mla(tokens=4, heads=3, query="fp8", layout="fp8")
INDEX = indexer(tokens=4, index_heads=3)
QK = qk(tokens=3, heads=3, index_heads=3, query="fp8", layout="fp8_ds_mla", slot_rule="negative", topk="narrow")
LATENTS = latents(tokens=4, q_width=96, topk="narrow", layout="fp8", index_slot_rule="short")
QUERIES = queries(tokens=4, heads=3, index_heads=3)
BEYOND = (
    replace(MLA, slot_rule="beyond"),
    replace(INDEX, index_slot_rule="beyond", position_rule="outside"),
    replace(QK, index_slot_rule="beyond"),
    replace(LATENTS, position_rule="outside"),
)


def sabotage(monkeypatch, change):
    """Make provider split do `change(arguments)` after its work."""

    def run(op, arguments, config):
        split.run(op, arguments, config)
        change(arguments)

    module = SimpleNamespace(run=run, why_not=split.why_not, why_not_here=split.why_not_here)
    provider = dispatch.PROVIDERS["split"]
    monkeypatch.setitem(dispatch.PROVIDERS, "split", SimpleNamespace(**_fields(provider), load=lambda: module))


def _fields(provider):
    return {"name": provider.name, "on_request": provider.on_request, "fused": provider.fused}


def only(case, provider="split"):
    (result,) = check_case(case, [provider], 0, CPU)
    return result


@pytest.mark.parametrize("provider", ["interpreter", "split"])
@pytest.mark.parametrize("case", [MLA, INDEX, QK, LATENTS, QUERIES, replace(INDEX, tokens=0)])
def test_providers_pass(case, provider):
    result = only(case, provider)
    assert (result.status, result.reasons) == ("passed", [])
    assert result.error is not None
    assert result.error <= result.split_error * (1 + ERROR_SLACK)


@pytest.mark.parametrize("case", [QK, LATENTS, QUERIES])
@pytest.mark.parametrize("provider", ["interpreter", "split"])
def test_providers_pass_without_an_indexer(case, provider):
    result = only(replace(case, index="absent", out="allocated"), provider)
    assert (result.status, result.reasons) == ("passed", [])


def test_positions_outside_the_table_are_clamped_where_no_key_is_written():
    assert only(replace(QUERIES, position_rule="outside")).status == "passed"


@pytest.mark.parametrize("op", ROLES)
def test_some_of_the_quick_set_passes_everywhere(op):
    cases = [case for case in plan([op], "quick", CPU) if case.tokens * max(case.heads, case.index_heads) <= 224][::4]
    assert len(cases) >= 5
    results = list(verify(cases, ["interpreter", "split"], 1, CPU))
    assert [result.call for result in results if result.status != "passed"] == []
    assert all(summary.ok for summary in summarise(results))


@pytest.mark.parametrize("case", BEYOND)
def test_addresses_beyond_their_tables_are_cleaned_by_kernels_and_refused_by_torch(case):
    assert only(case, "interpreter").status == "passed"
    assert only(case, "split").status == "passed"


def test_a_torch_chain_that_does_not_refuse_is_found(monkeypatch):
    monkeypatch.setattr("dsafuse.ops.roles.check_addresses", lambda *_: None)
    assert "did not raise IndexError" in only(BEYOND[0]).reasons[0]


def test_a_compiled_provider_is_declined_on_cpu_with_its_reason():
    result = only(MLA, "triton")
    assert result.status == "declined"
    assert "cpu" in result.reasons[0]


def test_a_wrong_query_is_found(monkeypatch):
    sabotage(monkeypatch, lambda a: a["q_out"].view(torch.uint8)[0, 0, 0].bitwise_xor_(1))
    result = only(MLA)
    assert result.status == "failed"
    assert result.comparison.mismatching_bytes == 1
    assert result.comparison.code_distance == 1


def test_a_write_beyond_the_tensor_is_found(monkeypatch):
    def overrun(a):
        q_out = a["q_out"].view(torch.uint8)
        q_out.as_strided((1,), (1,), q_out.storage_offset() + q_out.numel()).bitwise_not_()

    sabotage(monkeypatch, overrun)
    assert "q_out: 1 bytes differ" in only(MLA).reasons[0]


@pytest.mark.parametrize("name", ["q_out", "kv_cache"])
@pytest.mark.parametrize("place", [-1, "end"])
def test_a_write_past_a_row_is_found(monkeypatch, name, place):
    """Of rows with padding between them, whose neighbours are nobody's."""

    def overrun(a):
        row = a[name].view(torch.uint8)[1, 1]
        first = row.storage_offset() + (len(row) if place == "end" else place)
        row.as_strided((1,), (1,), first).bitwise_not_()

    sabotage(monkeypatch, overrun)
    case = replace(MLA, out="wide", cache_strides="gaps", block_size=16)
    assert any(f"{name}: 1 bytes differ" in reason for reason in only(case).reasons)


def test_a_write_to_a_row_that_no_slot_names_is_found(monkeypatch):
    sabotage(monkeypatch, lambda a: a["kv_cache"][-1, -1].bitwise_not_())
    assert any("kv_cache" in reason for reason in only(replace(MLA, slot_rule="short")).reasons)


def test_a_changed_input_is_found(monkeypatch):
    sabotage(monkeypatch, lambda a: a["positions"].zero_())
    assert any("positions: the call changed an input" in reason for reason in only(MLA).reasons)


@pytest.mark.parametrize("name", ["q_c_out", "kv_c_out", "k_pe_out", "topk_indices"])
def test_a_wrong_output_of_the_latent_seam_is_found(monkeypatch, name):
    sabotage(monkeypatch, lambda a: a[name].view(torch.uint8)[0, 1].bitwise_xor_(0x40))
    assert any(name in reason for reason in only(replace(LATENTS, index="absent")).reasons)


@pytest.mark.parametrize("case", [QK, LATENTS])
@pytest.mark.parametrize("row", [0, -1])
def test_a_row_not_cleared_or_cleared_beyond_the_tokens_is_found(monkeypatch, case, row):
    def change(a):
        if "topk_indices" in a:  # prepare_qk's two ops, which run beside it, have none
            a["topk_indices"][row] = -1 if row else 0

    sabotage(monkeypatch, change)
    assert any("topk_indices" in reason for reason in only(case).reasons)


def test_a_cache_guarded_by_the_other_caches_slots_is_found(monkeypatch):
    """vLLM's fused_norm_rope once guarded the indexer's rows by the MLA slots."""

    def run(op, arguments, config):
        slots = torch.where(arguments["slot_mapping"] < 0, -1, arguments["index_slot_mapping"])
        split.run(op, {**arguments, "index_slot_mapping": slots}, config)

    module = SimpleNamespace(run=run, why_not=split.why_not, why_not_here=split.why_not_here)
    provider = dispatch.PROVIDERS["split"]
    monkeypatch.setitem(dispatch.PROVIDERS, "split", SimpleNamespace(**_fields(provider), load=lambda: module))
    assert any(
        "index_kv_cache" in r for r in only(replace(LATENTS, slot_rule="negative", index_slot_rule="permuted")).reasons
    )


def test_one_launch_that_differs_from_its_two_ops_is_found(monkeypatch):
    def run(op, arguments, config):
        split.run(op, arguments, config)
        if op == QK.op:
            arguments["index_q_out"].view(torch.uint8)[0, 0, 0].bitwise_xor_(1)

    module = SimpleNamespace(run=run, why_not=split.why_not, why_not_here=split.why_not_here)
    provider = dispatch.PROVIDERS["split"]
    monkeypatch.setitem(dispatch.PROVIDERS, "split", SimpleNamespace(**_fields(provider), load=lambda: module))
    assert any("index_q_out: not the bytes that" in reason for reason in only(QK).reasons)


def test_an_output_that_is_not_written_is_found(monkeypatch):
    module = SimpleNamespace(run=lambda *_: None, why_not=split.why_not, why_not_here=split.why_not_here)
    provider = dispatch.PROVIDERS["split"]
    monkeypatch.setitem(dispatch.PROVIDERS, "split", SimpleNamespace(**_fields(provider), load=lambda: module))
    for case in (MLA, replace(MLA, out="allocated"), INDEX, LATENTS, QUERIES):
        assert only(case).status == "failed"


def test_a_provider_that_raises_has_failed_and_the_next_case_runs(monkeypatch):
    def fail(_arguments):
        raise RuntimeError("out of luck")

    sabotage(monkeypatch, fail)
    first, second = verify([MLA, MLA], ["split"], 0, CPU)
    assert first.status == second.status == "failed"
    assert "out of luck" in first.reasons[0]


def test_a_failure_prints_the_call_that_reproduces_it():
    result = Result(MLA.op, MLA.name, 7, "triton", "cuda")
    assert result.call == (
        "dsafuse verify fused_qk_rope_concat_and_cache_mla "
        "--case tokens=4,heads=3,query=fp8,layout=fp8 --seed 7 --provider triton --device cuda"
    )
    assert Case.named(result.op, result.case) == MLA


def test_a_larger_error_than_split_is_a_failure(monkeypatch):
    errors = iter([0.01, 0.011])  # split's is measured first
    monkeypatch.setattr("dsafuse.check.verify.max_error", lambda *_: next(errors))
    result = only(MLA, "interpreter")
    assert (result.error, result.split_error, result.status) == (0.011, 0.01, "failed")
    assert "float64" in result.reasons[0]


def test_rates_are_judged_over_the_set():
    results = [
        Result(INDEX.op, INDEX.name, 0, "triton", "cpu", comparison=Comparison(norm_elements=10**5)) for _ in "ab"
    ]
    for result in results:
        result.comparison.norm_elements_off = 10
    assert all(summary.ok for summary in summarise(results))
    results[0].comparison.norm_elements_off = 11
    assert not any(summary.ok for summary in summarise(results))


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        (mla(activation="fp32", rounding="fp32"), 1e-6),
        (mla(activation="bf16"), 2**-8),
        (mla(activation="fp32", layout="fp8_ds_mla", query="fp8"), 2**-4),
        (indexer(activation="fp32"), 2**-4),
        (indexer(activation="bf16", index_rope_style="interleaved"), 2**-3),
        (indexer(activation="fp32", scale_rule="fp32", fp8="e4m3fnuz"), 2**-4),
        (latents(activation="fp32", index="absent"), 1e-6),
        (latents(activation="bf16", index="absent"), 2**-7),
        (latents(activation="fp32", layout="fp8_ds_mla"), 2**-4),
        (queries(activation="fp32", query="fp8"), 2**-4),
    ],
)
def test_the_oracle_is_as_close_to_float64_as_its_formats(case, limit):
    inputs = draw_inputs(case, 0, CPU)
    arm = run_arm(OPS[case.op], case, inputs.arguments, "oracle", 0, CPU)
    assert 0 < max_error(case, inputs, arm.tensors) <= limit


@pytest.mark.parametrize("make", EVERY_OP)
@pytest.mark.parametrize("name", ["rope_style", "index_rope_style"])
def test_a_wrong_rotation_has_a_large_error(make, name):
    """The reference is independent of the oracle: it must tell the pairing."""
    case = make(tokens=4)
    inputs = draw_inputs(case, 0, CPU)
    given = name if name in inputs.arguments else "rope_style"
    if given not in inputs.arguments:
        return
    other = "neox" if inputs.arguments[given] == "interleaved" else "interleaved"
    arm = run_arm(OPS[case.op], case, {**inputs.arguments, given: other}, "oracle", 0, CPU)
    assert max_error(case, inputs, arm.tensors) > 0.2


@pytest.mark.parametrize("name", ["q_norm_eps", "kv_norm_eps"])
def test_a_forgotten_norm_has_a_large_error(name):
    inputs = draw_inputs(LATENTS, 0, CPU)
    arm = run_arm(OPS[LATENTS.op], LATENTS, {**inputs.arguments, name: 3.0}, "oracle", 0, CPU)
    assert max_error(LATENTS, inputs, arm.tensors) > 0.2

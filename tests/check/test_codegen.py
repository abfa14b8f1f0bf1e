"""The compiled code of every target, held to the recorded floors; and that the counting would see a fall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsafuse.__main__ import app
from dsafuse.check import assembly, codegen
from dsafuse.check.codegen import Kernel, Report
from dsafuse.check.floors import Floors, write
from dsafuse.kernels import launch, plans
from dsafuse.layouts import LATENT_DIM, QUERY_DIM
from dsafuse.models import MODELS
from dsafuse.registry import OPS
from dsafuse.target import Target

RECORDED = Path(__file__).parents[2] / "benchmarks" / "codegen.toml"
MLA, INDEXER = "fused_qk_rope_concat_and_cache_mla", "indexer_qk_rope_quant_and_cache"
FULL, RANK = codegen.HEADS
TESTED = ("gfx942", "gfx950", "sm_90")

SUBSET = [
    *(Kernel(target, "prepare_qk", "fp8", FULL) for target in TESTED),
    *(Kernel(target, "prepare_latents", "fp8", RANK) for target in TESTED),
    *(Kernel(target, "prepare_queries", "no indexer", FULL) for target in TESTED),
    *(Kernel(target, "prepare_latents", "no indexer", FULL) for target in TESTED),
    Kernel("gfx942", INDEXER, "tiled16", FULL),
    *(Kernel(target, INDEXER, "indexer fp32", FULL) for target in TESTED),
    Kernel("gfx950", MLA, "fp8_ds_mla", FULL),
    Kernel("sm_90", MLA, "fp8_ds_mla fp32", FULL),
    Kernel("gfx950", MLA, "plain", FULL),
    Kernel("gfx942", MLA, "chain", FULL),
    Kernel("sm_100", "prepare_qk", "fp8", RANK),
    *(Kernel(target, "prepare_qk", "top-k rows", FULL) for target in TESTED),
]
"""Every target, op and role once or more, in well under a minute; `dsafuse codegen --check` compiles all."""


@pytest.fixture(autouse=True, scope="module")
def cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What an earlier version compiled proves nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
    compiled.cache_clear()


@cache
def compiled(kernel: Kernel) -> list[Report]:
    """The reports of a kernel, compiled once for all tests."""
    ((_, reports),) = codegen.reports([kernel])
    return reports


def fused(kernel: Kernel) -> Report:
    """The one report of a kernel that is no chain."""
    (report,) = compiled(kernel)
    return report


@pytest.mark.parametrize("kernel", SUBSET, ids=lambda k: f"{k.target}-{k.op}-{k.variant}-{k.heads[0]}")
def test_a_kernel_holds_its_floors(kernel: Kernel) -> None:
    floors = Floors.read(RECORDED)
    for report in compiled(kernel):
        assert floors.misses(report) == [], report.kernel


def test_every_kernel_has_a_recorded_floor() -> None:
    recorded = {(key[0], key[1], key[2], key[4:]) for key in Floors.read(RECORDED).kernels}
    assert recorded == {(k.target, k.op, k.variant, k.heads) for k in codegen.kernels()}


@pytest.mark.parametrize("target", codegen.TARGETS)
def test_no_variant_compiles_what_another_does(target: str) -> None:
    def call(kernel: Kernel) -> tuple[str, tuple[int, int], object]:
        variant, op = codegen.VARIANTS[kernel.variant], OPS[kernel.op]
        _, config = op.resolve(**codegen.arguments_of(op, variant, kernel.heads, Target.named(target)))
        return kernel.op, kernel.heads, config

    calls = Counter(call(k) for k in codegen.kernels([target]) if not codegen.VARIANTS[k.variant].chain)
    assert [twice for twice, times in calls.items() if times > 1] == []


@pytest.mark.parametrize("target", TESTED)
def test_the_query_path_moves_wide_pieces(target: str) -> None:
    report = fused(Kernel(target, "prepare_queries", "no indexer", FULL))
    latent = plans.PLANS[Target.named(target).vendor]["attention"].block_heads * LATENT_DIM // report.threads
    assert sum(width * count for width, count in report.loads.items() if width >= 16) >= 2 * latent
    assert sum(width * count for width, count in report.stores.items() if width >= 8) >= latent
    if target.startswith("gfx"):
        assert min(report.stores) >= 8


@pytest.mark.parametrize("target", TESTED)
def test_the_latent_path_moves_wide_pieces(target: str) -> None:
    report = fused(Kernel(target, "prepare_latents", "no indexer", FULL))
    assert (
        sum(width * count for width, count in report.loads.items() if width >= 16) >= 2 * LATENT_DIM // report.threads
    )
    assert sum(width * count for width, count in report.stores.items() if width >= 8) >= LATENT_DIM // report.threads


@pytest.mark.parametrize("target", TESTED)
def test_top_k_rows_are_cleared_by_stores_of_16_bytes_and_cost_no_register(target: str) -> None:
    without, cleared = (fused(Kernel(target, "prepare_qk", variant, FULL)) for variant in ("fp8", "top-k rows"))
    row_bytes = 4 * MODELS["deepseek-v3.2"].index_topk
    assert cleared.stores[16] - without.stores.get(16, 0) == row_bytes // cleared.threads // 16
    assert (cleared.registers, cleared.shared_bytes) == (without.registers, without.shared_bytes)


@pytest.mark.parametrize("target", TESTED)
def test_every_value_is_converted_to_fp8_in_hardware(target: str) -> None:
    report = fused(Kernel(target, "prepare_queries", "no indexer", FULL))
    heads = plans.PLANS[Target.named(target).vendor]["attention"].block_heads
    assert report.fp8_conversions == heads * QUERY_DIM // report.threads // 2


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_a_program_is_one_wave_on_cdna(target: str) -> None:
    report = fused(Kernel(target, "prepare_qk", "fp8", FULL))
    assert (report.threads, report.shared_bytes) == (64, 0)


@pytest.mark.parametrize(
    ("change", "miss"),
    [
        ({"spills": 1}, "spills: got 1, expected none"),
        ({"scalar_spills": 5}, "scalar_spills: got 5, expected none"),
        ({"fused_multiply_adds": 2}, "fused_multiply_adds: got 2, expected none"),
        ({"loads": {8: 99}}, "load_bytes_16: got 0, expected at least"),
        ({"stores": {4: 99}}, "store_bytes_8: got 0, expected at least"),
        ({"fp8_conversions": 0}, "fp8_conversions: got 0, expected at least"),
        ({"registers": 250}, "registers: got 250, expected at most"),
        ({"instructions": 9999}, "instructions: got 9999, expected at most"),
        ({"heads": 1}, "no floor is recorded for it"),
    ],
)
def test_a_fall_is_seen(change: dict[str, object], miss: str) -> None:
    report = replace(compiled(SUBSET[0])[0], **change)
    (found,) = Floors.read(RECORDED).misses(report)
    assert found.startswith(miss)


def test_ceilings_hold_for_the_compiler_that_they_were_recorded_with() -> None:
    floors = replace(Floors.read(RECORDED), triton="3.0.0")
    report = compiled(SUBSET[0])[0]
    assert floors.misses(replace(report, registers=250)) == []
    assert floors.misses(replace(report, spills=1)) != []


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    reports = [*compiled(SUBSET[0]), *compiled(SUBSET[5])]
    write(reports, tmp_path / "floors.toml")
    floors = Floors.read(tmp_path / "floors.toml")
    assert len(floors.kernels) == len(reports) == 2
    assert [floors.misses(report) for report in reports] == [[], []]


@pytest.mark.parametrize(
    ("target", "op"),
    [
        ("sm_90", "prepare_queries"),
        ("sm_90", "prepare_latents"),
        ("gfx942", "prepare_latents"),  # which fuses nothing in prepare_queries, allowed or not
        ("gfx950", "prepare_queries"),
        ("gfx950", "prepare_latents"),
    ],
)
def test_contraction_would_be_counted(target: str, op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = launch.launch_options
    monkeypatch.setattr(launch, "launch_options", lambda *a: real(*a) | {"enable_fp_fusion": True})
    ((_, (*_, report)),) = codegen.reports([Kernel(target, op, "no indexer", FULL)])
    assert report.fused_multiply_adds > 0


def test_without_a_disassembler_ptx_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sass = fused(Kernel("sm_90", "prepare_queries", "no indexer", FULL))
    monkeypatch.setattr(assembly, "disassembler", lambda: None)
    ((_, (*_, ptx)),) = codegen.reports([Kernel("sm_90", "prepare_queries", "no indexer", FULL)])
    assert (ptx.assembly, sass.assembly) == ("ptx", "sass")
    assert ptx.registers is None
    assert {16: sass.loads[16]}.items() <= ptx.loads.items()
    assert {16: sass.stores[16]}.items() <= ptx.stores.items()
    assert [miss for miss in Floors.read(RECORDED).misses(ptx) if "recorded" not in miss] == []


def test_amd_widths_are_told_from_every_spelling() -> None:
    text = """
	global_load_dwordx4 v[0:3], v4, s[0:1]
	buffer_load_ushort v0, v1, s[0:3], 0 offen
	global_load_short_d16_hi v0, v[1:2], off
	global_load_d16_b16 v0, v[1:2], off
	global_load_b128 v[0:3], v[4:5], off
	global_store_d16_hi_b8 v[0:1], v2, off
	global_store_byte_d16_hi v[0:1], v2, off
	global_store_dwordx2 v[0:1], v[2:3], off
	v_fma_f32 v0, v1, v2, v3
	v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7]
	v_dual_mul_f32 v0, v1, v2 :: v_dual_fmac_f32 v3, v4, v5
	s_nop 0
"""
    facts = assembly.amd({"amdgcn": text})
    assert facts["loads"] == {2: 3, 16: 2}
    assert facts["stores"] == {1: 2, 8: 1}
    assert facts["fused_multiply_adds"] == 4
    assert facts["instructions"] == 11


def test_the_command_reports_and_checks(tmp_path: Path) -> None:
    command = ["codegen", "--target", "sm_90", "--op", "prepare_queries"]
    done = CliRunner().invoke(app, [*command, "--record", str(tmp_path / "floors.toml")])
    assert done.exit_code == 0, done.output
    assert "prepare_queries" in done.stdout
    floors = (tmp_path / "floors.toml").read_text()
    (tmp_path / "high.toml").write_text(floors.replace("fp8_conversions = ", "fp8_conversions = 9"))
    short = CliRunner().invoke(app, [*command, "--check", str(tmp_path / "high.toml")])
    assert short.exit_code == 1
    assert "fp8_conversions: got" in short.stdout
    assert short.stdout.splitlines()[-1] == f"floors: 0 of {floors.count('instructions = ')} kernels hold"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--target", "sm_80"], "--target: got 'sm_80', expected one of"),
        (["--target", "cpu"], "--target: got 'cpu', expected one of"),
        (["--op", "rope"], "OP: got 'rope', expected one of"),
        (["--check", "no/such.toml"], "--check: got no/such.toml, expected a file"),
    ],
)
def test_what_is_out_of_range_is_refused(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["codegen", *arguments])
    assert done.exit_code == 2
    assert said in done.stderr

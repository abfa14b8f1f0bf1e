"""What is known of a GPU: names, vendors, fp8 formats."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsafuse import target as target_module
from dsafuse.target import Target
from tests.inputs import FN, FNUZ


@pytest.mark.parametrize(
    ("name", "vendor", "fp8"),
    [
        ("sm_80", "nvidia", set()),
        ("sm_89", "nvidia", {FN}),
        ("sm_90", "nvidia", {FN}),
        ("sm_100", "nvidia", {FN}),
        ("gfx90a", "amd", set()),
        ("gfx942", "amd", {FNUZ}),
        ("gfx950", "amd", {FN}),
        ("gfx1200", "amd", {FN}),  # read as fnuz, every value doubles (ROCm/aiter#4102)
        ("gfx1201", "amd", {FN}),
        ("cpu", "cpu", {FN, FNUZ}),
    ],
)
def test_a_target_has_the_fp8_formats_of_its_hardware(name: str, vendor: str, fp8: set[torch.dtype]) -> None:
    target = Target.named(name)
    assert (target.arch, target.vendor, target.fp8) == (name, vendor, fp8)
    assert target.gpu is (vendor != "cpu")


def test_an_unknown_target_is_named_beside_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"target: got 'gfx000', expected one of cpu, .*gfx942"):
        Target.named("gfx000")


def test_every_listed_name_can_be_named() -> None:
    assert [Target.named(name).arch for name in Target.names()] == list(Target.names())


@pytest.mark.parametrize("name", Target.names())
def test_dependent_launch_is_offered_from_sm_90_on_and_never_on_amd(name: str) -> None:
    target = Target.named(name)
    newer = target.vendor == "nvidia" and int(name.removeprefix("sm_")) >= 90
    assert target.dependent_launch is newer


def test_a_cpu_device_is_the_cpu_target() -> None:
    assert Target.of(torch.device("cpu")) is Target.named("cpu")


def test_a_device_that_is_neither_gpu_nor_cpu_is_named() -> None:
    with pytest.raises(ValueError, match="device: got 'meta', expected cuda"):
        Target.of(torch.device("meta"))


@pytest.fixture
def detected(monkeypatch: pytest.MonkeyPatch):
    """Pretend that a GPU with these properties is there."""

    def pretend(hip: str | None, **properties: object) -> Target:
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
        return Target.of(torch.device("cuda", 0))

    target_module._of.cache_clear()
    yield pretend
    target_module._of.cache_clear()


def test_a_cuda_device_is_told_by_its_compute_capability(detected) -> None:
    assert detected(None, major=10, minor=0) is Target.named("sm_100")


def test_a_rocm_device_is_told_by_its_arch_without_feature_flags(detected) -> None:
    assert detected("6.4", gcnArchName="gfx942:sramecc+:xnack-") is Target.named("gfx942")


def test_a_gpu_that_the_table_lacks_is_named(detected) -> None:
    with pytest.raises(ValueError, match="target: got 'sm_75'"):
        detected(None, major=7, minor=5)

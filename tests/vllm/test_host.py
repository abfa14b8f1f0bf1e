"""The probe: what is touched exists and looks as it did; where it does not, nothing is installed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from dsafuse import switches
from dsafuse.vllm import host
from dsafuse.vllm.host import Symbol
from dsafuse.vllm.model_path import symbols
from tests.vllm import taken


def test_the_installed_vllm_differs_in_nothing() -> None:
    assert host.wrapper_differences() == []
    assert host.differences(host.CPU_SYMBOLS) == []


def test_the_installed_version_and_platform_have_a_row() -> None:
    row = host.row()
    assert isinstance(row, host.Tested)
    assert (row.minor, row.platform, row.path) == ("0.32", "cpu", "wrapper")


def test_every_row_has_a_path_and_the_wrapper_path_its_symbols() -> None:
    from dsafuse.vllm import lazy

    assert len({(row.minor, row.platform) for row in host.TESTED}) == len(host.TESTED)
    for row in host.TESTED:
        assert row.path in lazy._PATHS
        if row.path == "wrapper":
            assert row.minor in host.WRAPPER_SYMBOLS


def test_every_backend_that_was_read_has_a_form_and_every_wrapper_row_some_backends() -> None:
    """But for dsafuse's own, which no vLLM can change."""
    from dsafuse.vllm import gates

    read = {backend for backends in host.QUERY_SYMBOLS.values() for backend in backends}
    assert read == {backend for backend in gates.QUERY_FORMS if not backend.startswith("DSAFUSE_")}
    assert {row.minor for row in host.TESTED if row.path == "wrapper"} == set(host.QUERY_SYMBOLS)


def test_every_tested_version_has_a_rule_for_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    from dsafuse.vllm.model_path import symbols

    assert host.TILE_SCALE_RULES.keys() == {row.minor for row in host.TESTED} == {minor for minor, _ in symbols.PATHS}
    for version, rule in (("0.26.0", "fp32"), ("0.32.0+cpu", "ue8m0"), ("0.33.1", "ue8m0")):
        monkeypatch.setattr(host, "version", lambda version=version: version)
        assert host.tile_scale_rule() == rule


@pytest.mark.parametrize(
    ("version", "platform", "path"),
    [("0.26.0", "cuda", "wrapper"), ("0.26.0", "rocm", None), ("0.26.0", "cpu", None), ("0.27.1", "cuda", None)],
)
def test_rows_are_looked_up_by_minor_version_and_platform(version: str, platform: str, path: str | None) -> None:
    row = host.row(version, platform)
    if path is None:
        assert isinstance(row, str)
        assert row.startswith("vLLM and its platform must be one of those tested (0.26 on cuda, ")
        assert row.endswith(f", got {version} on {platform}")
    else:
        assert isinstance(row, host.Tested)
        assert row.path == path


def test_a_version_without_symbols_has_no_wrapper_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "version", lambda: "0.30.0")
    (difference,) = host.wrapper_differences()
    assert difference == "vLLM must be one of 0.26, 0.32 for the wrapper path, got 0.30.0"
    host.flashmla_differences.cache_clear()
    assert host.flashmla_differences() == ("vLLM must be one of 0.26 for a padded query, got 0.30.0",)
    host.flashmla_differences.cache_clear()


@pytest.mark.parametrize(("version", "minor"), [("0.32.0", "0.32"), ("0.32.1+cpu", "0.32"), ("1.0.0rc1", "1.0")])
def test_minor_versions(version: str, minor: str) -> None:
    assert host.minor(version) == minor


@pytest.mark.parametrize(
    ("symbol", "difference"),
    [
        (Symbol("vllm.no_such_module", "f"), r"vllm.no_such_module.f is missing"),
        (Symbol("vllm.config", "NoSuchClass.f"), r"vllm.config.NoSuchClass.f is missing"),
        (
            Symbol("vllm.utils.torch_utils", "_encode_layer_name", ("name",)),
            r"_encode_layer_name takes \(layer_name\), expected \(name\)",
        ),
        (
            Symbol("vllm.utils.torch_utils", "_encode_layer_name", ("layer_name",), source="0123456789abcdef"),
            r"_encode_layer_name has another body \(sha256 [0-9a-f]{16}, expected 0123456789abcdef\)",
        ),
        # A platform answers with None where it lacks an attribute.
        (Symbol("vllm.platforms", "current_platform.no_such_thing", ()), r"no_such_thing is missing \(it is None\)"),
        (Symbol("vllm.envs", "VLLM_USE_BREAKABLE_CUDAGRAPH", ()), r"CUDAGRAPH is a bool, expected a function"),
    ],
)
def test_each_kind_of_difference_is_named(symbol: Symbol, difference: str) -> None:
    (found,) = host.differences((symbol,))
    assert re.search(difference, found)


PROBED = {
    # The call that scores has a probe of its own, without which it is not made.
    **{
        f"{minor}, wrapper": ("dsafuse.vllm.wrapper", (*table, *host.SCORING_SYMBOLS["0.26"]))
        for minor, table in host.WRAPPER_SYMBOLS.items()
    },
    **{
        f"{minor} on {platform}, model": ("dsafuse.vllm.model_path.hook", (*host.SHARED_SYMBOLS, *path.symbols))
        for (minor, platform), path in symbols.PATHS.items()
    },
    "0.32, CPU": ("dsafuse.vllm.cpu.install", (*host.WRAPPER_SYMBOLS["0.32"], *host.CPU_SYMBOLS)),
}


@pytest.mark.parametrize("path", PROBED)
def test_all_that_is_taken_from_vllm_is_probed(path: str) -> None:
    """What is not would be an error in the middle of a model's building, in place of a line in the log."""
    root, table = PROBED[path]
    probed = {f"{symbol.module}.{symbol.name}" for symbol in table}
    found = taken.of(root, "dsafuse.vllm.lazy:__getattr__", without=("dsafuse.vllm.lazy:_install",))
    assert "vllm.platforms.current_platform.fp8_dtype" in found or root == "dsafuse.vllm.cpu.install"
    missing = set()
    for each in found:
        holder, _, name = each.rpartition(".")
        if each.startswith(taken.OPS):
            known = any(symbol.endswith(f".{name}") for symbol in probed)
        elif name.startswith("__"):
            known = True
        else:
            known = each in probed or any(symbol.startswith(f"{each}.") for symbol in probed)
            known = known or (holder in probed and builtin(holder))
        if not known:
            missing.add(each)
    assert missing == set()


def builtin(path: str) -> bool:
    """Whether this object of vLLM's is one of Python's types, whose methods no vLLM can change."""
    module, _, name = path.rpartition(".")
    return type(getattr(importlib.import_module(module), name)).__module__ == "builtins"


SOME = """
import vllm.a as a
from vllm.platforms import current_platform as platform
from dsafuse.vllm import {name}_other as other
def used():
    from vllm import envs
    def inner(): return envs.SWITCH, a.b.c(platform.kind)
    return inner, other.reached
def unused(): other.unreached
TABLE = (used,)
"""


def test_what_is_taken_is_found_wherever_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {
        "some": "from dsafuse.vllm.other import TABLE\nimport torch\nclass C:\n  def f(self): torch.ops.vllm.op(TABLE)",
        "other": SOME.format(name="yet"),
        "yet_other": "import vllm.x as x\nx.at_import()\ndef reached(): x.y\ndef unreached(): x.z",
    }
    for name, text in pages.items():
        (tmp_path / f"{name}.py").write_text(text)
    ours = {f"dsafuse.vllm.{name}": tmp_path / f"{name}.py" for name in pages}
    monkeypatch.setattr(taken, "_file", ours.get)
    assert taken.of("dsafuse.vllm.some") == {
        *("torch.ops.vllm.op", "vllm.a", "vllm.a.b.c", "vllm.envs", "vllm.envs.SWITCH"),
        *("vllm.platforms.current_platform", "vllm.platforms.current_platform.kind"),
        *("vllm.x", "vllm.x.at_import", "vllm.x.y"),
    }


@pytest.fixture
def hooks_free(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """vLLM's table of replaced classes, without ours; restored afterwards."""
    from vllm.model_executor import custom_op

    from dsafuse.vllm import wrapper
    from dsafuse.vllm.cpu import indexer  # noqa: F401 -- their imports are not part of what is tested

    for key in (wrapper.KEY, "SparseAttnIndexer"):
        monkeypatch.delitem(custom_op.op_registry_oot, key, raising=False)
    table: dict[str, Any] = custom_op.op_registry_oot
    return table


def test_installing_twice_is_installing_once(hooks_free: dict[str, Any]) -> None:
    from dsafuse.vllm import lazy, wrapper
    from dsafuse.vllm.cpu.indexer import TorchSparseAttnIndexer

    assert lazy._install() == []
    assert lazy._install() == []
    assert hooks_free[wrapper.KEY] is wrapper.FusedMultiHeadLatentAttentionWrapper
    assert hooks_free["SparseAttnIndexer"] is TorchSparseAttnIndexer


def test_off_installs_cpu_support_and_no_hook(hooks_free: dict[str, Any]) -> None:
    from dsafuse.vllm import lazy, wrapper

    with switches.override(mode="off"):
        assert lazy._install() == []
    assert wrapper.KEY not in hooks_free
    assert "SparseAttnIndexer" in hooks_free


def test_another_holder_keeps_its_hook(hooks_free: dict[str, Any]) -> None:
    from dsafuse.vllm import lazy, wrapper

    class Theirs:
        pass

    hooks_free[wrapper.KEY] = Theirs
    hooks_free["SparseAttnIndexer"] = Theirs
    problems = lazy._install()
    assert hooks_free[wrapper.KEY] is Theirs
    assert hooks_free["SparseAttnIndexer"] is Theirs
    assert len(problems) == 2
    assert all("already held by" in problem and "Theirs, another plugin" in problem for problem in problems)
    del hooks_free[wrapper.KEY], hooks_free["SparseAttnIndexer"]


def test_a_difference_installs_nothing_and_strict_raises(
    hooks_free: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm import lazy

    changed = Symbol("vllm.config", "NoSuchClass")
    monkeypatch.setattr(host, "WRAPPER_SYMBOLS", {"0.32": (*host.WRAPPER_SYMBOLS["0.32"], changed)})
    monkeypatch.setattr(host, "CPU_SYMBOLS", (*host.CPU_SYMBOLS, changed))
    problems = lazy._install()
    assert [problem.split(":")[0] for problem in problems] == ["CPU support", "fused preparation"]
    assert all("vllm.config.NoSuchClass is missing" in problem for problem in problems)
    assert not hooks_free
    with switches.override(mode="strict"), pytest.raises(RuntimeError, match="NoSuchClass is missing"):
        lazy._install()


def test_the_model_classes_are_vllms_own() -> None:
    from vllm.model_executor.models import deepseek_v2

    from dsafuse.vllm import lazy

    assert lazy.DeepseekV32ForCausalLM is deepseek_v2.DeepseekV3ForCausalLM
    assert lazy.GlmMoeDsaForCausalLM is deepseek_v2.GlmMoeDsaForCausalLM
    # What follows the "@" keeps vLLM's cache of facts about classes apart by version.
    assert getattr(lazy, "GlmMoeDsaForCausalLM@0.32.0+cpu") is deepseek_v2.GlmMoeDsaForCausalLM
    with pytest.raises(AttributeError):
        lazy.LlamaForCausalLM  # noqa: B018


def test_an_untested_vllm_installs_nothing_and_strict_raises(
    hooks_free: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsafuse.vllm import lazy

    monkeypatch.setattr(host, "row", lambda: "vLLM must be another")
    assert lazy._install() == ["vLLM must be another"]
    assert not hooks_free
    with switches.override(mode="strict"), pytest.raises(RuntimeError, match="not installed: vLLM must be another"):
        lazy._install()


def test_the_row_says_which_hook(hooks_free: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from dsafuse.vllm import lazy

    monkeypatch.setattr(host, "row", lambda: host.Tested("0.32", "cuda", "model", "nothing"))
    monkeypatch.setitem(lazy._PATHS, "model", lambda: ["asked"])
    assert lazy._install() == ["fused preparation: asked"]
    assert not hooks_free


HOOKS = {
    "docs/vllm.md": ("What each hook touches", ("vllm/wrapper.py", "vllm/cpu/install.py")),
    "docs/vllm-model-path.md": ("What is touched", ("vllm/model_path/__init__.py",)),
}


@pytest.mark.parametrize("page", HOOKS)
def test_each_hook_names_the_page_that_says_what_it_touches_why_and_when_it_can_go(page: str) -> None:
    heading, hooks = HOOKS[page]
    root = Path(host.__file__).parents[3]
    section = (root / page).read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    header, _, *rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert header == ["touched", "how", "why", "when it can go"]
    source = "".join(path.read_text() for path in Path(host.__file__).parent.rglob("*.py"))
    for row in rows:
        assert len(row) == 4
        assert all(row)
        for name in re.findall(r"`([\w.]+)`", row[0]):
            assert name.split(".")[-1] in source
    for hook in hooks:
        assert f'docs/{Path(page).name}, "{heading}"' in (root / "src/dsafuse" / hook).read_text()

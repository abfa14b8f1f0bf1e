"""The house: who may import whom, what importing costs, and a few things that must not be written where.

Every import statement counts, those inside functions and under TYPE_CHECKING too. The two links that are
resolved by name at the first dispatch (dispatch -> providers, split -> its steps) are strings on purpose, as are
Triton's names in `private`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "dsafuse"
TESTS = ROOT / "tests"

LEAVES = {"numerics", "layouts", "target", "models", "switches", "memory", "installed", "private"}
BASE = {"dispatch", "registry", "ops"} | LEAVES
ROOMS: dict[str, tuple[set[str], set[str]]] = {
    # room: (rooms it may import, libraries it may import)
    **{leaf: (LEAVES, {"torch"}) for leaf in LEAVES},
    "stopping": (set(), set()),
    "dispatch": (LEAVES, {"torch"}),
    "known": ({"private"}, {"torch"}),
    "entry": ({"known"} | LEAVES, {"torch"}),
    "registry": ({"dispatch", "entry", "known"} | LEAVES, {"torch"}),
    "ops": (BASE, {"torch"}),
    "torch_steps": (BASE, {"torch"}),
    "split": ({"torch_steps"} | BASE, {"torch"}),
    "kernels": ({"kernels"} | BASE, {"torch", "triton", "numpy"}),
    "warming": (BASE, {"torch"}),
    "__init__": ({"ops", "warming"}, set()),
    "check": ({"check", "split", "torch_steps", "warming", "__init__"} | BASE, {"torch", "triton", "matplotlib"}),
    "serving": ({"serving", "check", "stopping", "__init__"} | BASE, {"torch", "matplotlib"}),
    "vllm": (
        {"vllm", "warming", "stopping", "__init__"} | BASE,
        {"torch", "vllm", "safetensors", "tokenizers", "transformers", "rich"},
    ),
    "accuracy": (
        {"accuracy", "serving", "vllm", "check", "stopping", "__init__"} | BASE,
        {"torch", "transformers", "tokenizers", "safetensors", "datasets", "pyarrow"},
    ),
    "cli": (
        {"cli", "accuracy", "check", "serving", "vllm", "stopping", "__init__"} | BASE,
        {"torch", "typer", "rich", "click"},
    ),
    "__main__": ({"cli"}, {"typer"}),
}


def modules(root: Path = SOURCE) -> Iterator[tuple[str, Path]]:
    """(room, file) of every module."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        yield (relative.parts[0] if len(relative.parts) > 1 else path.stem), path


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Every imported name, dotted and absolute; `from a import b` counts as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def wrong_arrows(room: str, source: str, package: tuple[str, ...] = ("dsafuse",)) -> list[str]:
    """What a module of `room` imports and should not."""
    rooms, libraries = ROOMS[room]
    wrong = []
    for name in imports(ast.parse(source), package):
        top, *rest = name.split(".")
        if top == "dsafuse":
            inside = SOURCE / rest[0] if rest else SOURCE
            to = rest[0] if rest and (inside.is_dir() or inside.with_suffix(".py").exists()) else "__init__"
            if to != room and to not in rooms:
                wrong.append(f"{room} -> {to} ({name})")
        elif top not in sys.stdlib_module_names and top not in libraries:
            wrong.append(f"{room} -> {top}")
    return wrong


@pytest.mark.parametrize(("room", "path"), list(modules()), ids=lambda v: v if isinstance(v, str) else v.stem)
def test_imports_follow_the_arrows_of_the_house(room: str, path: Path) -> None:
    assert room in ROOMS, f"a new room deserves a line of purpose and its arrows: {room}"
    package = ("dsafuse", *path.relative_to(SOURCE).parent.parts)
    assert wrong_arrows(room, path.read_text(), package) == []


@pytest.mark.parametrize(
    ("room", "source", "wrong"),
    [
        ("ops", "import triton", ["ops -> triton"]),
        ("ops", "from dsafuse.kernels import launch", ["ops -> kernels (dsafuse.kernels.launch)"]),
        ("ops", "from dsafuse import kernels", ["ops -> kernels (dsafuse.kernels)"]),
        ("ops", "def f():\n    import dsafuse.check.verify", ["ops -> check (dsafuse.check.verify)"]),
        ("ops", "from ..kernels import tiles", ["ops -> kernels (dsafuse.kernels.tiles)"]),
        ("numerics", "import numpy", ["numerics -> numpy"]),
        ("numerics", "from dsafuse.registry import OPS", ["numerics -> registry (dsafuse.registry.OPS)"]),
        ("dispatch", "from dsafuse import registry", ["dispatch -> registry (dsafuse.registry)"]),
        ("check", "import vllm", ["check -> vllm"]),
        ("check", "from dsafuse.vllm import plan", ["check -> vllm (dsafuse.vllm.plan)"]),
        ("vllm", "from dsafuse.check import cases", ["vllm -> check (dsafuse.check.cases)"]),
        ("kernels", "from dsafuse import split", ["kernels -> split (dsafuse.split)"]),
        ("kernels", "import dsafuse", ["kernels -> __init__ (dsafuse)"]),
        ("ops", "import torch, math\nfrom dsafuse.layouts import FLAT", []),
        ("vllm", "from vllm.config import VllmConfig\nfrom dsafuse import prepare", []),
    ],
)
def test_an_arrow_that_points_the_wrong_way_is_seen(room: str, source: str, wrong: list[str]) -> None:
    package = ("dsafuse", room) if (SOURCE / room).is_dir() else ("dsafuse",)
    assert wrong_arrows(room, source, package) == wrong


def shown_rooms(document: str) -> dict[str, tuple[set[str], set[str]]]:
    """The map of the house that a document draws, as `ROOMS` has it."""
    groups = {"leaves": LEAVES, "base": BASE}
    cells = r"^\| *([^|]+?) *\|[^|]+\| *([^|]*?) *\| *([^|]*?) *\|$"
    found = {}
    for room, rooms, libraries in re.findall(cells, document.replace("`", ""), re.MULTILINE)[2:]:
        names = set(filter(None, rooms.split(", ")))
        found[room] = (
            set().union(*(groups.get(name, {name}) for name in names)),
            set(filter(None, libraries.split(", "))),
        )
    return found


def test_the_map_of_the_house_has_every_room_and_its_arrows() -> None:
    shown = shown_rooms((ROOT / "CONTRIBUTING.md").read_text())
    assert {room: (rooms | {room}, libraries) for room, (rooms, libraries) in shown.items()} == {
        room: (rooms | {room}, libraries) for room, (rooms, libraries) in ROOMS.items()
    }
    assert set([*shown][: [*shown].index("dispatch")]) == LEAVES


def imported_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


HEAVY = {"triton", "vllm", "typer", "rich", "transformers", "numpy.testing"}


def test_importing_the_library_imports_torch_and_nothing_else_of_weight() -> None:
    bare = imported_by("import torch")
    after = imported_by("import dsafuse; assert callable(dsafuse.fused_qk_rope_concat_and_cache_mla)")
    stdlib = set(sys.stdlib_module_names)
    added = {name for name in after - bare - stdlib if not name.startswith("_")}
    assert added == {"dsafuse"}
    assert not after & HEAVY


def test_the_test_above_would_see_an_import() -> None:
    assert "triton" in imported_by("import dsafuse.kernels.tiles")


def test_a_call_on_cpu_needs_no_triton() -> None:
    call = "import sys; sys.modules['triton'] = None; from tests.inputs import OPS, call_of"
    imported_by(f"{call}\nfor op in OPS: OPS[op](**call_of(op))")


def test_importing_the_library_reads_no_environment_variable_and_logs_nothing() -> None:
    code = "import os; os.environ['DSAFUSE_MODE'] = 'nonsense'; import dsafuse"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


# bans


def test_whether_a_package_is_there_is_asked_in_one_room() -> None:
    """Python's own answer is an exception where something without a spec stands in for the package."""
    assert [path.name for _, path in modules() if "find_spec" in path.read_text()] == ["installed.py"]


def test_the_fp8_maxima_are_written_in_numerics_alone() -> None:
    for _, path in modules():
        if path.name != "numerics.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and type(node.value) in (int, float):
                    assert node.value not in (448, 224), f"{path}:{node.lineno}"


def test_no_function_of_ours_takes_a_bool_for_a_rope_style() -> None:
    for room, path in modules():
        if room in ("kernels", "vllm"):  # a constexpr inside kernels, vLLM's own argument at the bridge
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg):
                assert "neox" not in node.arg, f"{path}:{node.lineno}"


def skips_in_handlers(source: str) -> list[int]:
    """Lines of an except block that turn a failure into a skip or an expected failure."""
    return [
        call.lineno
        for handler in ast.walk(ast.parse(source))
        if isinstance(handler, ast.ExceptHandler)
        for call in ast.walk(handler)
        if isinstance(call, ast.Attribute) and call.attr in ("skip", "xfail", "importorskip", "SkipTest", "skipTest")
    ]


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_no_failure_turns_into_a_skip(path: Path) -> None:
    assert skips_in_handlers(path.read_text()) == []


def test_a_skip_inside_except_is_seen() -> None:
    assert skips_in_handlers("try:\n    f()\nexcept OSError:\n    pytest.skip('no')") == [4]


def test_no_test_is_retried_or_expected_to_fail() -> None:
    for path in sorted(TESTS.rglob("*.py")):
        marks = re.findall(r"^@pytest\.mark\.(?:flaky|xfail)", path.read_text(), re.MULTILINE)
        assert marks == [], path


def test_the_version_is_stated_once() -> None:
    pattern = re.compile(r"""^\s*(?:__)?version(?:__)?\s*=\s*["']\d""", re.MULTILINE)
    files = [*SOURCE.rglob("*.py"), ROOT / "pyproject.toml"]
    assert [path.name for path in files if pattern.search(path.read_text())] == ["__init__.py"]

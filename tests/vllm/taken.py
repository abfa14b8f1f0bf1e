"""What code takes from vLLM, read from its syntax: by names that it imports, and attributes of these."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

OURS, THEIRS, OPS = "dsafuse.vllm", "vllm", "torch.ops.vllm."


@cache
def _file(name: str) -> Path | None:
    """Where a module's source is. None is imported for that."""
    package = find_spec(name.split(".")[0])
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parents[1].joinpath(*name.split("."))
    return next((each for each in (path / "__init__.py", path.with_suffix(".py")) if each.is_file()), None)


class Module:
    """One module of ours: what its names stand for, and which statement defines each."""

    def __init__(self, name: str) -> None:
        file = _file(name)
        assert file is not None
        self.name, self.body = name, ast.parse(file.read_text()).body
        self.names: dict[str, str] = {}
        self.defined: dict[str, ast.stmt] = {}
        for node in ast.walk(ast.Module(self.body, [])):
            self.names.update(_imported(node))
        for statement in self.body:
            for target in _targets(statement):
                self.defined[target] = statement
                self.names.setdefault(target, f"{name}.{target}")

    def runs_at_import(self) -> Iterator[ast.stmt]:
        """Every statement but functions; of classes and constants, too, what stands in them runs then."""
        return (each for each in self.body if not isinstance(each, ast.FunctionDef))


def _imported(node: ast.AST) -> dict[str, str]:
    if isinstance(node, ast.Import):
        return {each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0]
                for each in node.names}  # fmt: skip
    if isinstance(node, ast.ImportFrom):
        return {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return {}


def _targets(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [each.id for target in statement.targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


def _chains(node: ast.AST) -> Iterator[str]:
    """Dotted names in a statement, each as long as it goes; `importlib.import_module("m").n` is m.n."""
    parts: list[str] = []
    root: ast.AST = node
    while isinstance(root, ast.Attribute):
        parts.append(root.attr)
        root = root.value
    match root:
        case ast.Name(id=name):
            yield ".".join([name, *reversed(parts)])
        case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name))]):
            yield "=" + ".".join([name, *reversed(parts)])
        case _:
            for child in ast.iter_child_nodes(root):
                yield from _chains(child)


def of(*roots: str, without: tuple[str, ...] = ()) -> set[str]:
    """Dotted paths into vLLM, its torch ops too, of all that modules of ours reach.

    What a module does when it is imported counts, and of its functions those that something reached names. Not seen:
    attributes of values that vLLM returns, and names that are put together as strings.

    Args:
        roots: modules, all of whose names are reached, or one of them as "module:name".
        without: such names, not to be looked into.
    """
    taken: set[str] = set()
    modules: dict[str, Module] = {}
    done = {tuple(each.split(":")) for each in without}

    def module(name: str) -> Module:
        if name not in modules:
            modules[name] = Module(name)
            for statement in modules[name].runs_at_import():
                # A constant may name functions (tables do): these count where the constant is used.
                read(modules[name], statement, follow=not _targets(statement))
        return modules[name]

    def define(name: str, what: str) -> None:
        if (name, what) not in done and what in module(name).defined:
            done.add((name, what))
            read(module(name), module(name).defined[what])

    def go(path: str) -> None:
        """A path that begins in ours: its modules are imported, the name behind them is used."""
        parts = path.split(".")
        here = max(n for n in range(1, len(parts) + 1) if _file(".".join(parts[:n])))
        name = ".".join(parts[:here])
        if name.startswith(OURS) and here < len(parts):
            define(name, parts[here])
        elif name.startswith(OURS):
            module(name)

    def read(holder: Module, statement: ast.stmt, follow: bool = True) -> None:
        for node in ast.walk(statement):
            for path in _imported(node).values():
                visit(path, follow=True)
        for chain in _chains(statement):
            first, _, rest = chain.removeprefix("=").partition(".")
            start = first if chain.startswith("=") else holder.names.get(first)
            if start is not None:
                visit(f"{start}.{rest}" if rest else start, follow)

    def visit(path: str, follow: bool) -> None:
        if path.split(".")[0] == THEIRS or path.startswith(OPS):
            taken.add(path)
        elif path.startswith(OURS) and follow:
            go(path)

    for root in roots:
        name, _, what = root.partition(":")
        for each in (what,) if what else module(name).defined:
            define(name, each)
    return taken

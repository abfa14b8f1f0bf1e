"""torch's and Triton's private names: each may go; the ops still give the oracle's bytes, and say what they lack."""

from __future__ import annotations

import ast
import logging
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.fx.experimental.proxy_tensor import make_fx

from dsafuse import dispatch, known, private, split, torch_steps, warm_up
from dsafuse.dispatch import NoProviderError
from dsafuse.kernels import launch
from dsafuse.private import NAMES, Name
from dsafuse.target import Target
from tests.cli.test_cli import call as called
from tests.cli.test_cli import call_json
from tests.inputs import EVERY_OP, assert_same_memory, call_of, mla_call, run, twin
from tests.kernels.test_launch import forget
from tests.test_imports import SOURCE, imports

EVERY_NAME = pytest.mark.parametrize("name", NAMES, ids=lambda name: name.name)


def names_of(*uses: str) -> pytest.MarkDecorator:
    chosen = [name for name in NAMES if {*uses} & {*name.uses}]
    return pytest.mark.parametrize("name", chosen, ids=lambda name: name.name)


class Lacking:
    """A module, or what a name in it stands for, in which one dotted name is not."""

    def __init__(self, found: Any, name: str) -> None:
        self._found, self._rest = found, name.partition(".")[2]
        self._first = self._rest.partition(".")[0]

    def __getattr__(self, attribute: str) -> Any:
        if attribute == self._rest:
            raise AttributeError(attribute)
        found = getattr(self._found, attribute)
        return Lacking(found, self._rest) if attribute == self._first else found


@pytest.fixture
def take(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Name], None]]:
    """Take a name away: one of torch's from dsafuse alone, since torch's own functions need it, too."""
    resolve = pkgutil.resolve_name

    def taken(name: Name) -> None:
        owner, _, attribute = name.name.rpartition(".")
        if owner.startswith("torch"):
            lacking = Lacking(torch, name.name)
            monkeypatch.setattr(known, "torch", lacking)
            monkeypatch.setattr(
                pkgutil,
                "resolve_name",
                lambda asked: (
                    attrgetter(asked.removeprefix("torch."))(lacking) if asked == name.name else resolve(asked)
                ),
            )
        else:
            found = resolve(owner)
            if isinstance(found, type):
                found = next(each for each in found.__mro__ if attribute in vars(each))
            monkeypatch.delattr(found, attribute)
        fresh()

    fresh()
    yield taken
    monkeypatch.undo()
    fresh()


def fresh() -> None:
    private.why_not.cache_clear()
    dispatch.choose.cache_clear()
    forget()


class Provider(SimpleNamespace):
    """The split chain, which remembers calls as the kernels do, and declines to launch one again."""

    def __init__(self) -> None:
        self.remembered = 0

    def run(self, *args: Any) -> None:
        split.run(*args)

    def again(self, op: str, arguments: dict[str, Any], config: Any, _places: object) -> Callable[..., bool]:
        self.remembered += 1
        split.run(op, arguments, config)
        return lambda _: False


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    made = Provider()
    for op in EVERY_OP.values():
        monkeypatch.setattr(op, "_provider", lambda *_: made)
    return made


def out_form(op: str) -> Callable[..., None]:
    form = getattr(torch.ops.dsafuse, EVERY_OP[op].name)
    return lambda **call: form(**{name: value for name, value in call.items() if name != "q_dtype"})


@pytest.mark.parametrize("op", EVERY_OP)
@pytest.mark.parametrize("name", [None, *NAMES], ids=lambda name: name.name if name else "nothing")
def test_without_a_name_the_ops_give_the_oracles_bytes(
    op: str, name: Name | None, take: Callable[[Name], None], provider: Provider
) -> None:
    call = call_of(op, 3)
    want = run(op, "oracle", call)
    if name is not None:
        take(name)
    remembers = name is None or "known calls" not in name.uses
    for form in (EVERY_OP[op], out_form(op)):
        for _ in range(2):
            mine = twin(call)
            form(**mine)
            assert_same_memory(mine, want)
    assert provider.remembered == (4 if remembers else 0)


@pytest.mark.parametrize("op", EVERY_OP)
@names_of("watching")
def test_a_torch_that_does_not_tell_who_watches_sees_every_op(
    op: str, name: Name, take: Callable[[Name], None]
) -> None:
    call = call_of(op, 2) | dict.fromkeys(EVERY_OP[op].output_names)
    first = next(n for n, value in call.items() if isinstance(value, torch.Tensor))
    take(name)
    with pytest.raises(RuntimeError, match=f"Batching rule not implemented for dsafuse::{EVERY_OP[op].name}"):
        torch.func.vmap(lambda x: EVERY_OP[op](**call | {first: x}))(torch.stack([call[first]] * 2))
    graph = make_fx(lambda x: EVERY_OP[op](**call | {first: x}))(call[first]).graph
    assert sum(EVERY_OP[op].name in str(node.target) for node in graph.nodes) == 1


@pytest.mark.parametrize("op", EVERY_OP)
@names_of("watching")
def test_a_torch_that_does_not_tell_who_watches_takes_tensors_of_inference_mode(
    op: str, name: Name, take: Callable[[Name], None]
) -> None:
    call = call_of(op, 2)
    want = run(op, "oracle", call)
    take(name)
    with torch.inference_mode():
        inside, outside = twin(call), twin(call)
        EVERY_OP[op](**inside)
    EVERY_OP[op](**outside)
    assert any(value.is_inference() for value in outside.values() if isinstance(value, torch.Tensor))
    for done in (inside, outside):
        assert_same_memory(done, want)


@names_of("kernels", "interpreter")
def test_without_a_name_that_kernels_need_their_providers_say_so(name: Name, take: Callable[[Name], None]) -> None:
    take(name)
    with pytest.raises(
        NoProviderError, match=f"interpreter: rejected: .* missing, or not what it was, .*{name.name}"
    ) as raised:
        EVERY_OP["mla"].with_provider("interpreter")(**mla_call(2))
    for version in (f"triton {triton.__version__}", *private.TESTED):
        assert version in str(raised.value)
    if "kernels" in name.uses:
        _, config = EVERY_OP["mla"].resolve(**mla_call(2))
        decision = EVERY_OP["mla"].choose(config, Target.named("sm_90"), here=True)
        assert name.name in decision.trace[0].reason
        assert decision.provider == "split"
        assert split.steps_for(torch.device("cuda", 0)) is torch_steps
    else:
        assert launch.why_not_here() is None


@names_of("warm_up")
def test_without_a_name_that_it_needs_warm_up_says_so(name: Name, take: Callable[[Name], None]) -> None:
    take(name)
    with pytest.raises(RuntimeError, match=f"warm_up: missing, or not what it was, .*{name.name}"):
        warm_up("deepseek-v3.2", "sm_90", ops=["prepare_qk"], kv_layouts=["fp8"], queries=["fp8"])


@EVERY_NAME
def test_what_is_missing_is_logged_once_and_listed_for_every_use(
    name: Name, take: Callable[[Name], None], caplog: pytest.LogCaptureFixture
) -> None:
    assert private.lacks() == []
    take(name)
    listed = private.lacks()
    assert [reason.partition(":")[0] for reason in listed] == [use for use in private.WITHOUT if use in name.uses]
    for reason in listed:
        assert name.name in reason
        assert caplog.records == []
        with caplog.at_level(logging.WARNING, "dsafuse"):
            assert {private.why_not(reason.partition(":")[0]) for _ in range(3)} == {reason}
        assert [record.getMessage() for record in caplog.records] == [reason]
        caplog.clear()


@pytest.mark.parametrize("name", ["torch._C._dynamo.guards.TensorGuards", "triton.runtime.interpreter._patch_lang"])
def test_env_prints_what_is_missing(name: str, take: Callable[[Name], None]) -> None:
    assert call_json("env")[1]["missing_names"] == []
    take(next(each for each in NAMES if each.name == name))
    (reason,) = call_json("env")[1]["missing_names"]
    assert name in reason
    assert f"missing_names: {reason}" in called("env").stdout


def test_where_triton_is_not_installed_its_names_are_not_missed() -> None:
    code = "import sys; sys.modules['triton'] = None; from dsafuse import private; print(private.lacks())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


OTHERS: dict[str, tuple[str, Any]] = {
    "a guard that tells no strides": (
        "torch._C._dynamo.guards.TensorGuards",
        lambda *_, **__: SimpleNamespace(check=lambda tensor: tensor.numel() == 6),
    ),
    "a guard with other arguments": ("torch._C._dynamo.guards.TensorGuards", lambda *_: None),
    "a function that takes an argument": ("torch._C._len_torch_dispatch_stack", lambda key: 0),
    "a run with other arguments": ("triton.compiler.CompiledKernel.__getitem__", lambda self, grid: self.run(grid)),
    "a run without source": ("triton.compiler.CompiledKernel.__getitem__", len),
    "a run that is called": ("triton.compiler.CompiledKernel.run", lambda self: None),
    "hooks that are no list": ("triton.knobs.runtime.launch_enter_hook.calls", None),
    "a driver without streams": ("triton.backends.driver.GPUDriver.__init__", lambda self: None),
}


@pytest.mark.parametrize(("name", "other"), OTHERS.values(), ids=OTHERS)
def test_a_name_of_something_else_counts_as_missing(
    name: str, other: Any, take: Callable[[Name], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (row,) = (each for each in NAMES if each.name == name)
    assert row.is_here()
    owner, _, attribute = name.rpartition(".")
    monkeypatch.setattr(pkgutil.resolve_name(owner), attribute, other)
    assert not row.is_here()


def test_these_versions_were_tested() -> None:
    """Fails on a new torch or Triton: see "Add a torch or Triton version" in CONTRIBUTING.md."""
    found = (".".join(module.__version__.split(".")[:2]) for module in (torch, triton))
    assert "torch {} with Triton {}".format(*found) in private.TESTED


def private_names(source: str) -> set[str]:
    """Every dotted name of torch's or Triton's with an underscore before a part of it, as this code reaches it."""
    tree = ast.parse(source)
    aliases = {name.rpartition(".")[2]: name for name in imports(tree, ("dsafuse",))} | {"torch": "torch"}
    found = {name for name in aliases.values() if name.startswith(("torch.", "triton."))}
    for node in ast.walk(tree):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and aliases.get(node.id, "").startswith(("torch", "triton")):
            found.add(".".join([aliases[node.id], *parts]))
    return {name for name in found if any(part.startswith("_") and part[:2] != "__" for part in name.split("."))}


def test_every_private_name_that_the_library_uses_has_a_row() -> None:
    listed = [name.name.replace("driver:", "") for name in NAMES]
    used = {"torch._C._cuda_getDevice"} if torch.backends.cuda.is_built() else set()
    for path in (*SOURCE.glob("*.py"), *SOURCE.glob("kernels/*.py"), *SOURCE.glob("ops/*.py")):
        if path.name != "private.py":
            used |= private_names(path.read_text())
    unlisted = {name for name in used if not any(f"{row}.".startswith(f"{name}.") for row in listed)}
    assert not unlisted
    assert {name.rpartition(".")[2] for name in used} >= {"_len_torch_dispatch_stack", "_active", "_sum_combine"}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C._f()", {"torch._C._f", "torch._C"}),
        ("from triton.runtime import driver\ndriver._active", {"triton.runtime.driver._active"}),
        ("from triton.language.standard import _f", {"triton.language.standard._f"}),
        ("import torch\ntorch.Tensor.__torch_dispatch__\nself._x", set()),
    ],
)
def test_a_private_name_is_seen(source: str, found: set[str]) -> None:
    assert private_names(source) == found

"""An op: an oracle, its argument checks, its providers, and its face in `torch.ops.dsafuse`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import update_wrapper
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, get_args, get_type_hints

import torch

from dsafuse import private, switches
from dsafuse.dispatch import PROVIDERS, Decision, NoProviderError, OpConfig, choose
from dsafuse.entry import Entry
from dsafuse.known import is_watched
from dsafuse.memory import Tensors, expect_disjoint, expect_disjoint_views
from dsafuse.target import Target

P = ParamSpec("P")
R = TypeVar("R")

Arguments = dict[str, Any]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_LIBRARY = torch.library.Library("dsafuse", "DEF")

OPS: dict[str, Op[..., Any]] = {}
"""Every op by name."""


def is_cache(name: str) -> bool:
    """Whether an argument is a paged cache. Two may share a storage; whatever else is written has memory of its own."""
    return name.endswith("kv_cache")


class Op(Generic[P, R]):
    """A callable op. The decorated function's body is its oracle; calling the op runs the chosen provider.

    Args:
        oracle: the reference, with the public signature. It gets resolved arguments: outputs present, names valid.
        resolve: checks the arguments, fills in outputs and defaults in place, and returns the static config.
        outputs: shapes and dtypes of the outputs, from arguments that need not be checked yet.
        mutates: arguments written in place besides the outputs.
        derived: arguments that the out-form does not have, since its outputs tell them.
        index_prefix: what its names of the indexer's arguments begin with.
    """

    def __init__(
        self,
        oracle: Callable[P, R],
        *,
        resolve: Callable[[Arguments], OpConfig],
        outputs: Callable[[Arguments], Shapes],
        output_names: tuple[str, ...],
        mutates: tuple[str, ...],
        derived: tuple[str, ...],
        index_prefix: str = "",
    ) -> None:
        update_wrapper(self, oracle)
        self.name = oracle.__name__
        self.oracle = oracle
        self.index_prefix = index_prefix
        self.output_names = output_names
        self.mutates = mutates
        self.caches = tuple(filter(is_cache, mutates))
        self.own_memory = (*output_names, *(name for name in mutates if name not in self.caches))
        self._resolve = resolve
        self._outputs = outputs
        self._derived = derived
        self._signature = inspect.signature(oracle)
        parameters = tuple(self._signature.parameters.values())
        hints = get_type_hints(oracle)
        self._tensors = tuple(p.name for p in parameters if hints[p.name] in (torch.Tensor, torch.Tensor | None))
        self._optional = tuple(name for name in self._tensors if hints[name] is not torch.Tensor)
        self._needed = tuple(name for name in self._tensors if name not in self._optional)
        self._required = self._needed[0]
        self._entry = self._entry_of(parameters, Op._check_and_run, method=True)
        # Python looks for __call__ on the type: an op with parameters of its own has a type of its own.
        self.__class__ = type(type(self).__name__, (type(self),), {"__call__": self._entry.call})
        self._register(parameters, hints)
        OPS[self.name] = self

    if TYPE_CHECKING:

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
            """Check, choose a provider, run it, and return the outputs."""

    def __reduce__(self) -> str:
        return self.name  # pickled and copied as the one object of that name

    def resolve(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Arguments, OpConfig]:
        """The checked arguments, outputs allocated, and the static config that gates look at."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = dict(bound.arguments)
        return arguments, self._checked(arguments)

    def choose(self, config: OpConfig, target: Target, *, here: bool = False) -> Decision:
        """Who would run this op on `target`, and why. Raises nothing: the answer may be nobody."""
        return choose(self.name, config, target, switches.current(), here=here)

    def with_provider(self, name: str) -> Callable[P, R]:
        """This op bound to one provider, or to its oracle under the name "oracle"; for proof and timing.

        The returned function raises NoProviderError where that provider declines.
        """
        if name == "oracle":
            return self._call_oracle

        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with switches.override(mode="auto", ops=frozenset(switches.FAMILIES), provider=name):
                return self(*args, **kwargs)

        return call

    def _call_oracle(self, *args: P.args, **kwargs: P.kwargs) -> R:
        arguments, _ = self.resolve(*args, **kwargs)
        call: Callable[..., R] = self.oracle
        with _writable(arguments):
            return call(**arguments)

    def _provider(self, config: OpConfig, device: torch.device) -> ModuleType:
        decision = self.choose(config, Target.of(device), here=True)
        if decision.provider is None:
            raise NoProviderError(decision)
        return PROVIDERS[decision.provider].load()

    def _entry_of(
        self, parameters: Sequence[inspect.Parameter], otherwise: Callable[..., Any], **options: bool
    ) -> Entry:
        names = [p.name for p in parameters]
        tensors, optional = ([n for n in of if n in names] for of in (self._tensors, self._optional))
        return Entry(self.name, parameters, tensors, optional, self._required, otherwise, **options)

    def _check_and_run(self, **arguments: Any) -> R:
        """What a call does that is not known."""
        if _is_watched(arguments):
            return self._trace(arguments)
        self._run(arguments, self._entry)
        return self._result(arguments)

    def _checked(self, arguments: Arguments) -> OpConfig:
        """The config of arguments that are right each for itself, and whose outputs have memory of their own."""
        config = self._resolve(arguments)
        if arguments[self._required].device.type != "meta":  # which has no memory
            expect_disjoint(*self._written_and_read(arguments))
        return config

    def _written_and_read(self, arguments: Arguments) -> tuple[Tensors, Tensors]:
        tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        written = {name: tensors.pop(name) for name in (*self.own_memory, *self.caches) if name in tensors}
        return written, tensors

    def _run(self, arguments: Arguments, entry: Entry) -> None:
        """Check, fill in, choose a provider and run it; the call is known from then on if it can be launched again."""
        given = arguments.copy()
        config = self._checked(arguments)
        module = self._provider(config, arguments[self._required].device)
        if not hasattr(module, "again") or private.why_not("known calls"):
            with _writable(arguments):
                module.run(self.name, arguments, config)
            return
        entry.remember(
            given,
            arguments,
            self.output_names,
            lambda places: module.again(self.name, arguments, config, places),
        )

    def _expect_needed(self, arguments: Arguments) -> None:
        """The shapes of outputs are made of these, before anything is checked."""
        for name in self._needed:
            if arguments[name] is None:
                raise TypeError(f"{name}: got NoneType, expected a torch.Tensor")

    def _result(self, arguments: Arguments) -> R:
        results = tuple(arguments[name] for name in self.output_names)
        return results[0] if len(results) == 1 else results  # type: ignore[return-value]

    def _trace(self, arguments: Arguments) -> R:
        """Call the out-form; what only the Python function knows is checked here, the rest when it runs."""
        self._expect_needed(arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: got a tensor that requires grad, expected none (the ops have no backward)")
        if any(arguments[name] is not None for name in self._derived):
            for name, (_, dtype) in self._outputs(arguments).items():
                if arguments[name] is not None and arguments[name].dtype != dtype:
                    raise TypeError(f"{name}: got {arguments[name].dtype}, expected {dtype}")
        for name, (shape, dtype) in self._outputs(arguments).items():
            if arguments[name] is None:
                arguments[name] = arguments[self._required].new_empty(shape, dtype=dtype)
        out = {name: value for name, value in arguments.items() if name not in self._derived}
        getattr(torch.ops.dsafuse, self.name)(**out)
        return self._result(arguments)

    def _register(self, parameters: Sequence[inspect.Parameter], hints: dict[str, Any]) -> None:
        """Define the out-form: outputs that always exist required, nothing returned, derived arguments gone."""
        returned = get_args(hints["return"]) or (hints["return"],)
        required = {name for name, hint in zip(self.output_names, returned) if hint is torch.Tensor}
        out_parameters = [
            p.replace(
                annotation=torch.Tensor if p.name in required else hints[p.name],
                default=p.empty if p.name in required else p.default,
            )
            for p in parameters
            if p.name not in self._derived
        ]

        def check_and_run(**given: Any) -> None:
            arguments = {name: given.get(name) for name in self._signature.parameters}
            self._expect_needed(arguments)
            for name in self._outputs(arguments):
                if arguments[name] is None:
                    raise ValueError(f"{name}: got None, expected a tensor to write to (torch.ops.dsafuse.{self.name})")
            self._run(arguments, out_entry)

        out_entry = self._out_entry = self._entry_of(out_parameters, check_and_run, silent=True)
        call, intern = out_entry.call, sys.intern

        def out_form(*args: Any, **kwargs: Any) -> None:
            # torch makes the names anew at every call, and Python binds the ones that source code has far faster.
            call(*args, **{intern(name): value for name, value in kwargs.items()})

        signature = inspect.Signature(out_parameters, return_annotation=None)

        def fake(*args: Any, **kwargs: Any) -> None:
            # It returns nothing, so that there is no shape to work out. But this is the last to see who shares memory:
            # torch.compile may run the op on a copy of each output, and lose what one leaves in another.
            # Scales are not looked at: one that nothing needs may lie anywhere. Of one that is needed, and overlaps, a
            # backend reads what it was before the call.
            arguments = signature.bind(*args, **kwargs).arguments
            seen = {name: value for name, value in arguments.items() if name not in ("q_scale", "k_scale")}
            expect_disjoint_views(*self._written_and_read(seen))

        out_form.__signature__ = signature  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(out_form, mutates_args=(*self.mutates, *self.output_names))
        _LIBRARY.define(self.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(self.name, out_form, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsafuse::{self.name}", fake, lib=_LIBRARY)


def _is_watched(arguments: Arguments) -> bool:
    """Whether torch, or a tensor of a class of its own, has to see the op."""
    return (
        torch.compiler.is_compiling()
        or is_watched()
        or any(_has_own_dispatch(value) for value in arguments.values() if isinstance(value, torch.Tensor))
    )


def _writable(arguments: Arguments) -> AbstractContextManager[Any]:
    """torch's own steps write a tensor that was made in inference mode there alone; a kernel writes it anywhere."""
    tensors = (value for value in arguments.values() if isinstance(value, torch.Tensor))
    return torch.inference_mode() if any(tensor.is_inference() for tensor in tensors) else nullcontext()


def _has_own_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def fused_op(
    *,
    resolve: Callable[[Arguments], OpConfig],
    outputs: Callable[[Arguments], Shapes],
    output_names: tuple[str, ...],
    mutates: tuple[str, ...] = ("kv_cache",),
    derived: tuple[str, ...] = (),
    index_prefix: str = "",
) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of an oracle."""

    def decorate(oracle: Callable[P, R]) -> Op[P, R]:
        return Op(
            oracle,
            resolve=resolve,
            outputs=outputs,
            output_names=output_names,
            mutates=mutates,
            derived=derived,
            index_prefix=index_prefix,
        )

    return decorate

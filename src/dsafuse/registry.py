"""An op: an oracle, its argument checks, its providers, and its face in `torch.ops.dsafuse`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from operator import itemgetter
from types import ModuleType
from typing import Any, Generic, ParamSpec, TypeVar, get_args, get_type_hints

import torch

from dsafuse import switches
from dsafuse.dispatch import PROVIDERS, Decision, NoProviderError, OpConfig, choose
from dsafuse.known import KnownCalls
from dsafuse.target import Target

P = ParamSpec("P")
R = TypeVar("R")

Arguments = dict[str, Any]
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

_LIBRARY = torch.library.Library("dsafuse", "DEF")

OPS: dict[str, Op[..., Any]] = {}
"""Every op by name."""


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
        # Caches may share one storage, block by block; whatever else is written needs memory of its own.
        self.own_memory = (*output_names, *(name for name in mutates if not name.endswith("kv_cache")))
        self._resolve = resolve
        self._outputs = outputs
        self._derived = derived
        self._signature = inspect.signature(oracle)
        parameters = self._signature.parameters.values()
        self._names = tuple(p.name for p in parameters)
        self._name_set = frozenset(self._names)
        self._positional = tuple(p.name for p in parameters if p.kind is not p.KEYWORD_ONLY)
        self._defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
        hints = get_type_hints(oracle)
        tensor_names = [p.name for p in parameters if hints[p.name] in (torch.Tensor, torch.Tensor | None)]
        self._tensors_of = itemgetter(*tensor_names)
        self._values_of = itemgetter(*(p.name for p in parameters if p.name not in tensor_names))
        self._known = KnownCalls()
        self._register()
        OPS[self.name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Check, choose a provider, run it, and return the outputs."""
        arguments = self._bind(args, kwargs)
        if torch.compiler.is_compiling():
            return self._trace(arguments)
        given = self._tensors_of(arguments)
        tensors = [tensor for tensor in given if tensor is not None]
        first = given[0]
        key = None
        if isinstance(first, torch.Tensor) and first.is_cuda:
            absent = tuple([tensor is None for tensor in given])
            values = self._values_of(arguments)
            key = (first.shape[:1], absent, values, switches.current(), torch.is_grad_enabled())
            if self._known.launch(key, tensors, arguments):
                return self._result(arguments)
        config = self._resolve(arguments)
        module = self._provider(config, arguments[self._names[0]].device)
        module.run(self.name, arguments, config)
        # 0.0 and -0.0 are one key, and not one number.
        if key is not None and hasattr(module, "again") and 0.0 not in values:
            made = [
                name for name in self.output_names if arguments[name] is not None and not _holds(given, arguments[name])
            ]
            allocate = self._allocate if made else None
            self._known.remember(key, tensors, module.again(self.name, arguments, config, allocate))
        return self._result(arguments)

    def __reduce__(self) -> str:
        return self.name  # pickled and copied as the one object of that name

    def resolve(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Arguments, OpConfig]:
        """The checked arguments, outputs allocated, and the static config that gates look at."""
        arguments = self._bind(args, kwargs)
        return arguments, self._resolve(arguments)

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
        return call(**arguments)

    def _provider(self, config: OpConfig, device: torch.device) -> ModuleType:
        decision = self.choose(config, Target.of(device), here=True)
        if decision.provider is None:
            raise NoProviderError(decision)
        return PROVIDERS[decision.provider].load()

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        # inspect.Signature.bind costs more than a launch; it is asked only to word the error.
        arguments = {**self._defaults, **dict(zip(self._positional, args)), **kwargs}
        repeated = any(name in kwargs for name in self._positional[: len(args)])
        if arguments.keys() != self._name_set or repeated or len(args) > len(self._positional):
            self._signature.bind(*args, **kwargs)
        return arguments

    def _result(self, arguments: Arguments) -> R:
        results = tuple(arguments[name] for name in self.output_names)
        return results[0] if len(results) == 1 else results  # type: ignore[return-value]

    def _allocate(self, arguments: Arguments) -> None:
        """Make the outputs that are not given, without checks."""
        first = arguments[self._names[0]]
        for name, (shape, dtype) in self._outputs(arguments).items():
            if arguments[name] is None:
                arguments[name] = first.new_empty(shape, dtype=dtype)

    def _trace(self, arguments: Arguments) -> R:
        """Call the out-form; what only the Python function knows is checked here, the rest when it runs."""
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"{name}: got a tensor that requires grad, expected none (the ops have no backward)")
        if any(arguments[name] is not None for name in self._derived):
            for name, (_, dtype) in self._outputs(arguments).items():
                if arguments[name] is not None and arguments[name].dtype != dtype:
                    raise TypeError(f"{name}: got {arguments[name].dtype}, expected {dtype}")
        self._allocate(arguments)
        out = {name: value for name, value in arguments.items() if name not in self._derived}
        getattr(torch.ops.dsafuse, self.name)(**out)
        return self._result(arguments)

    def _register(self) -> None:
        """Define the out-form: outputs that always exist required, nothing returned, derived arguments gone."""
        hints = get_type_hints(self.oracle)
        returned = get_args(hints["return"]) or (hints["return"],)
        required = {name for name, hint in zip(self.output_names, returned) if hint is torch.Tensor}
        parameters = [
            p.replace(
                annotation=torch.Tensor if p.name in required else hints[p.name],
                default=p.empty if p.name in required else p.default,
            )
            for p in self._signature.parameters.values()
            if p.name not in self._derived
        ]

        def out_form(*args: Any, **kwargs: Any) -> None:
            arguments = self._bind(args, kwargs)
            for name in self._outputs(arguments):
                if arguments[name] is None:
                    raise ValueError(f"{name}: got None, expected a tensor to write to (torch.ops.dsafuse.{self.name})")
            call: Callable[..., R] = self
            call(**arguments)

        out_form.__signature__ = inspect.Signature(parameters, return_annotation=None)  # type: ignore[attr-defined]
        schema = torch.library.infer_schema(out_form, mutates_args=(*self.mutates, *self.output_names))
        _LIBRARY.define(self.name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(self.name, out_form, "CompositeExplicitAutograd")
        torch.library.register_fake(f"dsafuse::{self.name}", _fake, lib=_LIBRARY)


def _holds(tensors: tuple[Any, ...], tensor: torch.Tensor) -> bool:
    return any(each is tensor for each in tensors)


def _fake(*_args: Any, **_kwargs: Any) -> None:
    """The out-form returns nothing, so that there is no shape to work out."""


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

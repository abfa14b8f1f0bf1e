"""An op's entry: a function with the op's own parameters, so that Python binds them, which looks for a known call.

It is written out for each op as a person would write it by hand: a function that takes `*args, **kwargs` and sorts
them out itself costs as much as the rest of a known call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter
from typing import Any

import torch

from dsafuse import switches
from dsafuse.known import KnownCalls, Launch, known_call

# What it uses is handed to it, and is no global: torch.compile looks for globals in the module of that name.
_SOURCE = """\
def written({used}):
    def {name}({header}):
        if not is_compiling():
            try:
                _key = {key}
                _calls = find(_key, ())
            except (AttributeError, TypeError):  # no tensor, or a value without a hash: the check says which
                _calls = ()
            for _call in _calls:
                _result = _call(_key, ({tensors},))
                if _result is not None:
                    return {result}
        return otherwise({arguments})

    def key_of({header}):
        return {key}

    return {name}, key_of
"""


class Entry:
    """A function that an op is called through, and the calls that it knows.

    Args:
        name: of the function.
        parameters: of the function.
        tensors: those of them that are tensors.
        optional: those of the tensors that may be None. Which of them are is part of a call's key.
        counted: a tensor that is always there. How much it holds is part of a call's key, for the number of tokens.
        otherwise: what a call that isn't known is left to: it gets the arguments by name.
        method: whether the function, and `otherwise`, take `self` first.
        silent: whether the function returns nothing.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[Parameter],
        tensors: Sequence[str],
        optional: Sequence[str],
        counted: str,
        otherwise: Callable[..., Any],
        *,
        method: bool = False,
        silent: bool = False,
    ) -> None:
        self._known = KnownCalls()
        self._tensors = tuple(tensors)
        self._parameters = tuple(p.name for p in parameters)
        self._own = (None,) if method else ()
        values = [p.name for p in parameters if p.name not in tensors]
        key = ["id(overriding())", f"{counted}.numel()", *(f"{each} is None" for each in optional), *values]
        arguments = [f"{p.name}={p.name}" for p in parameters]
        used: dict[str, Any] = {
            "is_compiling": torch.compiler.is_dynamo_compiling,
            "overriding": switches.overriding,
            "find": self._known.find,
            "otherwise": otherwise,
            **{f"default_{p.name}": p.default for p in parameters if p.default is not p.empty},
        }
        source = _SOURCE.format(
            used=", ".join(used),
            name=name,
            header=", ".join([*(["self"] if method else []), *_header(parameters)]),
            key=f"({', '.join(key)})",
            tensors=", ".join(tensors),
            result="None" if silent else "_result",
            arguments=", ".join([*(["self"] if method else []), *arguments]),
        )
        module: dict[str, Any] = {"__name__": __name__}
        exec(compile(source, f"<entry of {name}>", "exec"), module)
        self.call: Callable[..., Any]
        self.call, self._key_of = module["written"](**used)
        self.call.__qualname__ = name  # Python's own errors have it

    def remember(
        self,
        given: dict[str, Any],
        settled: dict[str, Any],
        results: Sequence[str],
        launch_of: Callable[[dict[str, int]], Launch],
    ) -> None:
        """Run a call that has been checked, and know it from then on.

        Args:
            given: its arguments as the caller passed them.
            settled: the same after the check, outputs made.
            results: what the op returns.
            launch_of: launches it, and makes the launch for others, from the index that each tensor's address has among
                all addresses.
        """
        tensors = self._tensors
        call = known_call(
            tuple(given[name] for name in tensors),
            tuple(settled[name] for name in tensors),
            [tensors.index(name) for name in results],
            lambda places: launch_of({tensors[i]: place for i, place in places.items()}),
        )
        self._known.remember(self._key_of(*self._own, **{name: given[name] for name in self._parameters}), call)


def _header(parameters: Sequence[Parameter]) -> list[str]:
    words = [p.name if p.default is p.empty else f"{p.name}=default_{p.name}" for p in parameters]
    keyword_only = [i for i, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY]
    return [*words[: keyword_only[0]], "*", *words[keyword_only[0] :]] if keyword_only else words

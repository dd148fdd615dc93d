"""The options that every collective has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypedDict, TypeVar

from unisono.errors import BadArgument, unknown_option

_MEANINGS = {
    "algorithm": "a name as ring, tree:radix=4 or ring+direct, or a file of yours",
    "async_op": "True: return a Work at once, whose wait() returns the result",
    "timeout_s": "seconds until CollectiveTimeout; comm.timeout_s if not given",
    "reproducible": "True: the bits of a reduction depend on its inputs alone",
    "label": "what the call is for; ranks must agree on it, and errors name it",
    "codec": "as fp8 or fp8@hosts: floats are sent as shorter codes",
    "error_bound": "refuse the call if the codec's relative error may be above it",
    "stream": "the CUDA stream of the call, for CUDA arrays",
}
"""What each option of a collective means, for help()."""
_ELSEWHERE = {
    "timeout": "timeout_s",
    "algo": "algorithm",
    "alg": "algorithm",
    "blocking": "async_op",
    "asynchronous": "async_op",
    "deterministic": "reproducible",
    "name": "label",
    "compression": "codec",
    "src": "the rank that has or gets the data is root=",
    "dst": "the rank that has or gets the data is root=",
    "reduce_op": "the reduction is op=, where a collective has one",
    "reduction": "the reduction is op=, where a collective has one",
    "group": "groups are communicators: comm.split(color) makes one",
    "output": "the array for the result is out=",
}
"""Names that other libraries have, and ours."""
_Class = TypeVar("_Class", bound=type)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Options(TypedDict, total=False):
    """The options that every collective has, for type checkers."""

    algorithm: str | None
    async_op: bool
    timeout_s: float | None
    reproducible: bool
    label: str
    codec: Any
    coded: str | None
    error_bound: float | None
    stream: Any


CallKey = tuple[int, Any, Any, Any, int, Options]
"""The arguments of a plain call: collective, x, out, op, root and options."""


class _OptionFields(NamedTuple):
    algorithm: str | None = None
    async_op: bool = False
    timeout_s: float | None = None
    reproducible: bool = False
    label: str = ""
    codec: Any = None
    coded: str | None = None
    error_bound: float | None = None
    stream: Any = None


class CallOptions(_OptionFields):
    """The same options with their defaults."""

    __slots__ = ()

    if not TYPE_CHECKING:  # the fields are those of the base class

        def __new__(cls, *values: Any, **how: Any) -> CallOptions:
            """Name the option that is meant by one that does not exist."""
            try:
                return super().__new__(cls, *values, **how)
            except TypeError:
                for name in how:
                    if name not in cls._fields:
                        raise unknown_option(name, _MEANINGS, _ELSEWHERE) from None
                raise

    def refuse_stream(self, where: str) -> None:
        """Raise BadArgument if a stream is given for arrays of the host."""
        if self.stream is not None:
            raise BadArgument(f"{where}: stream= is for CUDA arrays only")

    def refuse_codec_options(self, where: str) -> None:
        """Raise BadArgument if there are codec options without a codec."""
        if self.coded is not None or self.error_bound is not None:
            raise BadArgument(
                f"{where}: coded= and error_bound= need a codec, as in codec='fp8'"
            )

    def first_beyond(self, *allowed: str) -> str:
        """The first option that is set and is not one of `allowed`; "" if none is."""
        plain = CallOptions()
        return next(
            (
                name
                for name, value in self._asdict().items()
                if name not in allowed and value != getattr(plain, name)
            ),
            "",
        )

    def refuse_codec(self, where: str, instead: str) -> None:
        """Raise BadArgument if a codec is given where none is possible."""
        if self.codec is not None:
            raise BadArgument(f"{where}: this call takes no codec; {instead}")


def with_option_help(cls: _Class) -> _Class:
    """Add the options to the docstring of every method that takes them."""
    width = max(map(len, _MEANINGS))
    text = "\n".join(f"    {name:<{width}}  {_MEANINGS[name]}" for name in _MEANINGS)
    for method in vars(cls).values():
        if inspect.isfunction(method) and (
            method.__annotations__.get("how") == "Unpack[Options]"
        ):
            method.__doc__ = f"{inspect.getdoc(method)}\n\nOptions:\n{text}\n"
    return cls


def names_options(
    elsewhere: Mapping[str, str],
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A decorator: an option that a function lacks is an error with the one meant."""

    def decorate(
        function: Callable[_Arguments, _Result],
    ) -> Callable[_Arguments, _Result]:
        known = list(inspect.signature(function).parameters)

        @functools.wraps(function)
        def call(*args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
            for name in options:
                if name not in known:
                    raise unknown_option(name, known, elsewhere)
            return function(*args, **options)

        return call

    return decorate

"""How algorithms are written, found and named.

An algorithm is a function decorated with `@algorithm`. Its file is its name, the
function is the collective: `ring.all_reduce` in ring.py. It takes the number of ranks
and keyword parameters with defaults, and either yields steps or returns a schedule made
of others. The root, where there is one, is rank 0, and schedules are turned to other
roots; unless the function takes `root`, and so finds the way from there itself.

Nothing is registered. The library looks into every module of this folder, into packages
that announce themselves by the entry point group `unisono.algorithms`, and into files
given by path; whatever is there is found, with no other edit.

People name an algorithm as `ring`, with parameters as `tree:radix=4` or `ring:both`,
and a pair as `ring+recursive_doubling`: any two whose collectives join to the one
wanted.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from unisono.algorithms.advice import Advice
from unisono.errors import (
    BadArgument,
    UnisonoError,
    UnsupportedWorld,
    unknown,
    whole_number,
)
from unisono.schedule.collective import COLLECTIVES, Collective
from unisono.schedule.schedule import Schedule
from unisono.schedule.step import Step

FROM_FILE = "_unisono_files_"
"""How the names of modules begin that were loaded from a user's file."""

MOST = 1 << 31
"""The largest number that a parameter may be."""

Param = int | bool | str
Body = Callable[..., Iterable[Step]]
Count = int | Callable[..., int]


@dataclass(frozen=True, eq=False)
class Requirement:
    """A condition on the number of ranks, with the words for it."""

    words: str
    holds: Callable[..., bool]


power_of_two = Requirement("a power of two", lambda n, **_: n & (n - 1) == 0)
"""For `@algorithm(needs=power_of_two)`: n is 1, 2, 4, 8 and so on."""


@dataclass(frozen=True, eq=False)
class Algorithm:
    """One algorithm for one collective: calling it gives the schedule for n ranks."""

    body: Body
    chunks: Count | None = None
    temporaries: Count = 0
    needs: Requirement | None = None
    alike: str = ""
    also: Sequence[Mapping[str, Param]] = ()
    least: Mapping[str, int] = field(default_factory=dict)
    params: Mapping[str, Param] = field(init=False)

    def __post_init__(self) -> None:
        """Read the parameters off the function's signature, or raise BadArgument."""
        if not inspect.isfunction(self.body) or (
            inspect.iscoroutinefunction(self.body)
            or inspect.isasyncgenfunction(self.body)
        ):
            raise BadArgument(f"@algorithm is for plain functions, not {self.body!r}")
        if self.body.__name__ not in COLLECTIVES:
            wrong = unknown("collective", self.body.__name__, COLLECTIVES)
            raise BadArgument(
                f"{self.where}: an algorithm is named after its collective; {wrong}"
            )
        if self.needs is not None and not isinstance(self.needs, Requirement):
            raise BadArgument(
                f"{self.where}: needs= takes a Requirement, as power_of_two is"
            )
        taken = list(inspect.signature(self.body).parameters.values())
        if not taken or taken[0].name != "n":
            raise BadArgument(f"{self.where}: the first parameter must be n")
        for p in taken[1:]:
            if not isinstance(p.default, int | bool | str):
                raise BadArgument(
                    f"{self.where}: parameter {p.name!r} needs a default: a number, a "
                    "truth value or a text"
                )
        params = {p.name: p.default for p in taken[1:] if p.name != "root"}
        object.__setattr__(self, "params", params)
        given = [self.least, *self.also] if isinstance(self.also, Sequence) else [0]
        for some in given:
            if not isinstance(some, Mapping) or not set(some) <= set(self.params):
                raise BadArgument(
                    f"{self.where}: also= is a list of parameters with values, least= "
                    "parameters with their least values"
                )

    @cached_property
    def where(self) -> str:
        """The file and line of the function, for messages."""
        code = self.body.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    @property
    def module(self) -> str:
        """The full name of the module it stands in."""
        return self.body.__module__

    @cached_property
    def name(self) -> str:
        """The name of the file."""
        if self.module == "__main__" or self.module.startswith(FROM_FILE):
            return Path(self.body.__code__.co_filename).stem
        return self.module.rpartition(".")[2]

    @property
    def collective(self) -> Collective:
        """The collective it is for."""
        return COLLECTIVES[self.body.__name__]

    @property
    def about(self) -> str:
        """The first line of the function's docstring."""
        return (self.body.__doc__ or "").strip().partition("\n")[0]

    @property
    def story(self) -> str:
        """The module's docstring: the idea, the cost, the paper."""
        module = sys.modules.get(self.module)
        return inspect.cleandoc(module.__doc__ or "") if module else ""

    @property
    def paper(self) -> str:
        """Where the idea comes from: the story's last paragraph, if it names a year."""
        last = " ".join(self.story.rpartition("\n\n")[2].split())
        return last if re.search(r"\b(19|20)[0-9]{2}\b", last) else ""

    @property
    def advice(self) -> Advice | None:
        """When it is good and when it is not: the module's ADVICE, if it has one."""
        found = getattr(sys.modules.get(self.module), "ADVICE", None)
        return found if isinstance(found, Advice) else None

    @property
    def variants(self) -> list[dict[str, Param]]:
        """Parameters worth listing: the defaults, each switch turned, and `also`."""
        variants: list[dict[str, Param]] = [{}]
        variants += [{k: not v} for k, v in self.params.items() if isinstance(v, bool)]
        return [*variants, *(dict(more) for more in self.also)]

    def supports(self, n: int, **params: Param) -> bool:
        """Whether there is a schedule for n ranks, as far as declared."""
        return self.needs is None or self.needs.holds(n, **params)

    def spelled(self, **params: Param) -> str:
        """The name with those parameters that are not the default, as one types it."""
        spelled = [
            key
            if value is True
            else f"{key}={str(value).lower() if value is False else value}"
            for key, value in params.items()
            if value != self.params[key]
        ]
        return ":".join([self.name, ",".join(spelled)]) if spelled else self.name

    @cached_property
    def takes_root(self) -> bool:
        """Whether its function takes the root; otherwise its schedule is relabelled."""
        return "root" in inspect.signature(self.body).parameters

    def __call__(self, n: int, **params: Param) -> Schedule:
        """The schedule for n ranks; its root, if it has one, is rank 0."""
        return self.rooted_at(0, n, params)

    def rooted_at(self, root: int, n: int, params: Mapping[str, Param]) -> Schedule:
        """The schedule for n ranks and that root."""
        n, root = whole_number("n", n), whole_number("root", root)
        if n < 1:
            raise BadArgument(f"n = {n}: a world has at least one rank")
        if not 0 <= root < n:
            raise BadArgument(f"root = {root}: ranks are 0..{n - 1}")
        if root and not self.collective.rooted:
            raise BadArgument(f"{self.collective.name} has no root")
        made = self._made(n, params, root if self.takes_root else 0)
        return made.rooted_at(root)

    def _made(self, n: int, params: Mapping[str, Param], root: int) -> Schedule:
        params = self._checked(params)
        full = {**self.params, **params}
        with _AlgorithmErrors(self):
            supported = bool(self.supports(n, **full))
        if not supported:
            assert self.needs is not None
            others = f" (try {self.alike})" if self.alike else ""
            raise UnsupportedWorld(
                f"{self.name}.{self.collective.name} needs {self.needs.words}, got {n} "
                f"ranks{others}",
                n=n,
            )
        name = self.spelled(**params)
        arguments = {**full, "root": root} if self.takes_root else full
        if not inspect.isgeneratorfunction(self.body):
            return self._adopted(n, name, arguments)
        default = self.collective.default_chunks(n)
        with _AlgorithmErrors(self):
            chunks = default if self.chunks is None else _count(self.chunks, n, full)
            temporaries = _count(self.temporaries, n, full)
            return Schedule(
                self.collective,
                n,
                chunks,
                lambda: self._steps(lambda: self.body(n, **arguments)),
                name=name,
                root=root,
                num_temporaries=temporaries,
                about=self.about,
                paper=self.paper,
            )

    def _checked(self, params: Mapping[str, Param]) -> dict[str, Param]:
        checked = dict(params)
        for key, value in params.items():
            if key not in self.params:
                if not self.params:
                    raise BadArgument(
                        f"{self.name}.{self.collective.name} has no parameters"
                    )
                raise unknown(f"parameter of {self.name}", key, self.params)
            default = self.params[key]
            if type(default) is int and not isinstance(value, str):
                value = checked[key] = whole_number(key, value)
            if type(value) is not type(default):
                raise BadArgument(
                    f"{self.name}: {key} must be {_KINDS[type(default)]}, got {value!r}"
                )
            if isinstance(value, int) and abs(value) > MOST:
                raise BadArgument(f"{self.name}: {key} = {value}: at most {MOST}")
            if isinstance(value, int) and value < self.least.get(key, value):
                raise BadArgument(
                    f"{self.name}: {key} = {value}: at least {self.least[key]}"
                )
        return checked

    def _adopted(self, n: int, name: str, params: Mapping[str, Param]) -> Schedule:
        """A schedule that the function made of others, under our name."""
        with _AlgorithmErrors(self):
            made = self.body(n, **params)
        if not isinstance(made, Schedule):
            raise BadArgument(
                f"{self.where}: expected a schedule, or steps yielded one by one, got "
                f"a {type(made).__name__}"
            )
        if made.collective is not self.collective or made.n != n:
            raise BadArgument(
                f"{self.where}: gave {made.collective.name} for {made.n} ranks, "
                f"expected {self.collective.name} for {n}"
            )
        steps = made.make
        return made.but(
            name=name,
            about=self.about,
            paper=self.paper,
            make=lambda: self._steps(steps),
        )

    def _steps(self, make: Callable[[], Iterable[Step]]) -> Iterator[Step]:
        """The steps, each looked at, and with accidents blamed on the algorithm."""
        with _AlgorithmErrors(self):
            for step in make():
                if not isinstance(step, Step):
                    raise BadArgument(
                        f"{self.where}: yielded {step!r}; expected a step, made by "
                        "copy(...) or reduce(...)"
                    )
                yield step


_KINDS = {int: "a whole number", bool: "true or false", str: "a text"}


def _count(count: Count, n: int, params: Mapping[str, Param]) -> int:
    value = count(n, **params) if callable(count) else count
    return whole_number("number of chunks", value)


class _AlgorithmErrors:
    """Turn an accident inside an algorithm into an error with its own line."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> None:
        file = self.algorithm.body.__code__.co_filename
        ours = self.algorithm.module.startswith("unisono.")
        if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
            return
        where = line_in(file, error) or self.algorithm.where
        if type(error) is BadArgument and not ours:
            if not str(error).startswith(file):  # once is enough
                raise BadArgument(f"{where}: {error}") from error
        elif not isinstance(error, UnisonoError):
            raise BadArgument(f"{where}: {type(error).__name__}: {error}") from error


def line_in(file: str, error: BaseException) -> str:
    """The last line of `file` that `error` passed through, as file:line."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename == file
    ]
    return f"{file}:{frames[-1].lineno}" if frames else ""


@overload
def algorithm(body: Body, /) -> Algorithm: ...
@overload
def algorithm(
    *,
    chunks: Count | None = None,
    temporaries: Count = 0,
    needs: Requirement | None = None,
    alike: str = "",
    also: Sequence[Mapping[str, Param]] = (),
    least: Mapping[str, int] = ...,
) -> Callable[[Body], Algorithm]: ...
def algorithm(body: Body | None = None, /, **more: Any) -> Any:
    """Make a function of n an algorithm for the collective it is named after.

    `chunks` and `temporaries` are numbers, or functions of n and the parameters;
    without `chunks` every rank has one (every pair of ranks, in all_to_all; one in all,
    in broadcast and reduce). `needs` is a condition on n, and `alike` what to try
    instead. `also` names parameters that are worth a line of their own in tables, and
    `least` the smallest values that parameters may have.
    """
    if body is not None:
        return Algorithm(body)
    return lambda function: Algorithm(function, **more)

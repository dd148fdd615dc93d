"""A schedule: a contract, and the steps that should fulfil it.

The steps are generated anew each time the schedule is iterated, so a ring of ten
thousand ranks takes no more memory than one of its steps. Everything else one may ask
of a schedule (is it correct, what does it cost, do all ranks end with the same bits,
how does it look) is another reader of the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

from unisono.errors import BadArgument, UnisonoError, whole_number
from unisono.schedule.collective import Collective, Contract, Ints
from unisono.schedule.consistency import Consistency, consistency
from unisono.schedule.cost import Cost, cost
from unisono.schedule.dependencies import Dependencies, dependencies
from unisono.schedule.step import Step
from unisono.schedule.transform import mirror, relabel, split, then
from unisono.schedule.verify import Proof, verify

VIEWS: dict[str, Callable[[Schedule], str]] = {}
"""Functions that draw schedules, by format. `unisono.view`, a layer above, fills this
in when imported, so that a schedule shows in a notebook without this layer knowing
how."""


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """Steps for `n` ranks that should fulfil `collective`; `verify` proves it.

    `name` is the algorithm with its parameters, as one would type it; `about` and
    `paper` describe what it does and where it comes from. Chunks are numbered
    0..num_chunks-1; temporaries, if any, after them.
    """

    collective: Collective
    n: int
    num_chunks: int
    make: Callable[[], Iterable[Step]] = field(compare=False)
    name: str = "unnamed"
    root: int = 0
    num_temporaries: int = 0
    about: str = ""
    paper: str = ""

    def __post_init__(self) -> None:
        """Refuse a contract that has no meaning, before any step is made."""
        if not callable(self.make):
            raise BadArgument(f"make = {self.make!r}: expected a function giving steps")
        for name in ("n", "root", "num_chunks"):
            object.__setattr__(self, name, getattr(self.contract, name))
        temporaries = whole_number("num_temporaries", self.num_temporaries)
        object.__setattr__(self, "num_temporaries", temporaries)
        if temporaries < 0:
            raise BadArgument(f"num_temporaries = {temporaries}: cannot be negative")

    @cached_property
    def contract(self) -> Contract:
        """The collective made concrete for this world."""
        return Contract(self.collective, self.n, self.root, self.num_chunks)

    @property
    def num_slots(self) -> int:
        """Chunks and temporaries together: the slots of one rank."""
        return self.num_chunks + self.num_temporaries

    def __iter__(self) -> Iterator[Step]:
        """The steps, generated anew; a step without transfers is none.

        Those of no phase get the collective's name.
        """
        for step in self.make():
            if not isinstance(step, Step):
                raise BadArgument(f"{self.title}: {step!r} is not a step")
            if len(step):
                yield step if step.phase else step.named(self.collective.name)

    @cached_property
    def num_steps(self) -> int:
        """How many steps there are, counted by running through them."""
        return sum(1 for _ in self)

    @property
    def title(self) -> str:
        """As in "all_reduce by ring, n=5"."""
        where = f", root {self.root}" if self.collective.rooted and self.root else ""
        return f"{self.collective.name} by {self.name}, n={self.n}{where}"

    def __repr__(self) -> str:
        """One line, for debuggers and lists."""
        chunks = "1 chunk" if self.num_chunks == 1 else f"{self.num_chunks} chunks"
        return f"<Schedule: {self.title}, {chunks}>"

    def __str__(self) -> str:
        """The steps drawn as text, once `unisono.view` has been imported."""
        return self._drawn("text") or repr(self)

    def _repr_svg_(self) -> str | None:
        """The picture that a notebook shows, once `unisono.view` has been imported."""
        return self._drawn("svg")

    def _drawn(self, kind: str) -> str | None:
        """The view of that kind, if there is one and it can draw this schedule."""
        try:
            return VIEWS[kind](self) if kind in VIEWS else None
        except UnisonoError:
            return None

    def but(self, **changes: object) -> Self:
        """The same schedule with some attributes changed."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def verify(self, *, seed: int | None = None) -> Proof:
        """Prove the contract kept, or raise ScheduleError with a counter-example."""
        return verify(self, seed=seed)

    def cost(self, count: int | Sequence[int] | Ints | None = None) -> Cost:
        """Rounds, bytes and reductions, derived by running through the steps.

        Without `count` sizes are fractions of one rank's buffer; with it (a number, or
        one per share if they are uneven) they are elements, or bytes if it counts
        bytes.
        """
        return cost(self, count)

    def consistency(self) -> Consistency:
        """Whether all ranks end with the same bits, and how deep the sums are."""
        return consistency(self)

    def dependencies(self) -> Dependencies:
        """Which transfers must wait for which, by what they read and write."""
        return dependencies(self)

    def then(self, after: Schedule) -> Schedule:
        """This schedule and afterwards another: see `transform.then`."""
        return then(self, after)

    def mirror(self) -> Schedule:
        """This schedule reversed: see `transform.mirror`."""
        return mirror(self)

    def split(self, segments: int) -> Schedule:
        """This schedule pipelined over `segments` parts: see `transform.split`."""
        return split(self, segments)

    def relabel(self, ranks: Sequence[int] | Ints) -> Schedule:
        """This schedule with rank r replaced by `ranks[r]`: see `transform.relabel`."""
        return relabel(self, ranks)

    def rooted_at(self, root: int) -> Schedule:
        """The same schedule, relabelled so that `root` is the root."""
        root = whole_number("root", root)
        if not 0 <= root < self.n:
            raise BadArgument(f"root = {root}: ranks are 0..{self.n - 1}")
        if not self.collective.rooted or root == self.root:
            return self
        turned = [(r - self.root + root) % self.n for r in range(self.n)]
        return self.relabel(turned)


def from_steps(
    collective: Collective,
    n: int,
    steps: Sequence[Step],
    *,
    num_chunks: int,
    **more: object,
) -> Schedule:
    """A schedule of given steps, for example those read from a file."""
    fixed = tuple(steps)
    return Schedule(collective, n, num_chunks, lambda: fixed, **more)  # type: ignore[arg-type]

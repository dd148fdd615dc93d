"""What is measured: one collective on a number of elements, and its amounts.

The size S and the factor of the bus bandwidth are those of nccl-tests, so that figures
can be compared: S is the whole array where each rank holds a part of it, and
the bus bandwidth is S / time × factor, which says how busy a link is whatever n is.

The floor is the time of the memory traffic alone: all that the ranks of a direct
schedule read and write, at the bandwidth at which as many processes copy arrays,
measured in the same run. With S bytes, n ranks and k = S / n, a rank on ordinary
buffers must stage what others read in a window (a read and a write), and on buffers
from `comm.empty` need not:

                    shared buffers                    more when staged
    all_reduce      2 S: reads and writes all of it   4 (S - k) + 2 k - S
    reduce_scatter  (n + 1) k                         2 (n - 1) k
    all_gather      2 (n - 1) k                       2 k
    all_to_all      2 (n - 1) k                       2 (n - 1) k

So two ranks of an all_reduce move 2 S each on shared and 4 S on ordinary buffers. With
a root the same bytes are counted over all ranks, and the root may be the busiest one.
Windows stay in caches while arrays do not, so a staged share can exceed one.

Ranks that share a GPU read and write one memory, and buffers are used in place. There
the share is that of the bytes that all ranks of a direct schedule read and write:

    all_reduce                        2 n S
    reduce_scatter, reduce            (n + 1) S: all inputs and one result
    all_gather, broadcast             2 n S; in place 2 (n - 1) S
    all_to_all                        2 n S
    gather, scatter                   2 S; in place 2 (n - 1) k

What stays in the GPU's cache is not read twice, so this share can exceed one as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from unisono.dtypes import DTYPES, OPS
from unisono.errors import BadArgument, unknown

COLLECTIVES = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    *("reduce", "gather", "scatter", "send_recv", "barrier"),
)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
ON_DEVICES = tuple(c for c in COLLECTIVES if c not in ("send_recv", "barrier"))
"""Those that CUDA arrays have."""
_WHOLE = ("all_reduce", "broadcast", "reduce", "send_recv", "barrier")

OUT_OF_PLACE, IN_PLACE = "out_of_place", "in_place"

TYPE_NAMES = {
    "float16": "half",
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
"""Types that have another name in nccl-tests; `-d` takes both."""


@dataclass(frozen=True)
class Case:
    """One row of the table; `count` is per rank where each rank holds a part."""

    collective: str
    n: int
    count: int
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0

    @property
    def parts(self) -> int:
        """Of how many counts the array consists."""
        return 1 if self.collective in _WHOLE else self.n

    @property
    def size(self) -> int:
        """The bytes S of the array."""
        return self.count * self.parts * DTYPES[self.dtype].itemsize

    @property
    def factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth."""
        if self.collective == "all_reduce":
            return 2 * (self.n - 1) / self.n
        return 1.0 if self.parts == 1 else (self.n - 1) / self.n

    @property
    def redop(self) -> str:
        """The reduction as nccl-tests names it, "none" if there is none."""
        if self.collective not in REDUCING:
            return "none"
        return "avg" if self.op == "mean" else self.op

    @property
    def shown_root(self) -> int:
        """The root, or -1 for collectives that have none."""
        return self.root if self.collective in ROOTED else -1

    @property
    def compared(self) -> str:
        """Where the peers are measured: in place where all of them can."""
        in_place = ("all_reduce", "broadcast", "reduce")
        return IN_PLACE if self.collective in in_place else OUT_OF_PLACE

    @property
    def places(self) -> tuple[str, ...]:
        """Where unisono can be measured."""
        only_out = ("all_to_all", "send_recv", "barrier")
        return (OUT_OF_PLACE, *(() if self.collective in only_out else (IN_PLACE,)))

    def lengths(self, rank: int) -> tuple[int, int]:
        """How many elements the rank gives and gets."""
        whole, part = self.count * self.parts, self.count
        at_root = whole if rank == self.root else 0
        return {
            "all_gather": (part, whole),
            "reduce_scatter": (whole, part),
            "gather": (part, at_root),
            "scatter": (at_root, part),
            "reduce": (whole, at_root),
        }.get(self.collective, (whole, whole))

    def plain(self) -> dict[str, Any]:
        """The case as it is sent to the workers."""
        return asdict(self)


def case_of(
    collective: str, n: int, nbytes: int, dtype: str, op: str, root: int
) -> Case:
    """The case whose array is nearest to `nbytes`, and not empty."""
    if collective == "barrier":
        return Case(collective, n, 0, dtype, op, root)
    one = Case(collective, n, 1, dtype, op, root)
    return Case(collective, n, max(1, nbytes // one.size), dtype, op, root)


def dtype_named(name: str) -> str:
    """Our name of a type, given by our name or that of nccl-tests."""
    ours = {theirs: mine for mine, theirs in TYPE_NAMES.items()}
    dtype = ours.get(name, name)
    if dtype not in DTYPES:
        raise unknown("element type", name, [*DTYPES, *ours])
    return dtype


def op_named(name: str) -> str:
    """Our name of a reduction, given by our name or that of nccl-tests."""
    op = "mean" if name == "avg" else name
    if op not in OPS:
        raise unknown("reduction", name, OPS)
    return op


def collectives_named(text: str) -> list[str]:
    """The collectives that "all", a name, or several with commas between mean."""
    if text == "all":
        return list(COLLECTIVES)
    for name in text.split(","):
        if name not in COLLECTIVES:
            raise unknown("collective", name, COLLECTIVES)
    return text.split(",")


def sizes_between(
    first: int, last: int, *, factor: int = 2, step: int = 0
) -> list[int]:
    """The sizes from `first` to `last`, multiplied by a factor or moved by a step."""
    if last < first:
        raise BadArgument(f"-b {first} -e {last}: sizes ascend, so the end is larger")
    if step < 0 or (step == 0 and factor < 2):
        raise BadArgument(f"-f {factor}: sizes must grow, so the factor is at least 2")
    if first < 1 and not step:
        raise BadArgument(f"-b {first}: 0 times a factor stays 0; begin with 1 or more")
    sizes = [first]
    while (further := sizes[-1] + step if step else sizes[-1] * factor) <= last:
        sizes.append(further)
        if len(sizes) > 10_000:
            raise BadArgument("more than 10,000 sizes; take a larger step")
    return sizes


def least_bytes(case: Case, *, shared: bool) -> tuple[float, float]:
    """What memory must move: bytes over all ranks, and those of the busiest rank.

    The module's docstring derives them. Collectives that move nothing have no floor.
    """
    n, s = case.n, float(case.size)
    k = s / n
    staged = 0 if shared else 1
    if case.collective == "all_reduce":
        each = 2 * s + staged * (4 * (s - k) + 2 * k - s)
        return n * each, each
    if case.collective == "reduce_scatter":
        each = (n + 1) * k + staged * 2 * (n - 1) * k
        return n * each, each
    if case.collective == "all_gather":
        each = 2 * (n - 1) * k + staged * 2 * k
        return n * each, each
    if case.collective == "all_to_all":
        each = (1 + staged) * 2 * (n - 1) * k
        return n * each, each
    return _least_with_root(case, staged)


def device_bytes(case: Case, place: str) -> float:
    """What ranks that share a GPU read and write in its memory; see the docstring."""
    n, s = case.n, float(case.size)
    copies = n if place == OUT_OF_PLACE else n - 1  # of a part to those who want it
    if case.collective == "all_reduce":
        return 2 * n * s
    if case.collective in REDUCING:
        return (n + 1) * s
    if case.collective in ("gather", "scatter"):
        return 2 * copies * s / n
    return 2 * copies * s


def _least_with_root(case: Case, staged: int) -> tuple[float, float]:
    n, s = case.n, float(case.size)
    others, k = n - 1, s / n
    if case.collective == "reduce":
        return (n + 1) * s + staged * 2 * others * s, (n + 1) * s
    if case.collective == "broadcast":
        return 2 * others * s + staged * 2 * s, 2 * s
    if case.collective in ("gather", "scatter"):
        return (1 + staged) * 2 * others * k, 2 * others * k
    if case.collective == "send_recv":
        return n * (1 + staged) * 2 * s, (1 + staged) * 2 * s
    return 0.0, 0.0

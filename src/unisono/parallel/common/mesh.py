"""Named axes over the ranks, each a communicator of its own.

    mesh = Mesh(comm, dp=2, tp=4)
    mesh["tp"].all_reduce(x)           among the four ranks that share a replica
    mesh["dp"]                         among the two that hold the same shard

The ranks form a grid, the last axis varies fastest:

    dp=0:  0 1 2 3      mesh["tp"] of rank 5 has the ranks 4 5 6 7
    dp=1:  4 5 6 7      mesh["dp"] of rank 5 has the ranks 1 5

Ranks of one host are next to each other in the grid. So put the axis with the most
communication last: its groups are runs of neighbours and stay inside a host wherever
its size divides the number of ranks there. (Tensor parallelism communicates in every
layer, data parallelism once in a step.)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import TracebackType

import numpy as np

from unisono.errors import BadArgument, unknown, whole_number
from unisono.parallel.common.agreement import check_same, setup_together
from unisono.runtime.communicator import Communicator


class Mesh:
    """A grid of all ranks of `comm`; a collective call.

    The product of the sizes is the world size; one size may be -1, which is inferred.
    """

    def __init__(self, comm: Communicator, **axes: int) -> None:
        """Split the world once for each axis."""
        self.comm = comm
        with setup_together(comm, "Mesh") as settings:
            self.shape = _shape(comm.world_size, axes)
            self.axes = tuple(axes)
            order = host_order(comm.hosts)
            settings += [f"axes {self}", f"ranks in the order {order}"]
        self._grid = np.array(order).reshape(self.shape)
        here = np.argwhere(self._grid == comm.rank)[0]
        self._coordinates = {axis: int(i) for axis, i in zip(axes, here, strict=True)}
        self._communicators: dict[tuple[str, ...], Communicator] = {}
        for axis in self.axes:
            self.over(axis)

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's index on each axis."""
        return dict(self._coordinates)

    def size(self, axis: str) -> int:
        """The number of ranks of an axis."""
        return self.shape[self._number(axis)]

    def ranks(self, *axes: str) -> list[int]:
        """The ranks of `comm` that differ from this one only on these axes."""
        run = {self._number(axis) for axis in axes}
        here = [
            slice(None) if i in run else self._coordinates[a]
            for i, a in enumerate(self.axes)
        ]
        return [int(rank) for rank in self._grid[tuple(here)].reshape(-1)]

    def __getitem__(self, axis: str) -> Communicator:
        """The communicator of this rank's neighbours along an axis."""
        self._number(axis)
        return self._communicators[axis,]

    def over(self, *axes: str) -> Communicator:
        """The communicator along several axes at once, in the order of the grid.

        A collective call; the second call returns the same communicator.
        """
        picked = {self._number(axis) for axis in axes}
        if len(picked) != len(axes) or not axes:
            raise BadArgument(f"Mesh.over{axes}: expected axes, each of them once")
        key = tuple(axis for i, axis in enumerate(self.axes) if i in picked)
        if key not in self._communicators:
            check_same(self.comm, "Mesh.over", [f"axes {', '.join(key)}"])
            members = self.ranks(*key)
            # The first rank is a color that no other group has.
            group = self.comm.split(members[0], members.index(self.comm.rank))
            assert group is not None
            group.name = f"{self.comm.name}/{'·'.join(key)}"
            self._communicators[key] = group
        return self._communicators[key]

    def close(self) -> None:
        """Close the communicators of all axes; `comm` stays open."""
        for axis in self._communicators.values():
            axis.close()

    def _number(self, axis: str) -> int:
        if axis not in self.axes:
            raise unknown("axis of the mesh", str(axis), self.axes)
        return self.axes.index(axis)

    def __repr__(self) -> str:
        """As it was created: Mesh(dp=2, tp=4)."""
        sizes = zip(self.axes, self.shape, strict=True)
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in sizes)})"

    def __enter__(self) -> Mesh:
        """For `with Mesh(...) as mesh:`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()


def host_order(hosts: Sequence[int]) -> list[int]:
    """The ranks sorted by host, those of one host next to each other."""
    return sorted(range(len(hosts)), key=lambda rank: (hosts[rank], rank))


def _shape(world: int, axes: dict[str, int]) -> tuple[int, ...]:
    """The sizes, with -1 replaced."""
    listed = ", ".join(f"{axis}={size}" for axis, size in axes.items())
    if not axes:
        raise BadArgument("Mesh: no axes; name them with sizes, as in Mesh(comm, dp=2)")
    sizes = [whole_number(f"Mesh: {axis}", size) for axis, size in axes.items()]
    if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
        raise BadArgument(
            f"Mesh({listed}): sizes are positive, and one may be -1 for the rest"
        )
    known = prod(size for size in sizes if size != -1)
    filled = tuple(world // known if size == -1 else size for size in sizes)
    if prod(filled) != world:
        raise BadArgument(
            f"Mesh({listed}): the axes make {known} ranks, the world has {world}; "
            "choose sizes whose product is the world size"
            + (", or that divide it" if -1 in sizes else "")
        )
    return filled

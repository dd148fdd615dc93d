"""Mesh: which ranks are on an axis, and what is refused."""

import numpy as np
import pytest

from unisono.errors import BadArgument, CollectiveMismatch
from unisono.parallel import Mesh
from unisono.parallel.common.mesh import host_order
from unisono.testing import world


def test_last_axis_varies_fastest():
    def look(comm):
        with Mesh(comm, dp=2, tp=3) as mesh:
            ranks = np.array([comm.rank], np.int64)
            return (
                mesh["dp"].all_gather(ranks).tolist(),
                mesh["tp"].all_gather(ranks).tolist(),
                mesh.coordinates,
            )

    with world(6) as w:
        found = w.run(look)
    assert found[4] == ([1, 4], [3, 4, 5], {"dp": 1, "tp": 1})
    assert [f[1] for f in found] == [[0, 1, 2]] * 3 + [[3, 4, 5]] * 3


def test_over_joins_several_axes():
    def look(comm):
        mesh = Mesh(comm, pp=2, dp=-1, tp=2)
        assert mesh.shape == (2, 2, 2)
        assert mesh.size("dp") == 2
        both = mesh.over("tp", "dp")
        assert mesh.over("dp", "tp") is both
        assert both.name == "world/dp·tp"
        assert mesh.ranks("pp") == [comm.rank % 4, comm.rank % 4 + 4]
        return both.all_gather(np.array([comm.rank], np.int64)).tolist()

    with world(8) as w:
        found = w.run(look)
    assert found == [[0, 1, 2, 3]] * 4 + [[4, 5, 6, 7]] * 4


def test_mesh_of_one_rank():
    with world(1) as w:
        mesh = w.run(lambda comm: Mesh(comm, dp=1, tp=-1))[0]
        assert repr(mesh) == "Mesh(dp=1, tp=1)"
        assert mesh["tp"].all_reduce(np.ones(2)).tolist() == [1, 1]
        assert mesh.coordinates == {"dp": 0, "tp": 0}


def test_ranks_of_a_host_are_neighbours_in_the_grid():
    assert host_order([0, 1, 0, 1]) == [0, 2, 1, 3]
    assert host_order([0, 0, 1, 1]) == [0, 1, 2, 3]
    assert host_order([0]) == [0]


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "no axes"),
        ({"dp": 3}, "make 3 ranks, the world has 2"),
        ({"dp": -1, "tp": 4}, "make 4 ranks, the world has 2"),
        ({"dp": -1, "tp": -1}, "one may be -1"),
        ({"dp": 0}, "sizes are positive"),
        ({"dp": 2.0}, "expected a whole number"),
    ],
)
def test_sizes_that_do_not_make_the_world_are_refused(axes, message):
    with world(2) as w, pytest.raises(BadArgument, match=message):
        w.run(lambda comm: Mesh(comm, **axes))


def test_unknown_axis_is_refused():
    with world(1) as w:
        mesh = Mesh(w.comms[0], dp=1, tp=1)
        with pytest.raises(BadArgument, match="unknown axis of the mesh 'pt'; near"):
            mesh["pt"]
        with pytest.raises(BadArgument, match="each of them once"):
            mesh.over("dp", "dp")


def test_different_axes_on_ranks_are_named():
    def make(comm):
        axes = {"dp": 2, "tp": 1} if comm.rank else {"dp": 1, "tp": 2}
        with pytest.raises(CollectiveMismatch) as raised:
            Mesh(comm, **axes)
        return str(raised.value)

    with world(2) as w:
        message = w.run(make)
    assert message[0] == message[1]
    assert "rank 0 has axes Mesh(dp=1, tp=2), rank 1 has axes Mesh(dp=2" in message[0]

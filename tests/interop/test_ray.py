"""Worlds of actors on a real cluster of Ray's: two raylets on this machine."""

import importlib
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from unisono.errors import BadArgument, ConnectFailed, MissingExtra, PeerLost

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore"),  # Ray's own, of many kinds
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "all_reduce.py"


@pytest.fixture(scope="module")
def ray():
    return pytest.importorskip("ray", reason="Ray is not installed: make peers")


@pytest.fixture(scope="module")
def cluster(ray):
    """Two nodes of two cores; every process of it is ended again.

    The second is an emulated host, so that ranks on both connect over TCP.
    """
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        from ray.cluster_utils import Cluster

        # Workers find unisono, and this file, where this process does.
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        quiet = {"include_dashboard": False, "object_store_memory": 80 << 20}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, **quiet})
        try:
            apart = {"UNISONO_HOST_ID": "second"}
            made.add_node(num_cpus=2, resources={"second": 2}, env_vars=apart, **quiet)
            ray.init(address=made.address, log_to_driver=False)
            yield made
        finally:
            ray.shutdown()
            made.shutdown()


@pytest.fixture(scope="module")
def run(cluster):
    from unisono.interop.ray import run

    return run


def test_ray_returns_results_by_rank_across_nodes(ray, run):
    def work(comm, k):
        x = np.full(1000, comm.rank + k)
        comm.all_reduce(x)
        node = ray.get_runtime_context().get_node_id()
        return comm.rank, comm.world_size, int(x[0]), node, os.getpid()

    results = run(work, 10, num_ranks=4, strategy="SPREAD")
    assert [row[:3] for row in results] == [(r, 4, 46) for r in range(4)]
    nodes = [row[3] for row in results]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]  # host by host
    assert len({row[4] for row in results}) == 4


def test_ranks_run_where_their_resources_are(ray, run):
    def node(comm):
        return ray.get_runtime_context().get_node_id()

    second = run(node, num_ranks=2, resources={"CPU": 1, "second": 1})
    assert len(set(second)) == 1
    assert run(node, num_ranks=1, resources={"second": 1})[0] == second[0]


def test_environment_and_local_ranks_are_set(run):
    def result(comm):
        names = "MINE", "UNISONO_LOCAL_RANK", "UNISONO_LOCAL_WORLD_SIZE"
        secret = [name for name in os.environ if "SECRET" in name]
        return [os.environ[name] for name in names], secret

    options = {"environment": {"MINE": "x"}, "timeout_s": 30}
    results = run(result, num_ranks=2, **options)
    # On one host they need neither port nor secret.
    assert results == [(["x", "0", "2"], []), (["x", "1", "2"], [])]


def test_exception_is_raised_unchanged_with_rank_and_node(run):
    def fail(comm):
        comm.barrier()
        if comm.rank == 2:
            raise KeyError("cheese")
        comm.barrier()

    with pytest.raises(KeyError, match="cheese") as error:
        run(fail, num_ranks=3)
    note = error.value.__notes__[0]
    assert "On rank 2 (pid " in note
    assert "on node " in note
    assert "in fail" in note


def test_unisono_error_keeps_its_attributes(run):
    def fail(comm):
        raise PeerLost("lost", ranks=[7], host="h", seq=3)

    with pytest.raises(PeerLost) as error:
        run(fail, num_ranks=1)
    assert (error.value.ranks, error.value.host, error.value.seq) == ((7,), "h", 3)


def test_dead_actor_is_named_by_rank_and_node(ray, run):
    def die(comm):
        comm.barrier()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    began = time.monotonic()
    with pytest.raises(PeerLost, match=r"rank 1 \(pid [0-9]+ on node ") as error:
        run(die, num_ranks=3)
    assert time.monotonic() - began < 60
    assert error.value.ranks == (1,)
    assert error.value.pids[0] > 0
    assert error.value.host == ray.util.get_node_ip_address()


def test_restart_has_the_same_number_of_ranks(run, tmp_path):
    mark = tmp_path / "died"

    def once(comm):
        comm.barrier()
        if comm.rank == 0 and not mark.exists():
            mark.touch()
            os._exit(3)
        return int(comm.all_reduce(np.ones(1))[0])

    assert run(once, num_ranks=2, restarts=1) == [2, 2]


def test_restart_continues_on_the_survivors(run):
    def shrink(comm):
        comm.barrier()
        if comm.world_size == 3 and comm.rank == 1:
            os._exit(3)
        return int(comm.all_reduce(np.ones(1))[0])

    assert run(shrink, num_ranks=3, restarts=1, min_ranks=2) == [2, 2]


def test_number_of_restarts_is_limited(run, tmp_path):
    log = tmp_path / "log"

    def fail(comm):
        with log.open("a") as file:
            file.write("x")
        raise ValueError("again")

    with pytest.raises(ValueError, match="again"):
        run(fail, num_ranks=1, restarts=2)
    assert log.read_text() == "xxx"


def test_missing_resources_are_reported(run):
    with pytest.raises(ConnectFailed, match=r"9 times .* cannot be placed") as error:
        run(print, num_ranks=9, placement_s=0.5)
    assert "of CPU 4 in the cluster" in str(error.value)
    assert error.value.missing == tuple(range(9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks = 0: a world has at least one rank"),
        ({"num_ranks": 1.5}, "num_ranks = 1.5: expected a whole number"),
        ({"num_ranks": 1, "strategy": "pack"}, "unknown strategy .*'pack'.*PACK"),
        ({"num_ranks": 1, "restarts": -1}, "restarts = -1"),
        ({"num_ranks": 1, "min_ranks": 2}, "at most num_ranks = 1"),
        ({"num_ranks": 1, "resources": {"CPU": 0}}, "amounts above 0"),
        ({"num_ranks": 1, "resources": {}}, "takes something"),
    ],
)
def test_invalid_ray_options_are_refused(ray, options, message):
    from unisono.interop.ray import run

    with pytest.raises(BadArgument, match=message):
        run(print, **options)


def test_nothing_is_left_in_the_cluster(ray, run):
    def free():
        return ray.available_resources().get("CPU") == 4

    until = time.monotonic() + 30
    while not free():
        assert time.monotonic() < until
        time.sleep(0.1)


def test_ray_runs_the_example_unchanged(ray, cluster, tmp_path):
    from unisono.interop.ray import run_script

    script = tmp_path / "script.py"
    show = f"import sys, runpy\nsys.stdout = open(r'{tmp_path}/' + sys.argv[1] + str("
    show += f"__import__('os').getpid()), 'w')\nrunpy.run_path(r'{EXAMPLE}')\n"
    script.write_text(show + "sys.stdout.close()\n")
    run_script(script, "said-", num_ranks=2)
    result = sorted(file.read_text() for file in tmp_path.glob("said-*"))
    assert "rank 0 of 2: the sum is 3, True" in result[0]
    assert "rank 1 of 2: the sum is 3, True" in result[1]


def test_failing_script_raises_peer_lost(cluster, tmp_path):
    from unisono.interop.ray import run_script

    script = tmp_path / "script.py"
    script.write_text("import sys; sys.exit(4)")
    with pytest.raises(PeerLost, match="left by SystemExit: 4"):
        run_script(script, num_ranks=1)
    script.write_text("import sys; sys.exit(0)")
    run_script(script, num_ranks=1)


# ray.util.collective


@pytest.fixture(scope="module")
def actors(ray, cluster):
    """Three, for all that follows: to import Ray's collectives takes seconds each."""

    class Actor:
        def __init__(self):
            from unisono.interop.ray import register

            register()

        def join(self, n, rank, name):
            from ray.util import collective

            collective.init_collective_group(n, rank, "unisono", name)

        def leave(self, name):
            from ray.util import collective

            collective.destroy_collective_group(name)

        def call(self, work, *args):
            from ray.util import collective

            return work(collective, *args)

    made = [ray.remote(num_cpus=0)(Actor).remote() for _ in range(3)]
    yield made
    for actor in made:
        ray.kill(actor)


def everything(collective, name, rank):
    """One call of each kind."""
    op = collective.types.ReduceOp
    found = {}
    x = np.full((2, 3), rank + 1.0, np.float32)
    collective.allreduce(x, name)
    found["allreduce"] = x.tolist()
    x = np.full(3, rank + 1)
    collective.allreduce(x, name, op.PRODUCT)
    found["product"] = x.tolist()
    x = np.full(3, rank + 1)
    collective.reduce(x, 2, name, op.MAX)
    found["reduce"] = x.tolist()
    x = np.full(3, rank)
    collective.broadcast(x, 1, name)
    found["broadcast"] = x.tolist()
    places = [np.zeros((1, 2), np.int64) for _ in range(3)]
    collective.allgather(places, np.full((1, 2), rank), name)
    found["allgather"] = [place.tolist() for place in places]
    shares = [np.full(2, 10.0 * r + rank) for r in range(3)]
    mine = np.zeros(2)
    collective.reducescatter(mine, shares, name)
    found["reducescatter"] = mine.tolist()
    collective.barrier(name)
    x = np.full(2, rank)
    if rank == 0:
        collective.send(x, 2, name)
    elif rank == 2:
        collective.recv(x, 0, name)
    found["send"] = x.tolist()
    return found


def test_ray_collectives_run_on_our_backend(ray, actors):
    ray.get([a.join.remote(3, r, "one") for r, a in enumerate(actors)])
    work = [a.call.remote(everything, "one", r) for r, a in enumerate(actors)]
    results = ray.get(work)
    for rank, found in enumerate(results):
        assert found["allreduce"] == [[6.0] * 3] * 2
        assert found["product"] == [6, 6, 6]
        assert found["reduce"] == ([3] * 3 if rank == 2 else [rank + 1] * 3)
        assert found["broadcast"] == [1, 1, 1]
        assert found["allgather"] == [[[r, r]] for r in range(3)]
        assert found["reducescatter"] == [30.0 * rank + 3] * 2
        assert found["send"] == [0 if rank == 2 else rank] * 2
    # A second group of the same actors, and the first one made again.
    ray.get([a.join.remote(3, 2 - r, "two") for r, a in enumerate(actors)])
    ray.get([a.leave.remote("one") for a in actors])
    ray.get([a.join.remote(3, r, "one") for r, a in enumerate(actors)])
    again = [a.call.remote(everything, "one", r) for r, a in enumerate(actors)]
    assert ray.get(again) == results


def test_ray_collectives_take_torch_tensors(ray, actors):
    pytest.importorskip("torch")

    def work(collective):
        import torch

        rank = collective.get_rank("torch")
        x = torch.full((4,), rank + 1, dtype=torch.bfloat16)
        collective.allreduce(x, "torch")
        mine = torch.zeros(2)
        collective.reducescatter(mine, [torch.full((2,), 1.0 * rank)] * 2, "torch")
        places = [torch.zeros(2) for _ in range(2)]
        collective.allgather(places, torch.full((2,), 1.0 * rank), "torch")
        return x.tolist(), mine.tolist(), [place.tolist() for place in places]

    ray.get([a.join.remote(2, r, "torch") for r, a in enumerate(actors[:2])])
    results = ray.get([a.call.remote(work) for a in actors[:2]])
    assert results == [([3.0] * 4, [1.0] * 2, [[0.0] * 2, [1.0] * 2])] * 2


def test_group_declared_by_the_driver_works(ray, actors):
    from ray.util import collective

    from unisono.interop.ray import register

    register()
    register()  # twice is once
    names = {"backend": "unisono", "group_name": "declared"}
    collective.create_collective_group(actors, 3, [0, 1, 2], **names)
    work = [a.call.remote(everything, "declared", r) for r, a in enumerate(actors)]
    assert [found["allreduce"] for found in ray.get(work)] == [[[6.0] * 3] * 2] * 3


def test_several_tensors_in_one_call_are_refused(ray, actors):
    def work(collective):
        group = collective.get_group_handle("lone")
        group.allreduce([np.zeros(1), np.zeros(1)])

    ray.get(actors[0].join.remote(1, 0, "lone"))
    with pytest.raises(BadArgument, match="2 tensors in one call: expected one per"):
        ray.get(actors[0].call.remote(work))


# Last, since Ray is slow to forget a node


def test_restart_continues_without_a_dead_node(ray, run, cluster):
    """Its raylet is killed, and with it the rank there; the other one goes on alone."""
    quiet = {"include_dashboard": False, "object_store_memory": 80 << 20}
    extra = [
        cluster.add_node(
            num_cpus=0,
            resources={"pair": 1},
            env_vars={"UNISONO_HOST_ID": name},
            **quiet,
        )
        for name in ("third", "fourth")
    ]

    def work(comm):
        if comm.world_size == 2 and comm.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)  # the raylet
        comm.barrier()
        return comm.world_size

    try:
        options = {"resources": {"pair": 1}, "restarts": 1, "min_ranks": 1}
        assert run(work, num_ranks=2, **options) == [1]
    finally:
        for node in extra:
            cluster.remove_node(node, allow_graceful=False)


def test_missing_ray_error_names_the_extra(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("unisono.interop.ray")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "unisono.interop.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'unisono\[ray\]'"):
        importlib.import_module("unisono.interop.ray")

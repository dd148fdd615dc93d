"""Arrays of users: strided, torch tensors, read-only, overlapping, in shared memory."""

import numpy as np
import pytest

import unisono
from conformance import bits, same
from unisono.dtypes import DTYPES, numpy_dtype
from unisono.errors import BadArgument, CollectiveMismatch, NotOffered
from unisono.testing import world

N = 3
SUM = sum(range(1, N + 1))


def mine(comm, shape=(4, 6), dtype=np.float32):
    return np.full(shape, comm.rank + 1, dtype)


# --- contiguous or not

VIEWS = {
    "every other column": lambda x: x[:, ::2],
    "transposed": lambda x: x.T,
    "backwards": lambda x: x[::-1],
    "a part": lambda x: x[1:3, 2:5],
    "one column": lambda x: x[:, 1],
    "no row": lambda x: x[:0, ::2],
    "one element": lambda x: x[1:2, 1:2],
    "no axes": lambda x: x[2, 3, ...],
    "Fortran": lambda x: np.asfortranarray(x),
}


@pytest.mark.parametrize("view", VIEWS)
def test_strided_views_are_reduced_in_place(worlds, view):
    def reduced(comm):
        whole = mine(comm)
        part = VIEWS[view](whole)
        before = whole.copy()
        assert comm.all_reduce(part) is part
        assert (part == SUM).all()
        inside = VIEWS[view](before)
        if np.shares_memory(part, whole):
            inside[...] = part
            assert (whole == before).all()  # and nothing around it has changed
        comm.all_reduce(part, async_op=True).wait()
        assert (part == N * SUM).all()

    worlds(N).run(reduced)


@pytest.mark.parametrize("view", VIEWS)
def test_strided_views_are_inputs_and_outputs(worlds, view):
    def copied(comm):
        x, out = VIEWS[view](mine(comm)), VIEWS[view](np.zeros((4, 6), np.float32))
        assert comm.all_reduce(x, out=out) is out
        assert (out == SUM).all()
        assert (x == comm.rank + 1).all()
        assert comm.broadcast(x, root=1, out=out) is out
        assert (out == 2).all()
        comm.reduce(x, root=2, out=out)
        assert (out == (SUM if comm.rank == 2 else 2)).all()
        assert comm.broadcast(x, root=1) is x
        assert (x == 2).all()

    worlds(N).run(copied)


def test_rows_of_views_are_gathered_and_scattered(worlds):
    def moved(comm):
        x = np.arange(24).reshape(4, 6)[:, ::2] + 100 * comm.rank
        everything = comm.all_gather(x)
        out = np.zeros((N * 4, 6), int)[:, ::2]
        assert comm.all_gather(x, out=out) is out
        assert (out == everything).all()
        assert (everything[4:8] == x - 100 * comm.rank + 100).all()
        again = np.zeros((4, 6), int)[:, 1::2]
        comm.scatter(everything if comm.rank == 1 else None, root=1, out=again)
        assert (again == x).all()
        back = comm.all_to_all(everything[:, ::2])
        assert (back[:4] == everything[4 * comm.rank : 4 * comm.rank + 4, ::2]).all()
        shared = comm.reduce_scatter(everything[::-1])
        top = everything[::-1][4 * comm.rank : 4 * comm.rank + 4]
        assert (shared == N * top).all()
        gathered = comm.gather(x, root=2)
        assert (gathered is None) == (comm.rank != 2)
        assert gathered is None or (gathered == everything).all()

    worlds(N).run(moved)


def test_unaligned_arrays_work(worlds):
    def reduced(comm):
        raw = np.zeros(4 * 50_000 + 1, np.uint8)
        x = raw[1:].view(np.float32)
        for count in (3, 5000, 50_000):
            x[:count] = comm.rank + 1
            comm.all_reduce(x[:count])
            assert (x[:count] == SUM).all()

    worlds(N).run(reduced)


# --- torch


def torch_rank(comm):
    """Everything that tensors can be; runs on threads and processes."""
    import torch

    def full(dtype=torch.float32, shape=(4, 6)):
        return torch.full(shape, comm.rank + 1, dtype=dtype)

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
        x = full(dtype)
        assert comm.all_reduce(x) is x
        assert (x == SUM).all()
        assert x.dtype == dtype
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bool):
        x = torch.ones(5).to(dtype)
        assert comm.all_reduce(x) is x
        assert (x.to(torch.float32) == (1 if dtype == torch.bool else N)).all()
    strided = full()[:, ::2]
    assert comm.all_reduce(strided, op="max") is strided
    assert (strided == N).all()
    weight = full().requires_grad_()
    assert comm.all_reduce(weight) is weight
    assert weight.requires_grad
    assert weight.grad_fn is None
    assert (weight.detach() == SUM).all()
    result = comm.all_gather(weight)
    assert isinstance(result, torch.Tensor)
    assert not result.requires_grad
    assert result.shape == (4 * N, 6)
    torch_views(comm, torch)
    torch_everywhere(comm, torch)
    return bits_of_sums(comm, torch)


def torch_views(comm, torch):
    """Conjugated and negated views have other bits than values."""
    z = torch.full((3, 4), complex(1, comm.rank + 1))
    conjugate = z.conj()
    assert conjugate.is_conj()
    assert comm.all_reduce(conjugate) is conjugate
    assert (conjugate == complex(N, -SUM)).all()
    assert (z == complex(N, SUM)).all()
    negated = torch.full((3,), complex(0, comm.rank + 1)).conj().imag
    assert negated.is_neg()
    total = comm.all_reduce(negated, out=torch.zeros(3))
    assert (total == -SUM).all()
    everything = comm.all_gather(z.conj())
    assert (everything == complex(N, -SUM)).all()
    empty = torch.zeros(0, 3).t()
    assert comm.all_reduce(empty) is empty


def torch_everywhere(comm, torch):
    x = torch.arange(6, dtype=torch.int32) + 10 * comm.rank
    assert comm.broadcast(x.clone(), root=1).tolist() == list(range(10, 16))
    assert comm.reduce_scatter(x).tolist() == [
        6 * comm.rank + 30,
        6 * comm.rank + 33,
    ]
    gathered = comm.gather(x[:1], root=1)
    assert (gathered.tolist() if comm.rank == 1 else gathered) == (
        [0, 10, 20] if comm.rank == 1 else None
    )
    out = torch.empty(2, dtype=torch.int32)
    comm.scatter(x if comm.rank == 0 else None, out=out)
    assert out.tolist() == [2 * comm.rank, 2 * comm.rank + 1]
    back = comm.all_to_all(x)
    wanted = [10 * r + 2 * comm.rank + i for r in range(N) for i in range(2)]
    assert back.tolist() == wanted
    comm.send(x, (comm.rank + 1) % N)
    comm.recv(x, (comm.rank - 1) % N)
    assert x[0] == 10 * ((comm.rank - 1) % N)
    mixed = comm.all_reduce(x, out=np.empty(6, np.int32))
    assert isinstance(mixed, np.ndarray)
    assert mixed[0] == 30
    shared = torch.from_numpy(comm.empty(20_000))
    shared[:] = comm.rank + 1
    assert (comm.all_reduce(shared) == SUM).all()
    scaled = comm.all_reduce(torch.ones(4), op=unisono.premul_sum(torch.tensor(2.0)))
    assert (scaled == 2 * N).all()


def bits_of_sums(comm, torch):
    """Sums of real numbers, to be compared between threads and processes."""
    seeded = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(3000, generator=seeded).to(torch.bfloat16)
    return comm.all_reduce(x).view(torch.uint8).numpy().tobytes()


def test_torch_tensors(worlds):
    pytest.importorskip("torch")
    on_threads = worlds(N).run(torch_rank)
    assert len(set(on_threads)) == 1


@pytest.mark.sweep  # each process imports torch
def test_torch_tensors_on_processes(worlds):
    pytest.importorskip("torch")
    on_threads = worlds(N).run(torch_rank)
    assert unisono.spawn(torch_rank, N) == on_threads


@pytest.mark.sweep
def test_torch_is_not_imported_for_arrays():
    assert unisono.spawn(knows_torch, 2) == [False, False]


def knows_torch(comm):
    import sys

    comm.all_reduce(np.ones(3))
    comm.all_gather_objects([1, 2])
    return "torch" in sys.modules


def test_sparse_and_device_tensors_are_refused(worlds):
    torch = pytest.importorskip("torch")
    sparse = torch.ones(3, 3).to_sparse()
    elsewhere = torch.ones(3, device="meta")

    def refused(comm):
        for x, message in ((sparse, "dense"), (elsewhere, "only CPU and CUDA tensors")):
            with pytest.raises(BadArgument, match=message):
                comm.all_reduce(x)
            with pytest.raises(BadArgument, match=message):
                comm.all_gather(x)

    worlds(1).run(refused)


# --- what cannot be


def frozen(count=6):
    x = np.zeros(count, np.float32)
    x.flags.writeable = False
    return x


X = np.zeros(6, np.float32)
BIG = np.zeros(24, np.float32)
SWAPPED = np.zeros(6, np.dtype(np.float32).newbyteorder())

REFUSED = {
    "other byte order": (lambda c: c.all_reduce(SWAPPED), "byte order"),
    "out in the other byte order": (
        lambda c: c.all_reduce(X, out=SWAPPED),
        "byte order",
    ),
    "read-only": (lambda c: c.all_reduce(frozen()), "read-only"),
    "out read-only": (lambda c: c.all_reduce(X, out=frozen()), "read-only"),
    "gathered into read-only": (
        lambda c: c.all_gather(X, out=frozen(6 * N)),
        "read-only",
    ),
    "received into read-only": (lambda c: c.recv(frozen()), "read-only"),
    "overlapping": (lambda c: c.all_reduce(BIG[:6], out=BIG[3:9]), "overlap"),
    "overlapping from behind": (
        lambda c: c.broadcast(BIG[3:9], out=BIG[:6], root=c.rank),
        "overlap",
    ),
    "gathered from another's rows": (
        lambda c: c.all_gather(BIG[1:7], out=BIG[: 6 * N]),
        "overlaps out",
    ),
    "scattered to another's rows": (
        lambda c: c.reduce_scatter(BIG[: 6 * N], out=BIG[1:7]),
        "overlaps x",
    ),
    "out of another type": (
        lambda c: c.all_reduce(X, out=np.zeros(6)),
        r"out is float64\[6\], the result is float32\[6\]",
    ),
    "out of another shape": (
        lambda c: c.all_reduce(X, out=np.zeros((2, 3), np.float32)),
        r"out is float32\[2, 3\]",
    ),
    "out too large": (
        lambda c: c.all_gather(X, out=np.zeros(6 * N + 1, np.float32)),
        "the result is",
    ),
    "out too small": (
        lambda c: c.reduce_scatter(BIG[:12], out=np.zeros(3, np.float32)),
        "the result is",
    ),
    "exchanged into another type": (
        lambda c: c.all_to_all(X, out=np.zeros(6, int)),
        "the result is",
    ),
    "no root": (lambda c: c.broadcast(X, root=None), "whole number"),
    "no array": (lambda c: c.all_reduce([1, 2, 3]), "got a list"),
    "a number": (lambda c: c.all_reduce(3.0), "got a float"),
    "nothing": (lambda c: c.all_reduce(None), "got a NoneType"),
    "a matrix": (lambda c: c.all_reduce(X[:, None].view(np.matrix)), "got a matrix"),
    "objects": (lambda c: c.all_reduce(np.array([None, 1])), "unknown element type"),
    "text": (lambda c: c.broadcast(np.array(["a", "b"])), "unknown element type"),
    "times": (lambda c: c.all_reduce(np.zeros(2, "M8[s]")), "unknown element type"),
    "long double": (
        lambda c: c.all_reduce(np.zeros(2, np.longdouble)),
        "unknown element type",
    ),
    "unknown operation": (lambda c: c.all_reduce(X, op="summ"), "nearest: sum"),
    "no operation": (lambda c: c.all_reduce(X, op=3), "got a int"),
    "Python's sum": (lambda c: c.all_reduce(X, op=sum), "expected op='sum'"),
    "bits of floats": (lambda c: c.all_reduce(X, op="bxor"), "no meaning"),
    "order of complex": (
        lambda c: c.all_reduce(np.zeros(2, complex), op="max"),
        "no meaning",
    ),
    "mean of truth": (
        lambda c: c.all_reduce(np.zeros(2, bool), op="mean"),
        "no meaning",
    ),
    "no factor": (lambda c: c.all_reduce(X, op=unisono.premul_sum), "factor"),
    "half a factor": (
        lambda c: c.all_reduce(np.zeros(2, int), op=unisono.premul_sum(0.5)),
        "needs an integer",
    ),
    "unknown algorithm": (
        lambda c: c.all_reduce(X, algorithm="rong"),
        "ring",
    ),
    "algorithm of others": (
        lambda c: c.all_to_all(X, algorithm="tree"),
        "all_to_all",
    ),
    "parameter that is none": (
        lambda c: c.all_reduce(X, algorithm="ring:radix=3"),
        "radix",
    ),
    "root too large": (lambda c: c.broadcast(X, root=N), r"ranks are 0\.\.2"),
    "root negative": (lambda c: c.reduce(X, root=-1), r"ranks are 0\.\.2"),
    "root not whole": (lambda c: c.gather(X, root=1.0), "whole number"),
    "root of truth": (lambda c: c.broadcast(X, root=True), "whole number"),
    "timeout of nothing": (lambda c: c.all_reduce(X, timeout_s=0), "positive"),
    "timeout that is none": (
        lambda c: c.all_reduce(X, timeout_s=float("nan")),
        "positive",
    ),
    "rank too large": (lambda c: c.send(X, N), r"ranks are 0\.\.2"),
    "rank negative": (lambda c: c.recv(X, -1), r"ranks are 0\.\.2"),
    "tag too large": (lambda c: c.send(X, 0, tag=1 << 40), "32-bit"),
    "tag not whole": (lambda c: c.send(X, 0, tag="a"), "whole number"),
    "a buffer of objects": (lambda c: c.empty(3, object), "unknown element type"),
    "a buffer of half": (lambda c: c.empty(2.5), "whole number"),
    "a negative buffer": (lambda c: c.empty((2, -1)), "negative"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_invalid_arguments_are_refused_and_break_nothing(worlds, what):
    make, message = REFUSED[what]

    def mistaken(comm):
        with pytest.raises(BadArgument, match=message):
            make(comm)
        return comm.all_reduce(np.ones(1))[0]

    assert worlds(N).run(mistaken) == [N] * N


def test_unknown_options_are_refused():
    comm = unisono.init(0, 1)
    with comm, pytest.raises(TypeError, match="compression"):
        comm.all_reduce(X, compression="fp8")


def test_algorithm_of_another_collective_is_refused(worlds):
    def refused(comm):
        with pytest.raises(NotOffered):
            comm.barrier(algorithm="bruck")

    worlds(2).run(refused)


def test_scatter_without_out_is_an_error_on_all_ranks_at_once():
    """The root does not wait for those that lack an array, nor do others."""

    def scattered(comm):
        x = np.arange(6.0) if comm.rank == 0 else None
        out = np.empty(2) if comm.rank == 1 else None
        if comm.rank == 2:
            with pytest.raises(BadArgument, match="out= is required"):
                comm.scatter(x, out=out, timeout_s=600)
        else:
            with pytest.raises(
                CollectiveMismatch, match="an error: scatter's out"
            ) as e:
                comm.scatter(x, out=out, timeout_s=600)
            assert 2 in e.value.calls

    world(N).run(scattered)


def test_wrong_x_of_the_root_is_an_error_on_all_ranks_at_once():
    def scattered(comm):
        if comm.rank:
            with pytest.raises(CollectiveMismatch, match="rank 0"):
                comm.scatter(out=np.empty(2), timeout_s=600)
        else:
            with pytest.raises(BadArgument, match="cannot be divided evenly"):
                comm.scatter(np.arange(7.0), timeout_s=600)

    world(N).run(scattered)


def test_scatter_takes_the_shape_of_x_where_there_is_no_out(worlds):
    def scattered(comm):
        x = np.arange(12.0).reshape(6, 2) if comm.rank == 1 else np.zeros((6, 2))
        even = comm.scatter(x, root=1)
        counts = [3, 0, 3]
        uneven = comm.scatter(x, root=1, counts=counts)
        return even[:, 0].tolist(), uneven[:, 0].tolist()

    assert worlds(N).run(scattered) == [
        ([0, 2], [0, 2, 4]),
        ([4, 6], []),
        ([8, 10], [6, 8, 10]),
    ]


def test_scatter_with_another_shape_of_x_is_a_mismatch():
    def scattered(comm):
        with pytest.raises(CollectiveMismatch):
            comm.scatter(np.zeros((3, 2 + comm.rank)), timeout_s=600)

    world(N).run(scattered)


# --- buffers of the communicator


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_of_every_type(worlds, dtype):
    def made(comm):
        for shape in (0, 5, np.int64(5), (2, 3), ()):
            x = comm.empty(shape, dtype)
            assert x.dtype == numpy_dtype(dtype)
            assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
            x[...] = True
            assert same(comm.broadcast(x.copy()), x)
        return comm.empty(3, numpy_dtype(dtype)).dtype == numpy_dtype(dtype)

    assert worlds(2).run(made) == [True, True]


def test_buffers_outlive_their_communicator():
    comm = unisono.init(0, 1)
    x = comm.empty(1000)
    x[:] = 3
    comm.close()
    del comm
    assert (x == 3).all()
    assert bits(x).size == 4000

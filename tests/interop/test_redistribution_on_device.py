"""`comm.redistribute` of CUDA tensors: held to torch's slices.

On the emulated driver the tensors are those of `fake_cuda.py`, which seem to be on a
device; `make gpu-test` runs the same on a GPU that the ranks share.
"""

from itertools import accumulate, pairwise, product

import fake_cuda
import pytest
import torch
from ranks import expect

import emulated
import emulated_world
from forked import attempt
from unisono.devices.arrays import DeviceArray
from unisono.parallel import redistribute
from unisono.runtime import redistribution
from unisono.runtime.call.shard_sizes import shard_sizes

on_emulated_driver = pytest.mark.skipif(emulated.ON_GPU, reason="the emulated driver")
on_gpu = pytest.mark.skipif(not emulated.ON_GPU, reason="there is no GPU")
SHAPES = ((6, 4, 2), (5, 7, 3), (2, 0, 5), (1, 1, 1))
CUTS = (0, 1, 2, None)


def whole_of(shape, dtype=torch.int32):
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def part(whole, cut, rank, sizes=None):
    """The rank's part by the rule, or by sizes."""
    if cut is None:
        return whole
    sizes = sizes or shard_sizes(whole.shape[cut], rank.n)
    begin, end = list(pairwise(accumulate(sizes, initial=0)))[rank.number]
    return whole.narrow(cut, begin, end - begin)


def check(found, wanted, what=""):
    assert found.is_cuda, f"{what}: not on the device"
    expect(fake_cuda.host(found), wanted.contiguous(), what)


def every_cut(rank, shape, asynchronous):
    fake_cuda.begin()
    whole = whole_of(shape)
    with rank.init(timeout_s=60) as comm:
        for old, new in product(CUTS, CUTS):
            x = fake_cuda.tensor(part(whole, old, rank))
            said = None if new == 1 else shape  # else ranks tell their sizes
            found = comm.redistribute(x, old, new, shape=said, async_op=asynchronous)
            if asynchronous:
                work, found = found, found.wait()
                work.synchronize(60)
                assert work.done()
                assert work.exception() is None
            check(found, part(whole, new, rank), f"{shape} from {old} to {new}")
            assert found.data_ptr() != x.data_ptr() or x.numel() == 0


@pytest.mark.cases(2)
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_any_cut_of_cuda_tensors_becomes_any_other(ranks, n, shape, asynchronous):
    ranks(n, every_cut, shape, asynchronous)


def summands(rank, dtype):
    fake_cuda.begin()
    dtype = getattr(torch, dtype)
    with rank.init(timeout_s=60) as comm:
        for shape, new, op in product(SHAPES, CUTS, ("sum", "max")):
            whole = whole_of(shape, dtype) % 8
            x = fake_cuda.tensor(whole * (rank.number + 1))
            found = comm.redistribute(x, "partial", new, op=op)
            total = rank.n * (rank.n + 1) // 2 if op == "sum" else rank.n
            check(found, part(whole * total, new, rank), f"{shape} to {new} by {op}")
            check(x, whole * (rank.number + 1), "x is not changed")


@pytest.mark.cases(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_summands_on_the_device_become_parts_or_the_whole(ranks, dtype):
    ranks(3, summands, dtype)


def uneven(rank):
    """Parts of any sizes, a rank without any, and tensors that are not contiguous."""
    fake_cuda.begin()
    whole = whole_of((7, 5), torch.float32)
    with rank.init(timeout_s=60) as comm:
        for sizes, new in product(([3, 4, 0], [0, 7, 0]), (0, 1, None)):
            x = fake_cuda.tensor(part(whole, 0, rank, sizes))
            found = comm.redistribute(x, 0, new)
            check(found, part(whole, new, rank), f"{sizes} to {new}")
            back = comm.redistribute(found, new, 0, sizes=sizes)
            check(back, part(whole, 0, rank, sizes), f"{new} to {sizes}")
        columns = fake_cuda.tensor(part(whole, 0, rank)).T
        check(comm.redistribute(columns, 1, 0), part(whole.T, 0, rank))


def test_uneven_parts_and_views_on_the_device(ranks):
    ranks(3, uneven)


def on_given_stream(rank, old, new):
    """What comes later on the given stream comes after the last copy, too.

    That is made on the current stream, where a kernel that waits is put behind it.
    """
    fake_cuda.begin()
    whole = whole_of((4, 6))
    with rank.init(timeout_s=60) as comm:
        x = fake_cuda.tensor(part(whole, old, rank))
        comm.redistribute(x, old, new)  # the ranks connect
        current, given = fake_cuda.Stream(), fake_cuda.Stream()
        copies, made, gates = copies_of(rank.n, old), [], []
        copy_back = redistribution.copy_back

        def counted(*arrays):
            copy_back(*arrays)
            made.append(arrays)
            if len(made) == copies:
                gates.append(emulated_world.Gate(current.cuda_stream))

        redistribution.copy_back = counted
        with torch.cuda.stream(current):
            found = comm.redistribute(x, old, new, stream=given)
        assert len(made) == copies
        assert not given.query(), "the given stream does not wait"
        gates[0].open()
        with torch.cuda.stream(given):
            check(found, part(whole, new, rank))


def copies_of(n, old):
    """Of rows that become columns, out of the packed ones; of a whole, the part."""
    return 1 if old is None else n


@on_emulated_driver
@pytest.mark.parametrize(("old", "new"), [(1, 0), (None, 1)])
def test_result_is_ready_on_the_given_stream(ranks, old, new):
    ranks(2, on_given_stream, old, new)


def gradients(rank):
    fake_cuda.begin()
    whole = torch.arange(35, dtype=torch.float64).reshape(5, 7).sin()
    weight = whole.cos()
    with rank.init(timeout_s=60) as comm:
        for old, new in product((0, 1, None), (0, 1, None)):
            x = part(whole, old, rank).cuda().requires_grad_()
            y = redistribute(x, comm, old, new)
            (y.sin() * part(weight, new, rank).cuda()).sum().backward()
            wanted = part(whole.cos() * weight, old, rank)
            torch.testing.assert_close(x.grad.cpu(), wanted)
        x = whole.cuda().requires_grad_()
        y = redistribute(x, comm, "partial", 1)
        (y * part(weight, 1, rank).cuda()).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), weight)


@on_gpu
def test_gradients_on_the_device_are_those_of_one_process(ranks):
    ranks(3, gradients)


def refused(rank):
    fake_cuda.begin()
    with rank.init(timeout_s=60) as comm:
        on_device, on_host = DeviceArray((2, 4), "float32", 0), torch.ones(2, 4)
        return [
            attempt(comm.redistribute, on_device, 0, 1),
            attempt(comm.redistribute, on_host, None, 1, stream=fake_cuda.Stream()),
            attempt(comm.redistribute, on_host, 0, 1, stream=fake_cuda.Stream()),
        ]


@on_emulated_driver
def test_what_cannot_be_redistributed_on_a_device_is_named(ranks):
    for array, *streams in ranks(2, refused):
        assert array["error"] == "BadArgument"
        assert "torch.as_tensor(x, device='cuda')" in array["message"]
        for stream in streams:
            assert stream["error"] == "BadArgument"
            assert "stream= is for CUDA arrays only" in stream["message"]

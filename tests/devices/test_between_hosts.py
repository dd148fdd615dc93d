"""Collectives on CUDA arrays between hosts: ranks are threads, hosts are pretended."""

import numpy as np
import pytest

from conformance import (
    MEANINGFUL,
    check,
    every_algorithm,
    every_reduction,
    every_type,
    numbers,
)
from device_cases import perform_on_device, to_device
from unisono import _native
from unisono.dtypes import DTYPES
from unisono.reductions import reduce
from unisono.runtime.device import pipeline
from unisono.testing import world

LAYOUTS = [
    (0, 1),
    (0, 0, 1, 1),
    (0, 0, 1),
    (0, 1, 2),
    (0, 1, 1, 0),
    (0, 0, 0, 1, 1),
    (0, 0, 1, 1, 2, 2),
]
layouts = pytest.mark.parametrize("hosts", LAYOUTS, ids=str)


@pytest.fixture
def small_pieces(monkeypatch):
    """So that small arrays have many of them."""
    monkeypatch.setattr(pipeline, "SLOT", 4096)


@pytest.mark.quick(hosts=[(0, 0, 1)])
@layouts
def test_every_algorithm_has_the_bits_of_the_schedule(hosts):
    n = len(hosts)
    cases = [c for c in every_algorithm(n, [77]) if c.what != "barrier"]
    with world(n, hosts=hosts) as w:
        check(cases, w.run(perform_on_device, cases))


@pytest.mark.sweep
@layouts
def test_every_type_and_operation_by_named_algorithms(hosts):
    n = len(hosts)
    cases = [c for c in every_reduction(n) if c.algorithm is not None]
    cases += every_type(n)
    with world(n, hosts=hosts) as w:
        check(cases, w.run(perform_on_device, cases))


def given(count, rank, dtype="float32"):
    """Small whole numbers, whose sums are exact in any order."""
    return (np.arange(count) % 5 + rank).astype(dtype)


def wanted_sum(count, n, dtype="float32"):
    return (np.arange(count) % 5 * n + sum(range(n))).astype(dtype)


def reduces(comm, counts):
    stream = _native.CudaStream(0)
    n, root, found = comm.world_size, comm.world_size - 1, []
    for count in counts:
        x = to_device(given(count, comm.rank))
        y = to_device(np.zeros(count, np.float32))
        comm.all_reduce(x, out=y, stream=stream)
        total = comm.reduce(x, root=root, stream=stream)
        mean = to_device(given(count, comm.rank, "float64"))
        comm.all_reduce(mean, op="mean", stream=stream)
        shared = to_device(given(count, comm.rank))
        comm.broadcast(shared, root=1, stream=stream)
        part = comm.reduce_scatter(
            to_device(given(count * n, comm.rank)), stream=stream
        )
        comm.synchronize(60)
        found.append(
            [
                y.numpy(),
                None if total is None else total.numpy(),
                mean.numpy(),
                shared.numpy(),
                part.numpy(),
                comm.rank == root or np.array_equal(x.numpy(), given(count, comm.rank)),
            ]
        )
    return found


@pytest.mark.quick(hosts=[(0, 0, 1, 1), (0, 0, 1)])
@layouts
def test_results_are_right_in_one_piece_and_in_many(hosts, small_pieces):
    n, counts = len(hosts), [0, 1, 3, 130, 20_011]
    with world(n, hosts=hosts) as w:
        ranks = w.run(reduces, counts)
    for rank, found in enumerate(ranks):
        for count, (y, total, mean, shared, part, kept) in zip(
            counts, found, strict=True
        ):
            assert np.array_equal(y, wanted_sum(count, n))
            assert (total is None) == (rank != n - 1)
            if total is not None:
                assert np.array_equal(total, wanted_sum(count, n))
            assert np.array_equal(mean, wanted_sum(count, n, "float64") / n)
            assert np.array_equal(shared, given(count, 1))
            whole = wanted_sum(count * n, n)
            assert np.array_equal(part, whole[count * rank : count * (rank + 1)])
            assert kept, "the input of a reduce was changed"


def every_op(comm, cases):
    stream = _native.CudaStream(0)
    found = []
    for dtype, op in cases:
        x = to_device(numbers(dtype, 301, [comm.rank]))
        comm.all_reduce(x, op=op, stream=stream)
        found.append(x)
    comm.synchronize(60)
    return [x.numpy() for x in found]


@pytest.mark.quick(hosts=[(0, 0, 1)])
@layouts
def test_every_type_and_operation_is_equal_on_all_ranks_and_right(hosts):
    n, cases = len(hosts), MEANINGFUL
    with world(n, hosts=hosts) as w:
        ranks = w.run(every_op, cases)
    for number, (dtype, op) in enumerate(cases):
        first = ranks[0][number]
        for other in ranks[1:]:
            assert other[number].tobytes() == first.tobytes(), (dtype, op)
        inputs = [numbers(dtype, 301, [r]) for r in range(n)]
        exact = (
            op in ("min", "max", "band", "bor", "bxor") or DTYPES[dtype].kind in "iub"
        )
        assert close(first, inputs, dtype, op, exact=exact), (dtype, op)


def close(found, inputs, dtype, op, *, exact):
    wanted = reduce(np.empty_like(inputs[0]), inputs, op)
    if exact:
        return found.tobytes() == wanted.tobytes()
    wide = np.complex128
    size = (
        sum(np.abs(x.astype(wide)) for x in inputs)
        if op != "prod"
        else 1 + np.abs(wanted.astype(wide))
    )
    error = np.abs(found.astype(wide) - wanted.astype(wide))
    step = {1: 0.3, 2: 0.02}.get(found.itemsize, 1e-5)
    return bool((error <= step * (size + 1e-3)).all())


def reproducible(comm, count):
    stream = _native.CudaStream(0)
    x = to_device(numbers("float32", count, [comm.rank]))
    comm.all_reduce(x, reproducible=True, stream=stream)
    comm.synchronize(60)
    plain = numbers("float32", count, [comm.rank]).copy()
    comm.all_reduce(plain, reproducible=True)
    return x.numpy(), plain


def test_reproducible_sums_have_the_bits_of_the_cpu_in_many_pieces(small_pieces):
    with world(4, hosts=(0, 0, 1, 1)) as w:
        for on_device, on_host in w.run(reproducible, 9_001):
            assert on_device.tobytes() == on_host.tobytes()


def uneven(comm):
    stream, rank, n = _native.CudaStream(0), comm.rank, comm.world_size
    counts = [3000 * r + 1 for r in range(n)]
    begin = sum(counts[:rank])
    mine = to_device(given(counts[rank], rank))
    all_rows = comm.all_gather(mine, counts=counts, stream=stream)
    share = comm.reduce_scatter(
        to_device(given(sum(counts), rank)), counts=counts, stream=stream
    )
    rows = comm.gather(mine, root=1, counts=counts, stream=stream)
    out = to_device(np.zeros(counts[rank], np.float32))
    whole = to_device(given(sum(counts), 1)) if rank == 1 else None
    comm.scatter(whole, out=out, root=1, counts=counts, stream=stream)
    send = [(rank + 1) * (r + 2) * 100 for r in range(n)]
    received = [(r + 1) * (rank + 2) * 100 for r in range(n)]
    exchanged = comm.all_to_all(
        to_device(given(sum(send), rank)),
        send_counts=send,
        recv_counts=received,
        stream=stream,
    )
    comm.synchronize(60)
    wanted_rows = np.concatenate([given(c, r) for r, c in enumerate(counts)])
    assert np.array_equal(all_rows.numpy(), wanted_rows)
    assert (rows is None) == (rank != 1)
    if rows is not None:
        assert np.array_equal(rows.numpy(), wanted_rows)
    total = wanted_sum(sum(counts), n)[begin : begin + counts[rank]]
    assert np.array_equal(share.numpy(), total)
    assert np.array_equal(out.numpy(), given(sum(counts), 1)[begin:][: counts[rank]])
    parts = []
    for r in range(n):
        lengths = [(r + 1) * (q + 2) * 100 for q in range(n)]
        at = sum(lengths[:rank])
        parts.append(given(sum(lengths), r)[at : at + lengths[rank]])
    assert np.array_equal(exchanged.numpy(), np.concatenate(parts))


@pytest.mark.quick(hosts=[(0, 0, 1), (0, 0, 1, 1)])
@layouts
def test_uneven_counts_in_many_pieces(hosts, small_pieces):
    with world(len(hosts), hosts=hosts) as w:
        w.run(uneven)


def explained(comm):
    x = comm.empty((1 << 20,), device="cuda")
    return (
        comm.explain("all_reduce", x),
        comm.explain("all_to_all", x),
        comm.explain("reduce", x, algorithm="tree"),
        comm.explain("reduce_scatter", x),
    )


def test_explain_tells_the_stages():
    with world(4, hosts=(0, 0, 1, 1)) as w:
        staged, whole, named, rows = w.run(explained)[0]
    assert "all_reduce of 4 MiB on 4 ranks of 2 hosts" in staged
    assert "inside     reduce_scatter by direct" in staged
    assert "on 2 rails of 2 MiB" in staged
    assert "inside     all_gather by direct" in staged
    assert "6 pieces of 4 MiB of the host" in staged
    assert "among all ranks" in whole
    assert "reduce by tree" in named
    assert "inside     reduce_scatter for each host by direct" in rows
    assert rows.count("inside ") == 1
    with world(2, hosts=(0, 1)) as w:
        alone = w.run(explained)[1][0]
    assert "among all ranks" in alone

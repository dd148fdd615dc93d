"""Collectives that only move tensors, bit for bit, by way of torch.distributed."""

import pytest
import torch
import torch.distributed as dist
from ranks import WAYS, ended, expect, group

TYPES = [
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e8m0fnu"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("complex64", "complex128", "bool"),
]


def given(rank, count, name="float32"):
    """Any bits that the type may have."""
    kind = getattr(torch, name)
    made = torch.Generator().manual_seed(1000 * count + rank)
    if name == "bool":
        return torch.randint(0, 2, (count,), generator=made).bool()
    size = count * kind.itemsize
    raw = torch.randint(0, 256, (size,), generator=made, dtype=torch.uint8)
    return raw.view(kind)


def every_copy(rank, name, how):
    n, me, count = rank.n, rank.number, 40
    options = {"async_op": how != "sync"}
    all_of = [given(r, count, name) for r in range(n)]
    x = all_of[me]
    with group(rank):
        for root in range(n):
            y = given(me, count, name)
            ended(dist.broadcast(y, root, **options), how)
            expect(y, all_of[root], "broadcast")

            outs = [torch.empty_like(x) for _ in range(n)] if me == root else None
            ended(dist.gather(x, outs, root, **options), how)
            for y, wanted in zip(outs or [], all_of, strict=False):
                expect(y, wanted, "gather")

            y = torch.empty_like(x)
            ended(dist.scatter(y, all_of if me == root else None, root, **options), how)
            expect(y, x, "scatter")

        outs = [torch.empty_like(x) for _ in range(n)]
        ended(dist.all_gather(outs, x, **options), how)
        for y, wanted in zip(outs, all_of, strict=True):
            expect(y, wanted, "all_gather")

        flat = torch.empty(n * count, dtype=x.dtype)
        ended(dist.all_gather_into_tensor(flat, x, **options), how)
        expect(flat, torch.cat(all_of), "all_gather_into_tensor")
        stacked = torch.empty(n, count, dtype=x.dtype)
        ended(dist.all_gather_into_tensor(stacked, x, **options), how)
        expect(stacked, torch.stack(all_of), "all_gather_into_tensor, stacked")

        sends = [given(n * me + to, 8, name) for to in range(n)]
        wanted = [given(n * r + me, 8, name) for r in range(n)]
        outs = [torch.empty_like(y) for y in wanted]
        ended(dist.all_to_all(outs, sends, **options), how)
        for y, right in zip(outs, wanted, strict=True):
            expect(y, right, "all_to_all")
        flat = torch.empty(8 * n, dtype=x.dtype)
        ended(dist.all_to_all_single(flat, torch.cat(sends), **options), how)
        expect(flat, torch.cat(wanted), "all_to_all_single")


@pytest.mark.cases(2)
@pytest.mark.quick(name=["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("name", TYPES)
def test_copies_of_every_type_are_correct(ranks, name):
    ranks(3, every_copy, name, WAYS[TYPES.index(name) % len(WAYS)])


@pytest.mark.cases(1)
@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("how", WAYS)
def test_copies_are_correct_by_every_way_of_waiting(ranks, n, how):
    ranks(n, every_copy, "float32", how)


def uneven(rank):
    n, me = rank.n, rank.number
    with group(rank):
        counts = [3 * r for r in range(n)]
        outs = [torch.empty(c) for c in counts]
        dist.all_gather(outs, given(me, counts[me]))
        for r, y in enumerate(outs):
            expect(y, given(r, counts[r]), "uneven all_gather")

        # Rank i sends i + j elements to rank j.
        sends = [given(10 * me + to, me + to) for to in range(n)]
        wanted = [given(10 * r + me, r + me) for r in range(n)]
        outs = [torch.empty_like(y) for y in wanted]
        dist.all_to_all(outs, sends)
        for y, right in zip(outs, wanted, strict=True):
            expect(y, right, "uneven all_to_all")

        gives, gets = [me + to for to in range(n)], [r + me for r in range(n)]
        rows = torch.cat([y.repeat_interleave(2).view(-1, 2) for y in sends])
        out = torch.empty(sum(gets), 2)
        dist.all_to_all_single(out, rows, gets, gives)
        right = torch.cat([y.repeat_interleave(2).view(-1, 2) for y in wanted])
        expect(out, right, "all_to_all_single with splits")

        # Only one sends anything.
        gives = [5] * n if me == 0 else [0] * n
        gets = [5] + [0] * (n - 1)
        out = torch.empty(5)
        dist.all_to_all_single(out, torch.ones(sum(gives)), gets, gives)
        expect(out, torch.ones(5))


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_copies_of_uneven_shares_are_correct(ranks, n):
    ranks(n, uneven)


def odd_shapes(rank, how):
    n, me = rank.n, rank.number
    options = {"async_op": how != "sync"}
    with group(rank):
        base = torch.zeros(4, 6)
        strided = base[:, ::2]
        strided.fill_(me + 1)
        ended(dist.broadcast(strided, n - 1, **options), how)
        expect(strided.contiguous(), torch.full((4, 3), float(n)))
        assert base[:, 1::2].sum() == 0, "it wrote elsewhere"

        turned = torch.full((2, 3), float(me)).t()
        outs = [torch.empty(2, 3).t() for _ in range(n)]
        ended(dist.all_gather(outs, turned, **options), how)
        for r, y in enumerate(outs):
            expect(y.contiguous(), torch.full((3, 2), float(r)))

        whole = torch.zeros(n, 50)
        whole[me] = me + 1
        ended(dist.all_gather_into_tensor(whole, whole[me], **options), how)
        expect(whole[:, 0], torch.arange(n) + 1.0, "in place")

        whole = torch.zeros(50 * n)
        if me == n - 1:
            whole[:50] = me + 1  # an input that lies in another's place
        mine = whole[:50] if me == n - 1 else torch.full((50,), me + 1.0)
        ended(dist.all_gather_into_tensor(whole, mine, **options), how)
        expect(whole.view(n, 50)[:, 7], torch.arange(n) + 1.0, "overlapping")

        columns = torch.empty(50, n).t()  # rows that do not lie in a row
        mine = torch.full((50,), float(me))
        ended(dist.all_gather(list(columns), mine, **options), how)
        expect(columns[:, 3], torch.arange(float(n)))

        x = torch.tensor(me)
        outs = [torch.tensor(-1) for _ in range(n)]
        ended(dist.all_gather(outs, x, **options), how)
        assert [int(y) for y in outs] == list(range(n))
        flat = torch.empty(n, dtype=torch.int64)
        ended(dist.all_gather_into_tensor(flat, x, **options), how)
        assert flat.tolist() == list(range(n))

        empty = torch.empty(0, 3)
        outs = [torch.empty(0, 3) for _ in range(n)]
        ended(dist.all_gather(outs, empty, **options), how)
        ended(dist.broadcast(empty, 0, **options), how)
        ended(dist.all_to_all_single(empty, empty.clone(), **options), how)

        swapped = torch.arange(float(n)) + 10 * me
        ended(dist.all_to_all_single(swapped, swapped, **options), how)
        expect(swapped, torch.arange(float(n)) * 10 + me, "all_to_all in place")


@pytest.mark.cases(2)
@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", WAYS)
def test_copies_of_odd_shapes_are_correct(ranks, n, how):
    ranks(n, odd_shapes, how)


def several_at_once(rank):
    n, me = rank.n, rank.number
    with group(rank) as pg:
        inputs = [given(me, size) for size in (4, 90)]
        outs = [[torch.empty_like(x) for x in inputs] for _ in range(n)]
        dist.all_gather_coalesced(outs, inputs)
        for r in range(n):
            for y, size in zip(outs[r], (4, 90), strict=True):
                expect(y, given(r, size))

        flats = [torch.empty(n * size) for size in (4, 90)]
        with dist._coalescing_manager(async_ops=True) as manager:
            for y, x in zip(flats, inputs, strict=True):
                dist.all_gather_into_tensor(y, x)
        manager.wait()
        for y, size in zip(flats, (4, 90), strict=True):
            expect(y, torch.cat([given(r, size) for r in range(n)]))
        for name in ("all_gather_single", "allgather_into_tensor"):
            again = [torch.empty_like(y) for y in flats]
            getattr(pg, f"{name}_coalesced")(again, inputs).wait()
            for one, other in zip(again, flats, strict=True):
                expect(one, other)

        two = [torch.full((3,), float(me)), torch.full((2, 2), float(me))]
        pg.broadcast(two, dist.BroadcastOptions()).wait()
        for y in two:
            expect(y, torch.zeros_like(y))


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
def test_coalesced_copies_are_correct(ranks, n):
    ranks(n, several_at_once)


def both_spellings(rank):
    n, me = rank.n, rank.number
    with group(rank) as pg:
        x = given(me, 6)
        for name in ("all_gather_single", "_allgather_base"):
            y = torch.empty(6 * n)
            getattr(pg, name)(y, x).wait()
            expect(y, torch.cat([given(r, 6) for r in range(n)]))
        for name in ("reduce_scatter_single", "_reduce_scatter_base"):
            y = torch.empty(6)
            getattr(pg, name)(y, torch.ones(6 * n)).wait()
            expect(y, torch.full((6,), float(n)))
        for name in ("all_to_all_single", "alltoall_base"):
            y = torch.empty(n)
            getattr(pg, name)(y, torch.full((n,), float(me)), [], []).wait()
            expect(y, torch.arange(float(n)))
        # The short forms that only the methods have.
        y = torch.ones(3)
        pg.allreduce(y).wait()
        pg.allreduce(y, dist.ReduceOp.MAX).wait()
        pg.allreduce([y]).wait()
        expect(y, torch.full((3,), float(n * n)))
        pg.broadcast(y, 0).wait()
        pg.reduce(y, 0).wait()
        pg.barrier().wait()
        outs = [torch.empty(2) for _ in range(n)]
        pg.allgather(outs, torch.full((2,), float(me))).wait()
        assert [int(y[0]) for y in outs] == list(range(n))
        pg.gather(outs if me == 0 else [], torch.ones(2), 0).wait()
        pg.scatter(y, [torch.zeros(3)] * n if me == 0 else [], 0).wait()
        expect(y, torch.zeros(3))
        pg.reduce_scatter(y, [torch.ones(3)] * n).wait()
        expect(y, torch.full((3,), float(n)))


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [1, 2])
def test_both_spellings_of_calls_give_the_same(ranks, n):
    ranks(n, both_spellings)

"""Reductions by way of torch.distributed, against plain torch.

Values are small whole numbers, so that every order of adding them gives the same bits
in every type.
"""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import WAYS, ended, expect, group

from unisono.interop.torch import calls

pytestmark = pytest.mark.one_in(3)

Op = dist.ReduceOp
FLOATS = ["float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
WHOLE = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
COMPLEX = ["complex64", "complex128"]
TYPES = [*FLOATS, *WHOLE, *COMPLEX, "bool"]
MEANINGS = {
    "SUM": lambda rows: rows.sum(0),
    "AVG": lambda rows: divided(rows.sum(0), len(rows)),
    "PRODUCT": lambda rows: rows.prod(0),
    "MIN": lambda rows: rows.amin(0),
    "MAX": lambda rows: rows.amax(0),
}
BITWISE = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def divided(total, n):
    """Part by part; torch itself multiplies complex numbers by 1 / n."""
    if total.is_complex():
        return torch.view_as_complex(torch.view_as_real(total) / n)
    return total / n


def ops_of(name):
    if name in COMPLEX:
        return ["SUM", "AVG"]
    if name == "bool":
        return ["SUM", "PRODUCT", "MIN", "MAX", *BITWISE]
    return [*MEANINGS, *(BITWISE if name in WHOLE else ())]


def given(rank, count, name):
    """A rank's values: whole numbers from 0 to 2."""
    made = torch.Generator().manual_seed(1000 * count + rank)
    values = torch.randint(0, 2 if name == "bool" else 3, (count,), generator=made)
    if name in COMPLEX:
        other = torch.randint(0, 3, (count,), generator=made)
        return torch.complex(values.double(), other.double()).to(getattr(torch, name))
    return values.to(getattr(torch, name))


def reduced(op, n, count, name):
    """What plain torch makes of all ranks' values."""
    wide = torch.complex128 if name in COMPLEX else torch.float64
    if op in BITWISE:
        total = given(0, count, name).long()
        for rank in range(1, n):
            total = BITWISE[op](total, given(rank, count, name).long())
        return total.to(getattr(torch, name))
    rows = torch.stack([given(rank, count, name).to(wide) for rank in range(n)])
    total = MEANINGS[op](rows)
    if name in FLOATS[2:]:
        total = total.float()  # which the small types are summed in
    return total.to(getattr(torch, name))


def all_reduces(rank, name):
    with group(rank):
        for op in ops_of(name):
            for i, count in enumerate((0, 1, 7, 5000)):
                x = given(rank.number, count, name)
                how = WAYS[i % len(WAYS)]
                work = dist.all_reduce(x, getattr(Op, op), async_op=how != "sync")
                value = ended(work, how)
                wanted = reduced(op, rank.n, count, name)
                expect(x, wanted, f"{op} of {count} {name}")
                if value is not None and name not in COMPLEX:
                    expect(value[0], wanted, "the work's value")


@pytest.mark.quick(name=["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("name", TYPES)
def test_all_reduce_of_every_type_is_correct(ranks, name):
    ranks(3, all_reduces, name)


def every_reduction(rank, name):
    n = rank.n
    with group(rank):
        for i, op in enumerate(ops_of(name)):
            how, count, root = WAYS[i % len(WAYS)], 6 * n, i % n
            options = {"op": getattr(Op, op), "async_op": how != "sync"}
            wanted = reduced(op, n, count, name)
            x = given(rank.number, count, name)
            ended(dist.all_reduce(x, **options), how)
            expect(x, wanted, f"all_reduce {op} {name}")

            before = given(rank.number, count, name)
            x = before.clone()
            ended(dist.reduce(x, root, **options), how)
            expect(x, wanted if rank.number == root else before, f"reduce {op} {name}")

            if name in COMPLEX:
                continue
            mine = wanted.chunk(n)[rank.number]
            y = torch.empty_like(mine)
            ended(dist.reduce_scatter_tensor(y, before, **options), how)
            expect(y, mine, f"reduce_scatter_tensor {op} {name}")
            y = torch.empty_like(mine)
            parts = [part.clone() for part in before.chunk(n)]
            ended(dist.reduce_scatter(y, parts, **options), how)
            expect(y, mine, f"reduce_scatter {op} {name}")


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_every_reduction_is_correct(ranks, n, name):
    ranks(n, every_reduction, name)


def premultiplied(rank, name):
    kind = getattr(torch, name)
    with group(rank):
        op = dist._make_nccl_premul_sum(0.5)
        x = torch.full((1000,), 2.0 * (rank.number + 1), dtype=kind)
        total = torch.full((1000,), rank.n * (rank.n + 1) / 2, dtype=kind)
        kept = x.clone()
        y = torch.empty(1000 // rank.n, dtype=kind)
        rows = x[: len(y) * rank.n]
        dist.reduce_scatter_tensor(y, rows, op=op)
        expect(y, total[: len(y)])
        expect(x, kept, "the input")
        dist.all_reduce(x, op=op)
        expect(x, total)
        x = kept.clone()
        dist.reduce(x, 0, op=op)
        expect(x, total if rank.number == 0 else kept)


@pytest.mark.quick(name=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["float32", "float64", "bfloat16", "float16"])
def test_premultiplied_sum_is_correct(ranks, name):
    ranks(3, premultiplied, name)


def uneven_shares(rank):
    n = rank.n
    counts = [5 * i for i in range(n)]
    with group(rank):
        inputs = [
            torch.full((c,), rank.number + 10.0 * i) for i, c in enumerate(counts)
        ]
        y = torch.empty(counts[rank.number])
        dist.reduce_scatter(y, inputs)
        total = n * (n - 1) / 2 + 10.0 * rank.number * n
        expect(y, torch.full((counts[rank.number],), total))


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
def test_uneven_reduce_scatter_is_correct(ranks, n):
    ranks(n, uneven_shares)


def several_at_once(rank):
    n, pg = rank.n, dist.group
    with group(rank):
        tensors = [torch.full((size,), float(rank.number)) for size in (3, 0, 700, 1)]
        total = n * (n - 1) / 2
        pg.WORLD.allreduce_coalesced(tensors).wait()
        for t in tensors:
            expect(t, torch.full_like(t, total))
        with dist._coalescing_manager(async_ops=True) as manager:
            for t in tensors:
                dist.all_reduce(t)
        manager.wait()
        for t in tensors:
            expect(t, torch.full_like(t, total * n))
        inputs = [torch.arange(float(n * k)) + rank.number for k in (1, 50)]
        outputs = [torch.empty(k) for k in (1, 50)]
        with dist._coalescing_manager():
            for y, x in zip(outputs, inputs, strict=True):
                dist.reduce_scatter_tensor(y, x)
        for y in outputs:
            k = len(y)
            mine = torch.arange(float(k)) + k * rank.number
            expect(y, mine * n + total)
        again = [torch.empty_like(y) for y in outputs]
        pg.WORLD.reduce_scatter_tensor_coalesced(again, inputs).wait()
        for one, other in zip(again, outputs, strict=True):
            expect(one, other)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
def test_coalesced_reductions_are_correct(ranks, n):
    ranks(n, several_at_once)


def odd_shapes(rank, how):
    n = rank.n
    total = n * (n + 1) / 2
    options = {"async_op": how != "sync"}
    with group(rank):
        base = torch.full((8, 6), float(rank.number + 1))
        strided = base[::2, 1::2]
        ended(dist.all_reduce(strided, **options), how)
        expect(strided.contiguous(), torch.full((4, 3), total))
        assert base.sum() == 12 * total + 36 * (rank.number + 1), "it wrote elsewhere"

        zero_dim = torch.tensor(float(rank.number + 1))
        ended(dist.all_reduce(zero_dim, **options), how)
        expect(zero_dim, torch.tensor(total))

        turned = torch.full((3, 5), float(rank.number + 1)).t()
        ended(dist.reduce(turned, 0, **options), how)
        wanted = total if rank.number == 0 else rank.number + 1.0
        expect(turned.contiguous(), torch.full((5, 3), wanted))

        x = torch.arange(4.0 * n).view(n, 4) + rank.number
        ended(dist.reduce_scatter_tensor(x[rank.number], x, **options), how)
        wanted = (torch.arange(4.0) + 4 * rank.number) * n + total - n
        expect(x[rank.number], wanted, "reduce_scatter in place")

        x = torch.arange(4.0 * n) + rank.number
        last = x[-4:]  # where others' share is
        ended(dist.reduce_scatter_tensor(last, x, **options), how)
        expect(last, wanted, "reduce_scatter into another's place")

        weight = torch.nn.Parameter(torch.ones(5))
        ended(dist.all_reduce(weight.data, **options), how)
        expect(weight.data, torch.full((5,), float(n)))


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("how", WAYS)
def test_reductions_of_odd_shapes_are_correct(ranks, n, how):
    ranks(n, odd_shapes, how)


def conjugated(rank):
    with group(rank) as pg:
        x = torch.full((4,), complex(1, rank.number + 1)).conj()
        pg.allreduce([x]).wait()
        expect(x.resolve_conj(), torch.full((4,), complex(rank.n, -3)))


def test_conjugated_views_are_reduced(ranks):
    ranks(2, conjugated)


def dropped(rank):
    with group(rank):
        others = []
        for _ in range(20):
            if rank.number == 0:
                time.sleep(0.005)  # come late
            # Nobody holds the work or the tensor: they live until it is done.
            dist.all_reduce(torch.ones(20_000), async_op=True)
            others.append(torch.full((20_000,), 3.0))
        dist.barrier()
        assert all(bool((x == 3.0).all()) for x in others), "memory was used again"


def test_work_without_references_completes(ranks):
    ranks(2, dropped)


def waited_twice(rank):
    """Who waits while a future is being completed finds the result at home."""
    with group(rank):
        for _ in range(30):
            x = torch.ones(300, 4)[:, ::2]
            work = dist.all_reduce(x, async_op=True)
            future = work.get_future()
            work.wait()
            expect(x.contiguous(), torch.full((300, 2), float(rank.n)))
            future.wait()


def test_wait_and_future_complete_together(ranks):
    ranks(2, waited_twice)


def sparse_sums(rank, name):
    kind = getattr(torch, name)
    with group(rank):
        at = torch.tensor([[0, rank.number], [1, 2]])
        x = torch.sparse_coo_tensor(at, torch.ones(2, dtype=kind), (rank.n + 1, 3))
        dense = torch.zeros(rank.n + 1, 3, dtype=kind)
        for r in range(rank.n):
            dense[0, 1] += 1
            dense[r, 2] += 1
        dist.all_reduce(x)
        expect(x.to_dense(), dense)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        expect(x.to_dense(), dense * rank.n)
        empty = torch.sparse_coo_tensor(size=(3, 3), dtype=kind)
        dist.all_reduce(empty)
        assert empty.to_dense().sum() == 0


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ["float32", "int64"])
def test_sparse_all_reduce_is_correct(ranks, n, name):
    ranks(n, sparse_sums, name)


def profiled(rank):
    with group(rank):
        x = torch.ones(100)
        with torch.profiler.profile() as seen:
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
            dist.broadcast(x, 0)
        names = [event.name for event in seen.events()]
        return [names.count(f"unisono:{what}") for what in ("all_reduce", "broadcast")]


def test_profiler_records_calls(ranks):
    assert ranks(2, profiled) == [[2, 1], [2, 1]]


def test_factor_of_a_torch_that_has_no_attribute_for_it():
    op = dist._make_nccl_premul_sum(0.5)

    class Older:
        def __getstate__(self):
            return op.__getstate__()

    assert calls._factor(Older()) == calls._factor(op) == 0.5

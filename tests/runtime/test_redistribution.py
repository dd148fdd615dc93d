"""Arrays divided in one way and then in another, held to NumPy's slices."""

from itertools import accumulate, pairwise, product

import numpy as np
import pytest

from unisono import BadArgument, CollectiveMismatch
from unisono.runtime.call.shard_sizes import shard_sizes
from unisono.testing import world

SHAPES = ((6, 4, 2), (5, 7, 3), (2, 0, 5), (1, 1, 1))
CUTS = (0, 1, 2, None)


def whole_of(shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def part(array, cut, rank, n, sizes=None):
    """The rank's part by the rule, or by sizes."""
    if cut is None:
        return array
    sizes = sizes or shard_sizes(array.shape[cut], n)
    begin, end = list(pairwise(accumulate(sizes, initial=0)))[rank]
    return array[(slice(None),) * cut + (slice(begin, end),)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_any_cut_becomes_any_other(n, shape):
    whole = whole_of(shape)

    def rank(comm):
        for (old, new), told in product(product(CUTS, CUTS), (False, True)):
            x = part(whole, old, comm.rank, n)
            found = comm.redistribute(x, old, new, shape=None if told else shape)
            wanted = part(whole, new, comm.rank, n)
            assert found.shape == wanted.shape
            assert (found == wanted).all()
            assert not np.shares_memory(found, x)

    world(n).run(rank)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [1, 3, 4])
def test_summands_become_parts_or_the_whole(n, shape):
    whole = whole_of(shape)

    def rank(comm):
        for new, op in product(CUTS, ("sum", "max")):
            factor = comm.rank + 1
            found = comm.redistribute(whole * factor, "partial", new, op=op)
            total = n * (n + 1) // 2 if op == "sum" else n
            assert (found == part(whole * total, new, comm.rank, n)).all()

    world(n).run(rank)


def test_parts_of_any_size_become_those_of_the_rule_and_back():
    """As torch.chunk makes them (3, 3, 1, 0), and with a rank that has nothing."""
    whole, n = whole_of((7, 5)), 4

    def rank(comm):
        for sizes in ([3, 3, 1, 0], [0, 7, 0, 0]):
            x = part(whole, 0, comm.rank, n, sizes)
            for new in (0, 1, None):
                found = comm.redistribute(x, 0, new)
                assert (found == part(whole, new, comm.rank, n)).all()
                back = comm.redistribute(found, new, 0, sizes=sizes)
                assert back.shape == x.shape
                assert (back == x).all()

    world(n).run(rank)


def test_ranks_of_several_hosts_redistribute():
    whole = whole_of((5, 7))

    def rank(comm):
        columns = comm.redistribute(part(whole, 0, comm.rank, 4), 0, 1)
        assert (columns == part(whole, 1, comm.rank, 4)).all()
        assert (comm.redistribute(columns, 1, None) == whole).all()
        rows = comm.redistribute(whole, "partial", 0)
        assert (rows == 4 * part(whole, 0, comm.rank, 4)).all()

    world(4, hosts=(0, 0, 1, 2)).run(rank)


def test_bytes_are_those_of_the_collective_alone():
    def rank(comm):
        def sent(old, new):
            x = part(whole_of((8, 12)), old, comm.rank, 4)
            before = comm.sent_bytes
            comm.redistribute(x, old, new, shape=(8, 12))
            return comm.sent_bytes - before

        assert sent(0, 1) == 3 * 2 * 3 * 4  # three others get two rows of three columns
        assert sent(0, None) == 3 * 2 * 12 * 4  # the own two rows, to each
        assert sent(None, 1) == sent(1, 1) == 0
        assert len(comm.records()) == 2  # one collective each, none to tell sizes

    world(4).run(rank)


def test_tensors_of_every_kind():
    torch = pytest.importorskip("torch")
    whole = torch.arange(35, dtype=torch.float32).reshape(5, 7)

    def rank(comm):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            rows = whole.to(dtype).tensor_split(3, 0)[comm.rank]
            columns = comm.redistribute(
                rows.requires_grad_(dtype.is_floating_point), 0, 1
            )
            assert isinstance(columns, torch.Tensor)
            assert torch.equal(columns, whole.to(dtype).tensor_split(3, 1)[comm.rank])
            transposed = whole.to(dtype).T.tensor_split(3, 0)[comm.rank]
            assert torch.equal(comm.redistribute(transposed, 0, 1).T, rows.detach())

    world(3).run(rank)


def test_placements_of_torch_name_the_cuts():
    tensor = pytest.importorskip("torch.distributed.tensor")
    shard, replicate, partial = tensor.Shard, tensor.Replicate(), tensor.Partial()
    whole = whole_of((4, 6))

    def rank(comm):
        x = part(whole, 0, comm.rank, 2)
        assert (comm.redistribute(x, shard(0), replicate) == whole).all()
        columns = comm.redistribute(x, shard(0), shard(1))
        assert (columns == part(whole, 1, comm.rank, 2)).all()
        assert (comm.redistribute(whole, partial, None) == 2 * whole).all()
        with pytest.raises(BadArgument, match="op='max'"):
            comm.redistribute(whole, tensor.Partial("max"), None)

    world(2).run(rank)


def test_async_call_is_a_work():
    whole = whole_of((5, 4))

    def rank(comm):
        x = part(whole, 0, comm.rank, 3)
        for old, new in ((0, 1), (0, None), (None, 1)):
            given = x if old == 0 else whole
            work = comm.redistribute(given, old, new, async_op=True, label="mine")
            assert (work.wait() == part(whole, new, comm.rank, 3)).all()
            assert work.is_completed()

    world(3).run(rank)


def test_negative_dimensions_count_from_the_end():
    whole = whole_of((4, 6))
    found = world(2).run(
        lambda comm: comm.redistribute(part(whole, 0, comm.rank, 2), -2, -1)
    )
    assert (np.concatenate(found, 1) == whole).all()


WRONG = [
    (("rows", 0), {}, "from_ = 'rows': expected the number of a dimension"),
    ((0.5, 0), {}, "from_ = 0.5: expected"),
    ((0, 2), {}, r"to = 2: the array has 2 dimensions; .* -2\.\.1"),
    ((0, "partial"), {}, "no one way to make summands"),
    ((0, 1), {"op": "max"}, "nothing is reduced from 0"),
    (("replicated", 1), {"op": "max"}, "nothing is reduced from 'replicated'"),
    (("partial", 1), {"op": np.add}, "expected the name of a reduction"),
    ((0, 1), {"shape": (5, 8)}, "by shape= this rank has"),
    ((0, 1), {"shape": (4,)}, "has 1 dimensions, x has 2"),
    ((None, 1), {"shape": (4, 4)}, "by shape= this rank has"),
    ((0, 1), {"sizes": [1, 2]}, "expected 2 numbers, none negative, that add up to 4"),
    ((0, None), {"sizes": [1, 3]}, "a whole has no parts"),
]


@pytest.mark.parametrize(("cuts", "options", "match"), WRONG)
def test_wrong_arguments_are_named(cuts, options, match):
    def rank(comm):
        with pytest.raises(BadArgument, match=match):
            comm.redistribute(np.ones((2, 4)), *cuts, **options)
        comm.barrier()  # it can still be used

    world(2).run(rank)


def test_a_single_number_cannot_be_cut():
    def rank(comm):
        with pytest.raises(BadArgument, match=r"reshape it to \(1,\)"):
            comm.redistribute(np.ones(()), None, 0)
        assert comm.redistribute(np.ones(()), "partial", None) == 2

    world(2).run(rank)


def test_a_wrong_argument_of_one_rank_is_an_error_on_all():
    def rank(comm):
        to = 7 if comm.rank == 1 else 1
        match = "to = 7" if comm.rank == 1 else "rank 1 gave a wrong argument"
        with pytest.raises(BadArgument, match=match):
            comm.redistribute(np.ones((2, 4)), 0, to)
        comm.barrier()

    world(3).run(rank)


def test_ranks_that_cut_differently_are_told_so():
    def rank(comm):
        with pytest.raises(CollectiveMismatch, match="redistribute 0 to"):
            comm.redistribute(np.ones((2, 2, 2)), 0, 1 + comm.rank, timeout_s=60)

    world(2).run(rank)

"""Wrong arguments are named, at once, and the group goes on."""

import pytest
import torch
import torch.distributed as dist
from ranks import expect, group

from forked import attempt, error_summary
from unisono.errors import BadArgument

n = 2


def gathered(lists):
    return [torch.empty(size) for size in lists]


def one():
    return torch.ones(3)


WRONG = {
    "too few outputs": (
        lambda: dist.all_gather(gathered([3]), one()),
        "a list of 2 tensors expected, got 1",
    ),
    "outputs of another type": (
        lambda: dist.all_gather([torch.empty(3).int() for _ in range(n)], one()),
        "dtype",
    ),
    "outputs of another size": (
        lambda: dist.all_gather(gathered([5, 5]), one()),
        "× 3 for an output of torch.float32 × 5",
    ),
    "a single output of another size": (
        lambda: dist.all_gather_into_tensor(torch.empty(5), one()),
        "an output of 5 elements for inputs of 3",
    ),
    "an output of another type": (
        lambda: dist.all_gather_into_tensor(torch.empty(6).double(), one()),
        "float",
    ),
    "an input that cannot be divided": (
        lambda: dist.reduce_scatter_tensor(one(), torch.ones(5)),
        "an input of 5 elements for an output of 3",
    ),
    "too many inputs": (
        lambda: dist.reduce_scatter(one(), [one()] * 3),
        "a list of 2 tensors expected, got 3",
    ),
    "rows that cannot be divided": (
        lambda: dist.all_to_all_single(one(), one()),
        "3 rows cannot be divided evenly among 2 ranks",
    ),
    "splits that do not add up": (
        lambda: dist.all_to_all_single(one(), one(), [1, 2], [1, 1]),
        "split sizes [1, 1] for 3 rows",
    ),
    "too few splits": (
        lambda: dist.all_to_all_single(one(), one(), [1, 2], [3]),
        "split sizes [3] for 3 rows and 2 ranks",
    ),
    "bits of floats": (
        lambda: dist.all_reduce(one(), dist.ReduceOp.BAND),
        "band has no meaning for float32",
    ),
    "a mean of booleans": (
        lambda: dist.all_reduce(one().bool(), dist.ReduceOp.AVG),
        "mean has no meaning for bool",
    ),
    "a type that nobody adds": (
        lambda: dist.all_reduce(torch.ones(3).to(torch.float8_e4m3fnuz)),
        "float8_e4m3fnuz cannot be reduced",
    ),
    "another device": (
        lambda: dist.all_reduce(torch.ones(3, device="meta")),
        "the tensor is on meta, expected the CPU",
    ),
    "a sparse tensor": (
        lambda: dist.broadcast(torch.ones(3).to_sparse(), 0),
        "expected a dense one",
    ),
    "a rank that is not there": (
        lambda: dist.broadcast(one(), 7),
        "7",
    ),
    "a message to nobody": (
        lambda: dist.send(one(), 7),
        "7",
    ),
    "a sparse maximum": (
        lambda: dist.all_reduce(one().to_sparse(), dist.ReduceOp.MAX),
        "sparse",
    ),
}


def refusal(call):
    """What a call raises, and which of the types that torch's users catch it is of."""
    try:
        call()
    except Exception as error:
        types = (ValueError, RuntimeError, BadArgument)
        kinds = [kind.__name__ for kind in types if isinstance(error, kind)]
        return error_summary(error) | {"kinds": kinds}
    return None


def wrong(rank):
    result = {}
    with group(rank):
        for name, (call, _) in WRONG.items():
            result[name] = refusal(call)
            x = one()
            dist.all_reduce(x)
            expect(x, one() * n, f"the group after {name}")
    return result


@pytest.fixture(scope="module")
def raised(forks):
    ends = forks.run(n, wrong)
    assert [end.status for end in ends] == [0, 0], ends[0].stderr
    return ends[0].value


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_with_the_reason(raised, name):
    assert raised[name] is not None, "nothing was raised"
    assert WRONG[name][1] in raised[name]["message"]


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_have_the_types_of_torch_and_unisono(raised, name):
    if name == "outputs of another type":  # torch itself refuses this
        assert raised[name]["kinds"] == ["ValueError"]
    else:
        assert raised[name]["kinds"] == ["ValueError", "RuntimeError", "BadArgument"]


def a_root_short_of_tensors(rank):
    with group(rank):
        mine = [one()] if rank.number == 0 else None
        result = attempt(dist.scatter, one(), mine, 0) if rank.number == 0 else None
        dist.barrier()
        result = attempt(dist.gather, one(), [one()], 0) if rank.number == 0 else result
        dist.barrier()
        return result


def test_root_with_too_few_tensors_is_refused(ranks):
    result = ranks(n, a_root_short_of_tensors)[0]
    assert "a list of 2 tensors expected, got 1" in result["message"]


def options(rank):
    return attempt(lambda: group(rank, pg_options=object()).__enter__())


def test_pg_options_are_refused(ranks):
    for result in ranks(n, options):
        assert "no pg_options" in result["message"]

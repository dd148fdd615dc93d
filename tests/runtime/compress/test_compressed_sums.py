"""Sums for which less is sent: what they are, the same everywhere, to the byte."""

import numpy as np
import pytest

from unisono import codecs
from unisono.codecs.powersgd import PowerSGD
from unisono.codecs.randomk import RandomK, drawn
from unisono.codecs.topk import TopK, largest
from unisono.errors import BadArgument, CollectiveMismatch
from unisono.runtime.call.shard_sizes import shard_sizes
from unisono.runtime.compress import sparse
from unisono.runtime.compress.error_feedback import CodedSum
from unisono.runtime.compress.powersgd import LowRankSum
from unisono.runtime.compress.sparse import RandomKSum, TopKSum
from unisono.runtime.stages import StagedWork
from unisono.testing import world

NS = [1, 2, 3, 5]
COUNT = 1000


def gradient(rank, step=0, count=COUNT):
    """Heavy tails: a few elements are much larger than the others."""
    source = np.random.default_rng([rank, step])
    return source.standard_t(2, count).astype(np.float32)


def done(compressed, x, **options):
    StagedWork(compressed.reduce(x, **options), None, "sum").wait()
    return x


def ended(worlds, n, make, steps=1, whole=True, count=COUNT):
    """Each rank's sums, what it remembers, and the bytes it sent in each step."""

    def run(comm):
        compressed, found, sent = make(comm), [], []
        for step in range(steps):
            before = comm.sent_bytes
            found.append(
                done(compressed, gradient(comm.rank, step, count), whole=whole)
            )
            sent.append(comm.sent_bytes - before)
        return found, compressed.memory, sent, compressed.bounds

    return worlds(n).run(run)


def of_all(n, step=0, count=COUNT):
    return [gradient(rank, step, count) for rank in range(n)]


def only(x, places):
    kept = np.zeros_like(x)
    kept[places] = x[places]
    return kept


def same_on_all(ranks):
    for found, *_ in ranks:
        for mine, first in zip(found, ranks[0][0], strict=True):
            assert mine.tobytes() == first.tobytes()


# --- top-k


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("k", [1, 20, 499, 500, 1000])
def test_topk_sums_each_ranks_largest_elements(worlds, n, k):
    ranks = ended(worlds, n, lambda c: TopKSum(c, TopK(k=k), COUNT, feedback=False))
    same_on_all(ranks)
    right = np.zeros(COUNT, np.float32)
    for x in of_all(n):
        right += only(x, largest(x, k))
    np.testing.assert_allclose(ranks[0][0][0], right, rtol=1e-6)


def pairs_bytes(n, x_of, k, again):
    """What all ranks send together, by the formulas of `runtime.sparse`."""
    chosen = [largest(x, k) for x in x_of]
    cuts = np.mean([c[np.arange(1, n) * k // n] for c in chosen], 0).astype(int)
    bounds = [0, *cuts.tolist(), COUNT]
    pairs = total = 0
    for owner in range(n):
        here = [c[(c >= bounds[owner]) & (c < bounds[owner + 1])] for c in chosen]
        pairs += sum(h.size for rank, h in enumerate(here) if rank != owner)
        found = np.unique(np.concatenate(here)).size
        total += min(found, shard_sizes(k, n)[owner]) if again else found
    assert 2 * total < COUNT
    return n * 16 * n * (n - 1) + 8 * (pairs + (n - 1) * total)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("again", [False, True])
def test_topk_sends_exactly_the_predicted_bytes(worlds, n, again):
    k = 20
    make = lambda c: TopKSum(c, TopK(k=k), COUNT, feedback=again)  # noqa: E731
    ranks = ended(worlds, n, make)
    sent = sum(sent[0] for _, _, sent, _ in ranks)
    assert sent == pairs_bytes(n, of_all(n), k, again)
    if again:  # split and gather: never more than 4k numbers each, and the counts
        most = 16 * k * n + n * 16 * n * (n - 1)
        assert sent <= most


def test_topk_regions_are_balanced(worlds):
    """Everything large lies in the first tenth; regions of equal size would not do."""
    n, k, count = 4, 200, 10_000

    def run(comm):
        x = gradient(comm.rank, count=count) * 1e-3
        x[:1000] *= 1e6
        before = comm.sent_bytes
        done(TopKSum(comm, TopK(k=k), count), x)
        return comm.sent_bytes - before

    sent = worlds(n).run(run)
    assert max(sent) < 1.2 * min(sent)


@pytest.mark.parametrize("k", [490, 600])
def test_topk_sends_dense_values_where_smaller(worlds, k):
    """Known before if 2k is everything; else when the owners see how much it is."""
    n = 4
    ranks = ended(worlds, n, lambda c: TopKSum(c, TopK(k=k), COUNT, feedback=False))
    sent = sum(sent[0] for _, _, sent, _ in ranks)
    dense = 2 * (n - 1) * 4 * COUNT
    counts = n * 16 * n * (n - 1)
    if k == 600:  # small ones are added up by every rank itself, and sent n-1 times
        plain = worlds(n).run(lambda c: _plain(c, COUNT))
        assert sent == sum(plain)
    else:
        split = 8 * n * k * (n - 1) / n
        assert sent < split * 1.1 + dense / 2 + counts
        assert sent >= dense / 2 + counts


def _plain(comm, count):
    before = comm.sent_bytes
    comm.all_reduce(np.zeros(count, np.float32))
    return comm.sent_bytes - before


@pytest.mark.parametrize("make", ["topk", "randomk"])
@pytest.mark.parametrize("whole", [True, False])
def test_unsent_elements_are_kept_for_the_next_call(worlds, make, whole):
    """After any number of steps: all that came is in the sums, or still waits."""
    n, steps = 3, 4
    how = {"topk": (TopKSum, TopK(0.05)), "randomk": (RandomKSum, RandomK(0.05))}
    kind, spec = how[make]
    ranks = ended(worlds, n, lambda c: kind(c, spec, COUNT), steps, whole)
    came = sum(sum(of_all(n, step)) for step in range(steps))
    waits = sum(memory["residual"] for _, memory, _, _ in ranks)
    if whole:
        same_on_all(ranks)
        summed = sum(ranks[0][0])
    else:
        summed = np.zeros(COUNT, np.float32)
        for rank, (found, _, _, bounds) in enumerate(ranks):
            mine = slice(*bounds[rank : rank + 2])
            summed[mine] = sum(found)[mine]
    np.testing.assert_allclose(summed + waits, came, rtol=1e-4, atol=1e-4)
    assert (summed == 0).any()


def test_dense_values_in_reduce_scatter(worlds):
    make = lambda c: TopKSum(c, TopK(0.9), COUNT)  # noqa: E731
    ranks = ended(worlds, 3, make, whole=False)
    right = sum(only(x, largest(x, 900)) for x in of_all(3))
    for rank, (found, _, _, bounds) in enumerate(ranks):
        mine = slice(*bounds[rank : rank + 2])
        np.testing.assert_allclose(found[0][mine], right[mine], rtol=1e-5)


def test_nan_reaches_all_ranks(worlds):
    def run(comm):
        x = gradient(comm.rank)
        if comm.rank == 1:
            x[7], x[8] = np.nan, -np.inf
        compressed = TopKSum(comm, TopK(0.01), COUNT)
        done(compressed, x)
        return x, compressed.memory["residual"]

    for x, waits in worlds(3).run(run):
        assert np.isnan(x[7])
        assert x[8] == -np.inf
        assert np.isfinite(waits).all()


def test_empty_tensor_is_summed(worlds):
    ranks = ended(worlds, 3, lambda c: TopKSum(c, TopK(), 0), count=0)
    assert [found[0].size for found, *_ in ranks] == [0] * 3


def test_tensor_beyond_32_bit_indices_is_refused(worlds):
    with pytest.raises(BadArgument, match=r"less than 2\^32"):
        TopKSum(worlds(1).comms[0], TopK(), sparse.MOST)
    with pytest.raises(BadArgument, match="k = 9, but there are 8"):
        TopKSum(worlds(1).comms[0], TopK(k=9), 8)


# --- random-k


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_randomk_sums_the_same_indices_on_all_ranks(worlds, n):
    k = 50
    make = lambda c: RandomKSum(c, RandomK(k=k, seed=3), COUNT)  # noqa: E731
    ranks = ended(worlds, n, make, steps=2)
    same_on_all(ranks)
    first = only(sum(of_all(n)), drawn(COUNT, k, 3))
    np.testing.assert_allclose(ranks[0][0][0], first, rtol=1e-5)
    assert not np.array_equal(np.flatnonzero(ranks[0][0][1]), np.flatnonzero(first))
    plain = worlds(n).run(lambda c: _plain(c, k))
    assert [sent for _, _, sent, _ in ranks] == [[p, p] for p in plain]


# --- PowerSGD

SHAPES = [(30, 20), (50,), (4, 5, 10), (3, 3), ()]
ELEMENTS = 600 + 50 + 200 + 9 + 1


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_powersgd_makes_two_all_reduces(worlds, n):
    ranks = ended(
        worlds, n, lambda c: LowRankSum(c, PowerSGD(2), SHAPES), count=ELEMENTS, steps=2
    )
    same_on_all(ranks)
    first, second = 2 * (30 + 4) + 60, 2 * (20 + 50)
    plain = worlds(n).run(lambda c: _plain(c, first) + _plain(c, second))
    assert [sent for _, _, sent, _ in ranks] == [[p, p] for p in plain]
    right = sum(of_all(n, count=ELEMENTS))
    found = ranks[0][0][0]
    np.testing.assert_allclose(found[600:650], right[600:650], rtol=1e-5)
    np.testing.assert_allclose(found[850:], right[850:], rtol=1e-5)
    assert np.linalg.matrix_rank(found[:600].reshape(30, 20), tol=1e-3) == 2
    waits = sum(memory["residual"] for _, memory, _, _ in ranks)
    summed = sum(ranks[0][0])
    came = right + sum(of_all(n, 1, ELEMENTS))
    np.testing.assert_allclose(summed + waits, came, rtol=1e-3, atol=1e-3)


def test_powersgd_converges_over_steps(worlds):
    """The same matrix again and again: what is found begins where it ended."""

    def run(comm):
        compressed = LowRankSum(comm, PowerSGD(2), [(30, 20)], feedback=False)
        m = gradient(7, count=600)
        return [np.linalg.norm(done(compressed, m.copy()) / 3 - m) for _ in range(6)]

    lost = worlds(3).run(run)[0]
    assert lost[-1] < lost[0]
    values = np.linalg.svd(gradient(7, count=600).reshape(30, 20))[1]
    assert lost[-1] == pytest.approx(np.linalg.norm(values[2:]), rel=0.05)


def test_powersgd_recovers_from_infinity(worlds):
    def run(comm):
        compressed, found = LowRankSum(comm, PowerSGD(2), [(30, 20)]), []
        for step in range(3):
            x = gradient(comm.rank, step, 600)
            if step == 1 and comm.rank == 0:
                x[3] = np.inf
            found.append(bool(np.isfinite(done(compressed, x)).all()))
        return found

    assert worlds(2).run(run) == [[True, False, True]] * 2


def test_powersgd_warmup_sends_whole_tensors(worlds):
    make = lambda c: LowRankSum(c, PowerSGD(1, warmup=1), [(30, 20)])  # noqa: E731
    found = ended(worlds, 2, make, steps=2, count=600)[0][0]
    np.testing.assert_allclose(found[0], sum(of_all(2, count=600)), rtol=1e-6)
    assert np.linalg.matrix_rank(found[1].reshape(30, 20), tol=1e-3) == 1


# --- codes, remembered at both ends


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("spec", ["onebit", "int4", "int8:stochastic"])
def test_error_feedback_keeps_residuals(worlds, n, spec):
    codec, steps = codecs.get(spec), 3
    ranks = ended(worlds, n, lambda c: CodedSum(c, codec, COUNT), steps)
    same_on_all(ranks)
    parts = [codec.nbytes(size) for size in shard_sizes(COUNT, n)]
    for rank, (_, _, sent, _) in enumerate(ranks):
        assert sent == [sum(parts) - parts[rank] + (n - 1) * parts[rank]] * steps
    came = sum(sum(of_all(n, step)) for step in range(steps))
    waits = sum(memory["residual"] for _, memory, _, _ in ranks)
    owners = np.concatenate([memory["owner"] for _, memory, _, _ in ranks])
    summed = sum(ranks[0][0])
    np.testing.assert_allclose(summed + waits + owners, came, rtol=1e-3, atol=1e-3)


def test_reduce_scatter_encodes_once(worlds):
    codec = codecs.get("int8")
    make = lambda c: CodedSum(c, codec, COUNT)  # noqa: E731
    ranks = ended(worlds, 3, make, whole=False)
    right = sum(of_all(3))
    for rank, (found, memory, sent, bounds) in enumerate(ranks):
        mine = slice(*bounds[rank : rank + 2])
        lost = np.linalg.norm(found[0][mine] - right[mine])
        assert 0 < lost < 0.1 * np.linalg.norm(right[mine])
        assert not memory["owner"].any()
        parts = [codec.nbytes(size) for size in shard_sizes(COUNT, 3)]
        assert sent == [sum(parts) - parts[rank]]


# --- beyond one host


@pytest.mark.parametrize("spec", ["topk:0.05", "randomk:0.05", "powersgd:2"])
def test_compressed_sums_between_hosts(worlds, spec):
    """Three times, so that sizes differ from call to call."""

    def run(comm):
        found = []
        for step in range(3):
            x = gradient(comm.rank, step, 600).reshape(30, 20)
            found.append(comm.all_reduce(x, codec=spec).tobytes())
        return found

    with world(3, hosts=(0, 0, 1), timeout_s=60.0) as apart:
        between = apart.run(run)
    within = worlds(3).run(run)
    assert between[0] == between[1] == between[2]
    if spec.startswith("topk"):  # sums in rank order, whatever the placement
        assert between == within
    for one, other in zip(between[0], within[0], strict=True):
        one, other = (np.frombuffer(x, np.float32) for x in (one, other))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# --- calls in stages


def test_staged_call_runs_in_order(worlds):
    def run(comm):
        compressed = TopKSum(comm, TopK(0.05), COUNT)
        x = gradient(comm.rank)
        work = StagedWork(compressed.reduce(x, label="mine"), x, "sum")
        result = repr(work), work.done()
        assert work.wait() is x
        assert work.done()
        assert work.exception() is None
        return result

    for result, at_once in worlds(2).run(run):
        assert result == "<Work: sum, in flight>"
        assert not at_once


def test_different_schemes_are_a_mismatch(worlds):
    def run(comm):
        compressed = RandomKSum(comm, RandomK(k=5 + comm.rank), COUNT)
        with pytest.raises(CollectiveMismatch):
            done(compressed, gradient(comm.rank))
        comm.close()

    worlds(2).run(run)


# --- by name, in one call


@pytest.mark.parametrize("spec", ["topk:0.1", "randomk:0.1,seed=4", "powersgd:2"])
def test_all_reduce_with_a_scheme(worlds, spec):
    def run(comm):
        x = gradient(comm.rank, count=600).reshape(30, 20)
        out = np.empty((20, 30), np.float32).T  # not contiguous
        assert comm.all_reduce(x, codec=spec, out=out) is out
        work = comm.all_reduce(x, codec=spec, op="mean", async_op=True, label="mine")
        assert work.wait() is x
        np.testing.assert_allclose(out, 3 * x, rtol=1e-5)
        return x.tobytes()

    assert len(set(worlds(3).run(run))) == 1


def test_topk_is_exact_for_sparse_tensors(worlds):
    def run(comm):
        x = np.zeros(100, np.float16)
        x[[comm.rank, 50]] = 1 + comm.rank
        return comm.all_reduce(x, codec="topk:k=2")

    for found in worlds(3).run(run):
        assert found.dtype == np.float16
        assert np.flatnonzero(found).tolist() == [0, 1, 2, 50]
        assert found[[0, 1, 2, 50]].tolist() == [1, 2, 3, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": np.zeros(9, np.int32)}, "float16, got int32; leave codec= out"),
        ({"x": np.zeros(9)}, "got float64"),
        ({"op": "max"}, "supports op='sum' and 'mean', got max"),
        ({"op": np.add}, "supports op='sum' and 'mean'"),
        ({"algorithm": "ring"}, "algorithm= is not supported"),
        ({"reproducible": True}, "reproducible= is not supported"),
        ({"timeout_s": 1.0}, "timeout_s= is not supported"),
        ({"error_bound": 0.1}, "error_bound= is not supported"),
        ({"codec": "topk:k=10"}, "k = 10, but there are 9"),
        ({"codec": "topk:2"}, "density = 2.0"),
    ],
)
def test_unsupported_options_with_a_scheme_are_refused(worlds, options, message):
    x = np.zeros(9, np.float32)
    with pytest.raises(BadArgument, match=message):
        worlds(1).comms[0].all_reduce(**{"x": x, "codec": "topk:0.5", **options})


def test_schemes_in_other_collectives_are_refused(worlds):
    with pytest.raises(BadArgument, match="only all_reduce supports"):
        worlds(1).comms[0].broadcast(np.zeros(9, np.float32), codec="topk:0.5")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("topk:0.1", "60 of 600 elements from each rank, with their indices"),
        ("topk:0.6", "all values: 360 with their indices would be larger"),
        ("randomk:0.1", "60 of 600 elements, drawn at random"),
        ("powersgd:2", "a matrix of 30 by 20 as two of rank 2"),
        ("powersgd:20", "everything, since the factors would be larger"),
    ],
)
def test_explain_shows_what_a_scheme_sends(worlds, spec, words):
    def run(comm):
        x = gradient(comm.rank, count=600).reshape(30, 20)
        before = comm.sent_bytes
        result = comm.explain("all_reduce", x, codec=spec)
        assert comm.sent_bytes == before
        return result

    result = worlds(3).run(run)[0]
    assert words in result
    assert "from each rank, 3.12 KiB without" in result

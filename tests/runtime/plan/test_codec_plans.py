"""Collectives with a codec: the bits, the bytes and the errors that were foretold."""

import numpy as np
import pytest

import unisono
from program_player import Call, play
from unisono import codecs
from unisono.dtypes import numpy_dtype
from unisono.errors import BadArgument, CollectiveMismatch
from unisono.runtime.plan import codec_plans as coded_plans
from unisono.runtime.plan.codec_plans import chunk_sizes
from unisono.runtime.plan.plans import lowered, offsets
from unisono.schedule.coding import Scope
from unisono.schedule.collective import Holders
from unisono.testing import world

KINDS = [
    ("all_reduce", ["direct", "ring", "halving_doubling", "naive", "tree", "swing"]),
    ("reduce_scatter", ["direct", "ring", "halving_doubling"]),
    ("all_gather", ["direct", "ring", "swing"]),
    ("broadcast", ["naive", "tree", "direct+direct"]),
    ("reduce", ["naive", "tree", "direct+direct"]),
    ("gather", ["direct", "tree"]),
    ("scatter", ["direct", "tree"]),
    ("all_to_all", ["direct", "bruck"]),
]
EVERY = [(what, name) for what, names in KINDS for name in names]
ROOT = 1


def gaussian(n, count, seed=0):
    return np.random.default_rng(seed).standard_normal((n, count)).astype(np.float32)


def heavy(n, count, seed=0):
    return np.random.default_rng(seed).standard_t(3, (n, count)).astype(np.float32)


def relative(found, exact):
    lost = found.astype(np.float64) - exact
    return np.sqrt((lost**2).sum() / (exact**2).sum())


def made_by_hand(what, name, codec, xs, scope=Scope.ALL, hosts=(), divisor=1):
    """What comes of it by the programs themselves, with codes made in Python."""
    n, count = xs.shape
    root = ROOT if what in ("broadcast", "reduce", "gather", "scatter") else 0
    schedule = unisono.schedule(what, name, n, root=root)
    total = count * n if what in ("all_gather", "gather") else count
    sizes = chunk_sizes(schedule.contract, total, codec.block)
    begins = offsets(schedule.contract, sizes)[0]
    chunks = np.arange(schedule.num_chunks)
    holder = schedule.contract.holder(schedule.collective.before, chunks)
    inputs = {}
    for c in chunks.tolist():
        for r in range(n) if holder is None else [int(holder[c])]:
            inputs[r, c] = [xs[r, begins[c] : begins[c] + sizes[c]].copy()]

    def added(values, completes):
        total = values[0].copy()
        for value in values[1:]:
            total = total + value
        return total / np.float32(divisor) if completes else total

    program = lowered(what, name, n, root, 0, hosts, scope)
    one = Call(program, inputs, pieces=1, hosts=hosts)
    (ends,) = play(
        [one],
        added,
        encode=lambda x: (codec.encode(x), x.size),
        decode=lambda code: codec.decode(*code),
    )
    after = schedule.collective.after
    order = chunks
    if after is Holders.TARGET:
        order = np.lexsort((chunks, schedule.contract.target(chunks)))
    results = []
    for r in range(n):
        parts = [ends[r, int(c)][0] for c in order if (r, int(c)) in ends]
        results.append(np.concatenate(parts) if parts else None)
    return results


def called(comm, what, xs, **how):
    """One call of a collective on this rank's row; the result, or None."""
    x = xs[comm.rank].copy()
    if what in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce"):
        return getattr(comm, what)(x, **how)
    if what == "scatter":
        out = np.empty(x.size // comm.world_size, x.dtype)
        mine = x if comm.rank == ROOT else None
        return comm.scatter(mine, root=ROOT, out=out, **how)
    return getattr(comm, what)(x, root=ROOT, **how)


def check(what, name, spec, xs, comms, **more):
    codec = codecs.get(spec)
    wanted = made_by_hand(what, name, codec, xs, **more)
    scope = more.get("scope", Scope.ALL)
    how = {"codec": f"{spec}@{scope}", "algorithm": name, "error_bound": 99.0}
    found = comms.run(lambda comm: called(comm, what, xs, **how))
    for mine, right in zip(found, wanted, strict=True):
        if right is None:
            assert mine is None
        else:
            np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize(("what", "name"), EVERY)
def test_bits_are_those_of_the_played_program(what, name):
    """The engine does what the programs say, whatever the pieces, to the last bit."""
    for n, window in ((4, 1 << 14), (3, 1 << 18)):
        with world(n, window=window) as w:
            for count, spec in ((n * 700, "fp8"), (n * 37, "int4"), (n, "bf16")):
                check(what, name, spec, gaussian(n, count), w)


@pytest.mark.parametrize("spec", codecs.NAMES)
def test_every_codec_gives_the_same_bits_on_all_ranks(spec):
    xs = heavy(4, 3001, seed=3)
    with world(4, window=1 << 14) as w:
        for name in ("direct", "halving_doubling", "ring", "naive"):
            check("all_reduce", name, spec, xs, w)


HOSTS = [(0, 0, 1, 1), (0, 1, 2), (0, 1, 0, 1, 1)]


@pytest.mark.quick(hosts=[(0, 0, 1, 1)])
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("scope", list(Scope))
def test_between_hosts(hosts, scope):
    n = len(hosts)
    xs = gaussian(n, n * 640)
    by = f"hierarchical:hosts={'.'.join(map(str, hosts))},by=direct/direct"
    with world(n, hosts=hosts, window=1 << 15) as w:
        for what, name in (
            ("all_reduce", "direct"),
            ("all_reduce", by if len(set(hosts)) < n else "ring"),
            ("all_gather", "ring"),
            ("broadcast", "tree"),
            ("all_to_all", "direct"),
        ):
            check(what, name, "fp8", xs, w, scope=scope, hosts=hosts)


def test_messages_of_many_frames():
    xs = gaussian(2, 300_000)
    with world(2, hosts=(0, 1), window=1 << 20) as w:
        check("all_reduce", "direct", "fp16", xs, w, hosts=(0, 1))


def test_codes_outside_the_window_in_many_pieces(monkeypatch):
    monkeypatch.setattr(coded_plans, "ROOM", 1 << 14)
    hosts = (0, 1, 2)
    xs = gaussian(3, 40_000)
    with world(3, hosts=hosts, window=1 << 12) as w:
        for name in ("direct", "ring", "naive"):
            check("all_reduce", name, "fp8", xs, w, hosts=hosts)
        check("broadcast", "tree", "int8", xs, w, hosts=hosts)


def test_large_calls_between_hosts_are_cut_into_segments():
    hosts = (0, 1)
    xs = gaussian(2, 300_000)

    def work(comm):
        x = called(comm, "all_reduce", xs, codec="fp8")
        return comm.records()[-1]["algorithm"], x

    with world(2, hosts=hosts) as w:
        found = w.run(work)
        name = "hierarchical:levels=1x2,by=direct/direct,segments=8"
        wanted = made_by_hand("all_reduce", name, codecs.get("fp8"), xs, hosts=hosts)
    for (by, mine), right in zip(found, wanted, strict=True):
        assert by.startswith("hierarchical:levels=1x2")
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_small_floats_are_added_up_in_float32(dtype):
    xs = gaussian(3, 1000).astype(numpy_dtype(dtype))
    wide = xs.astype(np.float32)
    wanted = made_by_hand("all_reduce", "direct", codecs.get("int8"), wide)
    with world(3) as w:
        found = w.run(lambda c: called(c, "all_reduce", xs, codec="int8"))
    for mine, right in zip(found, wanted, strict=True):
        assert mine.dtype == xs.dtype
        np.testing.assert_array_equal(mine, right.astype(xs.dtype))


def test_means_out_of_place_and_in_flight():
    xs = gaussian(4, 2000)
    codec = codecs.get("fp8")
    wanted = made_by_hand("all_reduce", "direct", codec, xs, divisor=4)

    def work(comm):
        x, out = xs[comm.rank].copy(), np.empty(2000, np.float32)
        comm.all_reduce(x, out=out, op="mean", codec="fp8")
        np.testing.assert_array_equal(x, xs[comm.rank])
        begun = comm.all_reduce(x, op="mean", codec="fp8", async_op=True)
        assert begun.wait() is x
        np.testing.assert_array_equal(x, out)
        half = comm.all_reduce(
            xs[comm.rank].copy(), op=unisono.premul_sum(0.25), codec="fp8"
        )
        assert relative(half, xs.sum(0) / 4) < 0.06
        return out

    with world(4) as w:
        found = w.run(work)
    for mine, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(mine, right)


def test_uneven_counts_and_in_place_buffers():
    counts = [300, 0, 77]
    xs = gaussian(3, sum(counts))
    begins = np.cumsum([0, *counts])

    def work(comm):
        r = comm.rank
        mine = slice(begins[r], begins[r + 1])
        whole = xs[r].copy()
        own = whole[mine]
        comm.reduce_scatter(whole, out=own, counts=counts, codec="fp8")
        gathered = np.empty(sum(counts), np.float32)
        comm.all_gather(own, out=gathered, counts=counts, codec="fp8")
        return own.copy(), gathered

    with world(3) as w:
        found = w.run(work)
    exact = xs.astype(np.float64).sum(0)
    for r, (own, gathered) in enumerate(found):
        np.testing.assert_array_equal(gathered, found[0][1])
        if own.size:
            assert relative(own, exact[begins[r] : begins[r + 1]]) < 0.06
    assert relative(found[0][1], exact) < 0.06


# --- bytes


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("spec", ["fp8", "mxfp8", "int4", "fp16", "int8:block=64"])
@pytest.mark.parametrize("count", [0, 1, 127, 128 * 15, 10_001])
def test_sent_bytes_follow_the_formula(n, spec, count):
    """All ranks together send 2(n-1) times the code of the whole, to the byte."""

    def work(comm):
        x = np.ones(count, np.float32)
        comm.all_reduce(x, codec=spec, algorithm="direct")
        return comm.sent_bytes

    with world(n) as w:
        sent = w.run(work)
    assert sum(sent) == 2 * (n - 1) * codecs.get(spec).nbytes(count)
    if spec == "fp8" and count == 128 * 15 and n in (3, 5):  # all as much
        assert set(sent) == {int(2 * (n - 1) / n * count * 1.03125)}


def test_only_bytes_between_hosts_are_encoded():
    hosts = (0, 0, 1, 1)

    def work(comm):
        x = np.ones(4 * 1280, np.float32)
        by = "hierarchical:hosts=0x2.1x2,by=direct/direct"
        comm.all_reduce(x, codec="fp8@hosts", algorithm=by)
        return comm.sent_bytes

    with world(4, hosts=hosts) as w:
        sent = w.run(work)
    # Inside, half of the buffer out and half back; across, a quarter out and back.
    inside, across = 2 * 2 * 1280 * 4, 2 * codecs.get("fp8").nbytes(1280)
    assert sent == [inside + across] * 4


def test_records_count_what_was_encoded_and_decoded():
    def work(comm):
        x = np.ones(4 * 1280, np.float32)
        comm.all_reduce(x, codec="fp8", label="grads")
        comm.all_reduce(x)
        return comm.records()[-2:]

    with world(4) as w:
        for coded, plain in w.run(work):
            share = codecs.get("fp8").nbytes(1280)
            assert coded["codec"] == "fp8"
            assert coded["algorithm"] == "direct"
            assert coded["label"] == "grads"
            # Three shares and the sum; three shares, the sum, three sums of others.
            assert coded["encoded_bytes"] == 4 * share
            assert coded["decoded_bytes"] == 7 * share
            assert (plain["codec"], plain["encoded_bytes"]) == ("", 0)


# --- errors of values


@pytest.mark.quick(n=[8])
@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize("name", ["direct", "halving_doubling"])
@pytest.mark.parametrize("draw", [gaussian, heavy])
def test_errors_match_the_prediction(n, name, draw):
    """Within 5 %, of the error of encoding once what is encoded there."""
    xs = draw(n, 128 * n * (8 if n == 8 else 2), seed=5)
    codec = codecs.get("fp8")

    def once(k):
        some = xs.reshape(n // k, k, -1).sum(axis=1).ravel()
        return relative(codec.decode(codec.encode(some), some.size), some)

    with world(n) as w:
        found = w.run(
            lambda c: called(c, "all_reduce", xs, codec="fp8", algorithm=name)
        )
    exact = xs.astype(np.float64).sum(0)
    noise = lowered("all_reduce", name, n, 0, 0, (), Scope.ALL).noise
    for mine in found[1:]:
        np.testing.assert_array_equal(mine, found[0])
    measured = relative(found[0], exact)
    assert measured == pytest.approx(noise.error(once), rel=0.05)
    if draw is gaussian:
        law = {"direct": 2**0.5, "halving_doubling": (np.log2(n) / 2 + 1) ** 0.5}
        assert measured == pytest.approx(law[name] * codec.error, rel=0.05)


def test_nan_and_infinity_are_never_made_finite():
    def work(comm):
        x = np.ones(1000, np.float32)
        if comm.rank == 1:
            x[[5, 500]] = np.nan, np.inf
        return comm.all_reduce(x, codec="fp8")

    with world(3) as w:
        for x in w.run(work):
            assert not np.isfinite(x[[5, 500]]).any()


def test_error_above_the_bound_is_refused_with_advice():
    def work(comm):
        x = np.ones(100, np.float32)
        with pytest.raises(
            BadArgument, match=r"by ring in fp8.*5\.47%.*'direct'.*3\.5"
        ):
            comm.all_reduce(x, codec="fp8", algorithm="ring", error_bound=0.05)
        with pytest.raises(BadArgument, match="even direct has"):
            comm.all_reduce(x, codec="fp8", algorithm="ring", error_bound=0.001)
        comm.all_reduce(x, codec="fp8", algorithm="ring")

    with world(8) as w:
        w.run(work)


# --- what cannot be


def wrong(call, match):
    with world(2) as w:

        def work(comm):
            with pytest.raises(BadArgument, match=match):
                call(comm)
            comm.barrier()  # nothing was sent

        w.run(work)


X = np.ones(10, np.float32)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda c: c.all_reduce(X.astype("i8"), codec="fp8"),
            "int64; leave codec= out",
        ),
        (lambda c: c.all_reduce(X.astype("f8"), codec="fp8"), "convert to float32"),
        (lambda c: c.all_reduce(X.copy(), codec="fp9"), "did you mean|fp8"),
        (lambda c: c.all_reduce(X.copy(), codec=8), "expected a name"),
        (lambda c: c.all_reduce(X.copy(), op="max", codec="fp8"), "op='sum', 'mean'"),
        (lambda c: c.all_reduce(X.copy(), op=np.add, codec="fp8"), "takes no codec"),
        (lambda c: c.all_reduce(X.copy(), codec="fp8@rack"), "scope"),
        (
            lambda c: c.all_reduce(X.copy(), codec="fp8@all", coded="hosts"),
            "contradict",
        ),
        (lambda c: c.all_reduce(X.copy(), coded="hosts"), "need a codec"),
        (lambda c: c.all_reduce(X.copy(), error_bound=0.1), "need a codec"),
        (lambda c: c.all_reduce(X.copy(), codec="fp8", error_bound=-1), "error_bound"),
        (lambda c: c.all_reduce(X.copy(), codec="fp8:block=30"), "multiple of 32"),
        (lambda c: c.all_reduce(X.copy(), codec="fp8", reproducible=True), "blocks"),
        (lambda c: c.barrier(codec="fp8"), "sends no values"),
        (lambda c: c.send(X, 1 - c.rank, codec="fp8"), "encode the message yourself"),
    ],
)
def test_invalid_codec_options_are_refused_with_advice(call, match):
    wrong(call, match)


def test_blocks_too_large_for_the_window_are_refused():
    with world(2, window=1 << 14) as w:

        def work(comm):
            with pytest.raises(BadArgument, match="a smaller block"):
                comm.all_reduce(np.ones(100_000, np.float32), codec="int8:block=65536")

        w.run(work)


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)])
@pytest.mark.parametrize(
    "specs", [("fp8", "int8"), ("fp8", None), ("fp8", "fp8@hosts")]
)
def test_different_codecs_are_a_mismatch(hosts, specs):
    def work(comm):
        with pytest.raises(CollectiveMismatch, match="in fp8"):
            comm.all_reduce(np.ones(10, np.float32), codec=specs[comm.rank])

    with world(2, hosts=hosts) as w:
        w.run(work)


def test_algorithm_variable_applies_with_a_codec(monkeypatch):
    monkeypatch.setenv("UNISONO_ALGORITHM", "all_reduce=ring")

    def work(comm):
        comm.all_reduce(np.ones(10, np.float32), codec="fp8")
        return comm.records()[-1]["algorithm"]

    with world(2) as w:
        assert w.run(work) == ["ring", "ring"]


def test_stochastic_rounding_differs_between_calls():
    xs = gaussian(2, 4000)

    def work(comm):
        calls = [called(comm, "all_reduce", xs, codec="int8:stochastic") for _ in "ab"]
        with pytest.raises(BadArgument, match="compute the same sums"):
            called(comm, "all_reduce", xs, codec="int8:stochastic", algorithm="naive")
        return calls

    with world(2) as w:
        (one, other), others = w.run(work)
    assert (one != other).any()
    np.testing.assert_array_equal([one, other], others)
    assert relative(one, xs.sum(0)) < 0.03


def test_many_ranks_use_two_levels():
    def work(comm):
        comm.all_reduce(np.ones(100, np.float32), codec="fp8")
        return comm.records()[-1]["algorithm"]

    with world(33) as w:
        assert set(w.run(work)) == {"hierarchical:by=direct/direct"}


def test_explain_shows_bytes_error_and_times():
    def work(comm):
        x = np.ones(1 << 16, np.float32)
        comm.all_reduce(x, codec="fp8")
        with pytest.raises(BadArgument, match="need a codec"):
            comm.explain("all_reduce", x, coded="hosts")
        with pytest.raises(BadArgument, match="by ring in fp8"):
            comm.explain(
                "all_reduce", x, codec="fp8", algorithm="ring", error_bound=0.01
            )
        return comm.explain("all_reduce", x, codec="fp8")

    with world(4) as w:
        result = w.run(work)[0].splitlines()
    assert result[0] == "all_reduce of 256 KiB on 4 ranks by direct in fp8"
    lines = {line.split()[0]: line for line in result[1:]}
    assert "1.03125 bytes for each float32, 3.88 times less" in lines["codec"]
    assert "sends 99 KiB, as values it would be 384 KiB" in lines["costs"]
    assert "3.41% of the result, 1.32 times" in lines["error"]
    assert "without a codec" in lines["predicted"]
    assert "not faster here" in lines["predicted"]  # it is memory
    assert "the median of 1 calls" in lines["measured"]

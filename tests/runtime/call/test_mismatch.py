"""What ranks must agree on in a call, and the errors if they do not."""

import os
import threading
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

import unisono
from unisono import _native, algorithms
from unisono.algorithms import read
from unisono.dtypes import DTYPES
from unisono.errors import BadArgument, CollectiveMismatch, UnsupportedWorld
from unisono.runtime.call import notes
from unisono.runtime.call.notes import CallNames
from unisono.runtime.call.reductions import Reduction
from unisono.runtime.observe import tracing
from unisono.runtime.plan import plans, programs
from unisono.runtime.plan.plans import CallKind
from unisono.schedule import copy_step
from unisono.schedule.collective import ALL_GATHER
from unisono.schedule.schedule import from_steps
from unisono.testing import world
from unisono.trace.draw import draw
from work_hooks import HOOK, hooks

BUILT_IN = Path(algorithms.__file__).parent
ODD = "a run for x in fp8 ünd " + "long " * 12


def source_of(name):
    return (BUILT_IN / f"{name}.py").read_text()


def content_of(name, n=2):
    made = unisono.schedule("all_reduce", name, n)
    return f"{plans.content_of(made):016x}"


@pytest.fixture
def mine(tmp_path):
    """A user's algorithm, at first a ring."""
    file = tmp_path / "mine.py"
    file.write_text(source_of("ring"))
    return file


# ---- Steps


@pytest.mark.parametrize("hosts", [(), (0, 1)])
def test_algorithm_files_with_other_steps_are_a_mismatch(mine, hosts):
    def call(comm):
        x = np.ones(100)
        if comm.rank == 0:
            comm.explain("all_reduce", x, algorithm=str(mine))
        comm.barrier()
        if comm.rank == 1:
            mine.write_text(source_of("dissemination"))
        comm.barrier()
        with pytest.raises(CollectiveMismatch) as raised:
            comm.all_reduce(x, algorithm=str(mine))
        return str(raised.value)

    with world(2, hosts=hosts) as w:
        for result in w.run(call):
            assert "rank 0" in result
            assert "rank 1" in result
            assert f"The steps of {mine} are not the same there" in result
            assert "same file" in result


def test_algorithm_files_that_differ_in_comments_agree(mine):
    def call(comm):
        x = np.ones(100)
        if comm.rank == 0:
            comm.explain("all_reduce", x, algorithm=str(mine))
        comm.barrier()
        if comm.rank == 1:
            mine.write_text(source_of("ring") + "\n# as it was\n")
        comm.barrier()
        return comm.all_reduce(x, algorithm=str(mine)).sum()

    with world(2) as w:
        assert w.run(call) == [200, 200]


def test_communicator_keeps_the_file_as_first_read(mine):
    def call(comm, before, after):
        comm.all_reduce(np.ones(5), algorithm=str(mine))
        assert comm.records()[-1]["content"] == content_of(before)
        comm.barrier()
        mine.write_text(source_of(after))
        comm.barrier()
        comm.all_reduce(np.ones(6), algorithm=str(mine))
        x = np.ones(6, np.float32)
        comm.all_reduce(x, algorithm=str(mine), codec="fp16", error_bound=1.0)
        contents = {r["content"] for r in comm.records()[-2:]}
        assert contents == {content_of(before)}
        assert "median" in comm.explain("all_reduce", np.ones(6), algorithm=str(mine))

    for before, after in (("ring", "dissemination"), ("dissemination", "ring")):
        with world(2) as w:  # a new one has what the last edit left
            w.run(call, before, after)


def test_edit_within_a_second_is_noticed(mine):
    """Python's cache of compiled files compares whole seconds and sizes."""
    ring, other = source_of("ring"), source_of("dissemination")
    size = max(len(ring.encode()), len(other.encode())) + 1
    for name, text in (("ring", ring), ("dissemination", other)):
        mine.write_bytes(text.encode().ljust(size, b"\n"))
        os.utime(mine, (1e9, 1e9))
        assert content_of(str(mine)) == content_of(name)
        assert plans.verified("all_reduce", str(mine), 2, 0).num_chunks
        made = plans.verified("all_reduce", str(mine), 2, 0)
        assert f"{plans.content_of(made):016x}" == content_of(name)


REUSING = '''
import numpy as np
from unisono.algorithms import algorithm
from unisono.schedule import copy_step

@algorithm(chunks=1)
def broadcast(n):
    """From rank to rank, in arrays that are used again."""
    src, dst = np.zeros(1, np.int64), np.ones(1, np.int64)
    for _ in range(n - 1):
        yield copy_step(np.zeros(1, np.int64), src=src, dst=dst)
        src += 1
        dst += 1
'''


def test_algorithm_may_reuse_its_arrays(mine):
    mine.write_text(REUSING)

    def call(comm):
        x = np.full(3, float(comm.rank))
        return comm.broadcast(x, algorithm=str(mine)).tolist()

    with world(4) as w:
        assert w.run(call) == [[0.0] * 3] * 4


def test_algorithm_file_can_be_fixed_after_an_error(mine):
    mine.write_text("def all_reduce(:\n")
    for _ in range(2):
        with pytest.raises(BadArgument, match=r"mine\.py:1"):
            algorithms.read(str(mine))
    mine.write_text(source_of("ring"))
    pair = algorithms.read(f"{mine}+ring")
    assert [path for path, _ in pair.files] == [str(mine)]
    assert unisono.schedule("all_reduce", pair, 3).verify()


# ---- Shapes


def twice(x, y):
    return x + y


def calls_of_other_shapes():
    """A name, and a function of comm and one of two shapes with 12 elements."""

    def rows(comm, shape):
        return np.zeros((shape[0] * comm.world_size, shape[1]))

    def scatter(comm, shape):
        x = rows(comm, shape) if comm.rank == 0 else None
        comm.scatter(x, out=np.zeros(shape))

    return {
        "all_reduce": lambda c, s: c.all_reduce(np.ones(s)),
        "all_reduce out": lambda c, s: c.all_reduce(np.ones(s), out=np.ones(s)),
        "async": lambda c, s: c.all_reduce(np.ones(s), async_op=True).wait(),
        "function": lambda c, s: c.all_reduce(np.ones(s), op=twice),
        "coded": lambda c, s: c.all_reduce(np.ones(s, np.float32), codec="fp16"),
        "topk": lambda c, s: c.all_reduce(np.ones(s, np.float32), codec="topk:0.1"),
        "reduce": lambda c, s: c.reduce(np.ones(s)),
        "broadcast": lambda c, s: c.broadcast(np.ones(s)),
        "all_gather": lambda c, s: c.all_gather(np.ones(s)),
        "all_gather out": lambda c, s: c.all_gather(np.ones(s), out=rows(c, s)),
        "gather": lambda c, s: c.gather(np.ones(s)),
        "reduce_scatter": lambda c, s: c.reduce_scatter(rows(c, s)),
        "scatter": scatter,
        "all_to_all": lambda c, s: c.all_to_all(np.ones(s)),
    }


@pytest.mark.parametrize("name", calls_of_other_shapes())
def test_shapes_of_equal_size_are_a_mismatch(name):
    """Also where every rank has made both calls before, and so on the quick path."""
    call = calls_of_other_shapes()[name]
    shapes = (2, 6), (6, 2)

    def run(comm):
        for shape in shapes * 2:
            call(comm, shape)
        with pytest.raises(CollectiveMismatch) as raised:
            call(comm, shapes[comm.rank])
        return str(raised.value)

    with world(2) as w:
        for result in w.run(run):
            assert "6]" in result
            assert "2]" in result


def test_mismatch_error_has_both_shapes():
    def run(comm):
        with pytest.raises(CollectiveMismatch) as raised:
            comm.all_reduce(np.ones([(2, 6), (6, 2)][comm.rank], np.float32))
        return raised.value.calls

    for hosts in ((), (0, 1)):
        with world(2, hosts=hosts) as w:
            for calls in w.run(run):
                assert calls[0].startswith("all_reduce(float32[2, 6], sum) by ")
                assert calls[1].startswith("all_reduce(float32[6, 2], sum) by ")


def test_shapes_with_empty_rows_are_compared():
    """all_gather of (2, 0) and (3, 0) would give results of other lengths."""

    def run(comm):
        comm.all_gather(np.ones((2, 0)))
        with pytest.raises(CollectiveMismatch):
            comm.all_gather(np.ones((2 + comm.rank, 0)))

    with world(2) as w:
        w.run(run)


def test_scalar_has_the_shape_of_an_array_of_one():
    def run(comm):
        x = np.array(2.0) if comm.rank == 0 else np.full(1, 3.0)
        gathered = comm.all_gather(x)
        return float(comm.all_reduce(x).sum()), gathered.shape

    with world(2) as w:
        assert w.run(run) == [(5.0, (2,))] * 2


def test_uneven_rows_agree_by_their_other_axes():
    def run(comm):
        counts = [1, 3]
        x = np.full((counts[comm.rank], 2), float(comm.rank))
        whole = comm.all_gather(x, counts=counts)
        with pytest.raises(CollectiveMismatch):
            comm.all_gather(x.reshape(-1, 2 - comm.rank), counts=[1, 3 + 3 * comm.rank])
        return whole.tolist()

    with world(2) as w:
        for whole in w.run(run):
            assert whole == [[0.0] * 2] + [[1.0] * 2] * 3


def test_raw_addresses_have_no_shape():
    """Torch's backends accept tensors of different shapes and one size."""

    def run(comm):
        x = np.ones([(2, 6), (6, 2)][comm.rank])
        at = x.ctypes.data
        comm.core.start("all_reduce", DTYPES["float64"], 12, at, at)
        assert comm.records()[-1]["shape"] == ""
        return x.sum()

    with world(2) as w:
        assert w.run(run) == [24.0, 24.0]


def test_arrays_of_many_axes_are_compared():
    """More than the quick path takes, and more than a note has room for."""
    most = (1,) * 40

    def run(comm):
        for _ in range(2):
            comm.all_reduce(np.ones((2, *most, 3)))
        assert comm.records()[-1]["shape"] == str([2, *most, 3])
        shape = (2, *most, 3) if comm.rank == 0 else (3, *most, 2)
        with pytest.raises(CollectiveMismatch):
            comm.all_reduce(np.ones(shape))

    with world(2) as w:
        w.run(run)


# ---- Names


def test_errors_have_full_names(tmp_path):
    folder = tmp_path / ODD
    folder.mkdir()
    file = folder / "mine.py"
    file.write_text(source_of("ring"))
    label = f"step 7 in {ODD}"

    def run(comm):
        x = np.ones(7, np.float32)
        for _ in range(2):
            comm.all_reduce(x, algorithm=str(file))
            comm.all_reduce(x, algorithm=str(file), label=label, codec="fp16")
        plain, coded = comm.records()[-2:]
        assert (plain["algorithm"], plain["codec"], plain["label"]) == (
            *(str(file), "", ""),
        )
        assert (coded["algorithm"], coded["codec"], coded["label"]) == (
            *(str(file), "fp16", label),
        )
        text = comm.explain("all_reduce", x, algorithm=str(file))
        assert "the median of 2 calls" in text
        text = comm.explain("all_reduce", x, algorithm=str(file), codec="fp16")
        assert "the median of 2 calls" in text
        comm.barrier()
        with pytest.raises(CollectiveMismatch) as raised:
            comm.all_reduce(x, algorithm=str(file), label=f"{ODD} {comm.rank}")
        return list(raised.value.calls.values())

    for hosts in ((), (0, 1)):
        with world(2, hosts=hosts) as w:
            for one, other in w.run(run):
                assert one.endswith(" 0")
                assert other.endswith(" 1")


def test_trace_has_full_names(tmp_path):
    label = f"step 7 in {ODD}"

    def run(comm):
        tracing.start(comm.core.session.logbook)
        comm.all_reduce(np.ones((3, 4)), label=label)
        tracing.stop(comm.core.session.logbook)
        folder = tmp_path / str(comm.rank)
        part = tracing.read_part(tracing.write_part(comm.core.session.logbook, folder))
        shortened = tracing.harvest(comm.core.session.logbook)
        shortened.names = {}
        return part, shortened

    with world(2) as w:
        parts, shortened = zip(*w.run(run), strict=True)

    def about(parts):
        sheet, _ = draw(parts)
        return [s.args for s in sheet.slices if s.name == "all_reduce"]

    for args in about(parts):
        assert (args["label"], args["shape"]) == (label, "[3, 4]")
    for args in about(shortened):
        assert args["label"] == ".." + label.encode()[-38:].decode()
        assert (args["algorithm"], args["shape"]) == ("naive", "[3, 4]")


def test_old_plans_have_short_names(monkeypatch):
    monkeypatch.setattr(notes, "MAX_FULL_NAMES", 1)
    monkeypatch.setattr(notes, "_FULL_NAMES", OrderedDict())

    def run(comm):
        comm.all_reduce(np.ones(3), label=ODD)
        assert comm.records()[-1]["label"] == ODD
        comm.all_reduce(np.ones(4))  # its names are whole in its note
        assert comm.records()[-2]["label"] == ODD
        comm.all_reduce(np.ones(5), label=ODD)
        return comm.records()[-3]

    with world(1) as w:
        (record,) = w.run(run)
    assert record["label"] == ".." + ODD[-38:]
    assert record["algorithm"] == "naive"


@pytest.mark.parametrize(
    "names",
    [
        CallNames(),
        CallNames("ring", "step 3", "fp8@hosts", "[2, 6]"),
        CallNames("/tmp/" + "x" * 500 + "/ring.py:radix=4"),
        CallNames("ä" * 500, "ö" * 500, "ü" * 500, "[1" + ", 1" * 60 + "]"),
        CallNames("\udcff.py", "\udcff", "\0"),
    ],
)
def test_note_texts_fit_their_size(names):
    texts = notes.in_short(names)
    sizes = [len(text.encode()) for text in texts]
    assert sum(sizes) <= _native.NOTE_BYTES
    assert max(sizes) <= 255
    for text, name in zip(texts, names, strict=True):
        assert text == name or ".." in text or "?" in text
    if "/tmp/" in names.algorithm:
        assert texts[0].startswith("/tmp/")
        assert texts[0].endswith("/ring.py:radix=4")


# ---- Limits


def test_programs_that_are_too_long_are_refused(monkeypatch):
    monkeypatch.setattr(plans, "MOST_ACTIONS", 3)
    plans.rank_program.cache_clear()

    def run(comm):
        with pytest.raises(BadArgument, match=r"by ring: a rank .*, at most 3 are"):
            comm.all_reduce(np.ones(8), algorithm="ring")
        return comm.all_reduce(np.ones(2), algorithm="naive").sum()

    with world(4) as w:
        assert w.run(run) == [8.0] * 4


def test_programs_of_codes_that_are_too_long_are_refused(monkeypatch):
    monkeypatch.setattr(plans, "MOST_ACTIONS", 3)
    plans._lowered.cache_clear()
    plans.coded_program.cache_clear()

    def run(comm):
        x = np.ones(8, np.float32)
        with pytest.raises(BadArgument, match=r"by ring: a rank .*, at most 3 are"):
            comm.all_reduce(x, algorithm="ring", codec="fp16", error_bound=1.0)

    with world(4) as w:
        w.run(run)


def test_native_core_refuses_plans_of_programs_that_it_cannot_count(monkeypatch):
    """Those that it has lowered itself, too."""
    count = plans.MOST_ACTIONS + 1
    step = copy_step(np.arange(count), src=0, dst=1)
    long = from_steps(ALL_GATHER, 2, [step], num_chunks=2 * count, name="long")
    monkeypatch.setattr(plans, "_refuse_too_long", lambda *_: None)
    made = programs.rank_program(long, 1)
    assert made.longest > plans.MOST_ACTIONS
    fine = {}
    monkeypatch.setattr(_native, "Plan", lambda **given: fine.update(given))
    nothing = CallKind(
        "barrier", DTYPES["uint8"], Reduction("sum"), 0, 0, read("direct")
    )
    plans.make_plan(nothing, 2, 1, window=1 << 20)
    monkeypatch.undo()
    assert _native.Plan(**fine)
    with pytest.raises(ValueError, match="more actions"):
        _native.Plan(**fine | {"programs": [made.program]})


def test_native_core_refuses_programs_that_it_cannot_count():
    none = np.zeros((0, 2), np.int32)
    with pytest.raises(ValueError, match="more actions"):
        _native.Program(
            actions=np.zeros((plans.MOST_ACTIONS + 1, 13), np.int32),
            sources=np.zeros((0, 3), np.int32),
            waits=none,
            exits=none,
            lead=[0],
            readers=[0],
            deliveries=[],
            messages=np.zeros((0, 5), np.int32),
        )


def test_worlds_that_are_too_large_are_refused(monkeypatch):
    most = _native.MOST_RANKS
    text = f"{most + 1} ranks: at most {most}"
    with pytest.raises(UnsupportedWorld, match=text):
        world(most + 1)
    with pytest.raises(UnsupportedWorld, match=text):
        unisono.init(rank=0, world_size=most + 1, job="too many")
    monkeypatch.setenv("UNISONO_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UnsupportedWorld, match=text):
        unisono.init(rank=0, world_size=most + 1, job="too many")
    with world(1) as w, pytest.raises(UnsupportedWorld, match=text):
        w.comms[0].grow(most + 1)


# ---- When it is recorded


def test_call_is_in_the_trace_before_its_end_is_visible():
    def run(comm):
        engine, seen, ended = comm.core.session.engine, [], threading.Event()
        engine.start_trace(64, 64)
        comm.barrier()

        def end(_, state):
            (_, calls), _ = engine.trace_entries()
            seen.append((state, calls, comm.records()[-1]["state"]))
            ended.set()

        hook = HOOK(end)
        if comm.rank == 0:
            work = comm.all_reduce(np.ones(3), async_op=True)
            assert hooks().when_done(work.native, hook, None) == 0
            comm.send(np.ones(1), 1)
            assert ended.wait(60)
            work.wait()
            return seen
        comm.recv(np.ones(1), 0)
        comm.all_reduce(np.ones(3))
        return None

    with world(2) as w:
        ((state, calls, recorded),) = w.run(run)[0]
    assert (state, recorded) == (1, "completed")
    assert calls == 3  # the barrier, the message, and this one

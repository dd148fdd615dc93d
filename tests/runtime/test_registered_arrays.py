"""`comm.register`: existing arrays that other ranks use where they are."""

import ctypes
import gc
import mmap
import os
import resource
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from conformance import STYLES, Case, check, perform
from forked import attempt, await_that
from processes import on_processes
from unisono import _native
from unisono.errors import BadArgument, UsageError

PAGE = mmap.PAGESIZE
COUNT = 5 * PAGE  # of float32: 20 pages
FEW = [
    *(("all_reduce", name) for name in ("direct", "ring", "tree")),
    *(("reduce_scatter", "direct"), ("all_gather", "ring"), ("broadcast", "chain")),
    *(("reduce", "tree"), ("all_to_all", "direct"), ("gather", "tree")),
]


@pytest.fixture(autouse=True)
def disarmed():
    yield
    _native.arm_failpoints("")


def home(comm, x):
    return comm.core.session.engine.memory_home(x.ctypes.data, x.nbytes)


def shared_mappings(x):
    """How many bytes of an array are mapped from shared memory of ours."""
    return sum(
        min(end, x.ctypes.data + x.nbytes) - max(begin, x.ctypes.data)
        for begin, end, access in mappings()
        if access[3] == "s" and begin < x.ctypes.data + x.nbytes and end > x.ctypes.data
    )


def mappings():
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, *_ = line.split()
        begin, end = (int(at, 16) for at in place.split("-"))
        yield begin, end, access


def numbers(count=COUNT, offset=3):
    """An array that begins and ends within pages, and values beside it."""
    whole = np.arange(count + 2 * offset, dtype=np.float32)
    return whole, whole[offset : offset + count]


# --- collectives


class Registering:
    """A communicator whose `empty` are ordinary arrays that are registered."""

    def __init__(self, comm):
        self.comm = comm
        self.made = 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def empty(self, count, dtype):
        self.made += 1
        x = np.empty(count + 100, dtype)[self.made % 50 :][:count]
        self.comm.register(x)
        return x


def cases(n):
    nobody, everybody, some = frozenset(), frozenset(range(n)), frozenset({0})
    count = 12 * 5 * PAGE // 4
    return [
        Case(what, name, n, count, style=STYLES[number % 3], lenders=who)
        for number, (what, name) in enumerate(FEW)
        for who in ((everybody, everybody), (everybody, nobody), (some, everybody))
    ]


def performs(comm, all_cases):
    return perform(Registering(comm), all_cases)


@pytest.mark.parametrize("n", [2, 4])
def test_collectives_on_registered_arrays_are_correct(n):
    check(cases(n), on_processes(performs, n, (cases(n),)))


def used_in_place(comm):
    """Parts, several calls in flight, and the values beside the array."""
    whole, x = numbers()
    before = whole.copy()
    made = comm.register(x)
    assert made.in_place
    assert shared_mappings(x) == x.nbytes // PAGE * PAGE - PAGE
    assert (whole == before).all()
    comm.all_reduce(x)
    assert (x == comm.world_size * before[3:-3]).all()
    parts = np.split(x, 4)
    works = [comm.all_reduce(part, async_op=True) for part in parts]
    for work in works:
        work.wait()
    assert (x == comm.world_size**2 * before[3:-3]).all()
    x += 1  # by its own address again
    comm.all_reduce(x)
    assert (x == comm.world_size**3 * before[3:-3] + comm.world_size).all()
    assert (whole[:3] == before[:3]).all()
    assert (whole[-3:] == before[-3:]).all()
    return comm.explain("all_reduce", x), comm.explain("all_reduce", x[:10])


def test_registered_array_is_used_in_place_and_its_neighbours_stay():
    for large, small in on_processes(used_in_place, 3):
        assert "used in place, if every rank's are: this rank's is registered" in large
        assert "staged, as every call on less than 32 KiB" in small


def explains(comm):
    x = np.ones(COUNT, np.float32)
    y = comm.empty(COUNT)
    return comm.explain("all_reduce", x), comm.explain("all_reduce", y)


def test_explain_tells_ordinary_from_shared_memory():
    ordinary, empty = on_processes(explains, 2)[0]
    assert "in place" not in ordinary
    assert "used in place, if every rank's are: this rank's is memory of" in empty


# --- the end of a registration


def ends(comm):
    whole, x = numbers()
    y, total = x[5:-5], whole.copy()
    comm.register(x)
    assert comm.register(y) == (True, "it is registered already")
    with pytest.raises(BadArgument, match="not a part of it"):
        comm.unregister(y)
    comm.unregister(x)
    assert shared_mappings(x) == 0
    assert home(comm, x) == 0
    assert (whole == total).all()
    with pytest.raises(BadArgument, match="not registered"):
        comm.unregister(x)
    comm.all_reduce(x)
    assert (x == comm.world_size * total[3:-3]).all()
    comm.register(x)  # once more
    comm.all_reduce(x)
    assert (x == comm.world_size**2 * total[3:-3]).all()
    comm.barrier()


def test_unregistered_array_is_private_and_keeps_its_content():
    on_processes(ends, 2)


def becomes_garbage(comm):
    """As itself, and as a view of it."""
    other = np.ones(COUNT, np.float32)
    seen = []
    for _ in range(3):
        whole, x = numbers()
        comm.register(x)
        address, nbytes = x.ctypes.data, x.nbytes
        whole = weakref.ref(whole)
        comm.register(other)
        assert comm.core.session.engine.memory_home(address, nbytes) == 3
        del x
        gc.collect()
        assert whole() is not None  # its pages are shared still
        comm.unregister(other)
        assert whole() is None
        seen.append(comm.core.session.engine.memory_home(address, nbytes))
        assert not any(a[3] == "s" and b <= address < e for b, e, a in mappings())
    x = np.ones(COUNT, np.float32)
    comm.register(x)
    with pytest.raises(ValueError, match="resize"):
        x.resize(2 * COUNT, refcheck=False)
    comm.barrier()
    return seen


def test_array_that_nobody_else_holds_is_private_before_it_is_freed():
    assert on_processes(becomes_garbage, 2) == [[0, 0, 0]] * 2


def groups(comm):
    """A group's registration serves the world, and the other way round."""
    x = np.ones(COUNT, np.float32)
    half = comm.split(comm.rank % 2)
    half.register(x)
    assert home(comm, x) == 3
    comm.all_reduce(x)
    assert comm.register(x).why == "its pages are shared with the ranks of this host"
    half.close()
    assert shared_mappings(x) > 0  # the world's is left
    comm.all_reduce(x)
    with pytest.raises(UsageError, match="closed"):
        half.register(x)
    comm.barrier()
    comm.close()
    return float(x.min()), float(x.max()), shared_mappings(x)


def test_several_communicators_share_a_registration():
    assert on_processes(groups, 4) == [(16.0, 16.0, 0)] * 4


def two_worlds(rank):
    comm = rank.init()
    other = type(rank)(rank.number, rank.n, rank.job + "-2", rank.folder).init()
    x = np.ones(COUNT, np.float32)
    comm.register(x)
    assert home(other, x) == 4
    assert other.register(x).in_place
    other.all_reduce(x)
    comm.all_reduce(x)
    comm.close()
    assert shared_mappings(x) > 0
    other.all_reduce(x)
    other.close()
    return float(x.min()), shared_mappings(x)


def test_two_worlds_share_the_pages_of_an_array(forks):
    for end in forks.run(2, two_worlds):
        assert end.value == [8.0, 0], end


def ends_in_flight(comm):
    """The registration ends while a call waits for the other rank."""
    x = np.ones(COUNT, np.float32)
    comm.register(x)
    work = None
    if comm.rank == 0:
        work = comm.all_reduce(x, async_op=True)
        comm.unregister(x)
    if comm.rank == 1:
        comm.all_reduce(x)
    if work is not None:
        work.wait()
    await_that(lambda: comm.rank or not shared_mappings(x), "the end of the pages")
    return float(x.min()), float(x.max())


def test_call_in_flight_goes_on_when_the_registration_ends():
    assert on_processes(ends_in_flight, 2) == [(2.0, 2.0)] * 2


def dropped(comm):
    x = np.ones(COUNT, np.float32)
    group = comm.duplicate()
    group.register(x)
    group.all_reduce(x)
    del group
    gc.collect()
    comm.barrier()
    return shared_mappings(x), float(x.min())


def test_dropped_communicator_ends_its_registrations():
    assert on_processes(dropped, 2) == [(0, 2.0)] * 2


# --- forks


def forked(comm):
    """A child neither changes the parent's values nor loses its own."""
    whole, x = numbers()
    before = whole.copy()
    comm.register(x)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            same = (whole == before).all()
            x[:] = -1
            os.write(ready[1], b"1")
            os.read(go[0], 1)
            error = attempt(comm.register, x)
            mine = same and (x == -1).all() and error["error"] == "UsageError"
            del x
            gc.collect()
            status = 0 if mine and whole[3] == -1 else 2
            del whole
            gc.collect()
        finally:
            os._exit(status)
    os.read(ready[0], 1)
    unchanged = bool((whole == before).all())
    comm.all_reduce(x)
    os.write(go[1], b"1")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return unchanged, status, bool((x == comm.world_size * before[3:-3]).all())


def test_forked_child_has_its_own_values():
    assert on_processes(forked, 2) == [(True, 0, True)] * 2


# --- threads that write meanwhile


def written(comm):
    """Another thread writes between the copy of a page and its replacement."""
    whole, x = numbers(1 << 20)
    before = whole.copy()
    _native.arm_failpoints("pages.copied:2:sleep=400")
    comm.barrier()
    done = threading.Event()

    def write():
        while not done.is_set():
            x[x.size // 3] += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with pytest.raises(UsageError, match="another thread wrote to it meanwhile"):
            comm.register(x)
    finally:
        done.set()
        writer.join()
        _native.arm_failpoints("")
    x[x.size // 3] = before[3 + x.size // 3]
    assert (whole == before).all()
    assert shared_mappings(x) == 0
    assert comm.register(x).in_place
    comm.all_reduce(x)
    return bool((x == comm.world_size * before[3:-3]).all())


def test_write_during_register_is_detected():
    assert on_processes(written, 2) == [True] * 2


# --- what is refused, or needs nothing


def refused(comm, folder):
    whole = np.ones((COUNT, 2), np.float32)
    fixed = np.ones(COUNT, np.float32)
    fixed.setflags(write=False)
    file = np.memmap(f"{folder}/{comm.rank}", np.float32, "w+", shape=COUNT)
    own_file = np.memmap(f"{folder}/{comm.rank}", np.float32, "c", shape=COUNT)
    locked = np.ones(COUNT, np.float32)
    address, nbytes = ctypes.c_void_p(locked.ctypes.data), ctypes.c_size_t(4 * COUNT)
    assert ctypes.CDLL(None).mlock(address, nbytes) == 0
    shared = np.frombuffer(mmap.mmap(-1, 4 * COUNT), np.float32)
    said = {}
    for name, x in {
        "not contiguous": whole[:, 0],
        "read-only": fixed,
        "file": file,
        "private file": own_file,
        "locked": locked,
        "shared": shared,
        "list": [1.0, 2.0],
        "masked": np.ma.masked_array(np.ones(COUNT)),
    }.items():
        error = attempt(comm.register, x)
        said[name] = error["error"], error["message"]
    x = np.ones(3 * COUNT, np.float32)
    comm.register(x[:COUNT])
    said["overlap"] = tuple(attempt(comm.register, x).values())[:2]
    own = np.frombuffer(
        mmap.mmap(-1, 4 * COUNT, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
        np.float32,
    )
    comm.barrier()
    return said, comm.register(own).in_place


def test_unsuitable_memory_is_refused_in_words(tmp_path):
    expected = {
        "not contiguous": "give the array that it is a view of",
        "read-only": "read-only",
        "file": "shared with other processes already",
        "private file": "a memory-mapped file",
        "locked": "locked (mlock)",
        "shared": "shared with other processes already",
        "list": "got a list",
        "masked": "got a MaskedArray",
        "overlap": "a part of the array is registered already",
    }
    for said, own in on_processes(refused, 2, (str(tmp_path),)):
        assert own
        assert set(said) == set(expected)
        for name, (error, message) in said.items():
            assert error == "BadArgument", (name, message)
            assert expected[name] in message


def needless(comm):
    x, y = comm.empty(COUNT), np.ones(100)
    found = comm.register(x), comm.register(y), comm.register(np.ones(0))
    for one in (x, y):
        comm.unregister(one)
    return [(f.in_place, f.why) for f in found]


def test_array_that_needs_nothing_is_left_alone():
    for found in on_processes(needless, 2):
        assert found[0] == (True, "it is memory of comm.empty")
        assert found[1] == (
            False,
            "it has 800 B, and calls on less than 32 KiB are staged",
        )
        assert found[2][0] is False


def on_threads(comm):
    x = np.ones(COUNT, np.float32)
    found = comm.register(x)
    comm.all_reduce(x)
    comm.unregister(x)
    return found.why, float(x.max())


def test_threads_need_no_registration(worlds):
    assert (
        worlds(2).run(on_threads) == [("the ranks are threads of one process", 2)] * 2
    )


def alone(comm):
    x = np.ones(COUNT, np.float32)
    found = comm.register(x)
    comm.unregister(x)
    return found.why, shared_mappings(x)


def test_single_rank_needs_no_registration():
    found = on_processes(alone, 1)
    assert found == [("there is no other rank on this host", 0)]


# --- limits


def few_descriptors(comm):
    whole, x = numbers()
    before = whole.copy()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    errors = []
    for more in range(3):  # none, one for the memory, and one for half a pipe
        used = os.dup(0)
        os.close(used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, hard))
        errors.append(attempt(comm.register, x))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (whole == before).all()
    assert shared_mappings(x) == 0
    comm.register(x)
    comm.all_reduce(x)
    assert (x == comm.world_size * before[3:-3]).all()
    return [(e["error"], "ulimit -n" in e["message"]) for e in errors]


def test_lack_of_descriptors_is_named_and_nothing_changes():
    for errors in on_processes(few_descriptors, 2):
        assert errors == [("OSError", True)] * 3


def cut_short(comm, seeds):
    """The system refuses to map pages, before or after some were replaced."""
    whole, x = numbers(2 << 20)
    before, failures = whole.copy(), []
    for seed in range(1, seeds):
        _native.arm_failpoints(f"pages.map:*:cut={seed}")
        failures.append(attempt(comm.register, x))
        _native.arm_failpoints("")
        assert (whole == before).all()
        if failures[-1] is None:
            comm.unregister(x)
        assert shared_mappings(x) == 0
    comm.register(x)
    comm.all_reduce(x)
    assert (x == comm.world_size * before[3:-3]).all()
    return [f and (f["error"], "max_map_count" in f["message"]) for f in failures]


def test_pages_that_cannot_be_replaced_leave_everything_as_it_was():
    for failures in on_processes(cut_short, 2, (6,)):
        assert ("MemoryError", True) in failures

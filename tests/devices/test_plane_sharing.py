"""Buffers that ranks of several processes use in place: how their memory is shared."""

import contextlib
import os
import time

import numpy as np
import pytest

import emulated
from device_cases import to_device
from expandable import GRAIN, Allocation, Range
from processes import on_processes
from unisono import _native

pytestmark = [pytest.mark.one_in(3), pytest.mark.usefixtures("without_packets")]

IN_PLACE, REFUSED, IMPOSSIBLE = 1, 3, 4
LIMIT_S = 30


class Rank:
    """A rank that makes all_reduces, and knows whether they were made in place."""

    def __init__(self, comm):
        emulated.initialize()
        self.comm = comm
        self.stream = _native.CudaStream(0)

    @property
    def native(self):
        return self.comm.core.device.made.plane.native

    def all_reduce(self, x):
        """Whether the input and the output were exposed."""
        before = self.native.exposed() if self.comm.core.device.made else 0
        self.comm.all_reduce(x, stream=self.stream)
        self.comm.synchronize(LIMIT_S)
        return self.native.exposed() > before

    def until(self, x, in_place=True):
        """Call until it is in place, or is not, on all ranks."""
        end = time.monotonic() + LIMIT_S
        while True:
            self.fill(x)
            is_so = self.all_reduce(x) == in_place
            assert self.is_sum(x)
            found = np.array([is_so, time.monotonic() < end])
            is_so, has_time = self.comm.all_reduce(found, op="min").tolist()
            if is_so or not has_time:  # the same on all ranks
                return is_so

    def fill(self, x):
        ranks = np.full(x.shape, 1.0 + self.comm.rank, x.dtype)
        emulated.write(x.__cuda_array_interface__["data"][0], ranks.tobytes())
        self.comm.barrier()

    def is_sum(self, x):
        n = self.comm.world_size
        return bool((x.numpy() == n * (n + 1) / 2).all())

    def sharing(self, x):
        address = x.__cuda_array_interface__["data"][0]
        return self.native.sharing_of(address, x.numpy().nbytes)


def ones(nbytes):
    return np.ones(nbytes // 4, np.float32)


def allocated(comm):
    return Rank(comm).until(to_device(ones(4000)))


def test_allocations_are_used_in_place():
    assert on_processes(allocated, 3) == [True] * 3


def in_one_piece(comm):
    rank, memory = Rank(comm), Range(4).map(1, 3)
    arrays = [memory.array(GRAIN + 400, ones(4000)), memory.array(3 * GRAIN, ones(64))]
    return [rank.until(x) for x in arrays], [rank.sharing(x) for x in arrays]


def test_created_memory_is_used_in_place():
    assert on_processes(in_one_piece, 3) == [([True] * 2, [IN_PLACE] * 2)] * 3


def across_pieces(comm):
    """A buffer in many mappings, more than are shared by one call."""
    rank, memory = Rank(comm), Range(24).map()
    inner = memory.array(3 * GRAIN - 80, ones(2 * GRAIN))
    whole = memory.array(40, ones(24 * GRAIN - 80))
    return rank.until(inner), rank.until(whole), rank.until(inner)


def test_buffer_across_many_mappings():
    assert on_processes(across_pieces, 2) == [(True, True, True)] * 2


def many(comm):
    """More allocations than the others can be told of at once."""
    rank, arrays = Rank(comm), [to_device(ones(64)) for _ in range(100)]
    for x in arrays:
        comm.all_reduce(x, stream=rank.stream)
    comm.synchronize(LIMIT_S)
    return all(rank.until(x) for x in arrays)


def test_many_allocations():
    assert on_processes(many, 2) == [True] * 2


def grows(comm):
    """Memory that is mapped behind what is shared already."""
    rank, memory = Rank(comm), Range(8).map(0, 1)
    found = [rank.until(memory.array(0, ones(2 * GRAIN)))]
    for i in range(2, 8):
        memory.map(i)
        found.append(rank.until(memory.array(GRAIN, ones(i * GRAIN))))
    return all(found)


def test_range_grows():
    assert on_processes(grows, 2) == [True] * 2


def replaced(comm):
    """Other memory at the same addresses: the others must not use the old one."""
    rank, memory = Rank(comm), Range(3).map()
    x = memory.array(0, ones(3 * GRAIN))
    found = [rank.until(x)]
    for i in range(6):
        comm.barrier()
        memory.unmap(i % 3)
        memory.map(i % 3)
        rank.fill(x)
        found.append(not rank.all_reduce(x))  # through the windows
        found.append(rank.is_sum(x))
        found.append(rank.until(x))
    return found


def test_replaced_memory_is_not_confused():
    assert on_processes(replaced, 2) == [[True] * 19] * 2


def replaced_on_one_rank(comm):
    rank, memory = Rank(comm), Range(2).map()
    x = memory.array(100, ones(GRAIN))
    found = [rank.until(x)]
    for _ in range(5):
        if comm.rank == 1:
            memory.unmap()
            memory.map()
        found.append(rank.until(x))
    return found


def test_memory_of_one_rank_is_replaced():
    assert on_processes(replaced_on_one_rank, 3) == [[True] * 6] * 3


def another_range(comm):
    """Addresses that are reserved anew, and then used by an allocation."""
    rank = Rank(comm)
    found = []
    for pieces in (2, 3, 2, 1):
        memory = Range(pieces).map()
        found.append(rank.until(memory.array(0, ones(pieces * GRAIN))))
        comm.barrier()
        memory.free()
        allocation = Allocation(ones(1 << 16))
        found.append(rank.until(allocation.array))
        allocation.free()
    return found


def test_ranges_come_and_go():
    assert on_processes(another_range, 2) == [[True] * 8] * 2


def unshareable(comm):
    rank, memory = Rank(comm), Range(2, exportable=comm.rank != 1).map()
    x = memory.array(0, ones(4000))
    found = [rank.until(x, in_place=comm.rank != 1) for _ in range(3)]
    return found, rank.sharing(x)


def test_memory_without_descriptors_goes_through_the_windows():
    results = on_processes(unshareable, 3)
    assert [found for found, _ in results] == [[True] * 3] * 3
    assert [state for _, state in results] == [IN_PLACE, IMPOSSIBLE, IN_PLACE]


def partly_mapped(comm):
    """An array whose last page is not there cannot be shared; a part of it can."""
    rank, memory = Rank(comm), Range(2).map(0)
    return rank.until(memory.array(GRAIN - 800, ones(800)))


def test_array_at_the_end_of_what_is_mapped():
    assert on_processes(partly_mapped, 2) == [True] * 2


def descriptors(comm):
    """How many there are of created memory, each of which has one when emulated."""
    rank, memory = Rank(comm), Range(16).map()
    rank.until(memory.array(0, ones(16 * GRAIN)))
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            link = os.readlink(f"/proc/self/fd/{descriptor}")
            found += "emulated-0-shared" in link
    comm.barrier()
    return found


@pytest.mark.skipif(emulated.ON_GPU, reason="what the driver opens is not known")
def test_descriptors_are_closed_when_memory_is_mapped():
    assert on_processes(descriptors, 2) == [16 + 16] * 2


def explained(comm):
    rank, memory = Rank(comm), Range(2).map()
    x = memory.array(0, ones(4000))
    rank.until(x)
    fresh = comm.empty((1000,), device="cuda")
    return comm.explain("all_reduce", x), comm.explain("all_reduce", fresh)


def test_explain_says_whether_a_buffer_is_used_in_place():
    for text, fresh in on_processes(explained, 2):
        assert "this array: used in place by all ranks" in text
        assert "this array: shared at its first call" in fresh


def split(comm):
    """Ranks that are not in the communicator are sent nothing."""
    memory = Range(2).map()
    group = comm.split(comm.rank % 2)
    found = Rank(group).until(memory.array(0, ones(2 * GRAIN)))
    return found, group.world_size


def test_groups_share_with_their_own_ranks():
    assert on_processes(split, 4) == [(True, 2)] * 4


# What is freed


def mapped_here():
    """How many times memory of emulated devices is mapped into this process."""
    with open("/proc/self/maps") as maps:
        return sum("unisono-emulated" in line for line in maps)


def counted(comm):
    """The same, before any rank frees something."""
    found = mapped_here()
    comm.barrier()
    return found


def falls_to(most, comm):
    """Whether so few are mapped in the end; no rank leaves before."""
    begun = time.monotonic()
    while mapped_here() > most and time.monotonic() - begun < LIMIT_S:
        time.sleep(0.01)
    comm.barrier()
    return mapped_here() <= most


only_emulated = pytest.mark.skipif(
    emulated.ON_GPU, reason="mappings are counted, which only the emulation shows"
)


def freed_allocations(comm):
    rank, allocations = Rank(comm), [Allocation(ones(64)) for _ in range(20)]
    for one in allocations:
        assert rank.until(one.array)
    many = counted(comm)
    for one in allocations:
        one.free()
    return falls_to(many - 20 - 20, comm)


@only_emulated
def test_freed_allocations_are_unmapped_by_the_others():
    assert on_processes(freed_allocations, 2) == [True] * 2


def freed_pieces(comm):
    rank, memory = Rank(comm), Range(6).map()
    x = memory.array(0, ones(6 * GRAIN))
    assert rank.until(x)
    many = counted(comm)
    memory.unmap(1, 2, 4)
    parts = falls_to(many - 6, comm)
    assert rank.until(memory.array(5 * GRAIN, ones(GRAIN)))
    few = counted(comm)
    memory.free()
    return parts, falls_to(few - 6, comm)


@only_emulated
def test_freed_pieces_are_unmapped_by_the_others():
    assert on_processes(freed_pieces, 2) == [(True, True)] * 2


def numbers_again(comm):
    """More segments, one after another, than there are numbers."""
    rank = Rank(comm)
    for _ in range(24):
        allocations = [Allocation(ones(64)) for _ in range(50)]
        for one in allocations:
            comm.all_reduce(one.array, stream=rank.stream)
        comm.synchronize(LIMIT_S)
        for one in allocations:
            one.free()
    x = to_device(ones(64))
    return rank.until(x)


@pytest.mark.sweep
def test_numbers_of_segments_are_used_again():
    assert on_processes(numbers_again, 2) == [True] * 2


def behind_freed(comm):
    """Memory that the driver maps when older memory is closed, which is told later."""
    rank, allocations = Rank(comm), [Allocation(ones(64)) for _ in range(5)]
    for one in allocations:
        assert rank.until(one.array)
    for one in allocations:
        one.free()
    x = to_device(ones(64))
    assert not rank.all_reduce(x), "the driver was to refuse it"
    return rank.until(x)


@only_emulated
def test_memory_that_is_refused_at_first_is_used_in_place_later(monkeypatch):
    monkeypatch.setenv("UNISONO_EMULATED_REFUSALS", "1")
    assert on_processes(behind_freed, 2) == [True] * 2


def used_in_flight(comm, created):
    """What rank 0 frees while a call of rank 1 is in flight."""
    rank, memory = Rank(comm), Range(4).map()
    allocations = [] if created else [Allocation(ones(64)), Allocation(ones(64))]
    shared = [memory.array(0, ones(2 * GRAIN))] if created else []
    for x in [*shared, *(one.array for one in allocations)]:
        assert rank.until(x)
    y = to_device(ones(128))
    assert rank.until(y)
    before = mapped_here()
    if comm.rank == 0:
        comm.barrier()  # the call of rank 1 is in flight
        memory.unmap(0, 1)
        for one in allocations:
            one.free()
        time.sleep(0.3)  # so that it is known, and would be unmapped
        comm.all_reduce(y, stream=rank.stream)
        comm.synchronize(LIMIT_S)
        return falls_to(before - 2, comm)
    comm.all_reduce(y, stream=rank.stream)
    comm.barrier()
    during = now = before
    while not rank.native.is_idle():  # so it was when they were counted
        during, now = now, mapped_here()
    comm.synchronize(LIMIT_S)
    return falls_to(before - 2, comm) and during == before


@only_emulated
@pytest.mark.parametrize("created", [True, False])
def test_memory_is_not_unmapped_while_a_call_is_in_flight(created):
    assert on_processes(used_in_flight, 2, (created,)) == [True] * 2


def without_rest(comm):
    """Calls on memory that comes and goes, and no pause between them."""
    rank = Rank(comm)
    results = []
    for i in range(150):
        memory = Range(2).map() if i % 3 else Allocation(ones(400))
        x = memory.array(8, ones(400)) if i % 3 else memory.array
        emulated.write(
            x.__cuda_array_interface__["data"][0],
            (ones(400) * (i + comm.rank)).tobytes(),
        )
        comm.all_reduce(x, stream=rank.stream)
        comm.all_reduce(x, op="max", stream=rank.stream)
        comm.synchronize(LIMIT_S)
        results.append(bool((x.numpy() == 2 * i + 1).all()))
        memory.free()
    return all(results)


@pytest.mark.sweep
def test_memory_comes_and_goes():
    assert on_processes(without_rest, 2) == [True] * 2


def replayed(comm):
    """A graph on shared memory, replayed while other memory is freed."""
    rank, memory = Rank(comm), Range(2).map()
    x = memory.array(0, np.full(100, comm.rank + 1, np.int64))
    comm.all_reduce(x, stream=rank.stream)
    comm.synchronize(LIMIT_S)
    emulated.begin_capture(rank.stream.handle)
    comm.all_reduce(x, stream=rank.stream)
    graph = emulated.instantiate(emulated.end_capture(rank.stream.handle))
    for i in range(20):
        other = Range(1).map() if i % 2 else Allocation(ones(64))
        y = other.array(0, ones(64)) if i % 2 else other.array
        rank.all_reduce(y)
        emulated.launch_graph(graph, rank.stream.handle)
        emulated.synchronize(rank.stream.handle)
        other.free()
    return x.numpy().tolist()


def test_graphs_are_replayed_while_memory_is_freed():
    assert on_processes(replayed, 2) == [[3 << 20] * 100] * 2

"""The emulation of CUDA's driver: streams, events, modules and launches.

A kernel that waits for a rank that has not come holds its stream for as long as a test
wants; nothing here waits for a time.
"""

import ctypes
from ctypes import c_int, c_size_t, c_uint, c_void_p

import emulated as cuda
from conformance import Case, check
from emulated_world import Collective, Gate, alone, refused
from unisono.dtypes import DTYPES

# Streams and events


def test_a_stream_works_in_order_and_beside_others(driver):
    first, second = (cuda.stream(cuda.NON_BLOCKING) for _ in range(2))
    x, y = cuda.allocate(64), cuda.allocate(64)
    cuda.fill(x, 1, 64)
    cuda.fill(y, 1, 64)
    cuda.synchronize()
    gate = Gate(first)
    cuda.fill(x, 2, 64, first)
    cuda.fill(x, 3, 64, first)
    cuda.fill(y, 4, 64, second)
    cuda.synchronize(second)
    assert cuda.query(first) == 600
    assert cuda.read(x, 64) + cuda.read(y, 64) == bytes([1] * 64 + [4] * 64)
    gate.open()
    cuda.synchronize(first)
    assert cuda.query(first) == 0
    assert cuda.read(x, 64) == bytes([3] * 64)


def test_the_default_stream_is_ordered_with_blocking_streams_alone(driver):
    blocking, later = cuda.stream(), cuda.stream()
    free = cuda.stream(cuda.NON_BLOCKING)
    x = cuda.allocate(3)
    cuda.fill(x, 0, 3, free)
    cuda.synchronize(free)
    gate = Gate(blocking)
    cuda.fill(x, 1, 1)  # waits for what `blocking` has to do
    cuda.fill(x + 1, 1, 1, later)  # waits for the default stream
    cuda.fill(x + 2, 1, 1, free)
    cuda.synchronize(free)
    assert [cuda.query(s) for s in (None, blocking, later, free)] == [600, 600, 600, 0]
    seen = ctypes.string_at(x, 3)
    gate.open()
    cuda.synchronize(later)
    assert seen == bytes([0, 0, 1])
    assert cuda.read(x, 3) == bytes([1, 1, 1])


def test_blocking_streams_do_not_wait_for_each_other(driver):
    first, second = cuda.stream(), cuda.stream()
    x = cuda.allocate(1)
    gate = Gate(first)
    cuda.fill(x, 9, 1, second)
    cuda.synchronize(second)
    assert cuda.query(first) == 600
    gate.open()
    assert cuda.read(x, 1) == bytes([9])


def word(function, stream, address, number, flags=0):
    at = ctypes.c_uint64(address)
    return cuda.code_of(function, c_void_p(stream), at, c_uint(number), c_uint(flags))


def test_a_stream_waits_until_a_word_has_come_so_far(driver):
    first, second = (cuda.stream(cuda.NON_BLOCKING) for _ in range(2))
    x, at = cuda.allocate(1), cuda.allocate_host(8)
    cuda.fill(x, 0, 1, first)
    cuda.fill(at, 0, 8, first)
    cuda.synchronize(first)
    assert word("cuStreamWaitValue32_v2", first, at, 5) == 0
    cuda.fill(x, 1, 1, first)
    assert word("cuStreamWriteValue32_v2", second, at, 4) == 0
    cuda.synchronize(second)
    assert cuda.query(first) == 600
    assert word("cuStreamWriteValue32_v2", second, at, 6) == 0
    cuda.synchronize(first)
    assert cuda.read(x, 1) == bytes([1])
    assert word("cuStreamWaitValue32_v2", first, at, 6) == 0  # it is there already
    cuda.synchronize(first)
    assert word("cuStreamWaitValue32_v2", first, at + 1, 6) == 1
    assert word("cuStreamWaitValue32_v2", first, at, 6, flags=3) == 801


def test_an_event_tells_how_far_a_stream_has_come(driver):
    stream, other = (cuda.stream(cuda.NON_BLOCKING) for _ in range(2))
    event = cuda.event()
    x = cuda.allocate(2)
    cuda.fill(x, 0, 2, stream)
    cuda.synchronize(stream)
    assert cuda.code_of("cuEventQuery", c_void_p(event)) == 0  # not yet recorded
    cuda.wait(other, event)
    cuda.synchronize(other)
    gate = Gate(stream)
    cuda.fill(x, 1, 1, stream)
    cuda.record(event, stream)
    assert cuda.code_of("cuEventQuery", c_void_p(event)) == 600
    cuda.wait(other, event)
    cuda.copy(x + 1, x, 1, other)
    assert cuda.query(other) == 600
    gate.open()
    cuda.synchronize(other)
    assert cuda.code_of("cuEventQuery", c_void_p(event)) == 0
    assert cuda.read(x, 2) == bytes([1, 1])


def test_who_waits_for_an_event_waits_for_what_it_was_recorded_for(driver):
    stream, other, third = (cuda.stream(cuda.NON_BLOCKING) for _ in range(3))
    event = cuda.event()
    gate = Gate(stream)
    cuda.record(event, stream)
    cuda.wait(other, event)
    cuda.record(event, third)  # nothing is before it
    cuda.call("cuEventSynchronize", c_void_p(event))
    assert cuda.query(other) == 600
    gate.open()
    cuda.synchronize(other)
    assert cuda.query(stream) == 0


def test_the_time_between_events(driver):
    stream = cuda.stream(cuda.NON_BLOCKING)
    begin, end, without = cuda.event(), cuda.event(), cuda.event(2)
    elapsed = "cuEventElapsedTime"
    with refused(400):
        cuda.value(ctypes.c_float, elapsed, c_void_p(begin), c_void_p(end))
    cuda.record(begin, stream)
    gate = Gate(stream)
    cuda.record(end, stream)
    cuda.record(without, stream)
    with refused(600):
        cuda.value(ctypes.c_float, elapsed, c_void_p(begin), c_void_p(end))
    gate.open()
    cuda.call("cuEventSynchronize", c_void_p(end))
    assert cuda.value(ctypes.c_float, elapsed, c_void_p(begin), c_void_p(end)) > 0
    with refused(400):
        cuda.value(ctypes.c_float, elapsed, c_void_p(begin), c_void_p(without))


def test_a_stream_that_is_destroyed_ends_its_work(driver):
    stream, other = (cuda.stream(cuda.NON_BLOCKING) for _ in range(2))
    x = cuda.allocate(1)
    event = cuda.event()
    gate = Gate(stream)
    cuda.fill(x, 3, 1, stream)
    cuda.record(event, stream)
    cuda.wait(other, event)
    cuda.destroy_stream(stream)
    with refused(400):
        cuda.synchronize(stream)
    with refused(400):
        cuda.destroy_stream(stream)
    assert cuda.query(other) == 600
    gate.open()
    cuda.synchronize(other)
    assert cuda.read(x, 1) == bytes([3])


def test_handles_that_are_destroyed_are_refused(driver):
    event = cuda.event()
    cuda.call("cuEventDestroy_v2", c_void_p(event))
    with refused(400):
        cuda.record(event)
    with refused(400):
        cuda.call("cuEventDestroy_v2", c_void_p(event))
    with refused(400):
        cuda.synchronize(12345)


def test_a_failure_on_the_device_stays():
    """Until its context is destroyed, every call returns it."""
    said = alone(
        """
        import emulated as cuda
        from ctypes import byref, c_size_t, c_ubyte, c_uint64, c_void_p
        cuda.initialize()
        at = cuda.reserve(cuda.GRAIN)
        cuda.map_at(at, cuda.GRAIN, cuda.create(cuda.GRAIN))
        stream = cuda.stream(cuda.NON_BLOCKING)
        x = cuda.allocate(1)
        cuda.write(x, bytes([1]))
        cuda.fill(at, 0, 8, stream)  # no access was given
        more = c_uint64(x), c_ubyte(2), c_size_t(1), c_void_p(stream)
        cuda.code_of("cuMemsetD8Async", *more)  # refused, or not done
        print(cuda.code_of("cuStreamSynchronize", c_void_p(stream)))
        print(cuda.code_of("cuMemAlloc_v2", byref(c_uint64()), c_size_t(8)))
        kept = (c_uint64 * 1).from_address(x)
        print(kept[0] % 256)
        cuda.release()
        cuda.initialize()
        cuda.free(cuda.allocate(8))
        """
    )
    assert said.split() == ["700", "700", "1"]


# Modules and launches


def test_images(driver):
    load = "cuModuleLoadData"
    for image, code in [
        (b"", 200),
        (b"unisono-emulated", 200),
        (b"unisono-emulated 11", 200),
        (b"unisono-emulated 11 0x", 200),
        (b"unisono-emulated 11 99", 200),
        (b"unisono-emulated 999999999999 0", 200),
        (f"unisono-emulated {DTYPES['float32'].code} 4".encode(), 200),  # no bits
        (b"\x7fELF", 209),
    ]:
        with refused(code):
            cuda.value(c_void_p, load, image)
    module = cuda.value(c_void_p, load, b"unisono-emulated 11 0")
    get = "cuModuleGetFunction"
    with refused(500):
        cuda.value(c_void_p, get, c_void_p(module), b"another")
    function = cuda.value(c_void_p, get, c_void_p(module), b"unisono_interpret")
    occupancy = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
    found = [
        cuda.value(c_int, occupancy, c_void_p(function), c_int(n), c_size_t(0))
        for n in (128, 512, 513)
    ]
    assert found == [6, 2, 0]
    limit = cuda.value(c_int, "cuFuncGetAttribute", c_int(0), c_void_p(function))
    with refused(701):
        cuda.launch(function, bytes(2048), None, threads=limit + 1)
    with refused(1):
        cuda.launch(function, bytes(2048), None, blocks=0)
    cuda.call("cuModuleUnload", c_void_p(module))
    with refused(400):
        cuda.launch(function, bytes(2048), None)


def test_ranks_as_streams_of_one_device(driver):
    case = Case("all_reduce", "ring", 3, 777)
    collective = Collective(case)
    streams = [cuda.stream(cuda.NON_BLOCKING) for _ in range(3)]
    for r, stream in enumerate(streams):
        collective.launch(r, stream)
    for stream in streams:
        cuda.synchronize(stream)
    assert collective.world.reported() == [0, 0, 0]
    check([case], [[(x, True)] for x in collective.results()])


def test_the_argument_of_a_launch_is_copied(driver):
    case = Case("all_reduce", "direct", 2, 64)
    collective = Collective(case)
    streams = [cuda.stream(cuda.NON_BLOCKING) for _ in range(2)]
    gate = Gate(streams[0])
    argument = ctypes.create_string_buffer(
        collective.arguments[0], len(collective.arguments[0])
    )
    pointers = (c_void_p * 1)(ctypes.addressof(argument))
    shape = [c_uint(x) for x in (2, 1, 1, 64, 1, 1, 0)]
    cuda.call(
        "cuLaunchKernel",
        c_void_p(collective.function),
        *shape,
        c_void_p(streams[0]),
        pointers,
        None,
    )
    ctypes.memset(argument, 0xFF, len(argument))
    collective.launch(1, streams[1])
    gate.open()
    for stream in streams:
        cuda.synchronize(stream)
    check([case], [[(x, True)] for x in collective.results()])


def test_launches_wait_for_a_rank_that_comes_later(driver):
    """And a rank that does not come holds no other stream."""
    case = Case("all_reduce", "direct", 2, 64)
    collective = Collective(case)
    streams = [cuda.stream() for _ in range(2)]
    other = Collective(case)  # before: it uses the default stream
    collective.launch(0, streams[0])
    assert cuda.query(streams[0]) == 600
    others = [cuda.stream() for _ in range(2)]
    for r, stream in enumerate(others):
        other.launch(r, stream)
    for stream in others:
        cuda.synchronize(stream)
    assert cuda.query(streams[0]) == 600
    collective.launch(1, streams[1])
    cuda.synchronize(streams[0])
    check([case], [[(x, True)] for x in collective.results()])


def test_an_urgent_stream_works_as_others_do(driver):
    least, greatest = c_int(), c_int()
    cuda.call(
        "cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest)
    )
    assert greatest.value < least.value
    stream = c_void_p()
    what = ctypes.byref(stream), c_uint(cuda.NON_BLOCKING), greatest
    cuda.call("cuStreamCreateWithPriority", *what)
    x = cuda.allocate(1)
    cuda.fill(x, 7, 1, stream.value)
    cuda.synchronize(stream.value)
    assert cuda.read(x, 1) == bytes([7])
    assert cuda.code_of("cuStreamDestroy_v2", stream) == 0

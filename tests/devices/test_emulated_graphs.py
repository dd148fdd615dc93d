"""The emulation of CUDA's driver: captures and graphs."""

import threading
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from types import SimpleNamespace

import numpy as np
import pytest

import emulated as cuda
from conformance import Case, check
from emulated_world import Collective, refused


@pytest.fixture
def stream(driver):
    return cuda.stream(cuda.NON_BLOCKING)


def test_what_is_captured_runs_when_the_graph_is_launched(stream):
    x, y = cuda.allocate(8), cuda.allocate(8)
    cuda.write(x, bytes(8))
    cuda.write(y, bytes(8))
    assert cuda.capturing(stream) == 0
    cuda.begin_capture(stream)
    assert cuda.capturing(stream) == 1
    cuda.fill(x, 7, 4, stream)
    cuda.copy(y, x, 8, stream)
    graph = cuda.end_capture(stream)
    assert cuda.capturing(stream) == 0
    cuda.synchronize(stream)
    assert cuda.read(y, 8) == bytes(8)
    launched = cuda.instantiate(graph)
    cuda.call("cuGraphDestroy", c_void_p(graph))
    for last in (1, 2):
        cuda.write(x, bytes(7) + bytes([last]))
        cuda.launch_graph(launched, stream)
        cuda.synchronize(stream)
        assert cuda.read(y, 8) == bytes([7] * 4 + [0] * 3 + [last])
    cuda.call("cuGraphExecDestroy", c_void_p(launched))
    with refused(1):
        cuda.launch_graph(launched, stream)
    with refused(1):
        cuda.instantiate(graph)


def fork(stream, others):
    event = cuda.event()
    cuda.record(event, stream)
    for other in others:
        cuda.wait(other, event)


def join(stream, others):
    for other in others:
        event = cuda.event()
        cuda.record(event, other)
        cuda.wait(stream, event)


def test_streams_of_one_capture_have_its_number(stream):
    other = cuda.stream(cuda.NON_BLOCKING)
    numbers = []
    for _ in range(2):
        assert cuda.capture_number(stream) == 0
        cuda.begin_capture(stream)
        numbers.append(cuda.capture_number(stream))
        assert cuda.capture_number(other) == 0
        fork(stream, [other])
        assert cuda.capture_number(other) == numbers[-1]
        join(stream, [other])
        cuda.end_capture(stream)
    assert 0 < numbers[0] < numbers[1]


def test_streams_join_a_capture_by_events(stream):
    """Their kernels wait for each other, so they must run at the same time."""
    others = [cuda.stream(cuda.NON_BLOCKING) for _ in range(2)]
    case = Case("all_reduce", "ring", 3, 200)
    collective = Collective(case)
    y = cuda.allocate(8)
    cuda.begin_capture(stream)
    fork(stream, others)
    assert [cuda.capturing(s) for s in others] == [1, 1]
    for r, each in enumerate([stream, *others]):
        collective.launch(r, each)
    join(stream, others)
    cuda.copy(y, collective.outputs[2], 8, stream)
    launched = cuda.instantiate(cuda.end_capture(stream))
    assert [cuda.capturing(s) for s in others] == [0, 0]
    for _ in range(3):
        cuda.launch_graph(launched, stream)
    cuda.synchronize(stream)
    check([case], [[(x, True)] for x in collective.results()])
    assert cuda.read(y, 8) == cuda.read(collective.outputs[2], 8)


def test_a_collective_is_replayed_a_thousand_times(driver):
    """Every replay runs once: in place, each makes the numbers three times as large."""
    case = Case("all_reduce", "direct", 3, 64, dtype="uint32")
    collective = Collective(case, in_place=True)
    streams = [cuda.stream(cuda.NON_BLOCKING) for _ in range(3)]
    launched = []
    for r, stream in enumerate(streams):
        cuda.begin_capture(stream)
        collective.launch(r, stream, blocks=1, threads=1)
        launched.append(cuda.instantiate(cuda.end_capture(stream)))
    for _ in range(1000):
        for each, stream in zip(launched, streams, strict=True):
            cuda.launch_graph(each, stream)
    for stream in streams:
        cuda.synchronize(stream)
    assert collective.world.reported() == [0, 0, 0]
    total = sum(case.given(r) for r in range(3))
    expected = total * np.uint32(pow(3, 999, 2**32))
    for result in collective.results():
        np.testing.assert_array_equal(result, expected)


def test_launches_of_a_graph_in_two_streams_run_one_after_the_other(stream):
    other = cuda.stream(cuda.NON_BLOCKING)
    case = Case("all_reduce", "direct", 2, 16, dtype="uint32")
    collective = Collective(case, in_place=True)
    cuda.begin_capture(stream)
    fork(stream, [other])
    collective.launch(0, stream, blocks=1, threads=1)
    collective.launch(1, other, blocks=1, threads=1)
    join(stream, [other])
    launched = cuda.instantiate(cuda.end_capture(stream))
    for _ in range(7):
        cuda.launch_graph(launched, stream)
        cuda.launch_graph(launched, other)
    for each in (stream, other):
        cuda.synchronize(each)
    assert collective.world.reported() == [0, 0]
    expected = (case.given(0) + case.given(1)) * np.uint32(2**13)
    for result in collective.results():
        np.testing.assert_array_equal(result, expected)


def lost(stream):
    """The capture failed, and the stream can be used again."""
    assert cuda.capturing(stream) == 2
    with refused(901):
        cuda.record(cuda.event(), stream)
    with refused(901):
        cuda.end_capture(stream)
    assert cuda.capturing(stream) == 0
    cuda.synchronize(stream)


@pytest.mark.parametrize("name", ["cuStreamSynchronize", "cuStreamQuery"])
def test_a_capturing_stream_is_not_waited_for(stream, name):
    cuda.begin_capture(stream)
    with refused(900):
        cuda.call(name, c_void_p(stream))
    lost(stream)


@pytest.mark.parametrize("name", ["cuEventSynchronize", "cuEventQuery"])
def test_a_captured_event_is_not_waited_for(stream, name):
    event = cuda.event()
    cuda.begin_capture(stream)
    cuda.record(event, stream)
    with refused(907):
        cuda.call(name, c_void_p(event))
    lost(stream)


def test_a_stream_that_is_not_joined(stream):
    other = cuda.stream(cuda.NON_BLOCKING)
    cuda.begin_capture(stream)
    fork(stream, [other])
    cuda.fill(cuda.allocate(8), 0, 8, other)
    with refused(903):  # the capture did not begin there
        cuda.end_capture(other)
    with refused(901):
        cuda.end_capture(stream)
    cuda.begin_capture(stream)
    fork(stream, [other])
    cuda.fill(cuda.allocate(8), 0, 8, other)
    with refused(904):
        cuda.end_capture(stream)
    assert [cuda.capturing(s) for s in (stream, other)] == [0, 0]


def test_captured_work_depends_on_captured_work_alone(stream):
    other = cuda.stream(cuda.NON_BLOCKING)
    event = cuda.event()
    cuda.record(event, other)
    cuda.begin_capture(stream)
    with refused(905):
        cuda.wait(stream, event)
    lost(stream)
    cuda.begin_capture(stream)
    cuda.begin_capture(other)
    cuda.record(event, stream)
    with refused(902):
        cuda.wait(other, event)
    lost(stream)
    lost(other)


def test_the_default_stream_is_not_used_while_a_blocking_stream_captures(driver):
    blocking = cuda.stream()
    x = cuda.allocate(8)
    with refused(900):
        cuda.begin_capture(0)
    cuda.begin_capture(blocking)
    with refused(906):
        cuda.capturing(None)
    assert cuda.capturing(blocking) == 1
    with refused(906):
        cuda.fill(x, 0, 8)
    lost(blocking)
    free = cuda.stream(cuda.NON_BLOCKING)
    cuda.begin_capture(free)
    cuda.write(x, bytes(8))
    cuda.end_capture(free)


def allocate_code():
    return cuda.code_of("cuMemAlloc_v2", byref(c_uint64()), c_size_t(8))


def in_thread(function):
    """What a function returns in another thread, with the same context."""
    found = []

    def run():
        cuda.initialize()
        found.append(function())
        cuda.release()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(
    ("of_thread", "of_capture", "here", "elsewhere"),
    [
        (cuda.GLOBAL, cuda.GLOBAL, 900, 900),
        (cuda.GLOBAL, cuda.THREAD_LOCAL, 900, 0),
        (cuda.THREAD_LOCAL, cuda.GLOBAL, 900, 0),
        (cuda.THREAD_LOCAL, cuda.THREAD_LOCAL, 900, 0),
        (cuda.RELAXED, cuda.GLOBAL, 0, 0),
        (cuda.RELAXED, cuda.THREAD_LOCAL, 0, 0),
        (cuda.GLOBAL, cuda.RELAXED, 0, 0),
        (cuda.THREAD_LOCAL, cuda.RELAXED, 0, 0),
    ],
)
def test_what_the_modes_of_thread_and_capture_forbid(
    stream, of_thread, of_capture, here, elsewhere
):
    def allocated():
        with cuda.capture_mode(of_thread):
            return allocate_code()

    for function, code in ((lambda f: f(), here), (in_thread, elsewhere)):
        cuda.begin_capture(stream, of_capture)
        assert function(allocated) == code
        if code:
            lost(stream)
        else:
            cuda.end_capture(stream)


def test_mode_of_a_thread_is_exchanged(driver):
    with cuda.capture_mode(cuda.RELAXED):
        given = c_int(cuda.THREAD_LOCAL)
        cuda.call("cuThreadExchangeStreamCaptureMode", byref(given))
        assert given.value == cuda.RELAXED
        cuda.call("cuThreadExchangeStreamCaptureMode", byref(given))
        assert given.value == cuda.THREAD_LOCAL
    with refused(1):
        cuda.call("cuThreadExchangeStreamCaptureMode", byref(c_int(3)))


UNSAFE = {
    "cuEventQuery": lambda at: (c_void_p(at.event),),
    "cuEventSynchronize": lambda at: (c_void_p(at.event),),
    "cuStreamQuery": lambda at: (c_void_p(at.other),),
    "cuStreamSynchronize": lambda at: (c_void_p(at.other),),
    "cuMemFree_v2": lambda at: (c_uint64(at.address),),
    "cuMemcpyDtoH_v2": lambda at: (bytes(8), c_uint64(at.address), c_size_t(8)),
    "cuModuleLoadData": lambda _: (byref(c_void_p()), b"unisono-emulated 11 0"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_calls_are_allowed_in_relaxed_mode_alone(stream, name):
    at = SimpleNamespace(
        event=cuda.event(),
        other=cuda.stream(cuda.NON_BLOCKING),
        address=cuda.allocate(8),
    )
    cuda.begin_capture(stream, cuda.GLOBAL)
    assert in_thread(lambda: cuda.code_of(name, *UNSAFE[name](at))) == 900
    lost(stream)
    cuda.begin_capture(stream, cuda.GLOBAL)
    with cuda.capture_mode(cuda.RELAXED):
        cuda.call(name, *UNSAFE[name](at))
    cuda.end_capture(stream)


def test_who_ends_a_capture(stream):
    with refused(401):
        cuda.end_capture(stream)
    cuda.begin_capture(stream, cuda.GLOBAL)
    with refused(401):
        cuda.begin_capture(stream)

    def end():
        return cuda.code_of("cuStreamEndCapture", c_void_p(stream), byref(c_void_p()))

    assert in_thread(end) == 908
    cuda.begin_capture(stream, cuda.RELAXED)
    assert in_thread(end) == 0


def test_a_stream_that_captures_is_destroyed(stream):
    other = cuda.stream(cuda.NON_BLOCKING)
    cuda.begin_capture(stream)
    fork(stream, [other])
    cuda.destroy_stream(stream)
    assert cuda.capturing(other) == 0
    cuda.synchronize(other)

"""The emulation of CUDA's driver: memory that processes share.

A process of its own opens what the test exports, on the word of a Unix socket; waits
for it are bounded by the socket's time limit.
"""

import contextlib
import ctypes
import os
import socket
import struct
import subprocess
import sys
import textwrap
from ctypes import c_size_t, c_void_p
from ctypes import c_uint64 as c_address

import pytest

import emulated as cuda
from emulated_world import SUPPORT, refused

LIMIT_S = 120

SERVER = """
import socket, sys
import emulated as cuda
link = socket.socket(fileno=int(sys.argv[1]))
link.settimeout(120)
cuda.initialize()
known = {}
while True:
    message, fds, _, _ = socket.recv_fds(link, 4096, 1)
    if not message:
        break
    try:
        got = eval(message, {"cuda": cuda, "fds": fds, "known": known})
    except cuda.CudaError as error:
        got = error.code
    link.sendall(repr(got).encode())
"""


class Process:
    """Another process, which evaluates what it is sent."""

    def __init__(self):
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(LIMIT_S)
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SERVER), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        )
        theirs.close()

    def __call__(self, expression, fds=()):
        socket.send_fds(self.link, [expression.encode()], list(fds))
        return eval(self.link.recv(4096))

    def end(self):
        self.link.close()
        self.process.wait(LIMIT_S)


@pytest.fixture
def other():
    process = Process()
    yield process
    process.end()


def test_another_process_opens_memory_by_its_handle(driver, other):
    x = cuda.allocate(5000)
    cuda.write(x, b"from the owner")
    handle = cuda.ipc_handle(x + 8)  # a handle is of the whole allocation
    at = other(f"cuda.open_handle({handle!r})")
    assert other(f"cuda.read({at}, 14)") == b"from the owner"
    assert other(f"cuda.range_of({at} + 4999)") == (at, 5000)
    other(f"cuda.write({at} + 100, b'from the other')")
    assert cuda.read(x + 100, 14) == b"from the other"


def test_a_handle_that_is_opened_twice_is_closed_twice(driver, other):
    x = cuda.allocate(64)
    handle = cuda.ipc_handle(x)
    at = other(f"cuda.open_handle({handle!r})")
    assert other(f"cuda.open_handle({handle!r})") == at
    assert other(f"cuda.close_handle({at})") is None
    assert len(other(f"cuda.read({at}, 8)")) == 8
    assert other(f"cuda.close_handle({at})") is None
    assert other(f"cuda.read({at}, 8)") == 1
    assert other(f"cuda.close_handle({at})") == 400


def test_memory_of_others_is_closed_and_not_freed(driver, other):
    at = other(f"cuda.open_handle({cuda.ipc_handle(cuda.allocate(64))!r})")
    assert other(f"cuda.free({at})") == 1
    assert other(f"cuda.ipc_handle({at})") == 1  # nor is it exported again


def test_a_handle_is_not_opened_where_it_was_made(driver):
    handle = cuda.ipc_handle(cuda.allocate(64))
    with refused(201):
        cuda.open_handle(handle)


def test_a_handle_of_freed_memory_is_refused(driver, other):
    """Also when its descriptor is another allocation's by then."""
    x = cuda.allocate(64)
    handle = cuda.ipc_handle(x)
    cuda.free(x)
    assert other(f"cuda.open_handle({handle!r})") == 400
    again = cuda.ipc_handle(cuda.allocate(64))
    assert struct.unpack_from("i", again, 12) == struct.unpack_from("i", handle, 12)
    assert other(f"cuda.open_handle({handle!r})") == 400
    assert other(f"cuda.open_handle({again!r})") > 1000


def test_a_handle_of_an_earlier_process_with_the_same_number_is_refused(driver, other):
    handle = bytearray(cuda.ipc_handle(cuda.allocate(64)))
    handle[16] ^= 1  # when the process began
    assert other(f"cuda.open_handle({bytes(handle)!r})") == 400


def test_a_handle_of_a_process_that_is_gone_is_refused(driver):
    process = Process()
    handle = process("cuda.ipc_handle(cuda.allocate(64))")
    process.end()
    with refused(400):
        cuda.open_handle(handle)


def test_what_is_no_handle_is_refused(driver):
    with refused(400):
        cuda.open_handle(bytes(64))
    with refused(1):
        cuda.ipc_handle(cuda.allocate_host(8))


def test_opened_memory_outlives_its_owner(driver):
    """As mappings do; CUDA leaves this undefined, but nothing crashes."""
    process = Process()
    handle = process(
        "(known.update(x=cuda.allocate(64)), cuda.write(known['x'], b'kept'),"
        " cuda.ipc_handle(known['x']))[2]"
    )
    at = cuda.open_handle(handle)
    process.end()
    assert cuda.read(at, 4) == b"kept"
    cuda.close_handle(at)


def mapped(allocation, nbytes=cuda.GRAIN):
    """Where physical memory is mapped, for reading and writing."""
    at = cuda.reserve(nbytes)
    cuda.map_at(at, nbytes, allocation)
    cuda.set_access(at, nbytes, 3)
    return at


def test_another_process_maps_physical_memory_by_a_descriptor(driver, other):
    allocation = cuda.create(cuda.GRAIN)
    at = mapped(allocation)
    cuda.write(at, b"from the owner")
    fd = cuda.export(allocation)
    other("known.update(a=cuda.import_descriptor(fds[0]))", [fd])
    os.close(fd)
    there = other("cuda.reserve(cuda.GRAIN)")
    other(f"cuda.map_at({there}, cuda.GRAIN, known['a'])")
    assert other(f"cuda.read({there}, 1)") == 700  # before access is given
    other("(cuda.release(), cuda.initialize())")
    other(f"cuda.set_access({there}, cuda.GRAIN, 3)")
    assert other(f"cuda.read({there}, 14)") == b"from the owner"
    other(f"cuda.write({there} + 64, b'from the other')")
    assert cuda.read(at + 64, 14) == b"from the other"
    # What is mapped stays there without the owner's handle and mapping.
    cuda.call("cuMemRelease", c_address(allocation))
    cuda.unmap(at, cuda.GRAIN)
    assert other(f"cuda.read({there} + 64, 14)") == b"from the other"


def test_descriptors_that_are_no_such_memory_are_refused(driver):
    own = cuda.create(cuda.GRAIN, exportable=False)
    with refused(1):
        cuda.export(own)
    with contextlib.closing(socket.socket()) as unrelated, refused(1):
        cuda.import_descriptor(unrelated.fileno())
    with refused(1):
        cuda.import_descriptor(9999)


def test_physical_memory_lives_while_it_is_mapped_or_held(driver):
    allocation = cuda.create(cuda.GRAIN)
    at = mapped(allocation)
    cuda.call("cuMemRelease", c_address(allocation))
    with refused(1):
        cuda.export(allocation)
    cuda.write(at + 1000, b"still there")
    held = cuda.value(c_address, "cuMemRetainAllocationHandle", c_void_p(at + 5))
    cuda.unmap(at, cuda.GRAIN)
    with refused(500):
        cuda.range_of(at)
    cuda.map_at(at, cuda.GRAIN, held)
    cuda.set_access(at, cuda.GRAIN, 1)
    assert cuda.read(at + 1000, 11) == b"still there"
    cuda.unmap(at, cuda.GRAIN)
    cuda.call("cuMemAddressFree", c_address(at), c_size_t(cuda.GRAIN))


def test_mappings_one_after_the_other_are_one_range_of_addresses(driver):
    size = 2 * cuda.GRAIN
    at = cuda.reserve(size)
    for i in range(2):
        cuda.map_at(at + i * cuda.GRAIN, cuda.GRAIN, cuda.create(cuda.GRAIN))
    cuda.set_access(at, size, 3)
    cuda.fill(at, 6, size)
    across = at + cuda.GRAIN - 4
    assert cuda.read(across, 8) == bytes([6]) * 8
    assert cuda.range_of(across) == (at, cuda.GRAIN)
    assert cuda.attribute(c_address, 11, across) == at  # what is reserved
    assert cuda.attribute(c_size_t, 12, across) == size
    assert cuda.attribute(ctypes.c_int, 10, across) == 0
    assert cuda.attribute(c_address, 14, across) == 1
    with refused(1):  # mappings are in it
        cuda.call("cuMemAddressFree", c_address(at), c_size_t(size))
    with refused(1):  # half of one
        cuda.unmap(at, cuda.GRAIN // 2)
    cuda.unmap(at, size)
    cuda.call("cuMemAddressFree", c_address(at), c_size_t(size))


def test_wrong_mappings_are_refused(driver):
    allocation = cuda.create(cuda.GRAIN)
    with refused(1):
        cuda.create(cuda.GRAIN + 1)
    with refused(101):
        cuda.create(cuda.GRAIN, device=7)
    with refused(1):
        cuda.reserve(100)
    at = cuda.reserve(cuda.GRAIN)
    with refused(1):  # larger than the memory and the reserved addresses
        cuda.map_at(at, 2 * cuda.GRAIN, allocation)
    with refused(1):  # not reserved
        cuda.map_at(at + 16 * cuda.GRAIN, cuda.GRAIN, allocation)
    cuda.map_at(at, cuda.GRAIN, allocation)
    with refused(1):  # mapped already
        cuda.map_at(at, cuda.GRAIN, allocation)
    with refused(1):
        cuda.set_access(at, cuda.GRAIN, 2)
    with refused(1):
        cuda.value(c_address, "cuMemRetainAllocationHandle", c_void_p(cuda.allocate(8)))

"""The emulation of CUDA's driver: the library, devices, contexts and memory."""

import ctypes
import errno
import os
from ctypes import c_int, c_size_t, c_uint, c_void_p
from ctypes import c_uint64 as c_address

import emulated as cuda
from emulated_world import Gate, alone, refused

# The library


def test_a_library_that_is_not_there_is_named():
    said = alone(
        """
        from unisono import _native
        try:
            _native.cuda_driver_is_emulated()
        except RuntimeError as error:
            print(error)
        """,
        UNISONO_CUDA_DRIVER="/nowhere/libcuda.so.1",
    )
    assert "could not be opened: UNISONO_CUDA_DRIVER=/nowhere/libcuda.so.1" in said
    assert "No such file" in said
    assert "Unset UNISONO_CUDA_DRIVER" in said


def test_a_function_that_is_not_there_is_named():
    said = alone(
        """
        from unisono import _native
        try:
            _native.cuda_driver_is_emulated()
        except RuntimeError as error:
            print(error)
        """,
        UNISONO_CUDA_DRIVER="libc.so.6",
    )
    assert "libc.so.6 has no function cuInit" in said
    assert "update the driver" in said


def test_the_emulation_is_chosen_and_errors_have_the_drivers_words():
    said = alone(
        """
        from unisono import _native
        print(_native.cuda_driver_is_emulated())
        _native.check_cuda(0, "cuInit")
        for code in (2, 4321):
            try:
                _native.check_cuda(code, "cuMemAlloc_v2")
            except RuntimeError as error:
                print(error)
        """,
        UNISONO_CUDA_DRIVER="emulated",
    )
    assert said.splitlines() == [
        "True",
        "cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY (2): out of memory",
        "cuMemAlloc_v2: unknown error (4321)",
    ]


def test_a_setting_that_is_no_number_is_named():
    said = alone(
        """
        from unisono import _native
        try:
            _native.cuda_driver_is_emulated()
        except RuntimeError as error:
            print(error)
        """,
        UNISONO_CUDA_DRIVER="emulated",
        UNISONO_EMULATED_GPUS="two",
    )
    assert said == "UNISONO_EMULATED_GPUS=two is not a number"


# Devices and contexts


def test_nothing_works_before_the_driver_is_initialized():
    said = alone(
        """
        import emulated as cuda
        from ctypes import byref, c_int, c_size_t, c_uint, c_uint64
        got = c_uint64()
        print(cuda.code_of("cuDeviceGetCount", byref(c_int())))
        cuda.call("cuInit", c_uint(0))
        print(cuda.code_of("cuMemAlloc_v2", byref(got), c_size_t(1)))
        """
    )
    assert said.split() == ["3", "201"]


def test_devices_are_as_the_settings_say():
    said = alone(
        """
        import emulated as cuda
        from ctypes import c_int, c_void_p, create_string_buffer
        first = cuda.initialize(0)
        second = cuda.initialize(1)
        print(cuda.value(c_int, "cuDeviceGetCount"))
        for attribute in (16, 75, 76):
            print(cuda.value(c_int, "cuDeviceGetAttribute", c_int(attribute), c_int(1)))
        names = [create_string_buffer(16) for _ in range(2)]
        for device, name in enumerate(names):
            cuda.call("cuDeviceGetPCIBusId", name, c_int(16), c_int(device))
        print(names[0].value != names[1].value)
        print(cuda.value(c_int, "cuDeviceCanAccessPeer", c_int(0), c_int(1)))
        enable = "cuCtxEnablePeerAccess", c_void_p(first), c_int(0)
        print(cuda.code_of(*enable), cuda.code_of(*enable))
        x = cuda.allocate(8)
        print(cuda.attribute(c_int, 9, x))
        try:
            cuda.initialize(2)
        except cuda.CudaError as error:
            print(error.code)
        """,
        UNISONO_EMULATED_GPUS="2",
    )
    assert said.split() == ["2", "132", "9", "0", "True", "1", "0", "704", "1", "101"]


def test_devices_without_peer_access():
    said = alone(
        """
        import emulated as cuda
        from ctypes import c_int, c_void_p
        first = cuda.initialize(0)
        cuda.initialize(1)
        print(cuda.value(c_int, "cuDeviceCanAccessPeer", c_int(0), c_int(1)))
        print(cuda.code_of("cuCtxEnablePeerAccess", c_void_p(first), c_int(0)))
        at = cuda.reserve(cuda.GRAIN)
        cuda.map_at(at, cuda.GRAIN, cuda.create(cuda.GRAIN, 0))
        for device in (0, 1):
            try:
                cuda.set_access(at, cuda.GRAIN, 3, device)
                print(0)
            except cuda.CudaError as error:
                print(error.code)
        """,
        UNISONO_EMULATED_GPUS="2",
        UNISONO_EMULATED_PEERS="0",
    )
    assert said.split() == ["0", "217", "0", "217"]


def test_a_forked_child_is_refused_and_the_parent_goes_on(driver):
    stream = cuda.stream()
    x = cuda.allocate(64)
    cuda.fill(x, 1, 64, stream)
    cuda.synchronize(stream)
    child = os.fork()
    if child == 0:
        codes = [
            cuda.code_of("cuInit", c_uint(0)),
            cuda.code_of("cuStreamSynchronize", c_void_p(stream)),
            cuda.code_of("cuMemFree_v2", c_address(x)),
        ]
        os._exit(0 if codes == [3, 3, 3] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    cuda.fill(x, 2, 64, stream)
    cuda.synchronize(stream)
    assert cuda.read(x, 64) == bytes([2]) * 64


def test_all_threads_end_with_the_context():
    """In a process where nobody else uses the device."""
    said = alone(
        """
        import os
        import emulated as cuda
        from emulated_world import Gate
        cuda.initialize()
        before = len(os.listdir("/proc/self/task"))
        streams = [cuda.stream(), cuda.stream(cuda.NON_BLOCKING), None]
        x = cuda.allocate(8)
        for stream in streams:
            cuda.fill(x, 0, 8, stream)
        Gate(streams[0]).open()
        print(len(os.listdir("/proc/self/task")) > before)
        cuda.release()
        print(len(os.listdir("/proc/self/task")) == before)
        """
    )
    assert said.split() == ["True", "True"]


# Memory


def test_fresh_memory_is_not_zero_and_keeps_what_is_written(driver):
    x = cuda.allocate(1000)
    assert any(cuda.read(x, 1000))
    cuda.write(x + 10, b"hello")
    assert cuda.read(x + 10, 5) == b"hello"
    y = cuda.allocate(1000)
    cuda.copy(y, x, 1000)
    assert cuda.read(y, 1000) == cuda.read(x, 1000)


def test_addresses_and_attributes(driver):
    x, host = cuda.allocate(1000), cuda.allocate_host(100)
    assert cuda.range_of(x + 999) == (x, 1000)
    with refused(500):
        cuda.range_of(x + 1000)
    assert cuda.attribute(c_void_p, 1, x) == driver
    assert [cuda.attribute(c_uint, 2, a) for a in (x, host)] == [2, 1]
    assert cuda.attribute(c_int, 9, x + 5) == 0
    assert [cuda.attribute(c_int, 10, a) for a in (x, host)] == [1, 0]
    assert cuda.attribute(c_address, 11, x + 5) == x
    assert cuda.attribute(c_size_t, 12, x + 5) == 1000
    with refused(1):
        cuda.attribute(c_uint, 2, ctypes.addressof(ctypes.c_int()))
    first = cuda.attribute(c_address, 7, x)
    cuda.free(x)
    assert cuda.attribute(c_address, 7, cuda.allocate(1000)) != first


def test_freed_memory_is_not_mapped_and_not_given_again_soon(driver):
    x = cuda.allocate(4096)
    cuda.free(x)
    again = [cuda.allocate(4096) for _ in range(8)]
    assert x not in again
    with refused(1):
        cuda.free(x)
    with refused(1):
        cuda.read(x, 1)
    with refused(500):
        cuda.range_of(x)
    reader, writer = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.write.argtypes = [c_int, c_void_p, c_size_t]
    assert libc.write(writer, x, 16) == -1
    assert ctypes.get_errno() == errno.EFAULT
    os.close(reader)
    os.close(writer)


def test_wrong_ranges_are_refused():
    """In a process of its own: nothing else is allocated behind the range."""
    said = alone(
        """
        import emulated as cuda

        cuda.initialize()
        x = cuda.allocate(4096)
        for wrong in (
            lambda: cuda.allocate(0),
            lambda: cuda.write(x + 4000, bytes(97)),
            lambda: cuda.copy(x, x + 1, 4096),
            lambda: cuda.fill(x, 0, 4097),
            lambda: cuda.free(x + 8),
        ):
            try:
                wrong()
                print("accepted")
            except cuda.CudaError as error:
                print(error.code)
        """
    )
    assert said.split() == ["1"] * 5


def test_memory_is_limited():
    said = alone(
        """
        import emulated as cuda
        from ctypes import c_int, c_size_t
        cuda.initialize()
        print(cuda.value(c_size_t, "cuDeviceTotalMem_v2", c_int(0)))
        def code(call, *arguments):
            try:
                call(*arguments)
                return 0
            except cuda.CudaError as error:
                return error.code
        x = cuda.allocate(3 << 20)
        print(code(cuda.allocate, 2 << 20))
        cuda.free(x)
        print(code(cuda.create, 4 << 20))
        print(code(cuda.allocate, 1))
        print(code(cuda.allocate, (1 << 64) - 1))
        """,
        UNISONO_EMULATED_MEMORY=str(4 << 20),
    )
    assert said.split() == [str(4 << 20), "2", "0", "2", "2"]


def test_context_that_cannot_be_had_is_explained():
    said = alone(
        """
        from unisono import _native
        try:
            _native.CudaStream(0)
        except _native.CudaError as error:
            print(error)
        """,
        UNISONO_EMULATED_MEMORY="0",
    )
    assert "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)" in said
    assert "set CUDA_DEVICE_MAX_CONNECTIONS in every process" in said


def test_pinned_memory_has_one_address(driver):
    host = cuda.allocate_host(4096)
    got = cuda.value(
        c_address, "cuMemHostGetDevicePointer_v2", c_void_p(host + 8), c_uint(0)
    )
    assert got == host + 8
    x = cuda.allocate(8)
    cuda.write(x, b"abcdefgh")
    cuda.copy(host, x, 8)
    cuda.synchronize()
    assert ctypes.string_at(host, 8) == b"abcdefgh"
    cuda.call("cuMemFreeHost", c_void_p(host))
    with refused(1):
        cuda.call("cuMemFreeHost", c_void_p(host))
    with refused(1):
        cuda.value(c_address, "cuMemHostGetDevicePointer_v2", c_void_p(x), c_uint(0))


def test_memory_is_freed_when_the_work_of_the_device_has_ended(driver):
    """Also that of streams that are not ordered with the default stream."""
    stream = cuda.stream(cuda.NON_BLOCKING)
    x, y = cuda.allocate(64), cuda.allocate(64)
    cuda.write(x, bytes([7]) * 64)
    gate = Gate(stream)
    cuda.copy(y, x, 64, stream)
    gate.open()
    cuda.free(x)
    assert cuda.query(stream) == 0
    assert cuda.read(y, 64) == bytes([7]) * 64


def test_what_is_copied_from_ordinary_memory_may_change_after_the_call(driver):
    stream = cuda.stream()
    x = cuda.allocate(64)
    given = ctypes.create_string_buffer(bytes([5]) * 64, 64)
    gate = Gate(stream)
    cuda.copy(x, ctypes.addressof(given), 64, stream)
    given.raw = bytes(64)
    gate.open()
    cuda.synchronize(stream)
    assert cuda.read(x, 64) == bytes([5]) * 64


def test_memory_of_the_process_is_registered_once(driver):
    size = 1 << 16
    whole = ctypes.create_string_buffer(size)
    at = ctypes.addressof(whole)
    register = ("cuMemHostRegister_v2", c_void_p(at), c_size_t(size), c_uint(3))
    cuda.call(*register)
    for first, nbytes in ((at, size), (at + 100, 8), (at - 8, 16)):
        with refused(712):
            cuda.call(
                "cuMemHostRegister_v2", c_void_p(first), c_size_t(nbytes), c_uint(3)
            )
    pointer = ("cuMemHostGetDevicePointer_v2", c_void_p(at + 5), c_uint(0))
    assert cuda.value(c_address, *pointer) == at + 5
    cuda.fill(at + 8, 7, 3)
    cuda.synchronize()
    assert whole.raw[7:12] == b"\0\7\7\7\0"
    assert cuda.attribute(c_int, 2, at) == 1  # of the host
    with refused(1):
        cuda.call("cuMemFreeHost", c_void_p(at))
    cuda.call("cuMemHostUnregister", c_void_p(at))
    with refused(713):
        cuda.call("cuMemHostUnregister", c_void_p(at))
    with refused(1):
        cuda.value(c_address, *pointer)
    cuda.call(*register)
    cuda.call("cuMemHostUnregister", c_void_p(at))
    assert whole.raw[8] == 7  # the pages stay the process's

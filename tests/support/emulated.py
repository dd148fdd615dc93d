"""CUDA's driver, called through ctypes: the emulation, or that of the machine's GPU."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import (
    POINTER,
    byref,
    c_char,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_uint64,
    c_void_p,
)
from ctypes import c_uint64 as c_address

from unisono import _native

LAZY_PEER_ACCESS = 1
NON_BLOCKING = 1
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""Modes of captures, and of threads towards captures."""


class CudaError(Exception):
    """The name of the driver's error, and its number."""

    def __init__(self, function: str, code: int) -> None:
        name = ctypes.c_char_p()
        _call("cuGetErrorName", c_int(code), byref(name))
        self.code = code
        super().__init__(f"{function}: {(name.value or b'?').decode()} ({code})")


class IpcHandle(ctypes.Structure):
    """Passed by value, as the driver wants it."""

    _fields_ = (("bytes", c_ubyte * 64),)


class Properties(ctypes.Structure):
    """Of physical memory."""

    _fields_ = (
        ("type", c_int),
        ("handle_type", c_int),
        ("location_type", c_int),
        ("location", c_int),
        ("windows", c_void_p),
        ("flags", c_ubyte * 8),
    )


class Access(ctypes.Structure):
    """Of a device to mapped memory."""

    _fields_ = (("location_type", c_int), ("location", c_int), ("flags", c_int))


ON_GPU = os.environ.get("UNISONO_GPU_TESTS") == "1"
"""Set by `make gpu-test`: the tests use the machine's driver and GPU."""


def _found() -> dict[str, object]:
    names = _native.emulated_functions()
    if ON_GPU:
        library = ctypes.CDLL("libcuda.so.1")
        return {name: getattr(library, name) for name in names}
    return {name: ctypes.CFUNCTYPE(c_int)(at) for name, at in names.items()}


_functions = _found()
GRAIN = 2 << 20
"""The granularity of physical memory."""


def _call(name: str, *arguments: object) -> int:
    return _functions[name](*arguments)


def call(name: str, *arguments: object) -> None:
    """Call a function; arguments are ctypes' own."""
    code = _call(name, *arguments)
    if code:
        raise CudaError(name, code)


def code_of(name: str, *arguments: object) -> int:
    """What a function returns."""
    return _call(name, *arguments)


def value(kind, name: str, *arguments: object):
    """What a function writes through its first argument."""
    made = kind()
    call(name, byref(made), *arguments)
    return made.value


def initialize(device: int = 0) -> int:
    """Make the context of a device the current one; its handle."""
    call("cuInit", c_uint(0))
    context = value(c_void_p, "cuDevicePrimaryCtxRetain", c_int(device))
    call("cuCtxPushCurrent_v2", c_void_p(context))
    return context


def release(device: int = 0) -> None:
    call("cuCtxPopCurrent_v2", None)
    call("cuDevicePrimaryCtxRelease_v2", c_int(device))


def allocate(nbytes: int) -> int:
    return value(c_address, "cuMemAlloc_v2", c_size_t(nbytes))


def free(address: int) -> None:
    call("cuMemFree_v2", c_address(address))


def allocate_host(nbytes: int) -> int:
    return value(c_void_p, "cuMemHostAlloc", c_size_t(nbytes), c_uint(3))


def write(address: int, data: bytes) -> None:
    call("cuMemcpyHtoD_v2", c_address(address), data, c_size_t(len(data)))


def read(address: int, nbytes: int) -> bytes:
    data = (c_char * nbytes)()
    call("cuMemcpyDtoH_v2", data, c_address(address), c_size_t(nbytes))
    return data.raw


def copy(to: int, source: int, nbytes: int, stream: int | None = None) -> None:
    call(
        "cuMemcpyAsync",
        c_address(to),
        c_address(source),
        c_size_t(nbytes),
        c_void_p(stream),
    )


def fill(address: int, byte: int, nbytes: int, stream: int | None = None) -> None:
    call(
        "cuMemsetD8Async",
        c_address(address),
        c_ubyte(byte),
        c_size_t(nbytes),
        c_void_p(stream),
    )


def attribute(kind, number: int, address: int):
    return value(kind, "cuPointerGetAttribute", c_int(number), c_address(address))


def range_of(address: int) -> tuple[int, int]:
    base, nbytes = c_address(), c_size_t()
    call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), c_address(address))
    return base.value, nbytes.value


def ipc_handle(address: int) -> bytes:
    handle = IpcHandle()
    call("cuIpcGetMemHandle", byref(handle), c_address(address))
    return bytes(handle.bytes)


def open_handle(handle: bytes) -> int:
    given = IpcHandle((c_ubyte * 64)(*handle))
    return value(c_address, "cuIpcOpenMemHandle_v2", given, c_uint(LAZY_PEER_ACCESS))


def close_handle(address: int) -> None:
    call("cuIpcCloseMemHandle", c_address(address))


def create(nbytes: int, device: int = 0, *, exportable: bool = True) -> int:
    properties = Properties(1, int(exportable), 1, device)
    return value(
        c_address, "cuMemCreate", c_size_t(nbytes), byref(properties), c_address(0)
    )


def export(allocation: int) -> int:
    return value(
        c_int,
        "cuMemExportToShareableHandle",
        c_address(allocation),
        c_int(1),
        c_address(0),
    )


def import_descriptor(fd: int) -> int:
    return value(c_address, "cuMemImportFromShareableHandle", c_void_p(fd), c_int(1))


def reserve(nbytes: int) -> int:
    return value(
        c_address,
        "cuMemAddressReserve",
        c_size_t(nbytes),
        c_size_t(0),
        c_address(0),
        c_address(0),
    )


def map_at(address: int, nbytes: int, allocation: int) -> None:
    call(
        "cuMemMap",
        c_address(address),
        c_size_t(nbytes),
        c_size_t(0),
        c_address(allocation),
        c_address(0),
    )


def set_access(address: int, nbytes: int, flags: int, device: int = 0) -> None:
    access = Access(1, device, flags)
    call(
        "cuMemSetAccess",
        c_address(address),
        c_size_t(nbytes),
        byref(access),
        c_size_t(1),
    )


def unmap(address: int, nbytes: int) -> None:
    call("cuMemUnmap", c_address(address), c_size_t(nbytes))


def stream(flags: int = 0) -> int:
    return value(c_void_p, "cuStreamCreate", c_uint(flags))


def synchronize(stream: int | None = None) -> None:
    call("cuStreamSynchronize", c_void_p(stream))


def query(stream: int | None = None) -> int:
    return code_of("cuStreamQuery", c_void_p(stream))


def destroy_stream(stream: int) -> None:
    call("cuStreamDestroy_v2", c_void_p(stream))


def event(flags: int = 0) -> int:
    return value(c_void_p, "cuEventCreate", c_uint(flags))


def record(event: int, stream: int | None = None) -> None:
    call("cuEventRecord", c_void_p(event), c_void_p(stream))


def wait(stream: int | None, event: int) -> None:
    call("cuStreamWaitEvent", c_void_p(stream), c_void_p(event), c_uint(0))


def begin_capture(stream: int, mode: int = RELAXED) -> None:
    call("cuStreamBeginCapture_v2", c_void_p(stream), c_int(mode))


def end_capture(stream: int) -> int:
    graph = c_void_p()
    call("cuStreamEndCapture", c_void_p(stream), byref(graph))
    return graph.value or 0


@contextmanager
def capture_mode(mode: int) -> Iterator[None]:
    """The mode of this thread, for a while."""
    given = c_int(mode)
    call("cuThreadExchangeStreamCaptureMode", byref(given))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", byref(given))


def capturing(stream: int | None) -> int:
    status = c_int()
    call("cuStreamIsCapturing", c_void_p(stream), byref(status))
    return status.value


def capture_number(stream: int | None) -> int:
    """The number of the capture that a stream is in; 0 if it is in none."""
    status, number = c_int(), c_uint64()
    ignored = [c_void_p() for _ in range(3)]
    call(
        "cuStreamGetCaptureInfo_v2",
        c_void_p(stream),
        byref(status),
        byref(number),
        *ignored,
    )
    return number.value if status.value else 0


def instantiate(graph: int) -> int:
    """What can be launched; other threads may be in captures."""
    relaxed = 2
    with capture_mode(relaxed):
        return value(
            c_void_p, "cuGraphInstantiateWithFlags", c_void_p(graph), c_address(0)
        )


def launch_graph(exec_: int, stream: int) -> None:
    call("cuGraphLaunch", c_void_p(exec_), c_void_p(stream))


def kernel(dtype: int, op: int) -> int:
    image = f"unisono-emulated {dtype} {op}".encode()
    module = value(c_void_p, "cuModuleLoadData", image)
    return value(
        c_void_p, "cuModuleGetFunction", c_void_p(module), b"unisono_interpret"
    )


def launch(
    function: int,
    argument: bytes,
    stream: int | None,
    blocks: int = 2,
    threads: int = 64,
) -> None:
    given = ctypes.create_string_buffer(argument, len(argument))
    arguments = (c_void_p * 1)(ctypes.addressof(given))
    shape = [c_uint(x) for x in (blocks, 1, 1, threads, 1, 1, 0)]
    call(
        "cuLaunchKernel",
        c_void_p(function),
        *shape,
        c_void_p(stream),
        ctypes.cast(arguments, POINTER(c_void_p)),
        None,
    )

"""CUDA tensors without a GPU: the CPU's, with streams of the emulated driver.

Memory of an emulated device is the host's, so its kernels can use that of any tensor.
What torch itself does with such a tensor is done at once, when the current stream has
come so far: what is queued on another stream it does not wait for.

    fake_cuda.begin()
    x = fake_cuda.tensor(torch.ones(5))

Where the tests run on a GPU, `begin`, `tensor` and `host` are about real tensors of it.
"""

import ctypes
import os
import threading

import torch
from torch.distributed import distributed_c10d

import emulated
from unisono import _native
from unisono.interop.torch import collectives, stream_work, tensors

DEVICE = torch.device("cuda", 0)
_here = threading.local()


class Event:
    """As torch.cuda.Event."""

    def __init__(self):
        self._native = _native.CudaEvent(0)

    def record(self, stream):
        self._native.record(stream.cuda_stream)

    def query(self):
        return self._native.query()

    def order(self, stream):
        self._native.order(stream.cuda_stream)


class Stream:
    """As torch.cuda.Stream; 0 is the default one."""

    made = 0

    def __init__(self, device=DEVICE, handle=None):
        assert torch.device(device) == DEVICE
        self.device, self.device_index = DEVICE, 0
        self._native = _native.CudaStream(0) if handle is None else None
        self.cuda_stream = self._native.handle if handle is None else handle
        Stream.made += handle is None
        self.stream_id = Stream.made if handle is None else 0

    def __eq__(self, other):
        return self.cuda_stream == other.cuda_stream

    def __hash__(self):
        return self.cuda_stream

    def record_event(self):
        made = Event()
        made.record(self)
        return made

    def wait_event(self, event):
        event.order(self)

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def query(self):
        return emulated.query(self.cuda_stream) == 0

    def synchronize(self):
        emulated.synchronize(self.cuda_stream)


class On:
    """As torch.cuda.stream."""

    def __init__(self, stream):
        self._stream = stream

    def __enter__(self):
        self._before = current_stream()
        _here.stream = self._stream

    def __exit__(self, *error):
        _here.stream = self._before


def current_stream(device=DEVICE):
    """As torch.cuda.current_stream."""
    found = getattr(_here, "stream", None)
    if found is None:
        emulated.initialize()  # of this thread
        found = _here.stream = Stream(handle=0)
    return found


class FakeTensor(torch.Tensor):
    """A tensor that seems to be on the device."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    device = property(lambda self: DEVICE)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in WORKING:
            current_stream().synchronize()
        made = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(made, FakeTensor):
            with torch._C.DisableTorchFunctionSubclass():
                MEMORY.append(made.untyped_storage())
        return made


WORKING = ("copy_", "clone", "contiguous", "cat", "mul_", "mul", "add_", "fill_")
"""Functions that read or write elements; others may be called at any time."""
MEMORY = []
"""Of all tensors, which torch's allocator would not give away too early."""
FUTURES = []
"""The streams that futures were completed on."""


def tensor(x):
    """A tensor as if it were on the device."""
    if emulated.ON_GPU:
        return x.cuda()
    made = x.clone()
    MEMORY.append(made.untyped_storage())
    return made.as_subclass(FakeTensor)


def tensor_of_driver(x):
    """The same in memory that the driver knows, whose copies are in a stream's order.

    The bytes of other memory it takes at once.
    """
    memory = _native.CudaMemory(0, max(1, x.numel() * x.itemsize))
    raw = (ctypes.c_uint8 * memory.bytes).from_address(memory.address)
    made = torch.frombuffer(raw, dtype=x.dtype, count=x.numel()).reshape(x.shape)
    MEMORY.append(memory)
    return made.copy_(x).as_subclass(FakeTensor)


def host(x):
    """The elements of a tensor, when the current stream has come so far."""
    if emulated.ON_GPU:
        return x.cpu()
    current_stream().synchronize()
    return x.as_subclass(torch.Tensor).clone()


def _future_on(device):
    assert device == DEVICE
    made = torch.futures.Future()
    complete = made.set_result

    def set_result(value):
        FUTURES.append(current_stream())
        complete(value)

    made.set_result = set_result
    return made


def begin():
    """From now on torch.cuda is this; the process is a rank's, and ends with it."""
    if emulated.ON_GPU:
        torch.cuda.set_device(0)
        return
    os.environ["UNISONO_CUDA_DRIVER"] = "emulated"
    os.environ["UNISONO_CUDA_BLOCKS"] = "2"
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.current_stream = current_stream
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.Stream, torch.cuda.stream = Stream, On
    tensors.pinned_like = collectives.pinned_like = lambda x: torch.empty(
        x.shape, dtype=x.dtype
    )
    zeros = torch.zeros
    torch.zeros = lambda *shape, device="cpu", **how: (
        tensor(zeros(*shape)) if device == DEVICE else zeros(*shape, **how)
    )
    stream_work._future_on = _future_on
    # Or torch would show what it calls the tensors as those of the CPU.
    distributed_c10d.has_torch_function = lambda tensors: False

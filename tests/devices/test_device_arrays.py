"""What counts as an array on a device, and what is refused."""

import numpy as np
import pytest

from device_cases import to_device
from emulated_world import alone
from unisono import _native, premul_sum
from unisono.devices.arrays import (
    DeviceArray,
    is_on_device,
    ordinal_of,
    row_strides,
    view_of,
)
from unisono.dtypes import DTYPES
from unisono.errors import BadArgument
from unisono.testing import world


class Foreign:
    """An array of a library that has CUDA's array interface and nothing else."""

    def __init__(self, base, **changes):
        self.base = base
        self.__cuda_array_interface__ = base.__cuda_array_interface__ | changes


@pytest.fixture
def base():
    return to_device(np.arange(12, dtype=np.float32).reshape(3, 4))


@pytest.mark.parametrize("x", [np.ones(3), [1.0], 3, None])
def test_arrays_of_the_host_are_not_on_a_device(x):
    assert not is_on_device(x)


def test_array_interface_is_read(base):
    view = view_of(Foreign(base, stream=7), "call")
    assert (view.shape, view.dtype, view.ordinal) == ((3, 4), DTYPES["float32"], 0)
    assert view.address == base.view.address
    assert view.is_contiguous
    assert not view.is_readonly
    assert view.stream == 7


@pytest.mark.parametrize("name", [n for n, d in DTYPES.items() if d.kind != "v"])
def test_every_element_type_is_recognised(name):
    x = DeviceArray((2,), name, 0)
    assert view_of(Foreign(x), "call").dtype == DTYPES[name]


@pytest.mark.parametrize("name", list(DTYPES))
def test_our_own_arrays_have_every_element_type(name):
    assert view_of(DeviceArray((2, 0, 3), name, 0), "call").dtype == DTYPES[name]


def test_strides_tell_whether_an_array_is_contiguous(base):
    assert view_of(Foreign(base, strides=(16, 4)), "call").is_contiguous
    assert not view_of(Foreign(base, strides=(4, 12)), "call").is_contiguous
    assert row_strides((2, 3, 5), 4) == (60, 20, 4)


@pytest.mark.parametrize("current", [True, False])
def test_device_of_an_address_is_found_without_a_context_elsewhere(current):
    """Whether a context of its device is the current one, or none."""
    code = f"""
        import emulated as cuda
        from ctypes import byref, c_int, c_uint
        from unisono import _native

        def is_active(device):
            flags, active = c_uint(), c_int()
            given = c_int(device), byref(flags), byref(active)
            cuda.call("cuDevicePrimaryCtxGetState", *given)
            return bool(active.value)

        cuda.initialize(1)
        address = cuda.allocate(100)
        if not {current}:
            cuda.call("cuCtxPopCurrent_v2", None)
        print(_native.cuda_locate(address + 40) == (1, address, 100))
        print(is_active(0), is_active(1), is_active(2))
    """
    said = alone(code, UNISONO_EMULATED_GPUS="3")
    assert said.split("\n") == ["True", "False True False"]


def test_address_that_is_no_device_memory_is_refused(base):
    with pytest.raises(_native.CudaError, match="cuPointerGetAttribute"):
        _native.cuda_locate(np.ones(3).ctypes.data)


def test_foreign_arrays_take_part(base):
    with world(1) as w:
        result = w.run(lambda comm: comm.all_gather(Foreign(base)))[0]
    assert result.numpy().tolist() == base.numpy().tolist()


def call(x, **how):
    """The error of an all_reduce on a world of one rank."""
    with world(1) as w, pytest.raises(BadArgument) as raised:
        w.run(lambda comm: comm.all_reduce(x, **how))
    return str(raised.value)


def test_unusable_arrays_are_refused(base):
    address = base.view.address
    assert "masked" in call(Foreign(base, mask=base))
    assert "byte order" in call(Foreign(base, typestr=">f4"))
    assert "element type" in call(Foreign(base, typestr="<V4"))
    assert "not contiguous" in call(Foreign(base, strides=(4, 12)))
    assert "read-only" in call(Foreign(base, data=(address, True)))


def test_arrays_in_different_places_are_refused(base):
    out = np.zeros((3, 4), np.float32)
    assert "x is on cuda:0, out on the host" in call(base, out=out)
    assert "x is on the host, out on cuda:0" in call(out, out=base)


def test_what_devices_do_not_support_is_refused(base):
    assert "codec= is not supported" in call(base, codec="fp16")
    assert "not supported on CUDA" in call(base, op=premul_sum(0.5))
    assert "not supported on CUDA" in call(base, op=np.add)
    assert "not supported on CUDA" in call(base, codec="topk:0.1")
    with world(1) as w, pytest.raises(BadArgument, match="scan is not supported"):
        w.run(lambda comm: comm.scan(base))
    foreign = Foreign(base)
    for method in ("send", "recv"):
        with world(1) as w, pytest.raises(BadArgument, match="or a copy on the host"):
            w.run(lambda comm, name: getattr(comm, name)(foreign, 0), method)


def sent_around(comm):
    """To the next rank, when the calls before have ended."""
    stream = _native.CudaStream(0)
    x = to_device(np.full(5000, comm.rank + 1.0, np.float32))
    y = to_device(np.zeros((2500, 2), np.float32))
    comm.all_reduce(x, stream=stream)
    others = (comm.rank + 1) % comm.world_size, comm.rank - 1
    work = comm.recv(y, others[1] % comm.world_size, async_op=True)
    comm.send(x, others[0])
    work.wait()
    comm.all_reduce(y, stream=stream)
    comm.synchronize(30)
    return y.numpy()


def test_messages_travel_through_the_host(driver):
    with world(3) as w:
        for y in w.run(sent_around):
            assert (y == 18).all()


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0"])
def test_unknown_devices_are_refused(device):
    with pytest.raises(BadArgument, match="device = "):
        ordinal_of(device)


def test_copies_check_shape_and_type(base):
    with pytest.raises(BadArgument, match="expected float32"):
        base.copy_from(np.ones((3, 4)))
    base.copy_from(np.full((3, 4), 2, np.float32)[::-1])
    assert (base.numpy() == 2).all()


def test_parts_are_in_the_same_memory(base):
    part = base[1:]
    assert (part.shape, part.nbytes, len(part)) == ((2, 4), 32, 2)
    assert part.view.address == base.view.address + 16
    assert part.__cuda_array_interface__["data"][0] == part.view.address
    part.copy_from(np.full((2, 4), 9, np.float32))
    assert base.numpy().tolist() == [[0, 1, 2, 3], [9] * 4, [9] * 4]
    assert part[1:2].numpy().tolist() == [[9] * 4]
    assert base[:1].numpy().tolist() == [[0, 1, 2, 3]]
    assert base[2:1].shape == (0, 4)
    assert base[-1:].view.address == base.view.address + 32


@pytest.mark.parametrize("rows", [0, slice(0, 3, 2), slice(None, None, -1)])
def test_other_parts_are_refused(base, rows):
    with pytest.raises(BadArgument, match="parts such as"):
        base[rows]


def test_a_part_keeps_the_memory_of_the_whole():
    part = to_device(np.arange(8, dtype=np.int64))[6:]
    others = [to_device(np.zeros(8, np.int64)) for _ in range(8)]
    assert part.numpy().tolist() == [6, 7]
    assert part.view.address not in {x.view.address for x in others}


def test_collectives_run_on_parts():
    def gathered(comm):
        whole = to_device(np.arange(6, dtype=np.int32) + 10 * comm.rank)
        mine = whole[2 * comm.rank : 2 * comm.rank + 2]
        comm.all_gather(mine, out=whole[:4], stream=_native.CudaStream(0))
        comm.synchronize(60)
        return whole.numpy().tolist()

    with world(2) as w:
        assert w.run(gathered) == [[0, 1, 12, 13, 4, 5], [0, 1, 12, 13, 14, 15]]


@pytest.mark.parametrize(("nbytes", "offset"), [(33, 0), (32, 1), (0, 33)])
def test_copies_stay_inside_the_memory(nbytes, offset):
    memory, host = _native.CudaMemory(0, 32), np.zeros(64, np.uint8)
    for copy in (memory.write, memory.read):
        with pytest.raises(IndexError, match="more bytes"):
            copy(host.ctypes.data, nbytes, offset)


def test_empty_makes_arrays_on_a_device():
    with world(1) as w:
        x = w.run(lambda comm: comm.empty((3, 5), "bfloat16", device="cuda:0"))[0]
    assert isinstance(x, DeviceArray)
    assert (x.shape, x.dtype, x.nbytes) == ((3, 5), "bfloat16", 30)

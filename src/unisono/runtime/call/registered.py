"""Arrays that a communicator has registered: ordinary memory, made shared in place.

The whole pages of an array are replaced by shared pages with the same content, at the
same addresses, so other ranks of the host use it like an array of `comm.empty`. What
the array has of the pages at its ends is copied in every call, because the rest of
these pages belongs to others.

A registration ends with `unregister` or with its communicator. Until then it keeps the
memory's owner: of NumPy the array that allocated it, of torch a storage. An owner that
nobody else holds is released by the next call of `register` or `unregister`. Its end
could not be waited for: torch does not announce it, and NumPy from 2.5 on only after
the memory is freed, when another thread may have it.
"""

from __future__ import annotations

import errno
import mmap
import sys
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from weakref import ref

import numpy as np

from unisono import _native
from unisono.devices.arrays import is_on_device, is_tensor
from unisono.errors import BadArgument, UsageError
from unisono.runtime.call.buffers import IN_PLACE_FROM, Buffer, writable
from unisono.transports.session import Session
from unisono.units import format_bytes

_WHERE = "register"
_MAPS, _SMAPS, _STATUS = (Path("/proc/self") / f for f in ("maps", "smaps", "status"))


class MemoryHome(IntEnum):
    """How other ranks of the host access a buffer, as the native core numbers it."""

    PRIVATE = 0
    THREADS = 1
    EMPTY = 2
    REGISTERED = 3
    ELSEWHERE = 4  # it is registered, but not with this world
    PARTLY = 5  # a part of it is registered


class Registered(NamedTuple):
    """What `register` has done: whether calls use the array in place, and why."""

    in_place: bool
    why: str


class RegisteredArrays:
    """The registrations of one communicator."""

    def __init__(self, session: Session) -> None:
        """None yet."""
        self._session = session
        self._entries: dict[tuple[int, int], _Entry] = {}
        self._lock = threading.Lock()

    def add(self, x: Any) -> Registered:
        """Register an array, if that makes a difference."""
        buffer = _buffer(x)
        self._purge()
        if done := self._needless(buffer):
            return done
        home = self._home(buffer)
        if home is MemoryHome.PRIVATE:
            _refuse_memory(buffer)
        if home is MemoryHome.PARTLY:
            raise BadArgument(
                f"{_WHERE}: a part of the array is registered already; unregister it, "
                "and register the whole"
            )
        try:
            native = self._session.register(buffer.address, buffer.nbytes)
        except RuntimeError as why:
            raise UsageError(
                f"{_WHERE}: {why}, so the array is not registered; nothing may write "
                "to it until the call returns"
            ) from None
        with self._lock:
            self._entries[buffer.address, buffer.nbytes] = _entry(x, buffer, native)
        return Registered(True, "its pages are shared with the ranks of this host")

    def _needless(self, buffer: Buffer) -> Registered | None:
        """Why nothing is to be done."""
        home = self._home(buffer)
        if len(self._session.here(range(len(self._session.peers)))) == 1:
            return Registered(False, "there is no other rank on this host")
        if home is MemoryHome.THREADS:
            return Registered(True, "the ranks are threads of one process")
        if home is MemoryHome.EMPTY:
            return Registered(True, "it is memory of comm.empty")
        with self._lock:
            if home is MemoryHome.REGISTERED and any(
                entry.holds(buffer) for entry in self._entries.values()
            ):
                return Registered(True, "it is registered already")
        if buffer.nbytes < IN_PLACE_FROM:
            size = f"{format_bytes(buffer.nbytes)}, and calls on less than "
            why = f"it has {size}{format_bytes(IN_PLACE_FROM)} are staged"
            return Registered(False, why)
        return None

    def remove(self, x: Any) -> None:
        """End the registration of an array."""
        buffer = _buffer(x, "unregister")
        self._purge()
        with self._lock:
            entry = self._entries.pop((buffer.address, buffer.nbytes), None)
        if entry is not None:
            entry.end()
        elif self._needless(buffer) is None or self._home(buffer) in (
            MemoryHome.REGISTERED,
            MemoryHome.ELSEWHERE,
        ):
            raise BadArgument(
                "unregister: this array is not registered with this communicator; give "
                "the one that was given to register, not a part of it"
            )

    def close(self) -> None:
        """End all: the communicator is closed."""
        with self._lock:
            entries, self._entries = self._entries, {}
        for entry in entries.values():
            entry.end()

    def __del__(self) -> None:
        """End all: the communicator was dropped."""
        self.close()

    def _home(self, buffer: Buffer) -> MemoryHome:
        return home_of(self._session, buffer)

    def _purge(self) -> None:
        """End those whose memory nobody else holds."""
        with self._lock:
            over = [key for key, e in self._entries.items() if e.is_over()]
            entries = [self._entries.pop(key) for key in over]
        for entry in entries:
            entry.end()


class _Entry(NamedTuple):
    """A registration, and what keeps its memory.

    `is_over` tells that it should end; `is_freed` that the owner has other memory now,
    so that what is at the address is not the owner's any more.
    """

    address: int
    nbytes: int
    kept: object  # its memory is freed after the registration has ended
    native: _native.Registration
    is_over: Callable[[], bool] = bool
    is_freed: Callable[[], bool] = bool

    def holds(self, buffer: Buffer) -> bool:
        end = self.address + self.nbytes
        return (
            self.address <= buffer.address
            and buffer.address + buffer.nbytes <= end
            and not self.is_over()
        )

    def end(self) -> None:
        self.native.end(self.is_freed())


def home_of(session: Session, buffer: Buffer) -> MemoryHome:
    """How other ranks of the host access a buffer."""
    return MemoryHome(session.engine.memory_home(buffer.address, buffer.nbytes))


class _KeptArray:
    """An array of NumPy that owns its memory."""

    def __init__(self, owner: object) -> None:
        """The weak reference is there because NumPy resizes no array that has one."""
        self._owner = owner
        self._watch = ref(owner)

    def num_references(self) -> int:
        """Those of this method included."""
        return sys.getrefcount(self._owner)

    def is_alone(self) -> bool:
        """Whether nobody else holds the array, or a view of it."""
        return self.num_references() <= _NUM_REFERENCES_ALONE


_NUM_REFERENCES_ALONE = _KeptArray(np.empty(0)).num_references()


def _entry(x: Any, buffer: Buffer, native: _native.Registration) -> _Entry:
    place = buffer.address, buffer.nbytes
    owner = x
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, np.ndarray):
        kept = _KeptArray(owner)
        return _Entry(*place, kept, native, kept.is_alone)
    if not is_tensor(owner):
        return _Entry(*place, x, native)
    storage = owner.untyped_storage()
    begin = storage.data_ptr()
    holders = sys.modules["torch"]._C._storage_Use_Count
    return _Entry(
        *place,
        storage,
        native,
        lambda: holders(storage._cdata) == 1 or storage.data_ptr() != begin,
        lambda: storage.data_ptr() != begin,
    )


def _buffer(x: Any, where: str = _WHERE) -> Buffer:
    if is_on_device(x):
        raise BadArgument(
            f"{where}: the array is on a device; comm.empty(device=...) makes arrays "
            "there that all ranks can use"
        )
    buffer, is_copy = writable(x, where)
    if is_copy:
        raise BadArgument(
            f"{where}: the array is not contiguous, so every call copies it; give the "
            "array that it is a view of, or a contiguous copy"
        )
    return buffer


def _refuse_memory(buffer: Buffer) -> None:
    """Raise BadArgument unless it is ordinary memory of this process."""
    page = mmap.PAGESIZE
    first = -(-buffer.address // page) * page
    last = (buffer.address + buffer.nbytes) // page * page
    if getattr(buffer.array, "is_pinned", bool)():
        raise _refused("pinned for a device, which keeps the pages that it has")
    with _opened(_MAPS) as lines:
        for line in lines:
            place, access, _, _, file, *name = line.split(maxsplit=5)
            begin, end = (int(at, 16) for at in place.split("-"))
            if end <= first:
                continue
            if begin >= last:
                break
            if access[3] == "s":
                raise _refused("shared with other processes already")
            if access[:2] != "rw":
                raise _refused(f"mapped with the access {access}, not for writing")
            if file != "0" and not "".join(name).startswith("/memfd:unisono"):
                raise _refused(f"a memory-mapped file ({''.join(name).strip()})")
    if _is_locked(first, last):
        raise _refused("locked (mlock), which the shared pages would not be")


def _refused(what: str) -> BadArgument:
    return BadArgument(
        f"{_WHERE}: the array's memory is {what}; copy it into an array of comm.empty"
    )


def _opened(file: Path) -> TextIO:
    try:
        return file.open()
    except OSError as why:
        text = f"{_WHERE}: {file} cannot be read: {why.strerror}"
        if why.errno in (errno.EMFILE, errno.ENFILE):
            text += " (ulimit -n)"
        raise OSError(why.errno, text) from why


def _is_locked(first: int, last: int) -> bool:
    """Whether any of it is locked; the long list is read only if something is."""
    with _opened(_STATUS) as lines:
        locked = next((line for line in lines if line.startswith("VmLck:")), "")
    if locked.split()[1:2] in ([], ["0"]):
        return False
    inside = False
    with _opened(_SMAPS) as lines:
        for line in lines:
            head = line.split(maxsplit=1)[0]
            if "-" in head and head.replace("-", "").isalnum():
                begin, end = (int(at, 16) for at in head.split("-"))
                inside = begin < last and first < end
            elif inside and head == "VmFlags:" and " lo" in line:
                return True
    return False

"""A communicator of NCCL's, none of whose functions may block for long.

Its functions return at once and may go on in the background: who calls one asks until
it is done, so that a time limit holds, and a failure elsewhere ends the wait. Another
thread may abort it meanwhile.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_void_p

from unisono.devices import driver
from unisono.devices.nccl import (
    IN_PROGRESS,
    SUCCESS,
    Nccl,
    UniqueId,
    settings,
)
from unisono.errors import DeviceError
from unisono.runtime.device.nccl_calls import Function

_CONNECTS = "ncclCommInitRankConfig"
_SPINS = 20
_POLL_S = 1e-4
_LOCK_S = 2.0
"""How long abort() waits for a function that does not return."""


class Late(DeviceError):
    """A function of NCCL's has not ended in time."""


class Interrupted(DeviceError):
    """The communicator has failed meanwhile, or was aborted."""


class NcclComm:
    """One rank of a communicator of NCCL's, on one device."""

    def __init__(
        self,
        library: Nccl,
        ordinal: int,
        n: int,
        rank: int,
        unique_id: bytes,
        has_failed: Callable[[], bool],
    ) -> None:
        """Begin to connect to the other ranks, which do the same: then `connect()`.

        `has_failed` ends a wait.
        """
        self.library = library
        self._ordinal = ordinal
        self._has_failed = has_failed
        self._lock = threading.Lock()  # while a function is called
        handle = c_void_p()
        given = UniqueId((ctypes.c_ubyte * len(unique_id))(*unique_id))
        with driver.current_device(ordinal):
            code = library.call(
                _CONNECTS,
                byref(handle),
                n,
                given,
                rank,
                byref(settings()),
            )
        self._handle: int | None = handle.value
        self._begun = code
        if code not in (SUCCESS, IN_PROGRESS):
            raise self.error(_CONNECTS, code)

    def connect(self, limit_s: float) -> None:
        """Wait until all ranks are connected."""
        self._settle(_CONNECTS, self._begun, limit_s)

    @property
    def is_open(self) -> bool:
        """Whether it was neither closed nor aborted."""
        return self._handle is not None

    def state(self) -> int:
        """The code of what goes on in the background; Interrupted if it was aborted."""
        code = c_int()
        with self._lock:
            result = self._call("ncclCommGetAsyncError", self._opened(), byref(code))
        return result or code.value

    def run(self, functions: Sequence[Function], stream: int, limit_s: float) -> None:
        """Put a group of functions into a stream; when it returns, they are there."""
        if not functions:
            return
        with driver.current_device(self._ordinal), self._lock:
            name, code = self._put(functions, stream)
        self._settle(name, code, limit_s)

    def _put(self, functions: Sequence[Function], stream: int) -> tuple[str, int]:
        """The last function that was called, and what it returned."""
        where = c_void_p(self._opened()), c_void_p(stream)
        is_group = len(functions) > 1
        if is_group:
            self._call("ncclGroupStart")
        failed: tuple[str, int] | None = None
        for name, arguments in functions:
            code = self._call(name, *arguments, *where)
            if code not in (SUCCESS, IN_PROGRESS):
                failed = name, code
                break
        if not is_group:
            return failed or (name, code)
        code = self._call("ncclGroupEnd")  # a group that was begun must be ended
        return failed or ("ncclGroupEnd", code)

    def close(self, limit_s: float) -> None:
        """Wait until everything that was put into streams is done, and release it."""
        if self._handle is None:
            return
        with driver.current_device(self._ordinal):
            with self._lock:
                code = self._call("ncclCommFinalize", self._opened())
            try:
                self._settle("ncclCommFinalize", code, limit_s)
            except DeviceError:
                self.abort()
                return
            with self._lock:
                handle, self._handle = self._handle, None
                if handle is not None:
                    self._call("ncclCommDestroy", handle)

    def abort(self) -> None:
        """End its kernels, and release it; nothing happens if that was done before."""
        locked = self._lock.acquire(timeout=_LOCK_S)  # else a function does not return
        try:
            handle, self._handle = self._handle, None
            if handle is not None:
                with driver.current_device(self._ordinal):
                    self._call("ncclCommAbort", handle)
        finally:
            if locked:
                self._lock.release()

    def error(self, function: str, code: int) -> DeviceError:
        """The error of a function, with NCCL's words."""
        return self.library.error(function, code, self._handle)

    def _opened(self) -> int:
        if self._handle is None:
            raise Interrupted("NCCL's communicator was aborted")
        return self._handle

    def _call(self, name: str, *arguments: object) -> int:
        return self.library.call(name, *arguments)

    def _settle(self, function: str, code: int, limit_s: float) -> None:
        """Wait until a function is done; raise its error if it has one."""
        until = time.monotonic() + limit_s
        looks = 0
        while code == IN_PROGRESS:
            if self._has_failed():
                raise Interrupted(f"{function}: the communicator has failed")
            if time.monotonic() > until:
                raise Late(f"{function} of {self.library} takes longer than allowed")
            looks += 1
            time.sleep(0 if looks < _SPINS else _POLL_S)
            code = self.state()
        if code != SUCCESS:
            raise self.error(function, code)

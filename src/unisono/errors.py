"""What can go wrong, as one tree.

    UnisonoError
    ├─ UsageError      the caller asked for something that cannot be
    │  ├─ BadArgument         an unknown name, a value out of range, a wrong file
    │  │  ├─ NotOffered       no such algorithm for this collective
    │  │  ├─ UnknownOption    a function has no option of this name
    │  │  ├─ BadTopology      links or ranks that cannot be so
    │  │  └─ BadLog           a log of measurements that cannot be read
    │  ├─ UnsupportedWorld    the algorithm cannot be had for this number of ranks
    │  └─ CollectiveMismatch  ranks called different things
    ├─ ScheduleError   a schedule that does not keep its collective's promise
    ├─ TransportError  bytes do not arrive, or not as they were sent
    │  ├─ ConnectFailed       ranks did not connect
    │  ├─ PeerLost            a rank died, left or was interrupted
    │  ├─ Corrupted           bytes that no rank can have sent
    │  └─ NotAuthentic        a peer that does not belong to the job
    ├─ CollectiveTimeout  the deadline passed: who has not arrived
    ├─ DeviceError     a GPU cannot be used
    │  ├─ UnsupportedDevice   it is too old
    │  ├─ NvrtcMissing        the compiler of its kernels is not there
    │  ├─ NvrtcTooOld         the compiler does not know it, or C++20
    │  ├─ NcclMissing         the engine is NCCL, which is not there
    │  └─ CompilationFailed   a kernel could not be compiled
    └─ MissingExtra    an optional dependency is not installed
       └─ MissingLibrary      one that pip does not bring

A warning, which is no error: DroppedWork, of a call that nobody has waited for.

A message says where, what happened, what was expected, and what to do next. The values
in it are attributes as well, so that tools need not parse text.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence


class UnisonoError(Exception):
    """The root of every error that unisono raises on purpose."""


class UsageError(UnisonoError):
    """The caller asked for something that cannot be done; the message says what can."""


class BadArgument(UsageError, ValueError):
    """An unknown name, a value out of range, or a wrong file."""


class NotOffered(BadArgument):
    """No such algorithm for this collective, though perhaps for others."""


class UnknownOption(BadArgument, TypeError):
    """A function has no option of this name; the message has the one that is meant."""


class BadTopology(BadArgument):
    """Ranks that cannot reach each other, links without bandwidth, a wrong shape."""


class BadLog(BadArgument):
    """A log of measurements without rows, cut off, or of a run that went wrong."""

    def __init__(self, message: str, *, file: str, line: int = 0) -> None:
        """Keep the file and the line, which counts from 1; 0 is the whole file."""
        super().__init__(f"{file}:{line}: {message}" if line else f"{file}: {message}")
        self.file = file
        self.line = line


class UnsupportedWorld(UsageError):
    """The algorithm exists, but not for this number of ranks."""

    def __init__(self, message: str, *, n: int) -> None:
        """Keep the number of ranks that was asked for."""
        super().__init__(message)
        self.n = n


class ScheduleError(UnisonoError):
    """A schedule breaks a rule or its collective's promise: the counter-example.

    `step` counts from 1; for a fault of omission, which only the end shows, it is the
    step that last wrote the slot, or None. `missing` and `doubled` are ranks whose
    contribution is absent or counted more than once in chunk `chunk` on rank `rank`.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        chunk: int | None = None,
        missing: Sequence[int] = (),
        doubled: Sequence[int] = (),
    ) -> None:
        """Keep every value of the message as an attribute."""
        super().__init__(message)
        self.step = step
        self.rank = rank
        self.chunk = chunk
        self.missing = tuple(missing)
        self.doubled = tuple(doubled)


class CollectiveMismatch(UsageError):
    """Ranks called different things; `calls` maps two of them to what they called."""

    def __init__(self, message: str, *, calls: Mapping[int, str], seq: int) -> None:
        """Keep both sides and the sequence number."""
        super().__init__(message)
        self.calls = dict(calls)
        self.seq = seq


class TransportError(UnisonoError):
    """Bytes do not arrive, or not as they were sent."""


class ConnectFailed(TransportError):
    """Ranks did not connect: `missing` have not appeared."""

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        """Keep who is missing."""
        super().__init__(message)
        self.missing = tuple(missing)


class PeerLost(TransportError):
    """A rank died, left, or was interrupted, so the call cannot be completed."""

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int],
        pids: Sequence[int] = (),
        host: str = "",
        collective: str = "",
        seq: int = 0,
    ) -> None:
        """Keep who was lost, and in which call."""
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.pids = tuple(pids)
        self.host = host
        self.collective = collective
        self.seq = seq


class NotAuthentic(TransportError):
    """A process that does not belong to the job connected to it."""


class Corrupted(TransportError):
    """Bytes arrived that no rank of this job can have sent so."""


class CollectiveTimeout(UnisonoError, TimeoutError):
    """The deadline passed; `ranks` are those that had not done their part."""

    def __init__(
        self, message: str, *, ranks: Sequence[int], collective: str = "", seq: int = 0
    ) -> None:
        """Keep who is late, and in which call."""
        super().__init__(message)
        self.ranks = tuple(ranks)
        self.collective = collective
        self.seq = seq


class DeviceError(UnisonoError):
    """A GPU, or what is needed to use it, cannot be used; the message says why."""


class UnsupportedDevice(DeviceError):
    """The GPU is older than what kernels can be compiled for."""

    def __init__(self, message: str, *, capability: tuple[int, int]) -> None:
        """Keep the compute capability of the GPU."""
        super().__init__(message)
        self.capability = capability


class NvrtcMissing(DeviceError):
    """NVRTC, which compiles kernels, was found in none of the places in `looked`."""

    def __init__(self, message: str, *, looked: Sequence[str]) -> None:
        """Keep where it was looked for, and what was there."""
        super().__init__(message)
        self.looked = tuple(looked)


class NvrtcTooOld(DeviceError):
    """The NVRTC that was found cannot compile for this GPU, or not C++20."""

    def __init__(
        self,
        message: str,
        *,
        version: tuple[int, int],
        capability: tuple[int, int] | None = None,
    ) -> None:
        """Keep its version, and the compute capability of the GPU if that is why."""
        super().__init__(message)
        self.version = version
        self.capability = capability


class NcclMissing(DeviceError):
    """NCCL, or one that is new enough, was found in none of the places in `looked`."""

    def __init__(self, message: str, *, looked: Sequence[str]) -> None:
        """Keep where it was looked for, and what was there."""
        super().__init__(message)
        self.looked = tuple(looked)


class CompilationFailed(DeviceError):
    """A kernel could not be compiled; `log` is what the compiler printed."""

    def __init__(self, message: str, *, log: str) -> None:
        """Keep the whole log, of which the message shows the beginning."""
        super().__init__(message)
        self.log = log


class MissingExtra(UnisonoError, ImportError):
    """An optional dependency is needed; the message is the command that installs it."""

    def __init__(self, extra: str, purpose: str) -> None:
        """Name the extra and what it is for."""
        super().__init__(f"{purpose} needs: pip install 'unisono[{extra}]'")
        self.extra = extra


class MissingLibrary(MissingExtra):
    """A library of the system is needed; the message says how to install it."""

    def __init__(self, message: str) -> None:
        """There is no extra for it."""
        ImportError.__init__(self, message)
        self.extra = ""


class DroppedWork(RuntimeWarning):
    """The Work of an `async_op=True` call was dropped, and nobody had waited for it."""


def whole_number(name: str, value: object) -> int:
    """`value` as an int, if that is what it is; BadArgument if it is anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise BadArgument(f"{name} = {value!r}: expected a whole number") from None


def unknown_option(
    name: str, known: Iterable[str], meant: Mapping[str, str]
) -> UnknownOption:
    """The error for an option that does not exist; `meant` are other libraries' names.

    A name of `meant` that is none of `known` is an advice in words.
    """
    known = list(known)
    found = meant.get(name) or next(
        iter(difflib.get_close_matches(name, known, n=1, cutoff=0.6)), ""
    )
    if found in known:
        hint = f"{found}= is meant"
    else:
        hint = found or f"there are {', '.join(f'{one}=' for one in known)}"
    return UnknownOption(f"{name}=: there is no such option; {hint}")


def unknown(kind: str, name: str, known: Iterable[str]) -> BadArgument:
    """The error for a name that does not exist, with the three nearest that exist."""
    nearest = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.0)
    hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
    return BadArgument(f"unknown {kind} {name!r}{hint}")

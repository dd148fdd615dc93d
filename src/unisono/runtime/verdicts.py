"""What a communicator says when a call has failed, or will not be made.

The engine's verdict is one word; here it becomes an error that names ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unisono.errors import BadArgument, UnisonoError, UsageError
from unisono.runtime.failures import Trouble, describe, failure
from unisono.runtime.recorder import dump_on_error

if TYPE_CHECKING:
    from unisono._native import Comm
    from unisono._native import Work as NativeWork
    from unisono.transports.base import Peer, Transport


class Verdicts:
    """The part of a communicator that knows what went wrong."""

    rank: int
    name: str
    _native: Comm
    _transport: Transport
    _closed: bool
    _exceeded_s: float = -1.0
    """The limit of the call by which this rank broke the communicator, if it did."""

    @property
    def timeout_s(self) -> float:
        """How long a call may take that is given no limit of its own."""
        raise NotImplementedError

    @property
    def peers(self) -> list[Peer]:
        """Who the ranks are."""
        raise NotImplementedError

    def _failure(
        self,
        timeout_s: float | None = None,
        refused: str = "",
        words: str = "",
    ) -> UnisonoError:
        """What the verdict means, for the latest call or one refused because of it.

        `words` tell more of what was refused, for the flight record.
        """
        seq = self._native.seq() + bool(refused)
        notes = [n for n in self._native.states()[self.rank][1:3] if n[0] == seq]
        call = refused or (describe(notes[0]) if notes else "a call")
        verdict = self._native.verdict()
        limit = self._exceeded_s if refused else self._limit(timeout_s, seq)
        return self._told(verdict, call, seq, limit, self._native.awaited(), words)

    def _out_of_reach(self, rank: int, what: str, *, late: bool) -> UnisonoError:
        """A rank is gone or cannot be reached before a call: that breaks it for all.

        `late` tells that it might yet have answered, had there been more time.
        """
        self._native.give_up(rank, late)
        self._limit(None, self._native.verdict()[3])
        return self._failure(refused=what)

    def _explained(self, work: NativeWork, timeout_s: float | None) -> UnisonoError:
        """What went wrong with a call in flight."""
        verdict = work.verdict()
        call = describe(work.note())
        if verdict[0] == Trouble.MISFIT:
            sent, source = work.message_bytes(), work.source()
            return BadArgument(
                f"{call}: the message of {self.peers[source]} has {sent} bytes or "
                "another element type; receive it into an array that fits"
            )
        limit = self._limit(timeout_s, work.seq())
        return self._told(verdict, call, work.seq(), limit, work.awaited())

    def _limit(self, timeout_s: float | None, seq: int) -> float:
        """How long a call was given; remembered if the communicator broke by it."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        trouble, _, reporter, broken_at = self._native.verdict()
        is_mine = reporter == self.rank and broken_at == seq & 0xFFFFFFFF
        if trouble == Trouble.TIMEOUT and is_mine:
            self._exceeded_s = limit
        return limit

    def _told(
        self,
        verdict: tuple[int, int, int, int],
        call: str,
        seq: int,
        limit: float,
        awaited: Sequence[int],
        words: str = "",
    ) -> UnisonoError:
        self._transport.failed = True
        error = failure(
            self._native,
            self.peers,
            verdict,
            call=call,
            seq=seq,
            timeout_s=limit,
            awaited=awaited,
            rank=self.rank,
        )
        dump_on_error(self._transport.logbook, self.name, error, words or call)
        return error

    def _refuse_unusable(
        self, what: str, words: Callable[[], str] = lambda: ""
    ) -> None:
        """Raise if nothing can be called any more; `words` are asked for then."""
        if self._transport.engine.forked():
            raise UsageError(
                f"{what}: this process is a fork of rank {self.rank} and not itself a "
                "rank; start ranks with unisono.spawn or unisono run"
            )
        if self._closed:
            raise UsageError(f"{what}: the communicator {self.name!r} is closed")
        if self._native.verdict()[0] != Trouble.NONE:
            raise self._failure(refused=what, words=words())

"""Which wires go to which communicator: streams between ranks of different hosts.

A stream has one direction. The sender opens it, when a plan first needs it; at the
other end it is attached to its communicator as it arrives, or kept until there is one
of that number. So no rank waits for a connection that it has not asked for, and there
are no connections but those that some schedule uses.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unisono import _native
from unisono.errors import Corrupted
from unisono.transports import tls
from unisono.transports.handshake import KEY_SIZE
from unisono.transports.lanes import MOST_LANES

if TYPE_CHECKING:
    from unisono._native import Comm, Wire

MOST_WAITING = 1024
"""Streams of one rank that are kept here for communicators which are not here yet."""
_MOST_GONE = 1 << 16


@dataclass(frozen=True)
class StreamLabel:
    """What a stream is for: its communicator, and which of how many wires it is."""

    agreed: int
    lane: int = 0
    lanes: int = 1
    messages: bool = False
    """Whether it is for send and recv, and not for collectives."""
    takes_free_lane: bool = False
    """Whether a frame takes a lane that is free; else they take turns."""


@dataclass(frozen=True)
class StreamEnd:
    """One end of a stream: the wire that carries it, and the key of its frames."""

    wire: Wire
    key: bytes = field(repr=False)


OpenStream = Callable[[int, StreamLabel, float, Callable[[], str]], StreamEnd]
"""Opens a stream to a rank of the world, within some seconds. The last argument returns
why the rank need not be tried any longer, or ""."""


@dataclass
class _Attached:
    native: Comm
    ranks: Sequence[int]
    opening: threading.Lock = field(default_factory=threading.Lock)

    def lost(self, rank: int) -> Callable[[], str]:
        """Why a stream to this rank cannot be opened any more; "" while it can."""

        def why() -> str:
            states = self.native.states()
            if any(dead and not left for *_, left, dead, _ in states):
                return "a rank has died"
            if states[rank][4]:
                return "it has closed the communicator"
            return "the communicator is broken" if self.native.ends_next_call() else ""

        return why


class Streams:
    """The streams of one rank, each opened by `open_stream`.

    `epoch` numbers the worlds of a job: frames of another one are refused. `rails` says
    over how many network cards a rank of the world is reached: a stream to it has a
    lane for each at least, and as these may differ, a frame takes one that is free.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        *,
        lanes: int = 1,
        epoch: int = 0,
        rails: Callable[[int], int] = lambda rank: 1,
    ) -> None:
        """Nothing is opened yet."""
        self._open = open_stream
        self._lanes = lanes
        self._rails = rails
        self._epoch = epoch
        # The garbage collector may come here while it is held, by its holder's thread.
        self._lock = threading.RLock()
        self._members: dict[int, _Attached] = {}
        self._waiting: dict[int, list[tuple[int, StreamLabel, StreamEnd]]] = {}
        self._gone: OrderedDict[int, None] = OrderedDict()  # the last of them

    def join(self, agreed: int, native: Comm, ranks: Sequence[int]) -> None:
        """From now on streams with this number are for this communicator."""
        with self._lock:
            self._members[agreed] = member = _Attached(native, ranks)
            self._gone.pop(agreed, None)
            waiting = self._waiting.pop(agreed, [])
        for rank, label, end in waiting:
            # It is closed if it is refused, and the calls that need it say so.
            with contextlib.suppress(Corrupted):
                self._take(member, rank, label, end)

    def leave(self, agreed: int) -> None:
        """Nothing more is for this communicator."""
        with self._lock:
            self._members.pop(agreed, None)
            self._gone[agreed] = None
            if len(self._gone) > _MOST_GONE:
                self._gone.popitem(last=False)

    def leave_all(self) -> None:
        """Close this rank's end of the communicators that are still open."""
        with self._lock:
            members = list(self._members.items())
        for agreed, member in members:
            member.native.close()
            self.leave(agreed)

    def close(self) -> None:
        """Close streams that no communicator took."""
        with self._lock:
            waiting = [each for some in self._waiting.values() for each in some]
            self._waiting.clear()
        for _, _, end in waiting:
            end.wire.close()

    def arrived(self, rank: int, label: StreamLabel, end: StreamEnd) -> None:
        """A rank of the world has opened a stream to this one.

        Corrupted, and it is closed, if no rank can mean what the label says, or if
        there are too many for communicators that are not here.
        """
        try:
            _check(rank, label)
            with self._lock:
                member = self._members.get(label.agreed)
                if member is None and label.agreed not in self._gone:
                    self._keep(rank, label, end)
                    return
        except Corrupted:
            end.wire.close()
            raise
        if member is None:
            end.wire.close()
            return
        self._take(member, rank, label, end)

    def _keep(self, rank: int, label: StreamLabel, end: StreamEnd) -> None:
        """Until its communicator comes; of one that never does, not for ever.

        Where there is no room, those go first that were closed at the other end: its
        rank has left the communicator before this one knew of it.
        """
        held = [each for some in self._waiting.values() for each in some]
        of_rank = [each for each in held if each[0] == rank]
        if len(of_rank) >= MOST_WAITING:
            ended = [each for each in of_rank if each[2].wire.peer_closed()]
            for each in ended:
                self._waiting[each[1].agreed].remove(each)
                each[2].wire.close()
            self._waiting = {a: some for a, some in self._waiting.items() if some}
            if not ended:
                raise Corrupted(
                    f"rank {rank} has opened {len(of_rank)} streams for communicators "
                    "that this rank does not have: no more are kept"
                )
        self._waiting.setdefault(label.agreed, []).append((rank, label, end))

    def _take(
        self, member: _Attached, rank: int, label: StreamLabel, end: StreamEnd
    ) -> None:
        if rank not in member.ranks:
            end.wire.close()
            raise Corrupted(
                f"rank {rank} has opened a stream of a communicator that it is not in"
            )
        self._attach(member, False, rank, label, end)

    def reach(
        self, agreed: int, rank: int, *, timeout_s: float, messages: bool = False
    ) -> None:
        """Open the stream to a rank of a communicator, if it is not open."""
        member = self._members[agreed]
        if member.native.is_connected_to(rank, messages):
            return
        world_rank = member.ranks[rank]
        rails = self._rails(world_rank)
        lanes = -(-(1 if messages else self._lanes) // rails) * rails
        with member.opening:  # of several threads the first opens it for all
            if member.native.is_connected_to(rank, messages):
                return
            for lane in range(lanes):
                label = StreamLabel(agreed, lane, lanes, messages, rails > 1)
                end = self._open(world_rank, label, timeout_s, member.lost(rank))
                self._attach(member, True, world_rank, label, end)

    def _attach(
        self,
        member: _Attached,
        sends: bool,
        world_rank: int,
        label: StreamLabel,
        end: StreamEnd,
    ) -> None:
        rank = list(member.ranks).index(world_rank)
        try:
            member.native.attach(
                sends,
                rank,
                label.lane,
                label.lanes,
                end.wire,
                end.key,
                self._epoch,
                label.messages,
                label.takes_free_lane,
            )
        except ValueError:
            end.wire.close()
            raise Corrupted(
                f"a stream between this rank and rank {world_rank}: lane {label.lane} "
                f"of {label.lanes} is not one that it misses"
            ) from None


def _check(rank: int, label: StreamLabel) -> None:
    """Refuse numbers that no rank would send."""
    if not 0 <= label.lane < label.lanes <= MOST_LANES:
        raise Corrupted(
            f"rank {rank} has opened lane {label.lane} of {label.lanes} of a stream: "
            f"there are 1 to {MOST_LANES}, counted from 0; do all ranks run the same "
            "unisono?"
        )


StreamPair = Callable[[], tuple[StreamEnd, StreamEnd]]
"""Makes the two connected ends of a stream between threads of one process."""


def streams_between_threads(
    n: int, pair: StreamPair, *, lanes: int = 1, rails: int = 1
) -> list[Streams]:
    """The streams of n ranks that are threads on emulated hosts."""
    made: list[Streams] = []

    def opener(rank: int) -> OpenStream:
        def open_stream(
            to: int, label: StreamLabel, _: float, __: Callable[[], str]
        ) -> StreamEnd:
            mine, theirs = pair()
            made[to].arrived(rank, label, theirs)
            return mine

        return open_stream

    made += [
        Streams(opener(rank), lanes=lanes, rails=lambda _: rails) for rank in range(n)
    ]
    return made


def socket_pair() -> tuple[StreamEnd, StreamEnd]:
    """Two ends over a pair of Unix sockets."""
    return pair_of(*(_native.SocketWire(s.detach()) for s in socket.socketpair()))


def encrypted_pair() -> tuple[StreamEnd, StreamEnd]:
    """The same with TLS, whose handshake is complete."""
    socks, key = socket.socketpair(), os.urandom(tls.KEY_BYTES)
    mine = tls.begin(socks[0], key, is_client=True)
    theirs = tls.begin(socks[1], key, is_client=False)
    while any([tls.continue_handshake(mine), tls.continue_handshake(theirs)]):
        pass
    one, other = (sock.detach() for sock in socks)
    return pair_of(_native.TlsWire(one, mine), _native.TlsWire(other, theirs))


def pair_of(one: Wire, other: Wire) -> tuple[StreamEnd, StreamEnd]:
    """The ends of a stream over two connected wires, with a new key."""
    key = os.urandom(KEY_SIZE)
    return StreamEnd(one, key), StreamEnd(other, key)

"""How the ranks of a torch group find each other: by the store that torch gives them.

The group of all ranks has a rendezvous as any other world does. Rank 0 puts its name
into the store: a job's name on one host, or an address if there are several. Every
process that reaches the store can read and write it, so nothing else goes through it:
ranks trust each other by the job's secret alone.

Every other group has its memory in that world: on each host its first rank makes it at
once, and puts its number into the store; another rank reads that when it makes its
first call. So making a group waits for no rank, and ranks that never use it never
connect.

Under torchrun a store outlives a group, and the next one finds the old entries. Each
rank counts how many groups of this name it has made, and reads only entries of its own
count.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import unisono
from unisono.errors import CollectiveTimeout, ConnectFailed
from unisono.interop.torch.errors import as_both
from unisono.runtime.communicator import Communicator
from unisono.runtime.core import Core
from unisono.runtime.groups import agreed_number
from unisono.runtime.plan import tuned
from unisono.runtime.world.first import first_communicator
from unisono.transports import registry
from unisono.transports.interface import ConnectOptions
from unisono.transports.rank_table import host_identity
from unisono.transports.secret import find_secret
from unisono.transports.session import Session
from unisono.transports.threads import alone
from unisono.transports.tls import TLS, wanted

RENDEZVOUS_TIMEOUT_S = 60.0
_ANSWER_S = 5.0  # for rank 0 to name the missing ranks
_world: Session | None = None
_groups: WeakValueDictionary[str, GroupRendezvous] = WeakValueDictionary()


class GroupRendezvous:
    """One rank's way to the communicator of one group."""

    def __init__(self, options: Any) -> None:
        """Put into the store what others need; the world connects at once."""
        self.rank: int = options.group_rank
        self.size: int = options.group_size
        self.timeout_s: float = options.timeout.total_seconds()
        self.name: str = options.group_id or "world"
        self._store = options.store
        self._lock = threading.Lock()
        self._made: Communicator | None = None
        self._turn = self._store.add(f"unisono/{self.rank}", 1)
        ranks: Sequence[int] = list(options.global_ranks_in_group)
        self._session = _world_of(ranks)
        self._ranks = ranks
        self._segment = 0
        self._barriers = 0
        _groups[self.name] = self
        if self._session is None:
            self._made = self._rendezvous(is_world=not ranks)
        elif self._session.owner(ranks) == self._session.rank:
            self._segment = self._session.memory_for(ranks)
            self._store.set(self._key(self._segment_entry()), str(self._segment))

    def communicator(self) -> Communicator:
        """The communicator, made on first use."""
        if self._made is None:
            with self._lock:
                if self._made is None:
                    self._made = self._join()
        return self._made

    @staticmethod
    def of(name: str) -> GroupRendezvous | None:
        """That of the group to which torch gave this name."""
        return _groups.get(name)

    def close(self) -> None:
        """Leave, if it was ever used."""
        if self._made is not None:
            self._made.close()
        elif self._segment and self._session is not None:
            self._session.engine.drop(self._segment)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Rank 0 waits for each of the others, and publishes the result."""
        limit = timeout.total_seconds()
        limit = self.timeout_s if limit < 0 else limit
        self._barriers += 1
        turn = self._key(f"barrier/{self._barriers}")
        if self.rank == 0:
            self._await_all(turn, limit, wait_all_ranks)
            return
        self._store.set(f"{turn}/{self.rank}", "")
        failure = "no answer"
        with suppress(RuntimeError):
            self._store.wait([f"{turn}/done"], timedelta(seconds=limit + _ANSWER_S))
            failure = self._store.get(f"{turn}/done").decode()
        if failure:
            raise _late(
                f"Rank {self.rank} successfully reached monitoredBarrier, but received "
                f"errors while waiting for send/recv from rank 0: {failure}"
            )

    def _await_all(self, turn: str, limit: float, wait_all_ranks: bool) -> None:
        if limit <= 0:
            raise _late("Rank 0 timed out in monitoredBarrier")
        deadline = time.monotonic() + limit
        missing = []
        for rank in range(1, self.size):
            left = max(deadline - time.monotonic(), 1e-3)
            with suppress(RuntimeError):
                self._store.wait([f"{turn}/{rank}"], timedelta(seconds=left))
            # Asked once more: a millisecond may be too short for any store to answer.
            if not self._store.check([f"{turn}/{rank}"]):
                missing.append(rank)
                if not wait_all_ranks:
                    break
        failure = ""
        if missing:
            who = f"Ranks {', '.join(map(str, missing))}"
            who = who if len(missing) > 1 else f"Rank {missing[0]}"
            failure = f"{who} failed to pass monitoredBarrier in {limit:g} s"
        self._store.set(f"{turn}/done", failure)
        if failure:
            raise _late(failure, missing)

    def _key(self, what: str) -> str:
        return f"unisono/{self._turn}/{what}"

    def _read(self, entries: Sequence[str]) -> list[str]:
        """What others put into the store, or will before the group's time is up."""
        keys = [self._key(entry) for entry in entries]
        try:
            self._store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError:  # what each store raises differs
            lacking = [entry for entry in entries if not self._has(entry)]
            raise ConnectFailed(
                f"group {self.name!r}: rank {self.rank} waited {self.timeout_s:g} s; "
                f"not in the store: {', '.join(lacking)}",
                missing=[int(e.partition("/")[2] or 0) for e in lacking],
            ) from None
        return [self._store.get(key).decode() for key in keys]

    def _has(self, entry: str) -> bool:
        return bool(self._store.check([self._key(entry)]))

    def _rendezvous(self, *, is_world: bool) -> Communicator:
        global _world
        if self.size == 1:
            session = alone()
        else:
            if self.rank == 0:
                self._store.set(self._key("job"), secrets.token_hex(16))
            (job,) = self._read(["job"])
            session = self._connect_all(job, min(self.timeout_s, RENDEZVOUS_TIMEOUT_S))
        if is_world:
            _world = session
        return first_communicator(session, timeout_s=self.timeout_s)

    def _connect_all(self, job: str, limit_s: float) -> Session:
        """Whether on one host or on several, which all ranks read from the store."""
        self._store.set(self._key(f"host/{self.rank}"), host_identity())
        hosts = self._read([f"host/{r}" for r in range(self.size)])
        several = len(set(hosts)) > 1
        at, secret = "", None
        if several:
            # Where torch's own store is, ranks of other hosts can come.
            at = f"{_bracketed(os.environ.get('MASTER_ADDR') or 'localhost')}:0"
            if self.rank != 0:
                (at,) = self._read(["address"])
            secret = find_secret(os.environ)

        def announce(address: str) -> None:
            self._store.set(self._key("address"), address)

        options = ConnectOptions(
            self.rank,
            self.size,
            job,
            unisono.__version__,
            limit_s,
            address=at,
            secret=secret,
            interface=os.environ.get("UNISONO_INTERFACE"),
            tls=several and wanted(os.environ.get(TLS), TLS),
            announce=announce,
            tuned=tuned.is_there(),
        )
        return registry.get("tcp" if several else "shm").connect(options)

    def _segment_entry(self) -> str:
        """The name in the store for this host's memory of the group."""
        assert self._session is not None
        return f"segment/{self._session.owner(self._ranks)}"

    def _join(self) -> Communicator:
        session, ranks = self._session, self._ranks
        assert session is not None
        if session.owner(ranks) != session.rank:
            self._segment = int(self._read([self._segment_entry()])[0])
        joined = Core.joined(
            session,
            ranks,
            self._segment,
            agreed=agreed_number(f"{self.name}/{self._turn}"),
            timeout_s=self.timeout_s,
            rendezvous_timeout_s=min(self.timeout_s, RENDEZVOUS_TIMEOUT_S),
            name=self.name,
        )
        return Communicator(joined)


def _late(text: str, ranks: Sequence[int] = ()) -> BaseException:
    """The failure of a monitored barrier, in words that torch's programs know."""
    return as_both(CollectiveTimeout(text, ranks=ranks, collective="monitored_barrier"))


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _world_of(ranks: Sequence[int]) -> Session | None:
    """The world that a group lies in, unless it is the world, or there is none."""
    if not ranks or _world is None or not _world.users or _world.engine.forked():
        return None
    return _world

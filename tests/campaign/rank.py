"""One rank of a trial, in a child of the driver: works, reports, shrinks, continues.

What it has to say goes to the driver as lines of JSON, each with the time on the
monotonic clock. It waits for the driver's word only where a trial says so.
"""

import atexit
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback

import numpy as np

import unisono
from campaign.calls import Desk
from campaign.leftovers import holding_before, left_after
from campaign.plan import BREAKS, KILLS, LONG_S, SELF
from unisono import _native
from unisono.errors import CollectiveTimeout, ConnectFailed, PeerLost, UnisonoError

ENOUGH_S = 40.0
"""After which a rank that was to be disturbed has worked for long enough."""
SHRINK_S = 30.0
_SPARE_DESCRIPTORS = 3
_SPARE_MEMORY = 1 << 20
MOST_TURNS = 100_000


class Left(Exception):
    """This rank has left its world, as planned."""


class Rank:
    """What a child knows: its trial, its id, and how it reaches the driver."""

    def __init__(self, trial, me, job, tell, hear, heartbeats):
        self.trial, self.me, self.job = trial, me, job
        self.tell_fd, self.hear_fd, self.heartbeats = tell, hear, heartbeats
        self.desk = None
        self.interrupts = False
        self.limited = False
        self.children = []

    def tell(self, event, **facts):
        line = json.dumps({"event": event, "at": time.monotonic(), **facts})
        os.write(self.tell_fd, line.encode() + b"\n")

    def hear(self):
        """Wait until the driver lets it continue."""
        if not os.read(self.hear_fd, 1):
            os._exit(1)  # it is gone

    # --- the life of a rank

    def live(self, first_phase, joins):
        before = holding_before(self.trial)
        if joins:
            comm = unisono.init(job=self.job, join=True, timeout_s=LONG_S)
        else:
            comm = unisono.init(self.me, self.trial.n, job=self.job, timeout_s=LONG_S)
        ids = _ids(comm, self.me)
        self.tell("connected", ids=ids)
        try:
            for number in range(first_phase, len(self.trial.phases)):
                comm, ids = self.phase(number, comm, ids)
        except Left as why:
            self.tell("gone", why=str(why))
        self.close_groups()
        self.desk = None
        gc.collect()  # a world is left with the last of its groups
        comm.close()
        del comm
        gc.collect()
        self.end_children()
        self.tell("ended", left=left_after(before))

    def close_groups(self):
        if self.desk is not None:
            self.desk.close_groups()

    def phase(self, number, comm, ids):
        """Work through one phase; the world after it."""
        phase = self.trial.phases[number]
        key = f"{self.trial.seed}/{self.trial.number}/{number}"
        comm.timeout_s = phase.timeout_s
        self.desk = Desk(
            comm,
            ids,
            key,
            large=self.trial.large,
            messages=phase.has_messages,
            # A receive from any rank waits as long as any rank lives.
            any_source=phase.strike not in BREAKS,
            sign=lambda: self.heartbeats(self.me),
        )
        mine = self.me in phase.victims
        if mine and phase.failpoint:
            _native.arm_failpoints(f"{phase.failpoint}:{phase.hit}:kill")
        self.tell("began", phase=number)
        error = self.work(phase, mine)
        self.interrupts = False
        self.tell("worked", phase=number, **_described(error, self.desk))
        _restore_limits()
        self.limited = False
        if phase.strike in BREAKS:
            del error
            comm, ids = self.shrink(phase, comm, number)
        self.desk.groups.clear()
        if phase.grow:
            comm = comm.grow(comm.world_size + phase.grow, timeout_s=SHRINK_S)
            ids = _ids(comm, self.me)
            self.tell("grown", phase=number, ids=ids)
        return comm, ids

    def work(self, phase, mine):
        """Turns until one fails, or enough; what it raised."""
        breaks = phase.strike in BREAKS
        until = time.monotonic() + ENOUGH_S
        self.interrupts = mine and phase.strike == "interrupt"
        try:
            for turn in range(MOST_TURNS if breaks else phase.turns):
                if mine and phase.strike in SELF and turn == phase.turn:
                    getattr(self, phase.strike)()
                self.desk.turn(turn)
                if mine and self.limited and turn >= phase.turn + phase.turns:
                    return None  # it was enough for all that
                if time.monotonic() > until:
                    return TimeoutError("nothing has happened")
        except Left:
            raise
        except KeyboardInterrupt as error:
            if not self.interrupts:
                raise
            return error
        except (UnisonoError, OSError, MemoryError) as error:
            return error
        return None

    def shrink(self, phase, comm, number):
        if not phase.prompt:
            self.hear()
        self.desk.groups.clear()  # not before: dropping a group leaves it
        limit = 4.0 if phase.strike in ("stop", "partition") else SHRINK_S
        ids = None
        while ids is None:
            try:
                comm = comm.shrink(timeout_s=limit)
            except (PeerLost, ConnectFailed) as error:
                if phase.strike in ("kill", "interrupt", "descriptors", "memory"):
                    # Those who shrink promptly may find too few of the others.
                    self.tell("alone", phase=number, **_described(error, self.desk))
                raise Left(f"{type(error).__name__}: {error}") from None
            ids = self.lasting_ids(phase, comm)
        self.tell("shrunk", phase=number, ids=ids, left_out=list(comm.left_out))
        return comm, ids

    def lasting_ids(self, phase, comm):
        """The ids of the world after a phase, or None if it must shrink once more.

        A victim that is killed late may have come into this world, and is then its end.
        """
        victims = set(phase.victims) if phase.strike in KILLS else set()
        ids = []
        try:
            ids = _ids(comm, self.me)
            while not victims.isdisjoint(ids):
                comm.barrier()
        except PeerLost as error:
            named = {ids[rank] for rank in error.ranks} if ids else victims
            if not victims or not named <= victims:
                raise
            return None
        return ids

    # --- what a victim does itself

    def close(self):
        """Leave with a receive in flight that no rank sends to."""
        comm = self.desk.comm
        x = comm.empty(1000) if self.me % 2 else np.ones(1000, np.float32)
        comm.recv(x, tag=-1, async_op=True).allow_drop()
        gc.collect()  # a world is left with the last of its groups
        comm.close()
        raise Left("closed")

    def fork_exit(self):
        """A child that ends at once, as a process does."""
        pid = os.fork()
        if pid == 0:
            atexit._run_exitfuncs()
            os._exit(0)
        self.children.append(pid)

    def fork_hold(self):
        """A child that has all that is open here, and cannot use it."""
        pid = os.fork()
        if pid == 0:
            _be_forked(self.desk.comm)
        self.children.append(pid)

    def descriptors(self):
        """No more than a few from now on."""
        used = max(map(int, os.listdir("/proc/self/fd"))) + 1
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        spare = used + self.trial.number % _SPARE_DESCRIPTORS
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, most))
        self.exhaust()

    def memory(self):
        """Hardly any address space from now on."""
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit = used + (self.trial.number % 4) * _SPARE_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        self.exhaust()

    def exhaust(self):
        """Allocate buffers until there are no more; then continue without."""
        held = []
        self.limited = True
        try:
            while len(held) < 64:
                held.append(self.desk.comm.empty(1 << 18))
        except (UnisonoError, OSError, MemoryError):
            held.clear()
            raise

    def end_children(self):
        for pid in self.children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            os.waitpid(pid, 0)


def _restore_limits():
    for what in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
        most = resource.getrlimit(what)[1]
        resource.setrlimit(what, (most, most))


def _be_forked(comm):
    """A fork of a rank: calls are refused with a message, and it ends on request."""
    try:
        comm.all_reduce(np.ones(3))
        os._exit(3)
    except unisono.UsageError:
        gc.collect()
        time.sleep(600)
    finally:
        os._exit(4)


def _ids(comm, me):
    """The ids behind the ranks of a world: each tells its own."""
    return comm.all_gather(np.array([me])).tolist()


def _described(error, desk):
    if error is None:
        return {"error": ""}
    ranks = []
    if isinstance(error, PeerLost | CollectiveTimeout):
        ranks = list(error.ranks)
    elif isinstance(error, ConnectFailed):
        ranks = list(error.missing)
    named = [desk.members[r] for r in ranks if r < len(desk.members)]
    return {
        "error": type(error).__name__,
        "message": str(error),
        "ours": isinstance(error, UnisonoError),
        "named": named,
        "calls": desk.calls,
        "kind": desk.kind,
    }


def be_rank(rank, stderr, *, first_phase=0, joins=False):
    """Be one rank; never returns."""
    status = 1

    def interrupt(*_):
        if rank.interrupts:
            raise KeyboardInterrupt

    try:
        os.dup2(stderr, 2)
        signal.signal(signal.SIGINT, interrupt)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        faulthandler.enable(file=2)
        rank.live(first_phase, joins)
        status = 0
    except BaseException:
        text = traceback.format_exc()
        os.write(2, f"rank with id {rank.me}:\n{text}".encode())
        rank.tell("failed", text=text)
    finally:
        sys.stderr.flush()
        os._exit(status)

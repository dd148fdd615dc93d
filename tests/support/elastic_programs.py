"""What ranks do in the tests of worlds that change; each is given a communicator."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np

import unisono
from unisono.runtime.world import grow as growing
from unisono.runtime.world import shrink_protocol as shrinking
from unisono.runtime.world.agreement import ActionKind, Agreement
from unisono.runtime.world.first import open_sessions
from unisono.transports import endpoints, join


def tell(folder, word):
    """Let the others know that something has happened."""
    Path(folder, word).touch()


def until_told(folder, *words):
    deadline = time.monotonic() + 40
    while not all(Path(folder, word).exists() for word in words):
        assert time.monotonic() < deadline, f"{words} do not happen"
        time.sleep(0.01)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def works(comm):
    """One collective whose result tells who took part; the processes by rank."""
    x = comm.all_reduce(np.full(1000, 2.0**comm.rank))
    assert (x == 2**comm.world_size - 1).all()
    return comm.all_gather(np.array([os.getpid()])).tolist()


def until_lost(comm):
    """Collectives until one fails."""
    x = np.ones(100, np.float32)
    try:
        while True:
            comm.all_reduce(x)
    except unisono.PeerLost as lost:
        return lost


def works_until_it_dies(comm, victim):
    """Work, after which the victim dies, perhaps while others are still at it."""
    try:
        works(comm)
        if comm.rank == victim:
            die()
    except unisono.PeerLost as lost:
        return lost
    return until_lost(comm)


def world_summary(comm):
    assert open_sessions() == [comm.core.session]  # the world before it has ended
    epoch = comm.core.membership.epoch
    return comm.rank, comm.world_size, epoch, works(comm), comm.left_out


def loses(comm, victims):
    """One after another of these ranks dies, by their numbers at that time."""
    for victim in victims:
        old = comm
        works_until_it_dies(comm, victim)
        comm = comm.shrink(timeout_s=100)
        assert old.core.closed
    return world_summary(comm)


def loses_rank_0(comm, knows):
    """The other one shrinks; it may see that rank 0 has ended."""
    works_until_it_dies(comm, 0)
    try:
        return world_summary(comm.shrink(timeout_s=20, dead=[0] if knows else []))
    except unisono.ConnectFailed as why:
        return why.missing, str(why)


def fails_in_split(comm):
    """Rank 0 fails before it has joined the group that the others wait in."""
    works(comm)
    if comm.rank == 0:
        comm.core.session.communicator = lambda *_, **__: (_ for _ in ()).throw(OSError)
    try:
        comm.split(0)
    except (OSError, unisono.PeerLost) as error:
        return type(error).__name__, world_summary(comm.shrink(timeout_s=30))


def _dies_at(point):
    """Have this process killed at a point of shrinking."""
    if point == "request":
        endpoints.LocalLink.send = endpoints.RemoteLink.send = lambda *_: die()
    elif point == "proposal":
        true_step = Agreement.step

        def step(self, now):
            found = true_step(self, now)
            if found.kind in (ActionKind.HOST, ActionKind.JOIN):
                die()
            return found

        Agreement.step = step
    elif point == "connected":
        shrinking.form_world.__globals__["_AgreementDriver"]._rendezvous = _after(
            shrinking._AgreementDriver._rendezvous
        )
    else:
        number = {"first barrier": 1, "second barrier": 2}[point]
        true_barrier, passed = unisono.Communicator.barrier, []

        def barrier(self, **how):
            true_barrier(self, **how)
            passed.append(1)
            if len(passed) == number:
                die()

        unisono.Communicator.barrier = barrier


def _after(function):
    def once(*args):
        function(*args)
        die()

    return once


def loses_another_meanwhile(comm, first, second, point):
    """A rank dies, and while the others shrink another does."""
    if comm.rank == second:
        _dies_at(point)
    lost = works_until_it_dies(comm, first)
    assert lost.ranks == (first,)
    left = comm.world_size - 2
    comm = comm.shrink(timeout_s=100)
    while comm.world_size > left:  # it died so late that this world was settled with it
        until_lost(comm)
        comm = comm.shrink(timeout_s=100)
    return world_summary(comm)


def one_comes_late(comm, late, folder):
    """It lives, but calls shrink long after the others, which continue."""
    works(comm)
    others = {*range(comm.world_size)} - {late}
    if comm.rank != late:
        tell(folder, f"{comm.rank} worked")
        until_told(folder, *(f"{rank} worked" for rank in others))
        tell_after = f"{comm.rank} went on"
        comm = comm.shrink(timeout_s=2.0)
        found = world_summary(comm)
        tell(folder, tell_after)
        until_told(folder, "it has asked")
        comm.close()
        return found
    until_told(folder, *(f"{rank} went on" for rank in others))
    try:
        comm.shrink(timeout_s=100)
    except unisono.UnisonoError as why:
        return type(why), str(why)
    finally:
        tell(folder, "it has asked")


def nobody_died(comm, folder):
    """One calls shrink while the others wait in a collective."""
    works(comm)
    tell(folder, f"{comm.rank} worked")
    if comm.rank == 1:
        until_told(folder, *(f"{rank} worked" for rank in range(comm.world_size)))
    else:
        lost = until_lost_in_barrier(comm)
        assert lost.ranks
    first = comm.shrink(timeout_s=100)
    second = first.shrink(timeout_s=100)
    return world_summary(second)


def until_lost_in_barrier(comm):
    try:
        comm.barrier()
    except unisono.PeerLost as lost:
        return lost


def only_one_calls(comm, caller, folder):
    works(comm)
    if comm.rank != caller:
        until_told(folder, "it has called")
        return None
    try:
        comm.shrink(timeout_s=1.0)
    except unisono.ConnectFailed as why:
        return why.missing, str(why)
    finally:
        tell(folder, "it has called")


def misuses(comm, folder):
    """Every way not to call it; what each says."""
    record = {}

    def attempt(name, call):
        try:
            call()
            record[name] = "nothing"
        except unisono.UnisonoError as why:
            record[name] = f"{type(why).__name__}: {why}"

    part = comm.split(0)
    attempt("split", part.shrink)
    attempt("split grows", lambda: part.grow(9))
    attempt("timeout", lambda: comm.shrink(timeout_s=0))
    attempt("smaller", lambda: comm.grow(1))
    attempt("no number", lambda: comm.grow("five"))
    child = os.fork()
    if child == 0:
        try:
            comm.shrink()
        except unisono.UsageError as why:
            os._exit(17 if "fork" in str(why) else 1)
        os._exit(2)
    record["fork"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    works(comm)
    tell(folder, f"{comm.rank} worked")
    until_told(folder, *(f"{rank} worked" for rank in range(comm.world_size)))
    out = np.zeros(8)
    work = comm.recv(out, src=(comm.rank + 1) % comm.world_size, async_op=True)
    made = []
    second = threading.Thread(
        target=lambda: attempt("second thread", lambda: made.append(comm.shrink()))
    )
    true_survive = shrinking._AgreementDriver.agree

    def agree(self, attempt=None):
        if not second.ident:
            second.start()
            second.join()
        return true_survive(self, attempt)

    shrinking._AgreementDriver.agree = agree
    new = comm.shrink(timeout_s=100)
    assert not made
    attempt("in flight", work.wait)
    attempt("closed", comm.shrink)
    attempt("part of the old world", part.barrier)
    attempt("closed grows", lambda: comm.grow(9))
    same = new.grow(new.world_size)
    assert same is new
    return record, world_summary(new)


def grows(comm, world_size):
    """Ranks that began; those that join run `joins`."""
    return world_summary(comm.grow(world_size, timeout_s=100))


def joins():
    return world_summary(unisono.init(join=True, rendezvous_timeout_s=100))


def begun(n):
    """The world of the first n ranks, though all were started for more."""
    rank, job = int(os.environ["UNISONO_RANK"]), os.environ["UNISONO_JOB"]
    return unisono.init(rank, n, job=job, rendezvous_timeout_s=100)


def grows_or_joins(first, world_size, shrinks=()):
    """With init=False: the last ranks join."""
    if "UNISONO_JOIN" in os.environ:
        return joins()
    comm = begun(first)
    for victim in shrinks:
        works_until_it_dies(comm, victim)  # none is still in init
        comm = comm.shrink(timeout_s=100)
    return grows(comm, world_size)


def nobody_joins(comm, address):
    """Usually the others call later than rank 0 waits for joining processes."""
    works(comm)
    if comm.rank > 0 and address is None:
        time.sleep(1.2)
    try:
        comm.grow(comm.world_size + 1, timeout_s=0.5, address=address)
    except unisono.ConnectFailed as why:
        return str(why), world_summary(comm)


def dies_while_others_wait_to_grow(comm, victim):
    try:
        works(comm)
        if comm.rank == victim:
            time.sleep(0.5)
            die()
        comm.grow(comm.world_size + 1, timeout_s=100)
    except unisono.PeerLost as lost:
        return lost.ranks, world_summary(comm.shrink(timeout_s=100))


def a_newcomer_dies(first, world_size):
    """It is admitted, and dies before all have connected; the others continue."""
    if "UNISONO_JOIN" in os.environ:
        true_ask = join.Joiner.ask

        def ask(self, *args):
            if true_ask(self, *args) is not None:
                die()

        join.Joiner.ask = ask
        return joins()
    shrinking.RENDEZVOUS_TIMEOUT_S = growing.RENDEZVOUS_TIMEOUT_S = 2.0
    comm = begun(first)
    return grows(comm, world_size)

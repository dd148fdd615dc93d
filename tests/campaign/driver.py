"""Runs trials: forks the ranks, disturbs them, listens to them, and judges.

The process that does this has everything imported, one thread, and never a world of its
own: so forking is safe, and a rank begins within milliseconds. It is the reaper of all
its descendants, so nothing can be left behind unseen.
"""

import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import time
from dataclasses import dataclass, field

from campaign import calls, threads
from campaign.judge import judge_work, judge_world, may_be_too_few, outlasts
from campaign.plan import BREAKS, LOSSES
from campaign.rank import Rank, be_rank
from kill_trials.rank import Heartbeats
from unisono.runtime.world.address import free_port
from unisono.testing._namespaces import enter_network

LIMIT_S = 90.0
"""The time limit of a rank for one part of a phase."""
_MOST_RANKS = 64
_PASSES_S = 0.4
_SUBREAPER = 36
_SILENCE_S = 2


def become_reaper():
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


@dataclass
class Outcome:
    """What came of a trial."""

    trial: object
    problems: list = field(default_factory=list)
    done: list = field(default_factory=list)
    """The disturbances that took place, with the times to each error."""
    kills: int = 0
    calls: int = 0
    seconds: float = 0.0
    stderr: str = ""


class Child:
    """A rank as the driver sees it."""

    def __init__(self, me, pid, tells, hears):
        self.me, self.pid, self.tells, self.hears = me, pid, tells, hears
        self.handle = os.pidfd_open(pid)
        self.text = b""
        self.events = []
        self.ended = None

    def read(self):
        data = os.read(self.tells, 1 << 16)
        *lines, self.text = (self.text + data).split(b"\n")
        self.events += map(json.loads, lines)

    def event_of(self, event, phase=None):
        """The event of that name, of that phase if one is given; None before it."""
        for one in self.events:
            if one["event"] == event and phase in (None, one.get("phase")):
                return one
        return None

    def poll(self):
        """See whether it has ended."""
        if self.ended is None and select.select([self.handle], [], [], 0)[0]:
            status = os.waitid(os.P_PID, self.pid, os.WEXITED)
            exited = status.si_code == os.CLD_EXITED
            self.ended = status.si_status if exited else -status.si_status
        return self.ended

    def go_on(self):
        with contextlib.suppress(BrokenPipeError):
            os.write(self.hears, b"g")

    def signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self):
        for fd in (self.handle, self.tells, self.hears):
            os.close(fd)


class Stuck(Exception):
    """Somebody does not come."""


class Running:
    """One trial while it runs."""

    def __init__(self, trial, networks=None):
        self.trial, self.networks = trial, networks
        self.outcome = Outcome(trial)
        self.children = []
        self.living = list(range(trial.n))  # in the order of their ranks
        self.healed_at = None  # after the last short partition
        self.heartbeats = Heartbeats(_MOST_RANKS)
        self.stderr = os.memfd_create("stderr")
        self.job = secrets.token_hex(8)
        self.environ = self._environ()

    def _environ(self):
        made = {"UNISONO_TUNED": "0"}
        if self.trial.hosts:
            made["UNISONO_SECRET"] = secrets.token_hex(32)
            made["UNISONO_ADDRESS"] = f"127.0.0.1:{free_port()}"
        if self.trial.tls:
            made["UNISONO_TLS"] = "mutual"
        if self.trial.kind == "namespaces":
            first = self.networks[self.trial.hosts[0]]
            made["UNISONO_ADDRESS"] = f"{first.address}:29500"
            made["UNISONO_SILENCE_S"] = str(_SILENCE_S)
        return made

    def run(self):
        began = time.monotonic()
        try:
            self._run()
        except Stuck as why:
            self.outcome.problems.append(str(why))
            self._show_stacks()
        finally:
            self._end()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def _run(self):
        for me in range(self.trial.n):
            self.fork(me)
        self.await_all(self.living, "connected")
        for number, phase in enumerate(self.trial.phases):
            self.phase(number, phase)
            if self.outcome.problems or not self.living:
                return
        self.await_all(self.living, "ended")
        for me in self.living:
            self._check_end(self.children[me])

    def fork(self, me, **how):
        result, tell = os.pipe()
        hear, word = os.pipe()
        pid = os.fork()
        if pid == 0:
            for child in self.children:
                child.close()
            os.close(result)
            os.close(word)
            self._settle(me)
            rank = self.make_rank(
                self.trial, me, self.job, tell, hear, self.heartbeats.beat
            )
            be_rank(rank, self.stderr, **how)
        os.close(tell)
        os.close(hear)
        self.children.append(Child(me, pid, result, word))

    def make_rank(self, *args):
        return Rank(*args)

    def _settle(self, me):
        """In the child: go where the rank is to be."""
        os.environ.update(self.environ)
        if not self.trial.hosts:
            return
        host = self.trial.hosts[me % self.trial.n]
        os.environ["UNISONO_HOST_ID"] = f"host{host}"
        if self.trial.kind == "namespaces":
            there = self.networks[host]
            os.environ["UNISONO_HOST_ID"] = there.identity
            enter_network(there._network, there.name)

    # --- one phase

    def phase(self, number, phase):
        self.await_all(self.living, "began", number)
        victims = [self.children[v] for v in phase.victims]
        breaks = phase.strike in BREAKS
        struck_at = self.strike(number, phase, victims)
        gone = set(phase.victims) if phase.strike in LOSSES else set()
        stays = phase.strike in ("partition",)
        expected = [r for r in self.living if stays or r not in gone]
        seen = self.await_all(expected, "worked", number)
        pids = {child.me: child.pid for child in self.children}
        across = bool(self.trial.hosts)
        too_long = self.healed_at is not None and outlasts(
            self.healed_at - struck_at, _SILENCE_S
        )
        problems, times = judge_work(
            phase, seen, struck_at, across, pids, too_long=too_long
        )
        self.outcome.problems += problems
        self.outcome.calls += sum(result.get("calls", 0) for result in seen.values())
        self.outcome.done.append((phase.strike, times))
        if breaks:
            self.shrink(number, phase, expected, gone)
        elif too_long and any(result["error"] for result in seen.values()):
            self._give_up("too_long_partition")
        else:
            self._heal(phase, victims)

    def _give_up(self, why):
        """End a trial that cannot go on as planned, for a reason that is no fault."""
        self.outcome.done.append((why, []))
        for child in self.children:
            child.signal(signal.SIGKILL)
        self.living = []

    def strike(self, number, phase, victims):
        """Bring the disturbance about; when that was."""
        self.healed_at = None
        time.sleep(phase.after_s)
        struck_at = time.monotonic()
        name = phase.strike
        if name in ("kill", "kill_two", "kill_at_failpoint"):
            struck_at = self._kill(phase, victims)
        elif name == "kill_in_shrink":
            struck_at = self._kill(phase, victims[:1])
            self.await_any(number, "worked")
            time.sleep(
                phase.turn * phase.after_s
            )  # before the world is settled, or after
            self._kill(phase, victims[1:])
        elif name in ("stop", "pause"):
            victims[0].signal(signal.SIGSTOP)
        elif name == "interrupt":
            self._interrupt(victims[0], number)
        elif name in ("partition", "short_partition"):
            others = set(self.trial.hosts) - set(phase.side)
            self.networks.partition(set(phase.side), others)
        if name in ("pause", "short_partition"):
            time.sleep(0.05 + 10 * phase.after_s)
            self._heal(phase, victims)
        if name == "short_partition":
            self.healed_at = time.monotonic()
        return struck_at

    def _kill(self, phase, victims):
        if phase.failpoint:
            self._passes(victims[0])
        now = time.monotonic()
        for victim in victims:
            if victim.poll() is not None:  # at its failpoint
                now = self.heartbeats.last(victim.me) or now
            victim.signal(signal.SIGKILL)
            self.outcome.kills += 1
        return now

    def _passes(self, victim):
        until = time.monotonic() + _PASSES_S
        while victim.poll() is None and time.monotonic() < until:
            self.listen(0.002)

    def _interrupt(self, victim, number):
        until = time.monotonic() + LIMIT_S
        while victim.event_of("worked", number) is None and victim.poll() is None:
            victim.signal(signal.SIGINT)
            self.listen(0.05)
            if time.monotonic() > until:
                raise Stuck(f"rank {victim.me} is not interrupted")

    def _heal(self, phase, victims):
        if phase.strike == "pause":
            victims[0].signal(signal.SIGCONT)
        if phase.strike == "short_partition":
            self.networks.heal()

    def shrink(self, number, phase, expected, gone):
        if not phase.prompt:
            for me in expected:
                self.children[me].go_on()
        left = [r for r in self.living if r not in gone]
        too_few = may_be_too_few(phase, self.living, gone, bool(self.trial.hosts))
        self._let_go(phase, gone)
        seen = self.await_all(left, "shrunk", number, or_gone=True)
        alone = [me for me, result in seen.items() if result["event"] == "gone"]
        if alone and not too_few:
            words = [f"rank {me}: {seen[me]['why']}" for me in alone]
            self.outcome.problems += words
        went_on = {me: result for me, result in seen.items() if me not in alone}
        self.living = [me for me in left if me not in alone]
        if not alone:
            self.outcome.problems += judge_world(went_on, self.living)
        if phase.grow and self.living and not self.outcome.problems:
            self._grow(number, phase)

    def _let_go(self, phase, gone):
        """Those who are not in the next world, but live, must leave by themselves."""
        if phase.strike in ("stop", "partition", "close"):
            if phase.strike == "stop":
                left = [r for r in self.living if r not in gone]
                number = self.trial.phases.index(phase)
                self.await_all(left, "shrunk", number, or_gone=True)
            for me in gone:
                self.children[me].signal(signal.SIGCONT)
                if phase.strike == "stop" and not phase.prompt:
                    self.children[me].go_on()
            self.await_all(list(gone), "ended")
            if phase.strike == "partition":
                self.networks.heal()
            for me in gone:
                self._check_end(self.children[me])

    def _grow(self, number, phase):
        born = len(self.children)
        newcomers = list(range(born, born + phase.grow))
        for me in newcomers:
            self.fork(me, first_phase=number + 1, joins=True)
        seen = self.await_all(self.living, "grown", number)
        seen |= self.await_all(newcomers, "connected")
        self.outcome.problems += judge_world(seen, self.living + newcomers)
        self.living = seen[newcomers[0]]["ids"]

    def _check_end(self, child):
        if left := child.event_of("ended")["left"]:
            self.outcome.problems.append(f"rank {child.me} keeps {', '.join(left)}")

    # --- listening

    def listen(self, seconds):
        pipes = {c.tells: c for c in self.children}
        waiting = select.poll()
        for fd in pipes:
            waiting.register(fd, select.POLLIN)
        for fd, what in waiting.poll(1000 * seconds):
            if what & select.POLLIN:
                pipes[fd].read()
            else:  # ended
                time.sleep(0.001)

    def await_all(self, ids, event, phase=None, *, or_gone=False):
        """Wait until these ranks have reported it; their reports, by id."""
        until = time.monotonic() + LIMIT_S
        found = {}
        while True:
            for me in ids:
                child = self.children[me]
                result = child.event_of(event, phase)
                if result is None and or_gone:
                    result = child.event_of("gone")
                if result is not None:
                    found[me] = result
                elif child.event_of("failed"):
                    raise Stuck(f"rank {me} failed: {child.event_of('failed')['text']}")
                elif child.poll() is not None and not self._reads(child):
                    raise Stuck(f"rank {me} ended by itself with {child.ended}")
            if len(found) == len(ids):
                return found
            if time.monotonic() > until:
                missing = sorted(set(ids) - set(found))
                raise Stuck(f"hang: ranks {missing} do not come to {event!r} {phase}")
            self.listen(0.05)

    def _reads(self, child):
        """Whether an ended child had reported something that was not yet read."""
        if not select.select([child.tells], [], [], 0)[0]:
            return False
        before = len(child.events)
        child.read()
        return len(child.events) > before

    def await_any(self, number, event):
        until = time.monotonic() + LIMIT_S
        while not any(c.event_of(event, number) for c in self.children):
            if time.monotonic() > until:
                raise Stuck(f"hang: nobody comes to {event!r} {number}")
            self.listen(0.005)

    # --- the end

    def _show_stacks(self):
        for child in self.children:
            child.signal(signal.SIGCONT)
            child.signal(signal.SIGUSR1)
        time.sleep(0.5)

    def _end(self):
        good = not self.outcome.problems
        until = time.monotonic() + (20 if good else 0)
        for child in self.children:
            left = max(0.0, until - time.monotonic())
            if (
                child.ended is None
                and not select.select([child.handle], [], [], left)[0]
            ):
                if good:
                    self.outcome.problems.append(f"rank {child.me} does not end")
                child.signal(signal.SIGKILL)
                select.select([child.handle], [], [])
            child.poll()
            child.close()
        self._reap()
        with os.fdopen(self.stderr, "rb") as file:
            file.seek(0)
            self.outcome.stderr = file.read().decode(errors="replace")

    def _reap(self):
        """Orphans: forks of killed ranks that still run."""
        holds = sum(p.strike == "fork_hold" for p in self.trial.phases)
        for pid in _orphans():
            holds -= 1
            if holds < 0:
                self.outcome.problems.append(f"process {pid} was left behind")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _orphans():
    """Children of this process that run; ended ones are waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [pid for pid in map(int, file.read().split()) if pid not in _SPARED]


_SPARED = set()


def spare_children():
    """Those who are there now are no ranks."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        _SPARED.update(map(int, file.read().split()))


def run_trial(trial, networks=None):
    """Run one trial from beginning to end."""
    calls.warm(trial.n, trial.hosts)
    if trial.kind == "threads":
        return threads.run_trial(trial, Outcome)
    return Running(trial, networks).run()

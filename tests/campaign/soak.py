"""One world for long, without disturbances: what a rank holds must not grow.

Ranks make random calls, groups come and go, and every so often each rank writes down
what it holds. Memory and descriptors must be flat: the slope is taken over the last
three quarters, since caches fill in the beginning.
"""

import gc
import json
import os
import sys
import time
from pathlib import Path

import numpy as np

import unisono
from campaign import driver
from campaign.calls import Desk
from campaign.leftovers import holding, left_after, memory
from campaign.plan import Phase, Trial
from campaign.rank import Rank

SAMPLES = 120
_MOST_GROWTH = {"memory": 8 << 20, "descriptors": 4, "threads": 1, "maps": 6}
"""What counts as flat, however long it takes: arenas fragment, segments are reused."""
_CHECK_EVERY = 20
_TIMEOUT_S = 120.0


def soak(minutes, seed, out, n):
    """Run, print, and fail if anything grows."""
    if out:
        Path(out).touch()  # it can be written: an hour later is too late to know
    driver.become_reaper()
    results = []
    failures = 0
    for hosts in ((), tuple(r % 2 for r in range(n))):
        found = _soaked(minutes / 2, seed, n, hosts)
        failures += bool(found["problems"])
        results.append(found)
        sys.stdout.write(_text(found) + "\n")
    if out:
        Path(out).write_text(json.dumps(results, indent=1) + "\n")
    return int(bool(failures))


def _soaked(minutes, seed, n, hosts):
    quiet = (Phase("quiet"),)
    kind = "hosts" if hosts else "processes"
    trial = Trial(seed, 0, kind, n, hosts, False, False, quiet)
    running = _Soaking(trial, 60 * minutes)
    outcome = running.run()
    samples = {
        c.me: [e for e in c.events if e["event"] == "sample"] for c in running.all
    }
    ranks = {me: _slopes(some) for me, some in samples.items() if len(some) > 8}
    problems = outcome.problems + [
        f"rank {me}: {name} grows by {found['growth']:.0f}"
        for me, one in ranks.items()
        for name, found in one.items()
        if found["growth"] > _MOST_GROWTH[name]
    ]
    turns = min((some[-1]["turns"] for some in samples.values() if some), default=0)
    return {
        "hosts": hosts,
        "minutes": minutes,
        "turns": turns,
        "ranks": ranks,
        "problems": problems,
        "stderr": outcome.stderr[-5000:],
    }


def _slopes(samples):
    """Over the last three quarters: the most at its end beyond the most before."""
    late = samples[len(samples) // 4 :]
    half = len(late) // 2
    at = np.array([s["at"] for s in late])
    found = {}
    for name in ("memory", "descriptors", "threads", "maps"):
        values = np.array([s[name] for s in late], float)
        slope = float(np.polyfit(at - at[0], values, 1)[0])
        found[name] = {
            "first": values[0],
            "last": values[-1],
            "most": values.max(),
            "growth": values[half:].max() - values[:half].max(),
            "per_hour": slope * 3600,
        }
    return found


def _text(found):
    where = f"{len(set(found['hosts']))} hosts" if found["hosts"] else "one host"
    lines = [f"soak        {where}, {found['minutes']:g} min, {found['turns']} turns"]
    for me, one in found["ranks"].items():
        facts = [
            f"{name} {v['first']:.0f} → {v['last']:.0f} ({v['per_hour']:+.1f}/h)"
            for name, v in one.items()
        ]
        lines.append(f"rank {me}      {', '.join(facts)}")
    lines += [*found["problems"], found["stderr"]] if found["problems"] else []
    return "\n".join(lines)


class _Soaking(driver.Running):
    """A trial whose ranks work until a time that all have."""

    def __init__(self, trial, seconds):
        super().__init__(trial)
        self.seconds = seconds
        self.all = self.children

    def make_rank(self, *args):
        return _SoakingRank(self.seconds, *args)

    def _run(self):
        for me in range(self.trial.n):
            self.fork(me)
        until = time.monotonic() + self.seconds
        while time.monotonic() < until and not any(c.poll() for c in self.children):
            self.listen(1.0)
        self.await_all(self.living, "ended")
        for me in self.living:
            self._check_end(self.children[me])


class _SoakingRank(Rank):
    def __init__(self, seconds, *args):
        super().__init__(*args)
        self.seconds = seconds

    def live(self, first_phase, joins):
        before = holding()
        comm = unisono.init(self.me, self.trial.n, job=self.job, timeout_s=_TIMEOUT_S)
        self.soak(comm)
        comm.close()
        del comm
        self.desk = None
        gc.collect()
        self.tell("ended", left=left_after(before))

    def soak(self, comm):
        began = time.monotonic()
        ids, turn, next_sample = list(range(comm.world_size)), 0, 0.0
        more = True
        while more:
            self.desk = Desk(comm, ids, f"{self.trial.seed}/{turn}")
            for number in range(_CHECK_EVERY):
                self.desk.turn(number)
            turn += _CHECK_EVERY
            self.close_groups()
            passed = time.monotonic() - began
            if passed > next_sample:
                next_sample += self.seconds / SAMPLES
                self.sample(turn)
            # All continue as long as rank 0 does.
            more = bool(comm.broadcast_object(passed < self.seconds))

    def sample(self, turn):
        gc.collect()
        held = holding()
        self.tell(
            "sample",
            turns=turn,
            memory=memory()[0],
            descriptors=sum(held.descriptors.values()),
            threads=held.threads,
            maps=sum(held.maps.values()),
            pid=os.getpid(),
        )

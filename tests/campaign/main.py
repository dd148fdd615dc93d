"""The command line: trials until the time is up, one trial again, or a soak."""

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import secrets
import sys
import time
from itertools import count
from pathlib import Path

from campaign import driver
from campaign.plan import draw
from campaign.report import Report, failure_text
from unisono.testing import Hosts, hosts_available

_MOST_HOSTS = 4
_ENDS_IN_S = 30.0


def main(argv=None):
    """Run what was asked for; 1 if anything was not as promised."""
    asked = _arguments().parse_args(argv)
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", UNISONO_TUNED="0")
    if asked.soak:
        from campaign.soak import soak

        return soak(asked.minutes, asked.seed or 0, asked.out, asked.ranks)
    if asked.trial is not None:
        report = campaign(asked.seed or 0, [asked.trial], None, asked.only)
    else:
        seed = secrets.randbits(32) if asked.seed is None else asked.seed
        report = _parallel(seed, asked)
    _say(report.text())
    if asked.out:
        Path(asked.out).write_text(json.dumps(report.as_data(), indent=1) + "\n")
    return int(bool(report.failures))


def _arguments():
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--trials", type=int, help="so many at most")
    parser.add_argument("--kills", type=int, help="until so many ranks were killed")
    parser.add_argument("--seed", type=int, help="the same trials again")
    parser.add_argument("--trial", type=int, help="this one alone")
    parser.add_argument("--jobs", type=int, default=2, help="trials at the same time")
    parser.add_argument("--only", nargs="*", default=(), help="these disturbances")
    parser.add_argument("--out", help="a file for the figures, as JSON")
    parser.add_argument("--soak", action="store_true", help="one world for long")
    parser.add_argument("--ranks", type=int, default=4, help="of the soak")
    return parser


def _say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parallel(seed, asked):
    """Several drivers, each with every so-manieth trial."""
    until = time.monotonic() + 60 * asked.minutes
    jobs = asked.jobs
    context = multiprocessing.get_context("fork")
    share = None if asked.kills is None else -(-asked.kills // jobs)
    pipes = []
    for job in range(jobs):
        mine, theirs = context.Pipe()
        numbers = count(job, jobs)
        if asked.trials is not None:
            numbers = range(job, asked.trials, jobs)
        process = context.Process(
            target=_driver, args=(theirs, seed, numbers, until, asked.only, share)
        )
        process.start()
        theirs.close()
        pipes.append((process, mine))
    report = Report(seed)
    for process, pipe in pipes:
        report.merge(pipe.recv())
        process.join()
    return report


def _driver(pipe, seed, numbers, until, only, kills):
    pipe.send(campaign(seed, numbers, until, only, kills))


def campaign(seed, numbers, until, only=(), kills=None):
    """Run trials of these numbers, till then; a report."""
    driver.become_reaper()
    report = Report(seed)
    with _networks() as networks:
        driver.spare_children()
        gc.collect()
        gc.freeze()
        for number in numbers:
            if until is not None and time.monotonic() > until:
                break
            if kills is not None and report.kills >= kills:
                break
            trial = draw(seed, number, namespaces=networks is not None, only=only)
            outcome = driver.run_trial(trial, networks)
            report.add(outcome)
            if outcome.problems:
                _say(failure_text(outcome))
    return report


@contextlib.contextmanager
def _networks():
    """Hosts in namespaces of the kernel, where they can be had."""
    if hosts_available():
        yield None
        return
    with Hosts(_MOST_HOSTS) as made:
        yield made

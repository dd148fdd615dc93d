"""A trial whose ranks are threads of one process, a child of the driver."""

import faulthandler
import gc
import json
import os
import select
import signal
import time
import traceback

from campaign.calls import Desk
from campaign.leftovers import holding_before, left_after
from campaign.plan import LONG_S
from unisono.testing import world

LIMIT_S = 120.0


class Raised(Exception):
    """What a rank raises on request."""


def run_trial(trial, outcome_of):
    outcome = outcome_of(trial)
    began = time.monotonic()
    result, tell = os.pipe()
    stderr = os.memfd_create("stderr")
    pid = os.fork()
    if pid == 0:
        _be_world(trial, tell, stderr)
    os.close(tell)
    text = b""
    while time.monotonic() < began + LIMIT_S:
        if not select.select([result], [], [], 1.0)[0]:
            continue
        data = os.read(result, 1 << 16)
        if not data:
            break
        text += data
    else:
        outcome.problems.append("hang: threads do not end")
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
    os.close(result)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if text:
        found = json.loads(text)
        outcome.problems += found["problems"]
        outcome.calls = found["calls"]
    if status:
        outcome.problems.append(f"the process ended with {status}")
    outcome.done = [(f"threads_{p.strike}", []) for p in trial.phases]
    with os.fdopen(stderr, "rb") as file:
        file.seek(0)
        outcome.stderr = file.read().decode(errors="replace")
    outcome.seconds = time.monotonic() - began
    return outcome


def _be_world(trial, tell, stderr):
    """Be all ranks; never returns."""
    status = 1
    try:
        os.dup2(stderr, 2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        faulthandler.enable(file=2)
        found = _life(trial)
        os.write(tell, json.dumps(found).encode())
        status = 0
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _life(trial):
    problems, calls = [], 0
    before = holding_before(trial)
    for number, phase in enumerate(trial.phases):
        tls = "mutual" if trial.tls else None
        with world(trial.n, hosts=trial.hosts, tls=tls, timeout_s=LONG_S) as made:
            errors = {}
            try:
                calls += sum(made.run(_work, trial, number, errors))
            except Raised:
                if phase.strike != "raise":
                    problems.append("raised for no reason")
            except Exception:
                problems.append(traceback.format_exc())
            problems += _misread(phase, errors, trial.n)
            gc.collect()  # what the last of them had dropped
        del made
    gc.collect()
    if left := left_after(before):
        problems.append(f"left: {', '.join(left)}")
    return {"problems": problems, "calls": calls}


def _misread(phase, errors, n):
    if phase.strike != "raise":
        return []
    return [
        f"rank {rank} names {named}: {error}: {message}"
        for rank, (error, message, named) in errors.items()
        if error != "PeerLost" or set(named) - {*phase.victims, *errors}
    ] + ["nobody noticed"] * (n > 1 and not errors)


def _work(comm, trial, number, errors):
    phase = trial.phases[number]
    key = f"{trial.seed}/{trial.number}/{number}"
    raises = phase.strike == "raise"
    # A receive from any rank waits as long as any rank lives.
    desk = Desk(
        comm, range(comm.world_size), key, large=trial.large, any_source=not raises
    )
    try:
        for turn in range(1000 if raises else phase.turns):
            if comm.rank in phase.victims and turn == phase.turn:
                raise Raised
            desk.turn(turn)
    except Raised:
        raise
    except Exception as error:
        ranks = getattr(error, "ranks", ())
        named = [desk.members[r] for r in ranks]
        errors[comm.rank] = type(error).__name__, str(error), named
        raise
    finally:
        desk.close_groups()
        gc.collect()  # those that were dropped
    return desk.calls

"""Stacks of threads that run while they are read."""

import subprocess
import sys
import threading

from unisono.runtime.observe.recorder import stacks

PROGRAM = """
import gc, sys, threading, time
from unisono.runtime.observe.recorder import stacks

sys.setswitchinterval(1e-6)
gc.set_threshold(20)
gc.callbacks.append(lambda *_: time.sleep(0))  # a collection lets other threads run
over = False

def numbers():
    while True:
        for i in range(30):
            i * i
        yield i

def taken(source, depth):
    return taken(source, depth - 1) if depth else next(source)

def others(a, b, c, d=1.5, *more):
    return [a, b, c, d, more] if a > 3 else others(a + 1, b, "x", 2.5, *more)

def work():
    source = numbers()
    while not over:
        for depth in (0, 3, 7):
            taken(source, depth)
        others(0, 1.5, 2)

threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(3000):
    assert len(stacks()) == 4
over = True
for thread in threads:
    thread.join()
"""


def test_stacks_of_running_threads_can_be_read_at_any_time():
    done = subprocess.run([sys.executable, "-c", PROGRAM], timeout=200, check=False)
    assert done.returncode == 0


def test_frames_are_those_of_the_thread_the_innermost_first():
    ready, over = threading.Event(), threading.Event()

    def waits():
        ready.set()
        over.wait(100)

    thread = threading.Thread(target=waits, name="waiting")
    thread.start()
    ready.wait(100)
    found = {stack["thread"]: stack for stack in stacks()}
    over.set()
    thread.join()
    waiting = found["waiting"]
    assert not waiting["main"]
    assert not waiting["current"]
    mine = [f for f in waiting["frames"] if f["filename"] == __file__]
    assert [f["name"].rpartition(".")[2] for f in mine] == ["waits"]
    assert waiting["frames"][0]["name"].endswith("wait")
    assert waiting["frames"][-1]["name"] == "Thread._bootstrap"
    here = next(stack for stack in found.values() if stack["current"])
    assert here["frames"][0]["name"] == "stacks"
    assert here["frames"][1]["filename"] == __file__
    assert 60 < here["frames"][1]["line"] < 70

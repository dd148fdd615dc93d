"""Functions on real ranks, quickly: forked from a process that has all imported.

    ends = forks.run(3, some_function, 1, "two")

calls some_function(rank, 1, "two") in three processes at once, where `rank` can connect
to the others, and tells how each ended. The function must stand in a file by its name;
its arguments and its value travel as JSON. Whoever hangs is shown with its stack. The
forking process reads the file once, so what it imports costs the ranks nothing. There
is one for all tests: the fixture `forks`.

No order between processes comes by itself: a rank that must be later than another
waits for its word (`rank.tell`, `rank.until`), not for a time.
"""

import atexit
import copy
import faulthandler
import functools
import importlib.util
import itertools
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

LIMIT_S = 180.0
ATTRIBUTES = ("ranks", "pids", "host", "collective", "seq", "calls", "missing")


@dataclass
class Rank:
    """What a function gets: its rank, and how to join the world."""

    number: int
    n: int
    job: str
    folder: str

    def init(self, **options):
        import unisono

        return unisono.init(self.number, self.n, job=self.job, **options)

    def tell(self, word):
        """Let the others know that this rank has come so far, and its pid."""
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as file:
            file.write(str(os.getpid()))
        os.rename(file.name, f"{self.folder}/{word} of {self.number}")

    def until(self, word, *ranks):
        """Wait until these ranks have reported it; their pids."""
        files = [Path(self.folder) / f"{word} of {number}" for number in ranks]
        for file in files:
            await_that(file.exists, file.name)
        return [int(file.read_text()) for file in files]


def await_that(true, what="it"):
    """Wait until something holds; the limit is there for what hangs."""
    until = time.monotonic() + LIMIT_S / 3
    while not true():
        assert time.monotonic() < until, f"{what} does not happen"
        time.sleep(0.005)


def until_broken(comm):
    """Wait until the others have aborted what this rank has not begun."""
    await_that(lambda: comm.core.native.failure()[0] != 0, "a failure")


@dataclass
class End:
    """How a rank ended: its value or its error, what it wrote, its exit status."""

    rank: int
    pid: int
    value: object = None
    error: str = ""
    message: str = ""
    status: int | None = None
    stderr: str = ""
    hung: bool = False
    attributes: dict = field(default_factory=dict)

    def __getattr__(self, name):
        try:
            return self.__dict__["attributes"][name]
        except KeyError:
            raise AttributeError(f"{name} of {self}") from None


def error_summary(error):
    """An error as it travels."""
    found = {a: getattr(error, a) for a in ATTRIBUTES if hasattr(error, a)}
    found = {a: list(v) if isinstance(v, tuple) else v for a, v in found.items()}
    return {"error": type(error).__name__, "message": str(error), "attributes": found}


def attempt(call, *args, **options):
    """What a call raises, as it travels; None if it raises nothing."""
    try:
        call(*args, **options)
    except BaseException as error:
        return error_summary(error)
    return None


def interrupt_after(seconds, number=signal.SIGINT):
    """Have the kernel send this process a signal in a while."""
    threading.Timer(seconds, os.kill, (os.getpid(), number)).start()


def interrupt_in_call(comm, number=signal.SIGINT, calls=1):
    """Have the kernel send this process a signal while so many calls are in flight."""

    def strike():
        def in_flight():
            return sum(not r["retired"] for r in comm.records()) >= calls

        await_that(in_flight, "a call")
        time.sleep(0.05)  # most often it is asleep by then
        os.kill(os.getpid(), number)

    threading.Thread(target=strike).start()


class Forks:
    """The process that forks, as seen from a test; `env` is for it and the ranks."""

    def __init__(self, limit_s=LIMIT_S, **env):
        self._limit_s = limit_s
        self._numbers = itertools.count(1)
        self._env = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"} | env
        self._of_ranks = {}

    def having(self, **env):
        """The same process; its ranks have more in their environment."""
        made = copy.copy(self)
        made._of_ranks = self._of_ranks | env
        return made

    def __enter__(self):
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | self._env,
        )
        return self

    def __exit__(self, *error):
        self._server.stdin.close()
        self._server.wait(4 * LIMIT_S)
        self._server.stdout.close()

    def run(self, n, function, *args, hosts=(), env=()):
        """Run function(rank, *args) as n processes; their ends by rank.

        `hosts` are the numbers of ranks on each of several hosts, which are emulated;
        `env` has for each rank what its environment has more than that.
        """
        code = function.__code__
        env = [self._of_ranks | more for more in env or [{}] * n]
        order = {"n": n, "file": code.co_filename, "name": function.__name__}
        order |= {"args": args, "limit_s": self._limit_s, "hosts": hosts, "env": env}
        order["number"] = next(self._numbers)
        line = json.dumps(order).encode() + b"\n"
        self._server.stdin.write(line)
        self._server.stdin.flush()
        answer = {"number": 0}
        while answer["number"] != order["number"]:  # before are those of tests cut off
            text = self._server.stdout.readline()
            assert text, "the forking process died"
            answer = json.loads(text)
        ends = [End(**end) for end in answer["ends"]]
        hung = [end for end in ends if end.hung]
        assert not hung, f"{function.__name__} hangs:\n" + "\n".join(
            f"rank {end.rank}:\n{end.stderr}" for end in ends
        )
        return ends


# --- the forking process


@functools.cache
def module_of(file):
    spec = importlib.util.spec_from_file_location(f"forked_{abs(hash(file))}", file)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(file))
    spec.loader.exec_module(module)
    return module


def child(order, rank, job, tell, stderr):
    os.dup2(stderr, 2)
    os.dup2(stderr, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    faulthandler.enable(file=2)
    function = getattr(module_of(order["file"]), order["name"])
    status = 0
    try:
        me = Rank(rank, order["n"], job, order["folder"])
        end = {"value": function(me, *order["args"])}
    except BaseException as error:
        traceback.print_exc()
        end, status = error_summary(error), 1
    os.write(tell, json.dumps(end).encode())
    os.close(tell)
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(status)


def rendezvous_options():
    """The environment of ranks of several hosts."""
    from unisono.runtime.world.address import free_port

    address = f"127.0.0.1:{free_port()}"
    return {"UNISONO_ADDRESS": address, "UNISONO_SECRET": secrets.token_hex(32)}


def run(order):
    folder = tempfile.mkdtemp()  # not removed by ranks as they end
    os.chmod(folder, 0o777)  # some become another user
    try:
        return run_in(folder, order)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_in(folder, order):
    order["folder"] = folder
    job = secrets.token_hex(8)
    ranks = []
    module_of(order["file"])
    common = rendezvous_options() if order["hosts"] else {}
    places = [h for h, count in enumerate(order["hosts"]) for _ in range(count)]
    for rank in range(order["n"]):
        hear, tell = os.pipe()
        stderr = os.memfd_create("stderr")
        pid = os.fork()
        if pid == 0:
            os.environ.update(common)
            if places:
                os.environ["UNISONO_HOST_ID"] = f"host{places[rank]}"
            os.environ.update(order["env"][rank])
            child(order, rank, job, tell, stderr)
        os.close(tell)
        ranks.append(
            SimpleNamespace(
                pid=pid, hear=hear, stderr=stderr, handle=os.pidfd_open(pid)
            )
        )
    deadline = time.monotonic() + order["limit_s"]
    return [finish(number, rank, deadline) for number, rank in enumerate(ranks)]


def finish(number, rank, deadline):
    text = b""
    while select.select([rank.hear], [], [], max(0, deadline - time.monotonic()))[0]:
        data = os.read(rank.hear, 1 << 16)
        if not data:
            break
        text += data
    left = max(0, deadline - time.monotonic())
    hung = not select.select([rank.handle], [], [], left)[0]
    if hung:
        os.kill(rank.pid, signal.SIGUSR1)
        time.sleep(0.3)
        os.kill(rank.pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
    with os.fdopen(rank.stderr, "rb") as file:
        file.seek(0)
        stderr = file.read().decode(errors="replace")
    os.close(rank.hear)
    os.close(rank.handle)
    end = json.loads(text) if text else {}
    common = {"rank": number, "pid": rank.pid, "status": status, "stderr": stderr}
    return common | {"hung": hung} | end


if __name__ == "__main__":
    import numpy  # noqa: F401

    import unisono.runtime.world.init
    import unisono.testing  # noqa: F401

    for line in sys.stdin.buffer:
        order = json.loads(line)
        answer = {"number": order["number"], "ends": run(order)}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
    os._exit(0)  # to take apart what was imported takes long, and is of no use

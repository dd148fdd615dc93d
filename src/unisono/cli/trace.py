"""`unisono trace`: record a run, show it, compare two, diagnose a failed one."""

from __future__ import annotations

import contextlib
import functools
import http.server
import inspect
import shutil
import sys
import tempfile
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from unisono.cli import run as run_verb
from unisono.cli._what_if import what_if
from unisono.cli.output import (
    print_json,
    print_text,
    refuse_no_folder,
    refuse_unwritable,
)
from unisono.errors import BadArgument
from unisono.runtime.observe.tracing import TRACE
from unisono.trace import ask, document, flights
from unisono.trace.document import read, read_parts
from unisono.trace.summary import differences, differences_text, summarise
from unisono.trace.why import why as judge
from unisono.units import format_bytes

VIEWER = "https://ui.perfetto.dev"
PORT = 9001  # the one that Perfetto's policy lets its page fetch from
_TAKE_A_VALUE = ("-o", "--output", "--keep")
_JSON = "--json"


def trace() -> int:
    """Record a run, look at it, compare two, and ask why one went wrong.

    Example: unisono trace run -n 4 train.py
    """
    raise BadArgument(
        "trace: expected run, open, summary, diff, why or what-if (see --help)"
    )


run = App(
    name="run",
    help="Run a script as unisono run does, and record what its ranks do.",
    help_flags=(),
    version_flags=(),
    end_of_options_delimiter="\0",  # none: no word contains it
)


@run.default
def _run(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> int:
    """Run a script as unisono run does, and record what its ranks do.

    Beside the options of `unisono run` may stand -o FILE (the trace, if not given
    run.pt.trace.json.gz), --keep DIR (keep the parts of the ranks there as well) and
    --json (the summary as one JSON object, the last line).

    Example: unisono trace run -n 4 -o step.json train.py
    """
    if words[:1] in (("--help",), ("-h",)):
        print(inspect.getdoc(_run))
        return 0
    ours, theirs = _split(words)
    output = Path(ours.get("-o") or ours.get("--output") or "run.pt.trace.json.gz")
    refuse_unwritable(output, makes_folders=True)
    keep = ours.get("--keep")
    folder = Path(keep or tempfile.mkdtemp(prefix="unisono-trace-"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadArgument(f"--keep {folder}: expected a folder with nothing in it")
        variable = f"{TRACE}={folder.absolute()}"
        with contextlib.ExitStack() as redirected:
            if _JSON in ours:  # what ranks print goes to stderr: stdout is JSON alone
                redirected.enter_context(contextlib.redirect_stdout(sys.stderr))
            code = run_verb.carry_out("--env", variable, *theirs)
        if code and not any(folder.iterdir()):
            return code  # it has printed why
        parts = read_parts(folder)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    doc = document.merge(parts)
    document.write(doc, output)
    if _JSON in ours:
        print_json(summarise(doc).as_dict())
    else:
        print_text(f"{summarise(doc)}\n\nwrote {output}: unisono trace open {output}")
    return code


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Our own options, which are before the script, and the arguments of `run`."""
    ours: dict[str, str] = {}
    theirs: list[str] = []
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        if word == "--" or word.startswith("-m"):
            return ours, [*theirs, word, *left]
        if word == _JSON:
            ours[word] = ""
        elif word not in _TAKE_A_VALUE:
            values = 1 if run_verb.takes_a_value(word) else 0
            theirs += [word, *left[:values]]
            del left[:values]
        elif left:
            ours[word] = left.pop(0)
        else:
            raise BadArgument(f"trace run {word}: expected a path after it")
    return ours, [*theirs, *left]


def summary(path: Path, /, *, json: bool = False) -> int:
    """Time per collective, exposed time, late ranks, and the distance to the floor.

    Example: unisono trace summary run.pt.trace.json.gz

    Parameters
    ----------
    path
        A trace, or the folder where ranks left their parts (UNISONO_TRACE).
    json
        Print one JSON object instead.
    """
    summary_ = summarise(read(path))
    if json:
        print_json(summary_.as_dict())
    else:
        print_text(summary_)
    return 0


def diff(before: Path, after: Path, /, *, json: bool = False) -> int:
    """What each kind of call takes in one trace and in another.

    Example: unisono trace diff ring.json tree.json

    Parameters
    ----------
    before
        A trace, or a folder of parts.
    after
        Another one.
    json
        Print one JSON object instead.
    """
    changes = differences(summarise(read(before)), summarise(read(after)))
    if json:
        print_json([{**vars(change), "ratio": change.ratio} for change in changes])
    else:
        print_text(differences_text(changes))
    return 0


def why(
    where: str = "",
    /,
    *,
    pickle: Path | None = None,
    json: bool = False,
) -> int:
    """What went wrong: which rank is the cause, in which call, and on which line.

    Reads the flight records that ranks leave (unisono run --records, or
    UNISONO_FLIGHT_DIR). Without a folder the ranks of a job that runs are asked: of
    the one with this process, which may be a rank or the launcher, or of the only one.

    Example: unisono trace why records

    Parameters
    ----------
    where
        The folder with the flight records, or the pid of a rank or of its launcher.
    pickle
        Also write them to this folder for PyTorch's analyser, torchfrtrace, which
        reads pickles: unpickle only what you have written yourself.
    json
        Print one JSON object instead.
    """
    refuse_no_folder("--pickle", pickle)
    is_pid = where.isascii() and where.isdigit() and not Path(where).exists()
    if where and not is_pid:
        return _why(Path(where), pickle, json=json)
    with tempfile.TemporaryDirectory() as scratch:
        flights.write(ask.records(int(where) if is_pid else None), Path(scratch))
        return _why(Path(scratch), pickle, json=json)


def _why(folder: Path, pickle: Path | None, *, json: bool) -> int:
    diagnosis = judge(flights.read(folder))
    if json:
        print_json(diagnosis.as_dict())
    else:
        print_text(diagnosis)
    if pickle is not None:
        files = flights.to_pickle(folder, pickle)
        message = f"wrote {len(files)} files: torchfrtrace {pickle} -p rank_"
        print(message, file=sys.stderr if json else sys.stdout)
    return 0


def open_(
    path: Path,
    /,
    *,
    port: Annotated[str, Parameter(metavar="PORT")] = str(PORT),
    once: bool = False,
    browser: bool = False,
    per_rank: Path | None = None,
    json: bool = False,
) -> int:
    """Print how to view a trace, and with --browser open it.

    Perfetto's page fetches the file from this machine, from a server that listens on
    loopback only, for this file alone, until it was fetched or Ctrl-C.

    Example: unisono trace open run.pt.trace.json.gz --browser

    Parameters
    ----------
    path
        A trace, or the folder where ranks left their parts.
    port
        Where to serve it; Perfetto's page may fetch from 9001.
    once
        With --browser: end after the first fetch.
    browser
        Serve the file and open Perfetto's page in a browser.
    per_rank
        Also write a file for each rank to this folder, for analysers such as HTA.
    json
        Print one JSON object instead.
    """
    refuse_no_folder("--per-rank", per_rank)
    doc = read(path)
    if path.is_dir():
        path = path / "merged.pt.trace.json.gz"
        document.write(doc, path)
    for rank, part in document.per_rank(doc).items() if per_rank else ():
        document.write(part, Path(str(per_rank)) / f"rank{rank}.pt.trace.json.gz")
    events, size = len(doc["traceEvents"]), path.stat().st_size
    if json:
        written = {
            "path": str(path),
            "events": events,
            "bytes": size,
            "viewer": VIEWER,
        }
        print_json(written)
    else:
        print(f"{path}: {events} events, {format_bytes(size)}")
    if not browser:
        if not json:
            print(f"open {VIEWER} and drop the file there; or use --browser")
        return 0
    return _serve(path, port, once=once)


def _serve(path: Path, port: str, *, once: bool) -> int:
    if not (port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise BadArgument(f"--port {port}: expected a number below 65536")
    handler = functools.partial(_OneFile, path)
    with http.server.HTTPServer(("127.0.0.1", int(port)), handler) as server:
        here = f"http://127.0.0.1:{server.server_port}/{path.name}"
        print(f"serving {here} (Ctrl-C ends it)", flush=True)
        if not webbrowser.open(f"{VIEWER}/#!/?url={here}"):
            print(f"no browser here; open {VIEWER}/#!/?url={here}", flush=True)
        server.handle_request()
        while not once:
            server.handle_request()
    return 0


class _OneFile(http.server.BaseHTTPRequestHandler):
    """Serves one file to Perfetto's page, and nothing else."""

    def __init__(self, path: Path, *rest: object) -> None:
        self._path = path
        super().__init__(*rest)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """The file, by its name."""
        if self.path != f"/{self._path.name}":
            self.send_error(404)
            return
        data = self._path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Access-Control-Allow-Origin", VIEWER)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing of it."""


open_.__name__ = "open"
BELOW = (run, open_, summary, diff, why, what_if)

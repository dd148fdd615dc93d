"""Pages as programs: every snippet of a page is run, in order, and its output compared.

    ```python               runs; all of a page's blocks share one namespace
    ```python title="f.py"  is written to f.py, for a command below to use
    ```pycon                runs, and prints what stands there
    ```console              lines after `$ ` are commands, the others their output

In what is expected, `...` stands for anything. Commands are unisono's own and run in
this process, but for `unisono run`, whose ranks print in any order. `; echo $?` after a
command shows its exit code; without it the code must be 0.
"""

import contextlib
import doctest
import io
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from unisono.cli import main

LIMIT_S = 120
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ECHO = "; echo $?"


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its language, its title if it has one, its text and line."""

    kind: str
    title: str
    text: str
    line: int


def snippets(text):
    """All fenced blocks of a page, in order."""
    for found in FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', found[2])
        line = text.count("\n", 0, found.start()) + 2
        yield Snippet(found[1], title[1] if title else "", found[3], line)


class Page:
    """A page at work in a folder of its own, which is the current one."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.names: dict = {"__name__": "__page__"}
        self.written: set[str] = set()
        self.ran = 0

    def run(self) -> int:
        """Run everything; how many snippets were run or used."""
        for snippet in snippets(self.file.read_text(encoding="utf-8")):
            where = f"{self.file.name}:{snippet.line}"
            if snippet.kind == "python" and snippet.title:
                Path(snippet.title).write_text(snippet.text, encoding="utf-8")
                self.written.add(snippet.title)
            elif snippet.kind == "python":
                # Lines keep their numbers, so that a traceback points into the page.
                padded = "\n" * (snippet.line - 1) + snippet.text
                exec(compile(padded, str(self.file), "exec"), self.names)
            elif snippet.kind == "pycon":
                self._session(snippet, where)
            elif snippet.kind == "console":
                self._commands(snippet, where)
            else:
                continue
            self.ran += 1
        assert not self.written, f"{self.file.name}: nobody runs {self.written}"
        return self.ran

    def _session(self, snippet: Snippet, where: str) -> None:
        parser = doctest.DocTestParser()
        test = parser.get_doctest(snippet.text, self.names, where, str(self.file), 0)
        assert test.examples, f"{where}: no >>> in it"
        said = io.StringIO()
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test, out=said.write, clear_globs=False)
        assert not runner.failures, said.getvalue()
        self.names = test.globs

    def _commands(self, snippet: Snippet, where: str) -> None:
        first, *parts = re.split(r"^\$ ", snippet.text, flags=re.MULTILINE)
        assert parts, f"{where}: no $ in it"
        assert not first.strip(), f"{where}: begins with {first!r}"
        for part in parts:
            command, _, expected = part.partition("\n")
            self._command(command, expected, where)

    def _command(self, command: str, expected: str, where: str) -> None:
        shows_code = command.endswith(ECHO)
        words = shlex.split(command.removesuffix(ECHO))
        assert words[0] == "unisono", f"{where}: cannot run {command!r}"
        self.written -= {word.partition(":")[0] for word in words}
        code, out = apart(words) if words[1] == "run" else here(words)
        if shows_code:
            out += f"{code}\n"
        else:
            assert code == 0, f"{where}: $ {command}: exit code {code}\n{out}"
        if words[1] == "run":
            expected = "".join(sorted(expected.splitlines(keepends=True)))
        same = doctest.OutputChecker().check_output
        assert not expected or same(expected, out, doctest.ELLIPSIS), (
            f"{where}: $ {command}\nexpected:\n{expected}\ngot:\n{out}"
        )


def here(words):
    """A command of ours, in this process: its exit code and all it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words[1:])
    return code, said.getvalue()


def apart(words):
    """The same in a process of its own: what it prints, sorted, and if it fails why.

    What it says on standard error besides (a rank is late) depends on the machine.
    """
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    said = "".join(sorted(done.stdout.splitlines(keepends=True)))
    return done.returncode, said + (done.stderr if done.returncode else "")

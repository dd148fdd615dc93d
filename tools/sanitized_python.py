"""Make the interpreter of a virtual environment one that has sanitizers in it.

    .venv-tsan/bin/python tools/sanitized_python.py thread

The library of a sanitizer must be loaded before all others. LD_PRELOAD would do that
for every program that the interpreter starts as well, and some do not start so: no
shell does with gcc 12's libtsan. So the interpreter of the environment is replaced by
one that is linked with the library, which only it and what is started as
`sys.executable` then have.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

PROGRAM = """
#include <Python.h>
int main(int argc, char **argv) { return Py_BytesMain(argc, argv); }
"""


def link_options() -> list[str]:
    """What a program that embeds this Python is linked with."""

    def told(name: str) -> str:
        return str(sysconfig.get_config_var(name) or "")

    if told("Py_ENABLE_SHARED") == "1":
        folder = told("LIBDIR")
        options = [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    else:  # then extension modules find the API in the program
        options = [f"-L{told('LIBPL')}", *shlex.split(told("LINKFORSHARED"))]
    version = told("LDVERSION") or sysconfig.get_python_version()
    return [
        *(*options, f"-lpython{version}"),
        *shlex.split(f"{told('LIBS')} {told('SYSLIBS')}"),
    ]


def make(sanitizers: str, program: Path) -> None:
    """Compile it, and put it where `program` is.

    With libstdc++, needed or not: libasan looks for it when the process starts, and
    ends the process at the first throw if it was loaded later.
    """
    made = program.with_name("python.new")
    command = [
        *shlex.split(os.environ.get("CXX", "c++")),
        *(f"-fsanitize={sanitizers}", "-x", "c++", "-", "-x", "none", "-o", str(made)),
        *("-I", sysconfig.get_path("include"), "-Wl,--no-as-needed", *link_options()),
    ]
    subprocess.run(command, input=PROGRAM, text=True, check=True)
    made.replace(program)


if __name__ == "__main__":
    _, kinds = sys.argv
    # Other names of the interpreter are links, to this one or to what it was a link to.
    ours = Path(sys.executable).with_name("python")
    make(kinds, ours)
    for name in ("python3", f"python{sysconfig.get_python_version()}"):
        link = ours.with_name(name)
        link.unlink(missing_ok=True)
        link.symlink_to(ours.name)

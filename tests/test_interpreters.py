"""Sub-interpreters and free-threaded Python."""

import subprocess
import sys
import sysconfig
from importlib import import_module

import pytest

NEW = sys.version_info >= (3, 13)
interpreters = import_module("_interpreters" if NEW else "_xxsubinterpreters")


def test_sub_interpreter_is_refused_in_words():
    other = interpreters.create()
    try:
        if NEW:
            raised = interpreters.exec(other, "import unisono")
            said = f"{raised.type.__name__}: {raised.msg}"
        else:
            with pytest.raises(interpreters.RunFailedError) as failed:
                interpreters.run_string(other, "import unisono")
            said = str(failed.value)
    finally:
        interpreters.destroy(other)
    assert "ImportError" in said
    assert "unisono cannot be used in a sub-interpreter" in said
    assert "unisono.spawn" in said


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="for free-threaded Python"
)
def test_native_core_leaves_the_interpreter_without_its_lock():
    code = "import sys, unisono._native; print(sys._is_gil_enabled())"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False"], done.stderr

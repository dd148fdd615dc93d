"""Where hosts cannot be created: the reason is reported, and tests skip with it."""

import shutil
import subprocess
import sys

import pytest

from unisono.errors import BadArgument, UsageError
from unisono.testing import Hosts, hosts_available, needs_hosts

UNPRIVILEGED = """
import os
from unisono.testing.hosts import hosts_available
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
print(hosts_available())
"""


@pytest.fixture
def without_tools(monkeypatch):
    hosts_available.cache_clear()
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    yield
    hosts_available.cache_clear()


def test_missing_tools_are_named(without_tools):
    assert hosts_available() == "needs ip and tc, of the package iproute2"
    with pytest.raises(UsageError, match="Hosts: needs ip and tc"):
        Hosts(2).__enter__()
    mark = needs_hosts()
    assert mark.name == "skipif"
    assert mark.args == (True,)
    assert mark.kwargs["reason"] == hosts_available()


def test_error_without_privileges_asks_for_root():
    if not (shutil.which("ip") and shutil.which("tc")):
        pytest.skip("needs ip and tc")
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("needs root: unshare: "), done


def test_queue_too_short_for_one_stream_is_refused():
    with pytest.raises(BadArgument, match="queue = 1K: expected 256K or more"):
        Hosts(2, queue="1K")

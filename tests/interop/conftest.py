"""Ranks with torch: forked from one process, which has imported it."""

import os
import subprocess
import sys

import pytest
from adapter_cache import CACHE
from scripted_ranks import PRELUDE, environment, scripted

from forked import Forks

LIMIT_S = 120.0


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """The forking process; ranks put their stores into a folder of the session.

    They have the adapter in Python, whatever is built on this machine: the other has
    tests of its own, and torch does some things for it before it is called.
    """
    where = tmp_path_factory.mktemp("stores")
    result = {"UNISONO_TEST_STORES": str(where), "UNISONO_TORCH_ADAPTER": "python"}
    with Forks(LIMIT_S, **result) as made:
        yield made


@pytest.fixture(scope="session")
def built():
    """The compiled adapter; made once, which takes half a minute."""
    from unisono.interop.torch import compiled

    if compiled.compiler() is None:
        pytest.skip("there is no C++ compiler")
    code = "from unisono.interop.torch import compiled; compiled.load()"
    env = os.environ | {"XDG_CACHE_HOME": str(CACHE)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=280)


@pytest.fixture(params=["python", "compiled"])
def adapter(request):
    """Each of the two by its name, for ranks that look for it in `CACHE`."""
    if request.param == "compiled":
        request.getfixturevalue("built")
    return request.param


@pytest.fixture(params=["python", "compiled"])
def either_adapter(request):
    """Each of the two; the compiled one is built for the first test that needs it."""
    if request.param == "compiled":
        from unisono.interop.torch import compiled

        if compiled.compiler() is None:
            pytest.skip("there is no C++ compiler")
        compiled.build()
    return request.param


@pytest.fixture
def ranks(forks):
    """ranks(n, function, *args): what n ranks returned, all of which ended well.

    `hosts` are the numbers of ranks on each of several hosts.
    """

    def run(n, function, *args, hosts=()):
        ends = forks.run(n, function, *args, hosts=hosts)
        bad = [end for end in ends if end.status != 0]
        assert not bad, "\n".join(
            f"rank {end.rank} ended with {end.status}:\n{end.stderr}" for end in bad
        )
        return [end.value for end in ends]

    return run


@pytest.fixture
def across(ranks):
    """across(sizes, function, *args): the same for ranks on hosts of these sizes."""
    return lambda sizes, *what: ranks(sum(sizes), *what, hosts=sizes)


@pytest.fixture
def scripts(forks, tmp_path):
    """scripts(adapter, code): what each of two ranks says, which are forked."""

    def run(adapter, code, dies=()):
        common = environment(tmp_path, adapter, 2)
        env = [common | {"RANK": str(r)} for r in range(2)]
        ends = forks.run(2, scripted, PRELUDE + code, env=env)
        for end in ends:
            assert end.rank in dies or end.status == 0, end.stderr
            assert "leaked" not in end.stderr
        return [end.value for end in ends]

    return run

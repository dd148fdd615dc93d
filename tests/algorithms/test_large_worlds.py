"""A thousand ranks are verified one and all, and ten thousand within a gigabyte."""

import subprocess
import sys

import pytest

from unisono import schedule
from unisono.algorithms import library

GIBIBYTE = 1 << 30
# An algorithm's two worlds stand far apart, so that two workers share the longest.
WORLDS = [(*key, n) for n in (1000, 1024) for key in library()]
# It is the same at any n, and by far the longest.
WORLDS.remove(("all_to_all", "ring", 1024))
QUICK = ("tree", "hierarchical")

# The peak of this program alone: what ru_maxrss tells on Linux counts, across fork and
# exec, the memory of the process that started it.
VERIFY_AND_TELL_THE_PEAK = """
import pathlib, resource, sys
from unisono import schedule

proof = schedule("all_reduce", "ring", 10_240).verify()
assert proof.transfers == 2 * 10_240 * 10_239
status = pathlib.Path("/proc/self/status")
if status.exists():
    line = next(s for s in status.read_text().splitlines() if s.startswith("VmHWM:"))
    sys.stdout.write(str(int(line.split()[1]) * 1024))
else:
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(str(peak * unit))
"""


@pytest.mark.cases(2)
@pytest.mark.timeout(600)
@pytest.mark.quick(n=[1000], name=QUICK)
@pytest.mark.parametrize(("what", "name", "n"), WORLDS)
def test_every_algorithm_keeps_its_contract_among_a_thousand_ranks(what, name, n):
    proof = schedule(what, name, n).verify()
    assert proof.transfers >= n - 1


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform == "win32", reason="no measure of the peak there")
def test_ring_of_ten_thousand_ranks_is_verified_within_a_gigabyte():
    ran = subprocess.run(
        [sys.executable, "-c", VERIFY_AND_TELL_THE_PEAK],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert 0 < int(ran.stdout) < GIBIBYTE

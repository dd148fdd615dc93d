"""Some of the algorithms between hosts that are network namespaces, to the bit.

`python benchmarks/conformance_hosts.py` runs all of them, on many more placements.
"""

import pytest
from test_conformance import ONE_OF_EACH

from conformance import check, every_algorithm, every_reduction, perform
from unisono.testing import Hosts, needs_hosts, world_across

pytestmark = [pytest.mark.timeout(120), needs_hosts()]


@pytest.fixture(scope="module")
def hosts():
    with Hosts(4) as made:
        yield made


@pytest.mark.sweep
@pytest.mark.quick(ranks=[(1, 1)])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 3, 1), (1, 2, 1, 1)], ids=str)
def test_algorithms_between_namespaces_are_correct(ranks, hosts):
    n = sum(ranks)
    cases = every_algorithm(n, [1, n + 1, 40_001], ONE_OF_EACH)
    if n == 2:
        cases += every_reduction(n)
    check(cases, world_across(ranks, on=hosts).run(perform, cases))

"""Which transport a world gets, and which combinations are refused."""

import pytest

from unisono.errors import BadArgument
from unisono.runtime.world.init import _CHANGES
from unisono.runtime.world.membership import Membership


def chosen(**options):
    return Membership("job", _CHANGES, **options)._transport(2).name


def test_addresses_decide_unless_a_fabric_is_named():
    assert chosen() == "shm"
    assert chosen(across=True) == "tcp"
    assert chosen(across=True, fabric="tcp") == "tcp"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fabric": "tcp"}, "'tcp' connects ranks by an address, and there is none"),
        ({"fabric": "shm", "across": True}, "takes no address"),
        ({"fabric": "shm", "tls": True}, "'shm' does not encrypt"),
    ],
)
def test_combinations_that_cannot_work_are_refused(options, why):
    with pytest.raises(BadArgument, match=why):
        chosen(**options)

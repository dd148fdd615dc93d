"""Options by the names of other libraries: errors that have the right one."""

import pytest

import unisono
from unisono.errors import BadArgument, UnknownOption
from unisono.runtime.call.options import CallOptions
from unisono.runtime.call.reductions import as_reduction


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("timeout", "timeout=: there is no such option; timeout_s= is meant"),
        ("algo", "algorithm= is meant"),
        ("algoritm", "algorithm= is meant"),
        ("src", "the rank that has or gets the data is root="),
        ("group", "comm.split"),
        ("zzz", "there are algorithm=, async_op="),
    ],
)
def test_wrong_option_is_an_error_with_the_right_name(given, message):
    with pytest.raises(UnknownOption) as error:
        CallOptions(**{given: 1})
    assert message in str(error.value)
    assert isinstance(error.value, TypeError)


def test_calls_name_the_option_that_is_meant():
    comm = unisono.init()
    with pytest.raises(UnknownOption, match="timeout_s= is meant"):
        comm.barrier(timeout=3)
    comm.close()
    with pytest.raises(UnknownOption, match="timeout_s= is meant"):
        unisono.init(timeout=3)
    with pytest.raises(UnknownOption, match="n= is meant"):
        unisono.spawn(print, nprocs=2)


def test_reductions_of_other_libraries_have_our_name():
    for given, meant in {
        "add": "sum",
        "ADD": "sum",
        "SUM": "sum",
        "average": "mean",
        "mul": "prod",
        "maximum": "max",
    }.items():
        with pytest.raises(BadArgument, match=f"op='{meant}' is meant"):
            as_reduction(given)
    with pytest.raises(BadArgument, match="nearest"):
        as_reduction("nonsense")


def test_help_of_every_collective_lists_its_options():
    for name in ("all_reduce", "broadcast", "barrier", "send", "recv", "scan"):
        text = getattr(unisono.Communicator, name).__doc__
        for option in CallOptions._fields:
            assert option == "coded" or f"\n    {option} " in text
    assert "Options:" not in unisono.Communicator.split.__doc__

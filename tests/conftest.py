"""What tests of several folders have in common can be imported by all of them."""

import gc
import os
import signal
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

for _folder in ("support", "algorithms", "runtime", "schedule"):
    sys.path.append(str(Path(__file__).parent / _folder))

# The interpreters that tests start would all compile what they import, which takes as
# long as to import it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is chosen must not hang on what somebody has tuned on this machine.
os.environ["UNISONO_TUNED"] = "0"
# Nor on how fast the links are while tests run.
os.environ["UNISONO_PROBE"] = "0"
# Nor does a test build torch's compiled adapter in the background.
os.environ["UNISONO_TORCH_ADAPTER"] = "python"

# Who is started in the background may ignore Ctrl-C, and so would all it starts: but
# there are tests of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test passes or fails by a clock, those of made-up examples neither.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")


def pytest_configure(config):
    import rewriting  # from support
    import worker_crashes

    worker_crashes.register(config)
    rewriting.rewrite_share(config, Path(__file__).parent)


def is_quick(item, given):
    """Whether its parameters are among those that its markers `quick` name."""
    for node, marker in item.iter_markers_with_node("quick"):
        for name, values in marker.kwargs.items():
            if name in given and given[name] not in values:
                return False
            if name not in given and node is item:  # a file's may suit others in it
                raise pytest.UsageError(f"{item.nodeid} has no parameter {name!r}")
    return True


def with_fewer_examples(test):
    """Have Hypothesis make a quarter of the examples, but ten at least if it may.

    Settings have no public way to be changed after the decorator.
    """
    given = test._hypothesis_internal_use_settings or settings.default
    fewer = max(given.max_examples // 4, min(10, given.max_examples))
    test._hypothesis_internal_use_settings = settings(given, max_examples=fewer)


DEAR_FIXTURES = {"docs", "built"}
"""The site, the distributions: to make them takes ten seconds."""

MOST_CASES = 6
"""Of one function, in the quick suite, where no marker tells it."""


def cases_of_functions(items):
    """The quick tests of each function, in order."""
    found = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is None:
            found[item.nodeid.partition("[")[0]].append(item)
    return found.values()


def evenly_spread(function, number):
    """Which of the cases of a function are not sweeps."""
    marker = function.get_closest_marker("cases")
    most = MOST_CASES if marker is None else marker.args[0]
    step = max(1, number / most)
    return {int(i * step) for i in range(most)}


def thin_out(items):
    """Make sweeps of the most that repeat each other."""
    seen = Counter()
    for item in items:
        thinned = item.get_closest_marker("one_in")
        if thinned is None or item.get_closest_marker("sweep"):
            continue
        if seen[item.path] % thinned.args[0]:
            item.add_marker(pytest.mark.sweep)
        seen[item.path] += 1
    for cases in cases_of_functions(items):
        kept = evenly_spread(cases[0], len(cases))
        for i, item in enumerate(cases):
            if i not in kept:
                item.add_marker(pytest.mark.sweep)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc):
    """Make no tests of what would be sweeps, where these are not run.

    They are three of four, and to make them takes each worker seconds. There is no
    public way to take parameters back. Who names tests with parameters may mean one.
    """
    result = yield
    option, function = metafunc.config.option, metafunc.definition
    named = option.keyword or any("[" in name for name in metafunc.config.args)
    known = hasattr(metafunc, "_calls")
    if option.markexpr == "not sweep" and not named and known:
        cases = [
            case
            for case in metafunc._calls
            if is_quick(function, case.params)
            and all(mark.name != "sweep" for mark in case.marks)
        ]
        if function.get_closest_marker("one_in") is None:  # it counts those of a file
            kept = evenly_spread(function, len(cases))
            cases = [case for i, case in enumerate(cases) if i in kept]
        metafunc._calls = cases or metafunc._calls[:1]
    return result


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config, items):
    """Make a sweep of every test with parameters that are not among the quick ones.

    So are all that need a dear fixture. Of a file's with the marker `one_in(k)`, all
    but every k-th are one; and of one function's, all but a few that are evenly spread:
    six, or `cases(k)`. With `-k` neither is.

    Without sweeps, Hypothesis makes fewer examples; `make test-all` has it make all.
    """
    for item in items:
        dear = DEAR_FIXTURES.intersection(item.fixturenames)
        given = item.callspec.params if hasattr(item, "callspec") else {}
        if dear or not is_quick(item, given):
            item.add_marker(pytest.mark.sweep)
    if not config.option.keyword:  # who chooses by name wants them all
        thin_out(items)
    if config.option.markexpr == "not sweep":
        # The marker of Hypothesis is given later.
        tests = {item.obj for item in items if hasattr(item, "obj")}
        for test in tests:
            if getattr(test, "is_hypothesis_test", False):
                with_fewer_examples(test)


def pytest_collection_finish():
    """Let the garbage collector pass over modules and tests, which remain for good.

    There are so many of them that to look through them takes longer than most tests.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Give workers what belongs together, the longest first."""
    from distribution import Together  # from support

    return Together(config, log)


@pytest.fixture(scope="session")
def forks():
    """The process that ranks which are processes are forked from."""
    from forked import Forks  # from support

    with Forks() as made:
        yield made

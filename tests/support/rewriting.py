"""Asserts that pytest rewrites: each file once, not once in every worker of xdist.

Before the first run of tests no file has been rewritten, which takes longer than to
import it. All workers would begin with the same files. So each begins with a share of
its own, and finds what the others have left in the cache.
"""

from pathlib import Path

from _pytest.assertion import rewrite  # there is no public way

_PRIVATE = (
    "get_cache_dir",
    "try_makedirs",
    "_rewrite_test",
    "_write_pyc",
    "assertstate_key",
    "PYC_TAIL",
)
"""What a version of pytest may lack: then every worker rewrites what it imports."""


def rewrite_share(config, folder):
    """Rewrite this worker's share of the test files in a folder, if it is a worker."""
    mine = getattr(config, "workerinput", None)
    if mine is None or any(not hasattr(rewrite, name) for name in _PRIVATE):
        return
    number, workers = int(mine["workerid"].removeprefix("gw")), mine["workercount"]
    for file in sorted(Path(folder).rglob("test_*.py"))[number % workers :: workers]:
        cache = rewrite.get_cache_dir(file)
        pyc = cache / (file.stem + rewrite.PYC_TAIL)
        if not pyc.exists() and rewrite.try_makedirs(cache):
            found, code = rewrite._rewrite_test(file, config)
            state = config.stash[rewrite.assertstate_key]
            rewrite._write_pyc(state, code, found, pyc)

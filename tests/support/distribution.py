"""Which tests one worker of xdist runs for all, and which are begun first."""

from collections import OrderedDict
from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# What is dear to make (a site, a module, a browser, a run of torch's suite) one worker
# makes for all; another would make it again, or wait for it.
FILES = {
    "test_pages.py": "site",
    "test_links.py": "site",
    "test_reference.py": "site",
    "test_wheel.py": "wheel",
    "test_explainer.py": "browser",
    "test_notebook.py": "browser",
    "test_studio.py": "browser",
    "test_top_page.py": "browser",
    "test_site_theme.py": "browser",
    "test_torch_suite.py": "suite",
    "test_model.py": "model",
}

FOLDERS = {"interop": "interop", "parallel": "parallel"}
"""Likewise the process that has imported all of torch, from which ranks are forked."""

SECONDS = {
    "test_conformance_suite.py": 2.0,
    "test_bad_networks.py": 2.0,
    "campaign": 1.5,
    "test_across_hosts.py": 1.2,
    "test_encrypted.py": 1.2,
    "test_conformance.py": 1.2,
    "test_shrink_and_grow.py": 1.0,
    "test_link_probe.py": 0.8,
    "test_kill_trials.py": 0.8,
    "test_spawn.py": 0.8,
    "test_remote.py": 0.8,
    "test_across.py": 0.7,
    "test_bench_devices.py": 0.6,
    "test_shared_memory.py": 0.6,
    "test_plane_failures.py": 0.6,
    "test_between_hosts.py": 0.6,
    "test_between_hosts_failures.py": 0.5,
    "test_run_hosts.py": 0.5,
    "test_trace_verb.py": 0.4,
    "test_package.py": 0.4,
    "interop": 0.3,
    "launch": 0.2,
    "cli": 0.18,
    "parallel": 0.12,
    "runtime": 0.12,
    "devices": 0.12,
    "testing": 0.12,
    "transports": 0.09,
}
"""About how long a test of a file or a folder takes, where that is long."""


def place_of(nodeid):
    """The name of a test's file, and of its folder in tests/."""
    file = PurePosixPath(nodeid.partition("::")[0])
    return file.name, file.parts[min(1, len(file.parts) - 1)]


def scope_of(nodeid):
    """What a worker is given as a whole: a function with its parameters, or more."""
    file, folder = place_of(nodeid)
    return FILES.get(file) or FOLDERS.get(folder) or nodeid.partition("[")[0]


def seconds_of(nodeids):
    """About how long these tests take."""
    places = map(place_of, nodeids)
    return sum(SECONDS.get(file, SECONDS.get(folder, 0.03)) for file, folder in places)


class Together(LoadScopeScheduling):
    """Gives a worker what belongs together, the longest first.

    So at the end no worker is alone with a long test. Whenever a test ends, the base
    class counts all that a worker was given: what is done is taken away, or that takes
    long in the end.
    """

    def _split_scope(self, nodeid):
        return scope_of(nodeid)

    def _assign_work_unit(self, node):
        if not any(self.assigned_work.values()):  # nothing is given yet
            scopes = self.workqueue.items()
            ordered = sorted(scopes, key=lambda scope: -seconds_of(scope[1]))
            self.workqueue = OrderedDict(ordered)
        super()._assign_work_unit(node)

    def _reschedule(self, node):
        # Of two workers that replace others, one asks for work for both: then the other
        # may not know its tests yet.
        if node in self.registered_collections:
            super()._reschedule(node)

    def mark_test_complete(self, node, item_index, duration=0):
        super().mark_test_complete(node, item_index, duration)
        given = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(given[scope].values()):
            del given[scope]

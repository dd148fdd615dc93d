"""Which files this process has open, to see what a test leaves behind.

Other tests ran in the same process, and what they dropped may be closed meanwhile: so a
test asks what is open now and was not before, and never for the same number.
"""

import gc
import os


def open_files():
    """Descriptors, each with what it is; `open_files() - before` was left open."""
    gc.collect()
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except FileNotFoundError:  # the one that listed them
            continue
    return found

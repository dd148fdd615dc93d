"""Values that are made once for each key, also if several threads ask at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class OncePerKey(Generic[T]):
    """Threads that want the same value wait for the first, and for no other."""

    def __init__(self) -> None:
        """Without any value; a forked child gets new locks."""
        self._guard = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self.made: dict[Hashable, T] = {}
        os.register_at_fork(after_in_child=self._renew_locks)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, which `make` makes if it is not there."""
        if key in self.made:
            return self.made[key]
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self.made:
                self.made[key] = make()
            return self.made[key]

    def _renew_locks(self) -> None:
        """A child does not have the threads that hold them."""
        self._guard, self._locks = threading.Lock(), {}

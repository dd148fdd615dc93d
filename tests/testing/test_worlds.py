"""Ranks as threads: what an interrupt ends."""

import signal
import threading

import pytest

from unisono.testing import world, worlds


def test_interrupt_ends_a_run_whose_ranks_do_not_end(monkeypatch):
    monkeypatch.setattr(worlds, "_GRACE_S", 0.1)
    over = threading.Event()

    def loops(comm):
        if comm.rank == 0:
            signal.raise_signal(signal.SIGINT)
        over.wait(100)

    with world(2) as w, pytest.raises(KeyboardInterrupt):
        w.run(loops)
    over.set()

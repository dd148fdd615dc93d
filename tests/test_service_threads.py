"""Threads of the library start, or say that they cannot."""

import errno
import threading

import pytest

from unisono import service_threads
from unisono.service_threads import ServiceThread


class NeverBegins(ServiceThread):
    """As with too little memory: it ends before its first statement."""

    def _bootstrap(self):
        pass


def test_thread_runs():
    ran = []
    thread = ServiceThread(target=ran.append, args=(1,), daemon=True)
    thread.start()
    thread.join()
    assert ran == [1]


def test_thread_that_does_not_begin_is_an_error(monkeypatch):
    monkeypatch.setattr(service_threads, "_WAIT_S", 0.001)
    with pytest.raises(OSError, match="too little memory") as caught:
        NeverBegins(daemon=True).start()
    assert caught.value.errno == errno.ENOMEM


def test_too_many_threads_are_an_error(monkeypatch):
    def refused(*args, **options):
        raise RuntimeError("can't start new thread")

    name = (
        "_start_joinable_thread"
        if hasattr(threading, "_start_joinable_thread")
        else "_start_new_thread"
    )
    monkeypatch.setattr(threading, name, refused)
    with pytest.raises(OSError, match="can't start new thread") as caught:
        ServiceThread(daemon=True).start()
    assert caught.value.errno == errno.EAGAIN

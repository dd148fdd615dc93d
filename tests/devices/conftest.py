"""The emulated driver, for tests of this folder."""

import pytest

import emulated as cuda


@pytest.fixture
def driver():
    """The context of device 0, destroyed after the test with all that it has."""
    context = cuda.initialize()
    yield context
    cuda.release()

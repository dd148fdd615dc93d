"""One browser for all tests that need one; without one they are skipped."""

import chromium
import pytest


@pytest.fixture(scope="session")
def browser():
    if not chromium.find():
        pytest.skip("no chromium: apt-get install chromium, or `make browser`")
    try:
        made = chromium.Browser()
    except chromium.DoesNotRun as why:
        pytest.skip(f"chromium does not run here: {why}")
    yield made
    made.close()

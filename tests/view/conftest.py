"""One browser for all tests that need one; without one they are skipped."""

import threading

import chromium
import pytest

from unisono.cli._studio_search import ANSWERS
from unisono.view.studio import Studio


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


@pytest.fixture(scope="module")
def studio():
    with Studio(more=ANSWERS) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def desk_page(browser, studio):
    browser.window(1180, 900)
    browser.open(studio.address, "document.querySelector('[data-number]')")
    yield browser
    browser.run("1")
    assert browser.complaints == []

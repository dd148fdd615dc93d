"""Players in frames follow the theme switch of the site."""

import functools
import http.server
import threading
from pathlib import Path

import pytest

import unisono
from unisono.view.html import to_html

ROOT = Path(__file__).parents[2]
SITE = """<!doctype html><html><head><script src="theme.js"></script></head>
<body data-md-color-scheme="slate">
<iframe class="schedule" src="ring.html" width="900" height="700"></iframe>
</body></html>
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path):
    ring = unisono.schedule("all_reduce", "ring", n=3)
    (tmp_path / "ring.html").write_text(to_html(ring), encoding="utf-8")
    (tmp_path / "theme.js").write_bytes((ROOT / "docs" / "theme.js").read_bytes())
    (tmp_path / "index.html").write_text(SITE)
    handler = functools.partial(Quiet, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


def test_players_follow_the_theme_of_the_site(browser, site):
    inside = "document.querySelector('iframe').contentDocument"
    back = f"getComputedStyle({inside}.body).backgroundColor"  # the colour that is seen
    browser.window(1000, 800, theme="light")
    browser.open(site, f"{inside}?.body?.dataset.theme === 'dark'")
    dark = browser.run(back)
    browser.run("document.body.dataset.mdColorScheme = 'default'; 1")
    browser.wait(f"{inside}.body.dataset.theme === 'light'")
    assert browser.run(back) != dark
    choice = f"{inside}.querySelector('select[aria-label=Theme]').value"
    assert browser.run(choice) == "light"


def test_other_messages_change_nothing(browser, site):
    inside = "document.querySelector('iframe').contentDocument"
    browser.window(1000, 800, theme="light")
    browser.open(site, f"{inside}?.body?.dataset.theme === 'dark'")
    browser.run(
        "window.seen = []; new MutationObserver(() =>"
        f"seen.push({inside}.body.dataset.theme)).observe({inside}.body,"
        "{attributeFilter: ['data-theme']}); 1"
    )
    frame = "document.querySelector('iframe').contentWindow"
    for theme in ("null", "'x'", "{unisonoTheme: 'pink'}", "{unisonoTheme: 'light'}"):
        browser.run(f"{frame}.postMessage({theme}, '*')")
    browser.wait("seen.length")
    assert browser.run("seen") == ["light"]


def test_site_has_a_theme_switch_and_the_script_for_players():
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert settings.count("toggle:") == 3
    assert "extra_javascript: [theme.js]" in settings

"""The page of a running job: whom it answers, and what a browser shows of it."""

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from urllib.parse import urlsplit

import pytest

from unisono.cli import main
from unisono.errors import BadArgument
from unisono.trace import live
from unisono.trace.ask import MonitorSocket
from unisono.view.server import POLICY
from unisono.view.top_page import TopPage


def state(rank, seq, *, inside, trouble="none", sent=0):
    """What a rank answers of itself; even ranks are on host a."""
    group = {
        "name": "world",
        "ranks": [0, 1, 2],
        "rank": rank,
        "seq": seq,
        "call": "all_reduce(float32 × 8, sum)",
        "inside": inside,
        "since_ns": 10**9,
        "ended_ns": 10**9,
        "trouble": trouble,
        "sent_bytes": sent,
    }
    return {
        "rank": rank,
        "world_size": 3,
        "pid": 100 + rank,
        "host": "ab"[rank % 2],
        "job": "j",
        "time_ns": 3 * 10**9,
        "communicators": [group],
    }


def traffic(rank, sent):
    return {
        "time_ns": 10**9 + sent,
        "hosts": [0, 1, 0],
        "names": ["a", "b", "a"],
        "groups": [
            {
                "name": "world",
                "ranks": [0, 1, 2],
                "sent_to": [0 if to == rank else sent // 2 for to in range(3)],
                "guessed": 0,
            }
        ],
    }


def job(monkeypatch, answers):
    """Snapshots of ranks that answer so; (rank, query) to answer, None for none."""
    monkeypatch.setattr(
        live.ask, "ask", lambda socket, what: answers.get((socket.rank, what))
    )
    return [MonitorSocket(100 + rank, rank) for rank in range(3)]


def test_snapshot_says_who_waits_for_whom_and_what_failed(monkeypatch):
    answers = {
        (0, "state"): state(0, 4, inside=True, sent=100),
        (1, "state"): state(1, 3, inside=False, trouble="peer_died"),
        (0, "links"): traffic(0, 100),
    }
    sockets = job(monkeypatch, answers)
    before = live.look(sockets)
    assert {row.calls_rate for row in before.rows} == {None}
    answers[0, "state"] = state(0, 6, inside=True, sent=300)
    seen = live.look(sockets, before).as_dict()
    waits, broken, silent = seen["rows"]
    assert waits["waits_for"] == (1,)
    assert waits["host"] == "a"
    assert waits["calls_rate"] == pytest.approx(waits["rate"] / 100)
    assert broken["waits_for"] == ()
    assert broken["calls_rate"] == 0
    assert silent["failure"] == "does not answer"
    assert seen["failures"] == [
        {"rank": 1, "group": "world", "failure": "broken: peer died"},
        {"rank": 2, "group": "world", "failure": "does not answer"},
    ]
    assert seen["rank_hosts"] == ("a", "b", "a")


# --- the server


@pytest.fixture
def top(monkeypatch):
    """A page of a job of three ranks: 0 waits for 1, and 2 has failed."""
    answers = {
        (0, "state"): state(0, 4, inside=True, sent=2048),
        (1, "state"): state(1, 3, inside=False, sent=1024),
        (2, "state"): state(2, 4, inside=False, trouble="differing_calls"),
        **{(rank, "links"): traffic(rank, 2048) for rank in range(3)},
    }
    sockets = job(monkeypatch, answers)
    before = [None]

    def look():
        if "ended" in answers:
            return None
        before[0] = live.look(sockets, before[0])
        return before[0].as_dict()

    with TopPage(look, every=0.05) as server:
        server.known = answers
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(port, path, **headers):
    wire = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    wire.request("GET", path, headers=headers)
    answer = wire.getresponse()
    body = answer.read()
    wire.close()
    return answer, body


def test_nothing_is_answered_without_the_token(top):
    cookie = f"{top.cookie}={top.token}"
    wrong = [
        ("/", {}),
        ("/?token=", {}),
        ("/?token=x", {}),
        (f"/api/snapshot?token={top.token}", {}),
        ("/top.js", {}),
        ("/nothing", {}),
        ("/api/snapshot", {"Cookie": f"{top.cookie}={top.token[:-1]}"}),
        ("/api/snapshot", {"Cookie": f"{top.cookie}="}),
        ("/api/snapshot", {"Cookie": f"other={top.token}"}),
        ("/api/snapshot", {"Cookie": "=;;="}),
        ("/api/snapshot", {"Authorization": "Bearer "}),
        ("/api/snapshot", {"Authorization": f"Basic {top.token}"}),
    ]
    for path, headers in wrong:
        answer, body = get(top.port, path, **headers)
        assert answer.status == 401, path
        assert "unisono top has printed" in json.loads(body)["error"]
    for headers in ({"Cookie": cookie}, {"Authorization": f"Bearer {top.token}"}):
        answer, body = get(top.port, "/api/snapshot", **headers)
        assert answer.status == 200
        assert json.loads(body)["seen"]["world_size"] == 3
    more = get(top.port, "/api/snapshot", Cookie=cookie, Host="evil.example")
    assert more[0].status == 421
    more = get(top.port, "/", Cookie=cookie, **{"Sec-Fetch-Site": "cross-site"})
    assert more[0].status == 403


def test_address_with_the_token_gives_a_cookie_and_leads_on(top):
    there = urlsplit(top.address)
    assert there.netloc == f"127.0.0.1:{top.port}"
    answer, body = get(top.port, f"{there.path}?{there.query}")
    assert (answer.status, answer.headers["Location"], body) == (303, "/", b"")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    answer, body = get(top.port, "/", Cookie=cookie.partition(";")[0])
    assert answer.status == 200
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert top.token.encode() not in body


def test_tokens_differ_and_choices_are_refused(top):
    with TopPage(dict) as other:
        assert other.token != top.token
        assert len(other.token) > 40
    bearer = {"Authorization": f"Bearer {top.token}"}
    assert get(top.port, "/api/snapshot?pid=1", **bearer)[0].status == 400


def test_job_is_asked_once_in_the_given_time():
    looks = []
    with TopPage(lambda: looks.append(1) or {}, every=3600) as page:
        for _ in range(3):
            page._snapshot({})
    assert len(looks) == 1


@pytest.mark.parametrize("listen", ["0.0.0.0", "::", "localhost", "1.2.3"])
def test_one_address_is_listened_at(listen):
    with pytest.raises(BadArgument, match="one address of this machine"):
        TopPage(dict, listen=listen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "80"], "only with --web"),
        (["--listen", "127.0.0.1"], "only with --web"),
        (["--open"], "only with --web"),
        (["--web", "--once"], "a page goes on"),
        (["--web", "1"], "no job of this user"),
    ],
)
def test_options_that_do_not_go_together_are_refused(capfd, words, message):
    assert main(["top", *words]) == 2
    assert message in capfd.readouterr().err


JOB = """
import numpy as np, unisono
with unisono.init() as comm:
    comm.all_reduce(np.ones(4))
    print("ready", flush=True)
    input()
"""


@pytest.mark.sweep
def test_verb_serves_the_page_until_it_is_interrupted(tmp_path):
    file = tmp_path / "waits.py"
    file.write_text(JOB)
    python = [sys.executable, "-m", "unisono"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    one = os.environ | {"UNISONO_MONITOR": "1"}
    ran = subprocess.Popen([sys.executable, file], env=one, **pipes)
    served = None
    try:
        assert ran.stdout.readline() == "ready\n"
        command = [*python, "top", str(ran.pid), "--web", "--json"]
        served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        address = urlsplit(json.loads(served.stdout.readline())["address"])
        token = address.query.removeprefix("token=")
        bearer = {"Authorization": f"Bearer {token}"}
        answer, body = get(address.port, "/api/snapshot", **bearer)
        assert answer.status == 200
        (row,) = json.loads(body)["seen"]["rows"]
        assert (row["pid"], row["seq"]) == (ran.pid, 1)
        served.send_signal(signal.SIGINT)
        assert served.wait(60) == 0
    finally:
        for process in filter(None, (ran, served)):
            process.kill()
            process.communicate()


# --- in a browser


@pytest.fixture
def page(browser, top):
    """A browser that shows the page; it asks no more before the server ends."""
    browser.window(1400, 900)
    browser.open(top.address, "document.querySelector('[data-updates]')")
    yield browser
    browser.open("about:blank", "true")


def text(browser, selector):
    return browser.run(f"document.querySelector('{selector}').innerText")


def test_page_shows_the_job_and_its_end(page, top):
    assert page.run("location.search") == ""  # the token is in no history
    assert page.run("document.cookie") == ""  # nor can scripts read it
    assert "rank 0 waits for rank 1 in world, call 4" in text(page, ".waits")
    assert "rank 2, world: broken: differing calls" in text(page, "ul.trouble")
    hosts = page.run(
        "[...document.querySelectorAll('.host')].map(e => e.innerText.split(/\\n+/))"
    )
    assert [(h[0].split()[0], h[1:]) for h in hosts] == [
        ("a", ["0 waits", "2 failed"]),
        ("b", ["1 late"]),
    ]
    page.wait("Number(document.querySelector('[data-updates]').dataset.updates) > 2")
    assert "calls per second" in text(page, "figcaption")
    assert page.run("document.querySelectorAll('.bytes td').length") == 9
    assert page.run("document.querySelectorAll('.list tbody tr').length") == 3 + 6 + 3
    top.known["ended"] = True
    page.wait("document.querySelector('.state').innerText.includes('has ended')")
    assert top.told.is_set()
    assert page.complaints == []


def test_paused_page_goes_on_where_it_is_told_to(page, top):
    page.run("document.querySelector('header button').click()")
    assert "Paused" in text(page, ".state")
    top.known[0, "state"] = state(0, 9, inside=True)
    page.run("document.querySelector('header button').click()")
    page.wait("document.querySelector('.waits').innerText.includes('call 9')")


@pytest.mark.sweep
def test_page_of_a_job_fits_and_has_enough_contrast(page, top):
    from test_explainer import PROBES

    for theme in ("light", "dark"):
        page.window(1400, 900, theme=theme)
        page.open(top.address, "document.querySelector('[data-updates]')")
        page.run(PROBES)
        assert page.run("probe.faint(4.5)")["seen"] == []
    page.window(390, 844)
    assert page.run("document.documentElement.scrollWidth") <= 390


@pytest.mark.sweep
def test_page_says_that_nobody_answers_and_goes_on(page, top):
    page.run(
        "window.real = fetch;window.fetch = () => Promise.reject(new TypeError('x')); 1"
    )
    said = "document.querySelector('.state').innerText"
    page.wait(f"{said}.includes('does not answer: it was ended')")
    page.run("window.fetch = window.real; 1")
    page.wait(f"{said} === 'Live.'")

"""The studio: what it answers, whom it refuses, and how it looks in a browser."""

import gzip
import http.client
import json
import re
import signal
import subprocess
import sys
from urllib.parse import urlencode

import pytest

import unisono
from unisono.cli._studio_search import answer
from unisono.errors import BadArgument
from unisono.simulate import simulate, to_chrome
from unisono.view import studio_answers
from unisono.view.assets import text
from unisono.view.server import POLICY
from unisono.view.studio import Studio

PAGES = (
    *("Explain", "Costs", "Links", "Trees"),
    *("Strategies", "Search", "Truth", "Trace"),
)


def get(studio, path, method="GET", **headers):
    wire = http.client.HTTPConnection("127.0.0.1", studio.port, timeout=60)
    wire.request(method, path, headers=headers)
    answer = wire.getresponse()
    body = answer.read()
    wire.close()
    return answer, body


def test_server_listens_on_loopback_only(studio):
    assert studio.server_address[0] == "127.0.0.1"
    assert studio.address == f"http://127.0.0.1:{studio.port}/"


@pytest.mark.parametrize(
    "path", ["/", "/studio.js", "/style.css", "/api/strategies", "/api/truth"]
)
def test_files_come_with_a_strict_policy(studio, path):
    answer, body = get(studio, path)
    assert answer.status == 200
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert "unsafe" not in POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert body


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": ""}, 421),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_requests_from_other_sites_are_refused(studio, headers, status):
    answer, body = get(studio, "/api/choices", **headers)
    assert answer.status == status
    assert set(json.loads(body)) == {"error"}


def test_localhost_and_address_are_both_accepted(studio):
    for name in ("localhost", "127.0.0.1"):
        assert get(studio, "/", Host=f"{name}:{studio.port}")[0].status == 200


@pytest.mark.parametrize("path", ["/nothing", "/../pyproject.toml", "/?x=1", "/api/"])
def test_unknown_paths_are_not_found(studio, path):
    assert get(studio, path)[0].status == 404


def test_only_get_requests_are_answered(studio):
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(studio, "/", method)[0].status == 501


@pytest.mark.parametrize(
    ("path", "parameters", "message"),
    [
        ("stories", {"algorithm": "/tmp/mine.py"}, "not files"),
        ("stories", {"algorithm": "mine.py:radix=2"}, "not files"),
        ("stories", {"beside": "mine.py"}, "not files"),
        ("stories", {"topology": "mine.toml"}, "not files"),
        ("curves", {"topology": "this"}, "not files"),
        ("stories", {"algorithm": "rign"}, "nearest: ring"),
        ("stories", {"collective": "all_redcue"}, "nearest: all_reduce"),
        ("stories", {"n": "17"}, "expected 1 to 16"),
        ("stories", {"n": "0"}, "expected 1 to 16"),
        ("stories", {"n": "٥"}, "expected 1 to 16"),
        ("stories", {"size": "lots"}, "size 'lots'"),
        ("stories", {"codec": "fp9"}, "nearest: fp8"),
        ("stories", {"colour": "red"}, "choice"),
        ("stories", {"n": "4", "topology": "switch:5"}, "5 ranks"),
        ("curves", {"topology": "full:100000"}, "up to 512"),
        ("choices", {"collective": "x"}, "collective"),
    ],
)
def test_bad_parameters_are_refused_with_the_reason(studio, path, parameters, message):
    answer, body = get(studio, f"/api/{path}?{urlencode(parameters)}")
    assert answer.status == 400
    assert message in json.loads(body)["error"]


def test_repeated_and_malformed_parameters_are_refused(studio):
    assert get(studio, "/api/stories?n=2&n=3")[0].status == 400
    assert get(studio, "/api/stories?n")[0].status == 400


def test_stories_are_those_of_the_page(studio):
    parameters = {"algorithm": "ring", "beside": "tree", "n": "3", "size": "4K"}
    answer, body = get(studio, f"/api/stories?{urlencode(parameters)}")
    assert answer.status == 200
    result = json.loads(body)
    assert [story["algorithm"] for story in result] == ["ring", "tree"]
    made = unisono.schedule("all_reduce", "ring", n=3)
    right = simulate(made, "full:3", 4096).time * 1e6
    assert result[0]["time"] == pytest.approx(right, rel=1e-3)


def test_every_topology_offered_has_so_many_ranks():
    for n in range(1, 17):
        assert {
            studio_answers._topology(name).n for name in studio_answers.topologies(n)
        } == {n}


def test_every_algorithm_offered_has_a_story():
    result = studio_answers.choices({"n": "4", "topology": "torus:2x2"})
    for algorithm in result["algorithms"]:
        parameters = {"n": "4", "topology": "torus:2x2", "algorithm": algorithm}
        assert studio_answers.stories(parameters)[0].n == 4


def test_curves_have_a_winner_for_each_size_and_codecs_save_time():
    parameters = {"collective": "broadcast", "topology": "switch:4"}
    result = studio_answers.curves(parameters)
    for at in range(len(result["sizes"])):
        best = min(result["curves"], key=lambda curve: curve["times"][at])
        winner = next(c for c in result["curves"] if c["name"] == result["winners"][at])
        assert winner["times"][at] == best["times"][at] >= result["bound"][at] * 0.999
    coded = studio_answers.curves({**parameters, "codec": "fp8"})
    assert min(c["times"][-1] for c in coded["curves"]) < best["times"][-1]


def test_unavailable_ports_are_refused(studio):
    with pytest.raises(BadArgument, match=r"is not available.*--port 0"):
        Studio(studio.port)
    with pytest.raises(BadArgument, match="0 to 65535"):
        Studio(99999)


def test_strategies_come_from_a_recording():
    result = json.loads(text("strategies.json"))
    names = [strategy["name"] for strategy in result["strategies"]]
    assert names == [
        *("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "Tensor parallel"),
        *("Sequence parallel", "Context parallel", "Experts", "Parameter server"),
    ]
    by_name = {s["name"]: s for s in result["strategies"]}
    calls = {
        name: [e["name"] for e in s["happenings"] if e["kind"] == "comm"]
        for name, s in by_name.items()
    }
    assert set(calls["DDP"]) == {"all_reduce"}
    assert set(calls["FSDP"]) == {"all_gather", "reduce_scatter"}
    assert {"send", "recv", "all_reduce"} <= set(calls["Context parallel"])
    assert "all_to_all" in calls["Experts"]
    assert {"reduce_scatter", "all_gather"} <= set(calls["Sequence parallel"])
    assert set(calls["Parameter server"]) == {"reduce", "broadcast"}
    drawn = text("strategy.js").partition("const CALLS = [")[2].partition("]")[0]
    assert {name for some in calls.values() for name in some} <= set(
        re.findall("[a-z_]+", drawn)
    )
    assert by_name["FSDP"]["sent"] == pytest.approx(1.5 * by_name["DDP"]["sent"])
    for strategy in result["strategies"]:
        assert all(e["start"] <= e["end"] for e in strategy["happenings"])
        starts = [e["start"] for e in strategy["happenings"]]
        assert starts == sorted(starts)
    least = {
        name: min(s["memory"][-1]["parts"].values()) for name, s in by_name.items()
    }
    assert least["FSDP"] < least["DDP"]
    most = {
        name: max(m["parts"].get("gradients", 0) for m in s["memory"])
        for name, s in by_name.items()
    }
    assert most["ZeRO-2"] < most["ZeRO-1"] >= most["DDP"]


def test_verb_serves_until_it_is_interrupted():
    started = subprocess.Popen(
        [sys.executable, "-m", "unisono", "studio", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        port = int(json.loads(started.stdout.readline())["address"].split(":")[2][:-1])
        wire = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        wire.request("GET", "/")
        assert wire.getresponse().status == 200
        wire.close()
        started.send_signal(signal.SIGINT)
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.wait()
        started.stdout.close()


# --- in a browser


def choose(browser, **parameters):
    for name, value in parameters.items():
        before = browser.run("document.querySelector('.place').dataset.number")
        browser.run(
            f"(() => {{ const f = document.querySelector('select[name={name}]');"
            f"f.value = '{value}'; f.dispatchEvent(new Event('change')); }})()"
        )
        browser.wait(
            f"document.querySelector('.place').dataset.number !== '{before}'"
            " && document.querySelector('.place').ariaBusy === 'false'"
        )


def enter(browser, page):
    browser.run(
        "[...document.querySelectorAll('.pages button')]"
        f".find((e) => e.textContent === '{page}').click()"
    )
    browser.wait(f"document.querySelector('.place').dataset.page === '{page}'")


def test_choices_change_the_picture(desk_page):
    choose(desk_page, n=8, topology="dgx-h100:1", beside="rabenseifner", size="16M")
    titles = desk_page.run("[...document.querySelectorAll('h2')].map(e => e.innerText)")
    assert [title.split()[0] for title in titles] == ["ring", "rabenseifner"]
    assert desk_page.run("document.querySelectorAll('.stage').length") == 2
    assert "16 MiB" in desk_page.run("document.querySelector('.facts').innerText")
    choose(desk_page, collective="broadcast")
    assert "broadcast" in desk_page.run("document.querySelector('.place h1').innerText")
    desk_page.run("document.activeElement.blur()")
    desk_page.press("End")
    at = desk_page.run("Number(document.querySelector('[data-at]').dataset.at)")
    assert at > 0


def test_costs_have_a_line_for_each_algorithm(desk_page):
    enter(desk_page, "Costs")
    choose(desk_page, n=8)
    lines = desk_page.run("document.querySelectorAll('path.curve').length")
    assert lines == len(studio_answers.curves({"topology": "full:8"})["curves"])
    assert "is faster than" in desk_page.run(
        "document.querySelector('.curves ul').innerText"
    )


@pytest.mark.sweep
def test_cost_chart_names_its_axes_and_no_two_texts_collide(desk_page):
    enter(desk_page, "Costs")
    for parameters in (
        {"n": 8},
        {"topology": "cloud:2x4"},
        {"collective": "broadcast"},
    ):
        choose(desk_page, **parameters)
        axes = "[...document.querySelectorAll('.curves .axis')].map(e => e.textContent)"
        assert desk_page.run(axes) == [
            *("size of the array on a rank", "time, simulated", "fastest")
        ]
        boxes = desk_page.run(
            "[...document.querySelectorAll('.curves svg text')]"
            ".filter(e => e.textContent)"
            ".map(e => { const b = e.getBoundingClientRect();"
            "return [e.textContent, b.left, b.top, b.right, b.bottom] })"
        )
        assert "lower bound" in [box[0] for box in boxes]
        for i, (_, left, top, right, bottom) in enumerate(boxes):
            for other, l2, t2, r2, b2 in boxes[:i]:
                apart = (
                    left > r2 or right < l2 or top > b2 - 4 or bottom - 4 < t2
                )  # a line of text is higher than its letters
                assert apart, (boxes[i], other)


def test_search_answers_names_alone():
    found = answer({"model": "7B", "topology": "dgx-h100:1", "batch": "64"})
    assert "7B on dgx-h100:1, 64 sequences" in found["title"]
    times = [row[0]["value"] for row in found["rows"]]
    assert times == sorted(times)
    assert all(len(row) == len(found["heads"]) for row in found["rows"])
    for wrong in ({"model": "evil.py"}, {"batch": "1"}, {"nodes": "3"}):
        with pytest.raises(BadArgument):
            answer(wrong)


def test_what_a_search_found_is_sorted_by_the_column_pressed(desk_page):
    enter(desk_page, "Search")
    desk_page.run("document.querySelector('.search button').click()")
    desk_page.wait("document.querySelector('.sortable tbody tr')")
    rows = answer({})["rows"]
    column = (
        "[...document.querySelectorAll('.sortable tbody tr')]"
        ".map((e) => e.cells[3].innerText)"
    )
    shown = [row[3]["text"] for row in rows]
    assert desk_page.run(column) == shown
    press = "document.querySelectorAll('.sortable th button')[3].click()"
    by_memory = sorted((row[3] for row in rows), key=lambda cell: cell["value"])
    desk_page.run(press)
    assert desk_page.run(column) == [cell["text"] for cell in by_memory]
    desk_page.run(press)
    assert desk_page.run(column) == [cell["text"] for cell in reversed(by_memory)]
    sorts = "document.querySelectorAll('.sortable th')[3].ariaSort"
    assert desk_page.run(sorts) == "descending"


def test_strategies_can_be_walked_through(desk_page):
    enter(desk_page, "Strategies")
    desk_page.run("document.querySelectorAll('.strategies [role=tab]')[4].click()")
    output = set()
    for at in range(12):
        desk_page.run(
            "(() => { const s = document.querySelector('.strategies .scrub');"
            f"s.value = {at}; s.dispatchEvent(new Event('input')); }})()"
        )
        output.add(desk_page.run("document.querySelector('.sentence').textContent"))
    assert any(s.startswith("all_gather of") for s in output)
    assert any(s.startswith("Forward of layer 0") for s in output)


@pytest.mark.parametrize("packed", [False, True])
def test_recorded_trace_is_drawn(desk_page, tmp_path, packed):
    result = simulate(unisono.schedule("all_reduce", "ring", n=4), "switch:4", "1M")
    file = tmp_path / ("ring.json.gz" if packed else "ring.json")
    data = to_chrome(result).encode()
    file.write_bytes(gzip.compress(data) if packed else data)
    enter(desk_page, "Trace")
    put(desk_page, file)
    assert desk_page.run("document.querySelectorAll('.traces .bar').length") == 48
    assert desk_page.run("document.querySelectorAll('.traces .flow').length") == 24
    assert "8 lanes" in desk_page.run("document.querySelector('.traces').innerText")
    for _ in range(3):
        desk_page.click(".buttons-in-words button")
    few = desk_page.run("document.querySelectorAll('.traces .bar').length")
    assert 0 < few < 48


def test_trace_is_zoomed_by_wheel_and_keys(desk_page, tmp_path):
    result = simulate(unisono.schedule("all_reduce", "ring", n=4), "switch:4", "1M")
    file = tmp_path / "ring.json"
    file.write_text(to_chrome(result))
    enter(desk_page, "Trace")
    put(desk_page, file)
    words = "document.querySelector('.traces [aria-live]').textContent"
    whole = desk_page.run(words)
    x, y = desk_page.run(
        "(b => [b.x + b.width / 2, b.y + b.height / 2])"
        "(document.querySelector('.lanes').getBoundingClientRect())"
    )

    def wheel(turn):
        before = desk_page.run(words)
        about = {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": turn}
        desk_page.call("Input.dispatchMouseEvent", **about)
        desk_page.wait(f"{words} !== {json.dumps(before)}")

    wheel(-120)
    closer = desk_page.run(words)
    assert closer.split(" to ")[0] != "0 µs"
    wheel(120)
    assert desk_page.run(words) == whole
    desk_page.run("document.querySelector('.traces .panel').focus()")
    seen = []
    for key in "wwdass":
        desk_page.press(key)
        seen.append(desk_page.run(words))
    _, nearer, later, earlier, _, wider = seen
    assert nearer == earlier != later
    assert wider == whole != nearer


@pytest.mark.parametrize(
    ("data", "message"),
    [("{", "JSON"), ("{}", "no traceEvents"), ("[]", "nothing to draw")],
)
def test_file_that_is_no_trace_is_reported(desk_page, tmp_path, data, message):
    file = tmp_path / "odd.json"
    file.write_text(data)
    enter(desk_page, "Trace")
    put(desk_page, file)
    assert message in desk_page.run(
        "document.querySelector('[role=alert]:not(:empty)').innerText"
    )


def put(browser, file):
    """Give a file to the page, as a reader would."""
    found = browser.call(
        "Runtime.evaluate", expression="document.querySelector('input[type=file]')"
    )
    browser.call(
        "DOM.setFileInputFiles",
        files=[str(file)],
        objectId=found["result"]["objectId"],
    )
    browser.wait(f"document.querySelector('[data-file=\"{file.name}\"]')")


@pytest.mark.sweep
def test_studio_has_enough_contrast_in_both_themes(desk_page):
    from test_explainer import PROBES

    desk_page.run(PROBES)
    for theme in ("light", "dark"):
        desk_page.window(1180, 900, theme=theme)
        for page in PAGES:
            enter(desk_page, page)
            assert desk_page.run("probe.faint(4.5)")["seen"] == []


def test_studio_fits_a_phone(desk_page):
    desk_page.window(390, 844)
    for page in PAGES:
        enter(desk_page, page)
        assert desk_page.run("document.documentElement.scrollWidth") <= 390

"""The page in a real browser: play, scrub, views, keyboard, contrast, pictures."""

import base64
import json
import os
from pathlib import Path

import pytest

import unisono
from unisono.view.frames import frames, letter
from unisono.view.html import to_html
from unisono.view.story import tell

HERE = Path(__file__).parent
SCREENS = HERE / "screens"
PROBES = (HERE / "probes.js").read_text(encoding="utf-8")
VIEWS = ["grid", "graph", "timeline", "matrix", "all"]
CLOSE, FAR = 6.0, 1.0
"""How much two pictures may differ, of 255; and how much others differ at least."""


class Page:
    """A page in the browser, with words for what a reader does."""

    def __init__(self, browser, folder):
        self.browser, self.folder = browser, folder

    def show(
        self, schedule, *, width=900, height=700, theme="light", calm=False, **how
    ):
        file = self.folder / "page.html"
        file.write_text(to_html(schedule, **how), encoding="utf-8")
        self.browser.window(width, height, theme=theme, calm=calm)
        self.browser.open(file.as_uri(), "document.querySelector('[data-at]')")
        self.run(PROBES)
        return self

    def run(self, code):
        return self.browser.run(code)

    def scrub(self, at):
        return self.run(f"probe.scrub({at})")

    @property
    def at(self):
        return float(self.run("document.querySelector('[data-at]').dataset.at"))

    def view(self, name):
        self.run(
            f"document.querySelectorAll('[role=tab]')[{VIEWS.index(name)}].click()"
        )

    def speed(self, times):
        self.run(
            "(() => { const speed = document.querySelector('select[aria-label=Speed]');"
            f"speed.value = {times}; speed.dispatchEvent(new Event('change')); }})()"
        )

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def complaints(self):
        self.run("1")  # whatever was said before has been heard by then
        return self.browser.complaints


@pytest.fixture
def page(browser, tmp_path):
    made = Page(browser, tmp_path)
    yield made
    assert made.complaints() == []


def expected(schedule, frame):
    """The letters of every cell as Python knows them."""
    return [
        "".join(letter(r) for r in range(schedule.n) if cell.ranks >> r & 1)
        for row in frame.rows
        for cell in row
    ]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("name", "algorithm", "n"),
    [("all_reduce", "ring", 5), ("all_to_all", "bruck", 3), ("reduce", "tree", 12)],
)
def test_every_step_shows_who_holds_what(page, name, algorithm, n):
    made = unisono.schedule(name, algorithm, n=n)
    story = tell(made)
    page.show(made)
    for frame in frames(made):
        page.scrub(frame.number)
        shown = page.run("probe.cells()")
        assert [letters for letters, *_ in shown] == expected(made, frame)
        fresh = [cell.changed for row in frame.rows for cell in row]
        assert [ringed for _, ringed, _ in shown] == fresh
        done = story.beats[frame.number - 1].done if frame.number else None
        assert done in (None, sum(tick for *_, tick in shown))
        output = (
            story.beats[frame.number - 1].caption if frame.number else story.opening
        )
        assert page.text(".sentence") == output


def test_playing_by_time_delivers_everything_in_order(page):
    made = unisono.schedule("all_reduce", "recursive_doubling", n=6)
    story = tell(made, "cloud:3x2", "1M")
    page.show(made, topology="cloud:3x2")
    page.browser.press("t")
    assert page.run("document.querySelector('[data-by]').dataset.by") == "time"
    most = 0
    for part in range(11):
        page.scrub(story.time * part / 10)
        letters = sum(len(cell) for cell, *_ in page.run("probe.cells()"))
        assert letters >= most  # nothing that has arrived is lost again
        most = letters
    *_, last = frames(made)
    assert [c for c, *_ in page.run("probe.cells()")] == expected(made, last)


def test_player_plays_to_the_end_and_stops(page):
    page.show(unisono.schedule("all_reduce", "ring", n=2))
    page.speed(4)
    page.browser.click(".play")
    page.browser.wait("document.querySelector('[data-at]').dataset.at === '2'")
    page.browser.wait("document.querySelector('.play').ariaPressed === 'false'")
    again = (
        "(() => { document.querySelector('.play').click();"
        "return Number(document.querySelector('[data-at]').dataset.at) })()"
    )
    assert page.run(again) == 0  # once more, from the start


def test_reduced_motion_moves_by_whole_steps(page):
    page.show(unisono.schedule("all_reduce", "ring", n=2), calm=True)
    page.run(
        """(() => {
        const node = document.querySelector('[data-at]');
        window.seen = [];
        new MutationObserver(() => seen.push(Number(node.dataset.at)))
          .observe(node, {attributeFilter: ['data-at']});
        })()"""
    )
    page.speed(4)
    page.browser.click(".play")
    page.browser.wait("document.querySelector('[data-at]').dataset.at === '2'")
    assert set(page.run("seen")) == {1, 2}


def test_player_works_by_keyboard_alone(page):
    press = page.browser.press
    page.show(unisono.schedule("all_reduce", "ring", n=5))
    press("ArrowRight")
    press("ArrowRight")
    assert page.at == 2
    press("ArrowLeft")
    assert page.at == 1
    press("End")
    assert page.at == 8
    press("Home")
    assert page.at == 0
    page.speed(0.25)  # so that it is not done before we look
    press(" ")
    page.browser.wait("Number(document.querySelector('[data-at]').dataset.at) > 0")
    press(" ")
    assert page.run("document.querySelector('.play').ariaPressed") == "false"
    for number, view in enumerate(VIEWS, start=1):
        press(str(number))
        assert page.run("document.querySelector('[data-view]').dataset.view") == view
    press("t")
    press("ArrowRight")
    assert page.run("document.querySelector('[data-by]').dataset.by") == "time"


def test_every_control_is_reachable_by_tab_and_shows_focus(page):
    page.show(unisono.schedule("all_reduce", "ring", n=3))
    reached = []
    for _ in range(30):
        page.browser.press("Tab")
        result = page.run(
            "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
            "return [e.getAttribute('aria-label') || e.textContent || e.value,"
            " e.matches(':focus-visible') ? s.outlineStyle : 'none'] })()"
        )
        if result in reached:
            break
        reached.append(result)
    names = " ".join(name for name, _ in reached)
    for wanted in ("Grid", "Play (space)", "Position", "Speed", "Theme", "in words"):
        assert wanted in names
    assert {outline for name, outline in reached[:-1]} == {"solid"}, reached


def test_screen_readers_hear_a_name_for_every_control(page):
    page.show(unisono.schedule("all_reduce", "ring", n=3))
    tree = page.browser.call("Accessibility.getFullAXTree")["nodes"]
    result = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"]
    ]
    controls = {"button", "tab", "slider", "radio", "combobox", "tabpanel", "image"}
    named = [(role, name) for role, name in result if role in controls]
    assert {role for role, _ in named} == controls
    assert all(name for _, name in named)


def test_arrow_keys_change_tabs(page):
    page.show(unisono.schedule("all_reduce", "ring", n=3))
    page.run("document.querySelector('[role=tab]').focus()")
    page.browser.press("ArrowRight")
    assert page.run("document.activeElement.textContent") == "Graph"
    assert page.run("document.activeElement.ariaSelected") == "true"
    assert page.at == 0  # the arrow was for the tabs


def test_four_views_show_the_same_object(page):
    made = unisono.schedule("all_reduce", "ring", n=5)
    story = tell(made)
    page.show(made)
    page.view("all")
    page.scrub(2.5)
    count = "document.querySelectorAll({!r}).length"
    assert page.run(count.format(".panel:not([hidden])")) == 4
    assert page.run(count.format(".graph .token:not(.none)")) == 5
    assert page.run(count.format(".grid .token:not(.none)")) == 5
    assert page.run(count.format(".timeline .message")) == len(story.messages)
    assert page.run(count.format(".timeline .message.past")) == 10
    assert page.run(count.format(".matrix td.busy")) == 5
    page.scrub(8)
    sums = page.run("[...document.querySelectorAll('.sum')].map(e => e.textContent)")
    assert sums == ["1.6 MiB"] * 5
    hidden = page.run(
        "[...document.querySelectorAll('.panel svg')].map(e => e.ariaLabel)"
    )
    assert all(hidden)
    assert "Rank 0 has chunk 0: a+b+c+d+e" in hidden[0]


def test_click_on_the_timeline_moves_to_that_time(page):
    page.show(unisono.schedule("all_reduce", "ring", n=3))
    page.view("timeline")
    page.browser.click(".timeline svg")
    assert page.run("document.querySelector('[data-by]').dataset.by") == "time"
    assert page.at > 0


def test_two_schedules_play_on_one_clock(page):
    ring = unisono.schedule("all_reduce", "ring", n=4)
    tree = unisono.schedule("all_reduce", "tree", n=4)
    page.show(ring, beside=tree, width=1180)
    page.browser.press("t")
    page.browser.press("End")
    for stage, made in enumerate((ring, tree)):
        *_, last = frames(made)
        shown = page.run(f"probe.cells({stage})")
        assert [letters for letters, *_ in shown] == expected(made, last)
    assert page.at == pytest.approx(max(tell(ring).time, tell(tree).time))
    titles = page.run("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    assert [t.split()[0] for t in titles] == ["ring", "tree"]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.sweep
def test_text_has_enough_contrast(page, theme):
    page.show(unisono.schedule("all_reduce", "tree", n=16), theme=theme, width=1800)
    page.scrub(8)  # every colour is in use by now
    result = page.run("probe.faint(4.5)")
    assert result["seen"] == []
    assert result["count"] > 100
    page.show(unisono.schedule("all_reduce", "ring", n=4), theme=theme)
    for view in VIEWS[1:4]:
        page.view(view)
        page.scrub(1.5)
        result = page.run("probe.faint(4.5)")
        assert result["seen"] == []
        assert result["count"] > 20


def test_theme_can_be_chosen(page):
    page.show(unisono.schedule("all_reduce", "ring", n=3))
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.run(back)
    page.run(
        "(() => { const s = document.querySelector('select[aria-label=Theme]');"
        "s.value = 'dark'; s.dispatchEvent(new Event('change')) })()"
    )
    assert page.run(back) != light
    assert page.run("probe.faint(4.5)")["seen"] == []


def test_page_fits_a_phone(page):
    page.show(unisono.schedule("all_reduce", "ring", n=5), width=390, height=844)
    for view in VIEWS:
        page.view(view)
        assert page.run("document.documentElement.scrollWidth") <= 390
    touch = page.run(
        "[...document.querySelectorAll('.buttons button')]"
        ".map(e => e.getBoundingClientRect().width)"
    )
    assert min(touch) >= 36


COVERED = """[...document.querySelectorAll('.graph .rank-name, .graph .host-name')]
.filter((name) => {
  const box = name.getBoundingClientRect();
  const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
  const top = document.elementFromPoint(x, y);
  return top !== name && top.parentNode !== name;
}).map((name) => name.textContent)"""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("algorithm", "topology"), [("ring", ""), ("hierarchical", "cloud:4x4")]
)
def test_names_in_the_graph_are_never_hidden(page, algorithm, topology):
    made = unisono.schedule("all_reduce", algorithm, n=16)
    page.show(made, width=1400, height=900, topology=topology)
    page.view("graph")
    frames = page.run("document.querySelectorAll('.home').length")
    assert frames == (4 if topology else 0)
    for at in (0, 0.3, 1.5, 2.7, 3):
        page.scrub(at)
        assert page.run(COVERED) == []


HIDDEN = """(() => {
const bottom = document.querySelector('.controls').getBoundingClientRect().top;
const found = [];
for (const panel of document.querySelectorAll('.panel:not([hidden])')) {
  const made = panel.querySelector('svg, table').getBoundingClientRect();
  const outside = made.bottom > bottom || made.right > innerWidth || made.left < 0;
  if (outside || panel.scrollWidth > panel.clientWidth) found.push(panel.className);
}
return found; })()"""


@pytest.mark.sweep
def test_sixteen_ranks_and_two_of_eight_fit_a_window(page):
    """Nothing is cut off, hidden by the controls, or to be scrolled to."""
    large = unisono.schedule("all_reduce", "ring", n=16)
    ring, other = (
        unisono.schedule("all_reduce", name, n=8) for name in ("ring", "rabenseifner")
    )
    for made, beside in ((large, None), (ring, other)):
        page.show(made, beside=beside, width=1400, height=900)
        for view in VIEWS[:4]:
            page.view(view)
            assert page.run(HIDDEN) == []
            widths = "[...document.querySelectorAll('.stage')].map(e => e.clientWidth)"
            assert sum(page.run(widths)) > 1300  # the whole window is used


@pytest.mark.sweep
def test_large_pictures_scroll_inside_their_frame_on_a_phone(page):
    ring, other = (
        unisono.schedule("all_reduce", name, n=8) for name in ("ring", "rabenseifner")
    )
    large = unisono.schedule("all_reduce", "ring", n=16)
    for made, beside in ((ring, other), (large, None)):
        page.show(made, beside=beside, width=390, height=844)
        for view in VIEWS:
            page.view(view)
            assert page.run("document.documentElement.scrollWidth") <= 390
    page.view("grid")
    assert page.run(
        "(p => p.scrollWidth > 2 * p.clientWidth && "
        "getComputedStyle(p).overflowX === 'auto')(document.querySelector('.grid'))"
    )


def test_click_on_a_timeline_with_a_margin_finds_its_time(page):
    """A low window has a drawing narrower than its frame."""
    page.show(unisono.schedule("all_reduce", "ring", n=5), width=1400, height=560)
    page.view("timeline")
    lane = ".timeline .lane"
    page.browser.click(lane)
    story = tell(unisono.schedule("all_reduce", "ring", n=5))
    assert page.at == pytest.approx(story.time / 2, rel=0.02)


def test_world_of_one_has_no_steps(page):
    page.show(unisono.schedule("all_reduce", "ring", n=1))
    page.browser.press("ArrowRight")
    assert page.at == 0
    assert page.run("probe.cells()") == [["a", False, True]]


SHOTS = [
    ("ring-grid", "grid", 3, {}),
    ("ring-graph", "graph", 2.5, {}),
    ("ring-timeline", "timeline", 4, {}),
    ("ring-matrix", "matrix", 6, {}),
    ("ring-dark", "grid", 6, {"theme": "dark"}),
    ("ring-phone", "grid", 3, {"width": 390, "height": 760}),
]


@pytest.mark.parametrize(
    ("name", "view", "at", "window"), SHOTS, ids=[s[0] for s in SHOTS]
)
def test_page_matches_its_screenshots(page, name, view, at, window):
    page.show(unisono.schedule("all_reduce", "ring", n=5), **window)
    page.view(view)
    page.scrub(at)
    file, now = SCREENS / f"{name}.png", page.browser.picture()
    if os.environ.get("UNISONO_SCREENS") == "write":
        file.write_bytes(now)
    page.scrub(0)
    other = page.browser.picture()
    page.browser.open("about:blank", "true")  # pages of ours load no pictures
    page.run(PROBES)
    known, now, other = (
        base64.b64encode(data).decode() for data in (file.read_bytes(), now, other)
    )
    assert page.run(f"probe.differ('{known}', '{now}')") < CLOSE
    assert page.run(f"probe.differ('{now}', '{other}')") > FAR  # so much is visible

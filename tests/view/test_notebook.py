"""In a notebook: a widget where anywidget is, and elsewhere a still picture."""

import json
import sys

import pytest

import unisono
from unisono.errors import MissingExtra
from unisono.view.assets import script, text
from unisono.view.story import tell

RING = ("all_reduce", "ring")


def test_explanation_is_a_string():
    result = unisono.explain(unisono.schedule(*RING, n=3))
    assert isinstance(result, str)
    assert "every rank ends with a+b+c" in result
    assert result.schedule.n == 3


def test_still_picture_has_a_sentence_for_each_step():
    result = unisono.explain(unisono.schedule(*RING, n=3))._repr_html_()
    assert "<svg" in result
    assert "<script" not in result
    assert result.count("<li>") == 5


def test_large_worlds_have_a_picture_too():
    result = unisono.explain(unisono.schedule(*RING, n=32))
    assert "<svg" in result._repr_html_()
    assert set(result._repr_mimebundle_()) == {"text/plain", "text/html"}


def test_explanation_html_writes_the_page():
    result = unisono.explain(unisono.schedule(*RING, n=3)).html(topology="switch:3")
    assert "switch:3" in result


def test_widget_without_the_extra_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "unisono.view.widget", raising=False)
    with pytest.raises(MissingExtra, match="notebook"):
        unisono.explain(unisono.schedule(*RING, n=3)).widget()


def test_widget_has_the_story():
    pytest.importorskip("anywidget", reason="no anywidget: pip install anywidget")
    made = unisono.schedule(*RING, n=3)
    widget = unisono.explain(made).widget(topology="switch:3")
    assert json.loads(widget.stories)[0]["title"] == made.title
    assert widget._esm.endswith("export default $widget;\n")
    bundle = unisono.explain(made)._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle[0]


def test_widget_plays_and_does_not_affect_the_notebook(browser):
    import msgspec

    stories = msgspec.json.encode([tell(unisono.schedule(*RING, n=3))]).decode()
    browser.window(900, 700)
    browser.open("about:blank", "true")
    code = f"{script('widget')}\nreturn $widget;"
    browser.run(
        f"""(() => {{
        const sheet = document.createElement('style');
        sheet.textContent = {json.dumps(text("style.css"))};
        document.head.append(sheet);
        window.widget = new Function({json.dumps(code)})();
        const stories = {json.dumps(stories)};
        const model = {{get: () => stories, on: () => 0, off: () => 0}};
        window.end = widget.render({{model, el: document.body}});
        }})()"""
    )
    at = "Number(document.querySelector('[data-at]').dataset.at)"
    browser.press("ArrowRight")  # the notebook's key, not ours
    assert browser.run(at) == 0
    browser.run("document.querySelector('.play').focus()")
    browser.press("ArrowRight")
    assert browser.run(at) == 1
    outside = "getComputedStyle(document.documentElement).getPropertyValue('--page')"
    assert browser.run(outside) == ""
    browser.run("end()")
    assert browser.run("document.querySelector('[data-at] *')") is None
    assert browser.complaints == []

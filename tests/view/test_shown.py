"""What a prompt or a notebook shows of results."""

import unisono
from unisono.schedule.cost import cost
from unisono.schedule.verify import verify
from unisono.simulate import simulate


def test_explanation_prints_as_its_text_and_takes_names():
    text = unisono.explain("all_reduce", "ring", 3)
    assert repr(text) == str(text)
    assert text == unisono.explain(unisono.schedule("all_reduce", "ring", 3))
    assert "broadcast by tree, n=5" in unisono.explain("broadcast", "tree", 5, root=2)


def test_results_print_in_one_short_line_and_as_tables():
    ring = unisono.schedule("all_reduce", "ring", 4)
    result = simulate("ring", "ring:4", "1M")
    for shown, line, cells in (
        (verify(ring), "<Proof: all_reduce by ring, n=4, chance of error", ["steps"]),
        (cost(ring), "<Cost: all_reduce by ring, n=4, 6 steps, 6 rounds", ["span"]),
        (result, "<Result: all_reduce by ring of 1 MiB on ring:4: ", ["bound"]),
    ):
        assert repr(shown).startswith(line)
        assert len(repr(shown)) < 100
        html = shown._repr_html_()
        assert html.startswith("<table><caption>")
        assert all(f"<th>{cell}</th>" in html for cell in cells)

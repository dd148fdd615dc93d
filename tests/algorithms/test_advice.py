"""Words on when an algorithm is good, and the memory that is counted beside them."""

import re

import pytest

import unisono
from unisono import BadArgument
from unisono.algorithms import LANGUAGES, library
from unisono.algorithms.library import advice_on
from unisono.schedule import collective
from unisono.view.advice import advice, wrapped

IDEAS = {a.name: a for a in library().values()}
CHINESE = re.compile("[\u4e00-\u9fff]")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", sorted(IDEAS))
def test_every_algorithm_says_when_it_is_good(name, language):
    assert IDEAS[name].advice is not None
    words = IDEAS[name].advice.words(language)
    for text in (words.good, words.bad, words.memory):
        assert text.endswith("。" if language == "zh" else ".")
        assert bool(CHINESE.search(text)) == (language == "zh")


@pytest.mark.parametrize("key", library(), ids="-".join)
def test_who_says_none_holds_nothing(key):
    """Words about memory agree with what is counted from the steps."""
    for n in (2, 7, 8, 13):
        made = library()[key](n)
        if made.cost().memory:
            words = library()[key].advice.en.memory
            assert not re.match(r"None[:.]", words), made.title


def test_memory_is_what_a_rank_holds_for_others():
    def memory(name, what, n=8):
        return unisono.schedule(what, name, n).cost().memory

    assert memory("ring", "all_reduce") == 0
    assert memory("direct", "all_to_all") == 0
    assert memory("tree", "scatter") == pytest.approx(3 / 8)  # those below rank 4
    assert memory("tree", "gather") == pytest.approx(3 / 8)
    assert memory("tree", "broadcast") == 0
    assert memory("dissemination:carry", "all_reduce", 7) == 1
    assert memory("ring", "all_to_all", 3) == pytest.approx(1 / 3)
    assert memory("direct", "barrier") == 0


def test_a_pair_has_the_words_of_both():
    made = unisono.schedule("all_reduce", "ring+direct", 4)
    assert [name for name, _ in advice_on(made.collective, made.name)] == [
        "ring",
        "direct",
    ]
    assert [text.partition(":")[0] for _, text in advice(made)][::3] == [
        "ring",
        "direct",
    ]
    assert advice_on(collective("all_reduce"), "mine") == []


def test_amount_is_in_the_sentence_about_memory():
    made = unisono.schedule("gather", "tree", 8)
    assert "At n = 8: at most 0.375 of a buffer" in advice(made)[-1][1]
    assert "n = 8 时" in advice(made, "zh")[-1][1]
    with pytest.raises(BadArgument, match="unknown language 'fr'"):
        advice(made, "fr")


def test_chinese_lines_are_as_wide_as_others():
    lines = list(wrapped("适合", "小数据，消息少。" * 5, 24))
    assert lines[0] == "适合   小数据，消息少。"
    assert all(line.startswith(" " * 7) for line in lines[1:])
    assert "".join(line[7:] if i else line[5:] for i, line in enumerate(lines)) == (
        "小数据，消息少。" * 5
    )
    assert list(wrapped("good", "one two three", 14)) == [
        "good   one two",
        "       three",
    ]

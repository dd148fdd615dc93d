"""Old names of classes still work, and warn."""

from importlib import import_module

import pytest

RENAMED = [
    ("unisono.algorithms", "Need", "Requirement"),
    ("unisono.schedule", "Place", "Holders"),
    ("unisono.schedule", "copy", "copy_step"),
    ("unisono.simulate", "Codec", "CodecModel"),
    ("unisono.tune", "Costs", "LinkCosts"),
    ("unisono.tune", "Piece", "FitSegment"),
]


@pytest.mark.parametrize(("module", "old", "new"), RENAMED)
def test_old_name_warns_and_gives_the_new_object(module, old, new):
    package = import_module(module)
    with pytest.warns(DeprecationWarning, match=f"{module}.{old} is now .*{new}"):
        assert getattr(package, old) is getattr(package, new)


@pytest.mark.parametrize("module", sorted({row[0] for row in RENAMED}))
def test_unknown_name_is_an_attribute_error(module):
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        _ = import_module(module).nothing_of_the_kind

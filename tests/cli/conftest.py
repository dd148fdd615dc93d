"""The command line inside this process."""

import pytest

from unisono.cli import main


@pytest.fixture
def run(capsys):
    """Calls a verb: its code, and what it said to the two streams."""

    def call(*arguments):
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return call

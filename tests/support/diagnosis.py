"""What `unisono trace why` says of a folder of flight records."""

import json

from unisono.cli import main


def judge(capsys, folder):
    """As JSON, and as text."""
    assert main(["trace", "why", str(folder), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert main(["trace", "why", str(folder)]) == 0
    return result, capsys.readouterr().out

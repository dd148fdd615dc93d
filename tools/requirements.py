"""Print what unisono and its extras need, one requirement a line, unisono left out.

    python tools/requirements.py test docs

pip installs it while unisono is compiled. It needs the standard library alone.
"""

import re
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
OURS = re.compile(r"unisono\[(?P<extras>[\w,-]+)\]")


def requirements(extras: list[str]) -> list[str]:
    """Those of the package and of these extras, and of extras that these name."""
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        for text in project["optional-dependencies"][extra]:
            ours = OURS.fullmatch(text)
            found += requirements(ours["extras"].split(",")) if ours else [text]
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1:])))

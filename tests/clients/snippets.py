"""The training scripts of docs/pytorch.md, which are run as they are written.

Each is a block of Python whose first line is a comment: `# FILE: the command`.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
_BLOCK = re.compile(r"^```python\n# (\w+\.py): ([^\n]+)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Snippet:
    file: str
    command: str
    code: str

    @property
    def imports(self):
        """The packages it imports, those of Python itself left out."""
        found = re.findall(r"^(?:from|import) (\w+)", self.code, re.MULTILINE)
        return sorted(set(found) - set(sys.stdlib_module_names))


def snippets():
    """All of them, by the name of the file."""
    found = _BLOCK.findall(PAGE.read_text())
    return {file: Snippet(file, command, code) for file, command, code in found}

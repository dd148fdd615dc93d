"""What tests of several folders have in common can be imported by all of them."""

import sys
from pathlib import Path

for _folder in ("algorithms", "runtime", "schedule"):
    sys.path.append(str(Path(__file__).parent / _folder))

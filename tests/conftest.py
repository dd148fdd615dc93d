"""What tests of several folders have in common can be imported by all of them."""

import os
import sys
from pathlib import Path

for _folder in ("algorithms", "runtime", "schedule"):
    sys.path.append(str(Path(__file__).parent / _folder))

# What is chosen must not hang on what somebody has tuned on this machine.
os.environ["UNISONO_TUNED"] = "0"

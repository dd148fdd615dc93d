"""What tests of several folders have in common can be imported by all of them."""

import os
import signal
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

for _folder in ("algorithms", "runtime", "schedule"):
    sys.path.append(str(Path(__file__).parent / _folder))

# What is chosen must not hang on what somebody has tuned on this machine.
os.environ["UNISONO_TUNED"] = "0"

# Who is started in the background may ignore Ctrl-C, and so would all it starts: but
# there are tests of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test passes or fails by a clock, those of made-up examples neither.
settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unhurried")

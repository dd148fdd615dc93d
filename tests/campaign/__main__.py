"""`python tests/campaign`: see `--help`."""

import sys
from pathlib import Path

_TESTS = Path(__file__).parents[1]
sys.path[:1] = [str(_TESTS), str(_TESTS / "support")]

from campaign.main import main  # noqa: E402  (found by the path above)

sys.exit(main())

"""`python tests/clients`: see `--help`."""

import sys
from pathlib import Path

sys.path[:1] = [str(Path(__file__).parents[1])]

from clients.main import main  # noqa: E402  (found by the path above)

sys.exit(main())

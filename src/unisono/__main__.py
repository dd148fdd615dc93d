"""`python -m unisono` is `unisono`."""

import sys

from unisono.cli import main

sys.exit(main())

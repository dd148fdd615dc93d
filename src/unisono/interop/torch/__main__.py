"""`python -m unisono.interop.torch`: build the compiled adapter, or ask about it."""

import sys

from unisono.interop.torch.commands import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

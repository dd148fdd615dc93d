"""Where tests keep the compiled adapter: the user's groups do not change for them."""

from pathlib import Path

CACHE = Path(__file__).parents[2] / "build" / "cache"

"""The pages as the site has them: those that are kept, and those that are made."""

import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # docs/ is no part of the package


@pytest.fixture(scope="session")
def docs(tmp_path_factory):
    """A copy of docs/ with everything made, winners on two small machines only."""
    from docs import make_pages, winning

    made = tmp_path_factory.mktemp("site") / "docs"
    shutil.copytree(ROOT / "docs", made)
    machines = {"switch:4": "four ranks", "cloud:2x2": "two hosts of two"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(winning, "MACHINES", machines)
        make_pages.main(made)
    return made

"""What others have published, within fifteen per cent."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "simulation.py"


def test_published_bandwidths_are_reproduced():
    spec = importlib.util.spec_from_file_location("simulation_benchmark", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    errors = {row["case"]: row["error"] for row in module.published()}
    near = [case for case, error in errors.items() if abs(error) <= 0.15]
    assert sum("8 x H100, 4 GiB" in case for case in near) == 1
    assert len(near) >= 4, errors
    assert all(abs(error) < 0.2 for error in errors.values()), errors

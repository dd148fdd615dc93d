"""A synthesized schedule in a file: an algorithm as any other."""

from pathlib import Path

import numpy as np
import pytest

from unisono.algorithms import schedule
from unisono.errors import BadArgument, UnsupportedWorld
from unisono.schedule import load
from unisono.simulate import simulate
from unisono.synthesize import OFFERED, save, synthesize
from unisono.testing import world


@pytest.mark.parametrize("what", [one.name for one in OFFERED])
def test_algorithm_file_has_the_same_steps(what: str, tmp_path: Path) -> None:
    made = synthesize(what, "ring:5")
    file = tmp_path / "mine.py"
    save(made, file)
    again = schedule(what, str(file), 5)
    again.verify()
    assert [list(step) for step in again] == [list(step) for step in made.schedule]
    assert simulate(str(file), "ring:5", "1M", collective=what).time > 0
    cut = schedule(what, f"{file}:segments=4", 5)
    cut.verify()
    assert cut.num_chunks == 4 * made.schedule.num_chunks


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_schedule_file_can_be_read_again(suffix: str, tmp_path: Path) -> None:
    made = synthesize("all_reduce", "ring:5")
    file = tmp_path / f"mine{suffix}"
    save(made, file)
    assert load(file).num_chunks == made.schedule.num_chunks


def test_algorithm_file_runs(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    save(synthesize("all_reduce", "torus:2x2", failed=["0-1"]), file)

    def body(comm):  # type: ignore[no-untyped-def]
        return comm.all_reduce(np.full(1000, comm.rank + 1.0), algorithm=str(file))

    with world(4) as four:
        results = four.run(body)
    for result in results:
        np.testing.assert_array_equal(result, 10.0)


def test_algorithm_file_is_for_its_number_of_ranks_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    save(synthesize("all_reduce", "ring:5"), file)
    with pytest.raises(UnsupportedWorld, match="needs 5, got 4"):
        schedule("all_reduce", str(file), 4)


def test_algorithm_file_is_for_its_root_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    save(synthesize("broadcast", "ring:5", root=2), file)
    schedule("broadcast", str(file), 5, root=2).verify()
    with pytest.raises(BadArgument, match="for root 2 alone"):
        schedule("broadcast", str(file), 5, root=1).verify()


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    made = synthesize("all_reduce", "ring:3")
    with pytest.raises(BadArgument, match=r"saved as \.py"):
        save(made, tmp_path / "mine.txt")
    with pytest.raises(BadArgument, match="no such folder"):
        save(made, tmp_path / "nowhere" / "mine.py")

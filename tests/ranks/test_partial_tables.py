"""However ranks with parts make what saves them: what is loaded is the whole, or somebody was told before."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.ranks import partial_tables
from tests.ranks.forked import run

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(300)]


def test_a_part_is_never_the_whole_at_doors_drawn(tmp_path: Path, base_seed: int) -> None:
    print(f"seed {base_seed}")
    listed = partial_tables.drawn(1, base_seed)
    assert run(partial(partial_tables.run_cells, listed, 2), 2, tmp_path) == [0, 0]


def test_doors_that_know_who_saves_do_not_wait_to_see_who_comes(tmp_path: Path) -> None:
    assert run(partial_tables.no_door_waits, 2, tmp_path) == [0, 0]


def test_a_rank_that_saves_alone_may_try_again_after_an_error(tmp_path: Path) -> None:
    assert run(partial_tables.alone_after_errors, 2, tmp_path) == [0, 0]


def test_a_child_forked_from_a_rank_does_not_talk_on_its_connection(tmp_path: Path) -> None:
    assert run(partial_tables.forked_from_a_rank, 2, tmp_path) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks_count", [1, 2, 4])
@pytest.mark.parametrize("door", partial_tables.DOORS)
def test_a_part_is_never_the_whole_at_any_door(tmp_path: Path, door: str, ranks_count: int) -> None:
    listed = [cell for cell in partial_tables.cells() if cell.door == door]
    assert run(partial(partial_tables.run_cells, listed, ranks_count), ranks_count, tmp_path) == [0] * ranks_count

"""Saves of several ranks that wait for steps: each rank holds its cut, however far its own background has come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import step_ranks
from tests.ranks.forked import run

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]


def test_each_rank_holds_its_cut(tmp_path: Path) -> None:
    assert run(step_ranks.at_any_times, 2, tmp_path, [1, 2]) == [0, 0]


@pytest.mark.parametrize("is_stepping", [False, True])
def test_what_one_rank_has_changed_too_early_refuses_the_save_of_all(tmp_path: Path, is_stepping: bool) -> None:
    assert run(step_ranks.one_rank_is_refused, 2, tmp_path, is_stepping) == [0, 0]

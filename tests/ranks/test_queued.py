"""Saves of several ranks that are queued: what they build upon and who writes what follow from the number of the call.

One rank may make a call before the save in front of it has committed, and another one after that. Both are right.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncckpt
from tests.ranks import queued_ranks
from tests.ranks.forked import run

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]

SEEDS = [1, 2]


def check(path: Path, seed: int, steps_count: int, *, are_kept: bool = True) -> None:
    """The directory holds the first so many steps of a seed, or the last of these and its chain, and their contents."""
    expected = list(queued_ranks.changes(seed))[:steps_count]
    found = asyncckpt.list_steps(path)
    if not are_kept:
        assert found[-1] == steps_count
        expected = [change for change in expected if change.step in found]
    assert found == [change.step for change in expected]
    assert [found for change in expected for found in queued_ranks.differences(path, change)] == []
    assert asyncckpt.verify(path).strays == ()


def test_saves_at_any_times(tmp_path: Path) -> None:
    assert run(queued_ranks.at_any_times, 2, tmp_path, SEEDS) == [0, 0]
    for seed in SEEDS:
        are_kept = queued_ranks.keep_of(seed) is None
        check(tmp_path / f"{seed}", seed, queued_ranks.STEPS_COUNT, are_kept=are_kept)


@pytest.mark.slow
def test_saves_at_more_times(tmp_path: Path) -> None:
    seeds = list(range(10, 40))
    assert run(queued_ranks.at_any_times, 2, tmp_path, seeds) == [0, 0]
    for seed in seeds:
        are_kept = queued_ranks.keep_of(seed) is None
        check(tmp_path / f"{seed}", seed, queued_ranks.STEPS_COUNT, are_kept=are_kept)


def test_a_delta_builds_upon_a_save_that_was_in_flight_on_one_rank(tmp_path: Path) -> None:
    assert run(queued_ranks.one_rank_is_ahead, 2, tmp_path) == [0, 0]
    for kind in ("auto", "delta"):
        check(tmp_path / kind, 1, 2)


def test_a_delta_with_nothing_to_build_upon_fails_on_all_ranks(tmp_path: Path) -> None:
    assert run(queued_ranks.a_delta_has_nothing_to_build_upon, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == [3]


def test_the_next_step_is_the_same_on_all_ranks_after_a_failed_one(tmp_path: Path) -> None:
    assert run(queued_ranks.the_next_step_after_a_failed_one, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == [0, 1]


def test_ranks_save_in_full_after_their_parent_was_removed(tmp_path: Path) -> None:
    assert run(queued_ranks.the_parent_is_removed, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == [1, 2, 4, 5]
    for change in list(queued_ranks.changes(2))[3:5]:
        assert not queued_ranks.differences(tmp_path / "checkpoints", change)


def test_ranks_keep_the_best_and_what_one_of_them_pins(tmp_path: Path) -> None:
    assert run(queued_ranks.what_is_kept, 2, tmp_path) == [0, 0]
    for change in list(queued_ranks.changes(2))[1:4]:
        assert not queued_ranks.differences(tmp_path / "checkpoints", change)


def test_ranks_count_from_what_was_compacted(tmp_path: Path) -> None:
    assert run(queued_ranks.the_ranks_compact, 2, tmp_path) == [0, 0]
    checkpoints = tmp_path / "checkpoints"
    assert [asyncckpt.describe(checkpoints, step).parents for step in (5, 6, 7, 8)] == [(4,), (), (6,), (7, 6)]
    for change in list(queued_ranks.changes(2))[3:8]:
        assert not queued_ranks.differences(checkpoints, change)


def test_ranks_save_in_full_after_rank_0_alone_has_seen_that_their_parent_was_removed(tmp_path: Path) -> None:
    assert run(queued_ranks.one_rank_has_not_seen_that_the_parent_is_removed, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "checkpoints") == [3, 4]

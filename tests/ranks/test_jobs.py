"""Small jobs of several ranks, in processes of their own; what they saved is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import asyncckpt
from tests.ranks import job_ranks, replica_ranks
from tests.ranks.forked import run
from tests.ranks.training import differences, image, load_whole, run_alone

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]


def check(path: Path, steps: dict[int, int], ranks_count: int) -> None:
    """The directory holds these checkpoints: by step, how many steps had been trained then."""
    assert asyncckpt.list_steps(path) == sorted(steps)
    for step, trained_count in steps.items():
        found_step, found = load_whole(path, step)
        assert found_step == step
        assert differences(found, image(*run_alone(trained_count, ranks_count))) == []
        assert asyncckpt.verify(path, step).strays == ()


def test_ranks_without_a_process_group(tmp_path: Path) -> None:
    assert run(job_ranks.files_only, 3, tmp_path) == [0, 0, 0]
    check(tmp_path / "checkpoints", {1: 1, 2: 2, 3: 3, 4: 4}, 3)
    assert list((tmp_path / "checkpoints" / "ranks").iterdir()) == []


def test_a_job_whose_rank_was_killed_is_started_again(tmp_path: Path) -> None:
    assert run(job_ranks.begin_and_die, 2, tmp_path) == [0, -9]
    check(tmp_path / "checkpoints", {1: 1}, 2)
    assert run(job_ranks.begin_again, 2, tmp_path) == [0, 0]
    check(tmp_path / "checkpoints", {1: 1, 2: 2}, 2)


def test_a_sub_group_saves_together(tmp_path: Path) -> None:
    assert run(job_ranks.sub_group, 3, tmp_path) == [0, 0, 0]
    check(tmp_path / "checkpoints", {1: 1, 2: 2}, 2)
    check(tmp_path / "alone", {1: 1}, 1)


@pytest.mark.parametrize(
    ("job", "steps"),
    [
        (job_ranks.different_steps, {1: 1}),
        (job_ranks.a_filter_raises, {2: 2}),
        (job_ranks.a_rank_skips, {2: 1}),
        (job_ranks.a_call_fails, {2: 2}),
        (job_ranks.the_directory_cannot_be_opened, {1: 1}),
        (job_ranks.periodic_savers, {3: 3}),
        (job_ranks.a_last_call_fails, {1: 1}),
    ],
)
def test_what_goes_wrong_on_one_rank(tmp_path: Path, job: Callable[[int, Path], None], steps: dict[int, int]) -> None:
    assert run(job, 2, tmp_path) == [0, 0]
    check(tmp_path / "checkpoints", steps, 2)


def test_a_rank_that_does_not_come(tmp_path: Path) -> None:
    assert run(job_ranks.a_rank_does_not_come, 2, tmp_path) == [0, 0]
    check(tmp_path / "checkpoints", {1: 1}, 1)


def test_rank_0_folds_a_chain_for_all(tmp_path: Path) -> None:
    assert run(job_ranks.compaction, 2, tmp_path) == [0, 0]
    assert asyncckpt.describe(tmp_path / "checkpoints", 3).kind == "full"
    check(tmp_path / "checkpoints", {1: 1, 2: 2, 3: 3}, 2)


def test_what_ranks_share_is_written_once(tmp_path: Path) -> None:
    assert run(job_ranks.replicas, 3, tmp_path) == [0, 0, 0]


def test_a_rank_that_is_ahead_of_what_is_agreed_upon(tmp_path: Path) -> None:
    assert run(replica_ranks.one_rank_is_ahead, 2, tmp_path) == [0, 0]


def test_ranks_that_tie_different_tensors(tmp_path: Path) -> None:
    assert run(replica_ranks.ranks_tie_different_ones, 3, tmp_path) == [0, 0, 0]


def test_a_module_of_fsdp2_through_a_saver(tmp_path: Path) -> None:
    assert run(replica_ranks.fsdp2_through_a_saver, 2, tmp_path) == [0, 0]


def test_slices_of_recis_load_into_any_others(tmp_path: Path) -> None:
    assert run(job_ranks.slices, 3, tmp_path) == [0, 0, 0]


def test_ranks_that_do_not_know_of_each_other(tmp_path: Path) -> None:
    assert run(job_ranks.without_a_word_about_ranks, 2, tmp_path) == [0, 0]


def test_a_checkpoint_with_a_hole_is_not_committed(tmp_path: Path) -> None:
    assert run(job_ranks.boxes_that_do_not_make_up_the_whole, 2, tmp_path) == [0, 0]

"""Ranks with a Checkpointer do everything together: restore one step, stop behind one step, save the same last one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import asyncckpt
from tests.ranks import checkpointer_ranks
from tests.ranks.forked import run

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("job", "code", "last"),
    [
        (checkpointer_ranks.asked_to_stop, 143, 6),
        (checkpointer_ranks.all_asked_to_stop, 143, 5),
        (checkpointer_ranks.out_of_time, 143, 6),
        (checkpointer_ranks.to_the_end, 3, 7),
        (checkpointer_ranks.an_exception, 0, 4),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_all_ranks_save_the_same_last_step(
    tmp_path: Path, job: Callable[[int, Path], None], code: int, last: int
) -> None:
    assert run(job, 2, tmp_path) == [code, code]
    assert asyncckpt.list_steps(tmp_path / "ckpt")[-1] == last
    assert asyncckpt.load(tmp_path / "ckpt")["x"].tolist() == [last + 1] * 3
    for rank in range(2):
        done = [int(line) for line in (tmp_path / f"done-{rank}").read_text().split()]
        assert done == list(range(done[-1] + 1))
        assert done[-1] == last


@pytest.mark.parametrize("how", ["checkpointer", "saver"])
def test_an_error_that_is_logged_costs_the_step_that_reports_it_and_no_more(tmp_path: Path, how: str) -> None:
    assert run(partial(checkpointer_ranks.one_step_fails, how), 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [1, 2, *range(5, 10)]


def test_ranks_restore_together_or_not_at_all(tmp_path: Path) -> None:
    assert run(checkpointer_ranks.a_rank_cannot_restore, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1, 2]


@pytest.mark.parametrize("damaged", [0, 1])
def test_what_one_rank_finds_damaged_all_pass_by(tmp_path: Path, damaged: int) -> None:
    assert run(partial(checkpointer_ranks.one_finds_damage, damaged), 2, tmp_path) == [0, 0]


@pytest.mark.parametrize(
    ("event", "in_block"),
    [
        ("rank 1 is made", False),
        pytest.param("rank 1 is made", True, marks=pytest.mark.slow),
        pytest.param("rank 0 loads", False, marks=pytest.mark.slow),
        ("rank 1 loads", True),
        ("rank 1 waits", True),
    ],
)
def test_a_rank_that_is_terminated_in_the_restore_leaves_no_other_one_alone(
    tmp_path: Path, event: str, in_block: bool
) -> None:
    assert run(partial(checkpointer_ranks.asked_to_stop_in_restore, event, in_block), 2, tmp_path) == [143, 143]
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0]
    for rank in range(2):
        assert (tmp_path / f"done-{rank}").read_text().split() == ["0"]


def test_sigterm_ends_the_wait_for_a_rank_that_is_gone(tmp_path: Path) -> None:
    assert run(checkpointer_ranks.a_rank_dies_in_restore, 2, tmp_path) == [143, 143]


def test_sigterm_ends_the_wait_for_a_rank_that_does_not_come(tmp_path: Path) -> None:
    assert run(checkpointer_ranks.a_rank_does_not_come, 2, tmp_path) == [143, 143]


@pytest.mark.parametrize(
    "job",
    [checkpointer_ranks.an_error_in_restore, checkpointer_ranks.a_rank_is_not_made],
    ids=lambda job: job.__name__,
)
def test_an_error_of_one_rank_in_a_restore_is_one_of_all(tmp_path: Path, job: Callable[[int, Path], None]) -> None:
    assert run(job, 2, tmp_path) == [0, 0]

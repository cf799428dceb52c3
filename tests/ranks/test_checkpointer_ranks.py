"""Ranks with a Checkpointer do everything together: restore one step, stop behind one step, save the same last one."""

from __future__ import annotations

from collections.abc import Callable
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
        (checkpointer_ranks.out_of_time, 143, 4),
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


def test_ranks_restore_together_or_not_at_all(tmp_path: Path) -> None:
    assert run(checkpointer_ranks.a_rank_cannot_restore, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "ckpt") == [0, 1, 2]

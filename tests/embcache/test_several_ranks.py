"""Ranks in processes of their own: they save to one directory, in one commit, and hear what went wrong on another."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncckpt
from tests.embcache import job_ranks
from tests.embcache.models import CachedNet, Image, image, load_ranks, union
from tests.ranks.forked import run
from tests.shares import share_of

pytestmark = [pytest.mark.any_core, pytest.mark.timeout(200)]


def trained(steps: int, *, admit_after: int = 1) -> Image:
    """What both ranks hold after some steps."""
    return union(
        image(CachedNet(shard=(rank, job_ranks.WORLD), admit_after=admit_after).trained(range(steps)))
        for rank in range(job_ranks.WORLD)
    )


def load(path: Path, world_size: int, *, step: int | None = None, admit_after: int = 1) -> Image:
    """Load as many ranks, one after the other."""
    found = [CachedNet(shard=(rank, world_size), admit_after=admit_after) for rank in range(world_size)]
    return load_ranks(found, path, step=step, world_size=world_size)


def test_one_commit_of_all_ranks(tmp_path: Path) -> None:
    assert run(job_ranks.saves_and_loads, 2, tmp_path) == [0, 0]
    path = tmp_path / "sparse"
    # Of 0 to 30 the newest two were kept, and 21, the newest one known to be sound, with its parent; 31 removes none.
    assert asyncckpt.list_steps(path) == [20, 21, 22, 30, 31]
    assert {entry.name for entry in path.iterdir()} == {"LOCK", "manifests", "data"}
    for step, count in ((20, 12), (21, 12), (22, 2), (30, 2), (31, 12)):
        assert asyncckpt.verify(path, step).strays == ()
        for world_size in (1, 2, 3):
            assert load(path, world_size, step=step) == trained(count)
    assert load(tmp_path / "other", 5) == trained(12)


def test_what_goes_wrong_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    assert run(job_ranks.errors_of_one_rank, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "sparse") == [0, 1, 2, 3]
    assert load(tmp_path / "sparse", 3) == load(tmp_path / "unopened", 1) == trained(3)


def test_ranks_without_torch_distributed(tmp_path: Path) -> None:
    (tmp_path).chmod(0o750)
    assert run(job_ranks.by_files, 2, tmp_path) == [0, 0]
    assert asyncckpt.list_steps(tmp_path / "sparse") == [0, 1]
    for step, count in ((0, 3), (1, 6)):
        assert load(tmp_path / "sparse", 3, step=step, admit_after=2) == trained(count, admit_after=2)


@pytest.mark.parametrize(
    ("victim", "sends_count", "steps"),
    share_of(
        [
            pytest.param(1, 1, [0], id="rank 1 before it begins"),
            pytest.param(1, 2, [0], id="rank 1 when its files are written"),
            pytest.param(0, 1, [0], id="rank 0 before anybody writes"),
            pytest.param(0, 2, [0, 1], id="rank 0 behind the commit"),
        ],
        "dying ranks",
    ),
)
def test_a_rank_dies(tmp_path: Path, victim: int, sends_count: int, steps: list[int]) -> None:
    """The old checkpoint or the new one, and never a mix of both."""
    codes = run(job_ranks.dies, 2, tmp_path, victim, sends_count)
    assert codes[victim] == 9
    path = tmp_path / "sparse"
    assert asyncckpt.list_steps(path) == steps
    assert load(path, 3) == trained(3 * len(steps))
    assert run(job_ranks.goes_on, 2, tmp_path) == [0, 0]
    assert load(path, 1) == trained(9)


def test_saves_go_on_where_ranks_had_directories_of_their_own(tmp_path: Path) -> None:
    assert run(job_ranks.earlier_form, 2, tmp_path) == [0, 0]
    path = tmp_path / "sparse"
    assert load(path, 3, step=4, admit_after=2) == trained(3, admit_after=2)
    assert load(path, 3, admit_after=2) == trained(5, admit_after=2)

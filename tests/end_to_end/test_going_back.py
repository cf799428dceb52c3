"""A run that goes back to an older step, killed wherever: the directory tells one history."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from tests.end_to_end.going_back import Plan, run
from tests.ranks import forked

KILLED = -9


def checked_steps(path: Path) -> list[int]:
    """The steps of a directory, which are sound, refer only to each other, and tell one history."""
    steps = asyncckpt.list_steps(path)
    histories = {}
    for step in steps:
        assert set(asyncckpt.describe(path, step).parents) <= set(steps)
        asyncckpt.verify(path, step)
        state = asyncckpt.load(path, step, tables=True)
        histories[step] = state["history"]
        assert bool((state["history"][: step + 1] >= 0).all())
        assert bool((state["history"][step + 1 :] == -1).all())
        rows = {int(id): row for id, row in zip(state["t"]["id"], state["t"]["embedding"], strict=True)}
        runs = torch.stack([rows[id][0] for id in sorted(rows)])
        at = torch.stack([rows[id][1] for id in sorted(rows)]).long()
        assert bool((state["history"][at] == runs.long()).all()), "a row of another history"
    for older, newer in itertools.pairwise(steps):
        assert torch.equal(histories[newer][: older + 1], histories[older][: older + 1]), (older, newer)
    return steps


def start(folder: Path, plan: Plan, ranks_count: int, **more: Any) -> int:
    """Run all ranks; return how they ended, which is the same for all."""
    own = folder / f"{plan.number}"
    own.mkdir()
    [code] = {*forked.run(partial(run, plan=plan, ranks_count=ranks_count, **more), ranks_count, own)}
    assert code is not None
    return code


@pytest.mark.parametrize("deltas", [False, True], ids=["full", "deltas"])
@pytest.mark.parametrize("ranks_count", [1, 2])
def test_a_run_that_goes_back_and_is_killed_twice(tmp_path: Path, ranks_count: int, deltas: bool) -> None:
    """40 steps; back to 20, killed in the middle of what is discarded; back again, killed at 30; and on to 60."""
    path = tmp_path / "ckpt"
    assert start(tmp_path, Plan(1, 40, deltas=deltas), ranks_count) == 0
    assert checked_steps(path) == [*range(4, 40, 4), 39]
    middle = Plan(2, 60, back_to=20, deltas=deltas, kill_at_operation=13)
    assert start(tmp_path, middle, ranks_count) == KILLED
    left = checked_steps(path)
    assert left[:5] == [4, 8, 12, 16, 20]
    assert left != [*range(4, 40, 4), 39], "it was killed before it began"
    again = Plan(3, 60, back_to=20, deltas=deltas, kill_at_step=30)
    assert start(tmp_path, again, ranks_count) == KILLED
    assert checked_steps(path) == [4, 8, 12, 16, 20, 24, 28]
    assert start(tmp_path, Plan(4, 60, deltas=deltas), ranks_count) == 0
    steps = checked_steps(path)
    assert steps == [*range(4, 60, 4), 59]
    history = asyncckpt.load(path)["history"].tolist()
    assert history == [1] * 21 + [3] * 8 + [4] * 31 + [-1]
    assert asyncckpt.describe(path, 24).kind == "full"
    if deltas:
        assert asyncckpt.describe(path, 28).parents == (24,)


@pytest.mark.parametrize("at", [5, 7, 10, 12])
def test_a_run_goes_on_from_what_stays_when_it_was_killed_while_it_discarded(tmp_path: Path, at: int) -> None:
    """Killed when some of what goes is announced, and when some of it is gone.

    It went on from a step that its own next save completed to remove, with all that training had come from.
    """
    assert start(tmp_path, Plan(1, 40), 1) == 0
    assert start(tmp_path, Plan(2, 44, back_to=20, kill_at_operation=at), 1) == KILLED
    assert start(tmp_path, Plan(3, 60), 1) == 0
    assert {*range(4, 60, 4), 59} <= {*checked_steps(tmp_path / "ckpt")}


@pytest.mark.slow
@pytest.mark.parametrize("deltas", [False, True], ids=["full", "deltas"])
def test_killed_before_each_operation_of_going_back(tmp_path: Path, deltas: bool) -> None:
    """And started again without a word about going back: it goes on from what is the newest step then."""
    for count in range(40):
        folder = tmp_path / f"{count}"
        folder.mkdir()
        assert start(folder, Plan(1, 40, deltas=deltas), 1) == 0
        code = start(folder, Plan(2, 44, back_to=20, deltas=deltas, kill_at_operation=count), 1)
        checked_steps(folder / "ckpt")
        if code == 0:
            assert count > 20
            return
        assert start(folder, Plan(3, 60, deltas=deltas), 1) == 0
        assert {*range(4, 60, 4), 59} <= {*checked_steps(folder / "ckpt")}
    raise AssertionError("going back does not come to an end")


def test_ranks_of_a_group_go_back_together(tmp_path: Path) -> None:
    assert start(tmp_path, Plan(1, 12), 2, over_group=True) == 0
    assert start(tmp_path, Plan(2, 16, back_to=8), 2, over_group=True) == 0
    assert checked_steps(tmp_path / "ckpt") == [4, 8, 12, 15]


def test_the_check_finds_two_histories(tmp_path: Path) -> None:
    """A directory in which an older history was left beside the newer one."""
    state = {"history": torch.full((61,), -1)}
    table = asyncckpt.HashTable("t", 2)
    table.insert(torch.tensor([0]), torch.tensor([[1.0, 0.0]]))
    with asyncckpt.Saver(path=tmp_path, hashtables={"t": table}, tensors=state) as saver:
        for step, runs in ((0, [1]), (2, [1, 1, 1]), (1, [1, 2])):
            state["history"][:] = torch.tensor([*runs, *[-1] * (61 - len(runs))])
            saver.save(step)
    with pytest.raises(AssertionError, match=r"\(1, 2\)"):
        checked_steps(tmp_path)

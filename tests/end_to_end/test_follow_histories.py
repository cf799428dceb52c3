"""A follower ends at the state of the newest committed step, whatever training has gone back to, saved and removed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt import checkpoints
from tests.end_to_end.chains import TrainingRun
from tests.end_to_end.state import State

POLL_S = 0.005
WAIT_S = 60
ACTIONS = ("save", "save", "save", "save full", "compact", "go back", "prune")

pytestmark = pytest.mark.filterwarnings("ignore:asyncckpt. step:RuntimeWarning")


class Served:
    """A server: what it holds, and of which update."""

    def __init__(self, run: TrainingRun, chosen: random.Random, cursor: Path | None) -> None:
        self.run, self.chosen, self.state = run, chosen, State.empty()
        self.cursor = cursor
        self.follower = self.open()
        self.steps: list[int] = []

    def open(self) -> asyncckpt.follower.Follower:
        return asyncckpt.follow(self.run.path, poll_seconds=POLL_S, cursor=self.cursor)

    async def catch_up(self) -> None:
        """Take updates until this is the newest step; the last one is loaded, others perhaps."""
        newest = asyncckpt.list_steps(self.run.path)[-1]
        while self.state.image() != self.run.images[newest]:
            update = await asyncio.wait_for(anext(self.follower), WAIT_S)
            self.steps.append(update.step)
            if update.step == newest or self.chosen.random() < 0.7:
                await update.load(self.state.tables, self.state.dense)
                assert self.state.image() == self.run.images[update.step]
                update.done()

    async def begin_anew(self) -> None:
        """As a process that was killed, and has its cursor and nothing else."""
        await self.follower.aclose()
        self.follower = self.open()


async def follow_history(tmp_path: Path, seed: int) -> None:
    print(f"seed {seed}")
    chosen = random.Random(seed)
    keep = chosen.choice([None, None, 2])
    cursor = tmp_path / "cursor" if chosen.random() < 0.5 else None
    with TrainingRun(tmp_path / "run", rows=40, keep=keep, seed=seed) as run:
        next_step = 1
        served = Served(run, chosen, cursor)
        for _ in range(10):
            for _ in range(chosen.randrange(1, 4)):
                action = chosen.choice(ACTIONS) if next_step > 1 else "save"
                run.saver.wait_idle(WAIT_S)
                steps = asyncckpt.list_steps(run.path)
                if action.startswith("save"):
                    run.save(next_step, "full" if "full" in action else "auto")
                    next_step += 1
                elif action == "compact":
                    run.saver.compact().result(WAIT_S)
                elif action == "go back":
                    to = chosen.choice(steps)
                    checkpoints.remove_after(run.path, to)
                    next_step = to + 1
                else:
                    checkpoints.prune(run.path, keep=2)
            if chosen.random() < 0.7:
                run.saver.wait_idle(WAIT_S)
                await served.catch_up()
                if cursor is not None and chosen.random() < 0.3:
                    await served.begin_anew()
        run.saver.wait_idle(WAIT_S)
        await served.catch_up()
        await served.follower.aclose()


@pytest.mark.parametrize("seed", range(3))
async def test_a_follower_ends_at_the_newest_step_of_any_history(tmp_path: Path, seed: int) -> None:
    await follow_history(tmp_path, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
async def test_a_follower_ends_at_the_newest_step_of_any_of_many_histories(tmp_path: Path, seed: int) -> None:
    await follow_history(tmp_path, seed)


async def test_steps_that_are_saved_anew_are_followed(tmp_path: Path) -> None:
    """The newest one comes, and what comes after it is a change of that, for tables that hold it alone."""
    with TrainingRun(tmp_path, rows=200) as run:
        served = Served(run, random.Random(0), None)
        for step in (1, 2, 3):
            run.save(step)
            await served.catch_up()
        checkpoints.remove_after(tmp_path, 1)
        update = await asyncio.wait_for(anext(served.follower), WAIT_S)
        assert (update.step, update.kind) == (1, "full"), "what it serves is no step any more"
        for step in (2, 3):
            run.save(step)
        update = await asyncio.wait_for(anext(served.follower), WAIT_S)
        assert update.step == 2
        checkpoints.remove_after(tmp_path, 1)
        for step in (2, 3):
            run.save(step)
        update = await asyncio.wait_for(anext(served.follower), WAIT_S)
        assert (update.step, update.kind) == (3, "full")
        update.done()  # Not loaded: the tables hold a step 3 that is no more.
        assert run.save(4).kind == "delta"
        update = await asyncio.wait_for(anext(served.follower), WAIT_S)
        assert (update.step, update.kind, update.previous) == (4, "delta", 3)
        report = await update.load(served.state.tables, served.state.dense)
        assert served.state.image() == run.images[4]
        assert min(report.rows.values()) > 100, "they are loaded whole"
        await served.follower.aclose()


async def test_a_step_that_stays_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest may be large, and is looked at as long as nothing comes."""
    import asyncckpt.engine.follow.table_update as module

    read: list[int] = []
    plain = module.read_manifest
    monkeypatch.setattr(module, "read_manifest", lambda root, step: read.append(step) or plain(root, step))
    x = torch.zeros(1)
    with asyncckpt.Saver(path=tmp_path, tensors={"x": x}, deltas=asyncckpt.DeltaPolicy()) as saver:
        saver.save(1)
        follower = asyncckpt.follow(tmp_path, poll_seconds=POLL_S, after=1)
        follower._seen = follower._first_seen()
        assert read == [1]
        for _ in range(5):
            follower._look()
        assert (follower._found, read) == (None, [1, 1])

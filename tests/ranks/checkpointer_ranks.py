"""Ranks of synchronous training with a Checkpointer, functions of (rank, folder). Run by test_checkpointer_ranks.py.

The sum over all ranks in every step makes none of them end a step that another one has not begun.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt import checkpointer
from asyncckpt.engine.ranks import steps_together
from asyncckpt.errors import CorruptError, IncompatibleError, IOFailedError, PeerError, UsageError
from tests.ranks.job_ranks import WAIT_S_MAX, group_of
from tests.worlds.directories import flip_byte
from tests.worlds.objects import Stateful

DEADLINE = asyncckpt.RankOptions(peer_deadline=20.0)


class CountedSteps:
    """A tensor of the number of steps, on every rank."""

    def __init__(self, rank: int, folder: Path, ranks_count: int = 2) -> None:
        self.rank = rank
        group_of(rank, ranks_count, folder)
        self.x = torch.zeros(3)
        self.done = (folder / f"done-{rank}").open("a", buffering=1)

    def open(self, path: Path, **options: Any) -> asyncckpt.Checkpointer:
        options = {"every": 1000, "options": {"ranks": DEADLINE}, **options}
        return asyncckpt.Checkpointer(path, x=self.x, **options)

    def train(self, step: int) -> None:
        one = torch.ones(3) / 2
        dist.all_reduce(one)
        self.x += one
        print(step, file=self.done)

    def train_on(self, ckpt: asyncckpt.Checkpointer, steps: int, *, at: int | None) -> None:
        """Go on up to so many steps; this rank is terminated in one of them."""
        for step in range(ckpt.restore(), steps):
            if step == at:
                terminate()
            self.train(step)
            ckpt.step(step)


def asked_to_stop(rank: int, folder: Path) -> None:
    """Rank 1 is terminated in the middle of step 5: both save step 6, and leave."""
    training = CountedSteps(rank, folder)
    with training.open(folder / "ckpt", every=4) as ckpt:
        training.train_on(ckpt, 100, at=5 if rank == 1 else None)


def one_step_fails(how: str, rank: int, folder: Path) -> None:
    """Step 3 cannot be saved on rank 1; the program logs every error and goes on."""
    training = CountedSteps(rank, folder)
    failed: list[int] = []
    saver = asyncckpt.Saver(path=folder / "ckpt", tensors={"x": training.x}, ranks=DEADLINE) if how == "saver" else None
    with saver or training.open(folder / "ckpt", every=1) as saves:
        for step in range(1, 10):
            training.train(step)
            metadata = {"odd": object()} if (rank, step) == (1, 3) else None
            save = saves.save_async if isinstance(saves, asyncckpt.Saver) else saves.step
            try:
                save(step, metadata=metadata)
            except asyncckpt.CheckpointError:
                failed.append(step)
            (saver or saves._saver)._wait_in_flight(WAIT_S_MAX)  # type: ignore[union-attr]
    assert failed == ([3] if rank == 1 else [4])


def all_asked_to_stop(rank: int, folder: Path) -> None:
    """As by torchrun, which sends SIGTERM to all; here just before the last step."""
    training = CountedSteps(rank, folder)
    with training.open(folder / "ckpt") as ckpt:
        training.train_on(ckpt, 6, at=5 - rank)


def out_of_time(rank: int, folder: Path) -> None:
    """Steps of 500 s by the clock of rank 0, which says so one step ahead: the last one of an hour is step 6."""
    now = [0.0]
    checkpointer.monotonic = lambda: now[0]  # type: ignore[attr-defined]
    training = CountedSteps(rank, folder)
    with training.open(folder / "ckpt", max_hours=1) as ckpt:
        for step in range(ckpt.restore(), 100):
            training.train(step)
            now[0] += 0.0 if rank else 500.0
            ckpt.step(step)


def to_the_end(rank: int, folder: Path) -> None:
    """Without a `with` block, and by sys.exit on all."""
    training = CountedSteps(rank, folder)
    ckpt = training.open(folder / "ckpt", every=2)
    for step in range(ckpt.restore(), 8):
        training.train(step)
        ckpt.step(step)
    raise SystemExit(3)


def an_exception(rank: int, folder: Path) -> None:
    """On rank 1, in step 5: nobody waits for the others, and nothing is saved that not all have."""
    training = CountedSteps(rank, folder)
    with suppress(RuntimeError), training.open(folder / "ckpt", every=4) as ckpt:
        for step in range(ckpt.restore(), 100):
            if (rank, step) == (1, 5):
                raise RuntimeError("of this rank alone")
            training.train(step)
            ckpt.step(step)
            ckpt._periodic.drain()
    os._exit(0)  # Without the end of gloo, which has lost a peer.


def a_rank_cannot_restore(rank: int, folder: Path) -> None:
    """Then none goes on, and nothing is discarded; afterwards both can."""
    training = CountedSteps(rank, folder)
    with training.open(folder / "ckpt") as ckpt:
        assert ckpt.restore() == 0
        for step in range(4):
            training.train(step)
            ckpt.save_now(step)
    more = {"only here": torch.ones(2)} if rank else {}
    with training.open(folder / "ckpt", **more) as ckpt:
        with pytest.raises(UsageError if rank == 0 else PeerError, match="cannot resume from step 1"):
            ckpt.restore(1)
        with pytest.raises(IncompatibleError if rank else PeerError, match="only here"):
            ckpt.restore(1, discard_newer=True)
        assert asyncckpt.list_steps(folder / "ckpt") == [0, 1, 2, 3]
    with training.open(folder / "ckpt") as ckpt:
        assert ckpt.restore(1, discard_newer=True) == 2
        assert asyncckpt.list_steps(folder / "ckpt") == [0, 1]
        assert training.x.tolist() == [2.0] * 3
        ckpt.step(2)


def one_finds_damage(damaged: int, rank: int, folder: Path) -> None:
    """What one rank reads of step 3 is damaged: both pass it by, put it aside, and save it again."""
    training, path = CountedSteps(rank, folder), folder / "ckpt"
    own = torch.zeros(4096)
    with training.open(path, **{f"of_rank_{rank}": own}) as ckpt:
        for step in range(ckpt.restore(), 4):
            own.fill_(step)
            training.train(step)
            ckpt.save_now(step)
    dist.barrier()
    if rank == damaged:
        (name,) = (name for name in asyncckpt.describe(path, 3).files if f"/r0000{damaged}-" in name)
        flip_byte(path / name)
    dist.barrier()
    with training.open(path, **{f"of_rank_{rank}": own}) as ckpt:
        with pytest.raises(CorruptError if rank == damaged else PeerError):
            ckpt.restore()
        assert ckpt.restore(fallback=True) == 3
        assert ckpt.report is not None
        assert ckpt.report.fallback_from == (3,)
        assert (own.unique().tolist(), training.x.tolist()) == ([2], [3.0] * 3)
        with pytest.raises(UsageError if rank else PeerError):  # Refused on one rank, it puts nothing aside.
            ckpt.step(3, metadata={"a": object()} if rank else None)
        assert asyncckpt.list_steps(path) == [0, 1, 2, 3]
        dist.barrier()
        for step in range(3, 5):
            training.train(step)
            ckpt.save_now(step)
    assert asyncckpt.list_steps(path) == [0, 1, 2, 3, 4]
    asyncckpt.verify(path, 3)
    assert len(list((path / "damaged").iterdir())) == 1


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def await_true(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S_MAX
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


class Restoring(CountedSteps):
    """Training that has a checkpoint of step 0, and the process ids of both ranks."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__(rank, folder)
        self.folder, self.part = folder, Stateful({"a": 1})
        pids: list[int] = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        self.other_pid = pids[1 - rank]
        with self.open(folder / "ckpt", part=self.part) as ckpt:
            self.train(0)
            ckpt.save_now(0)

    def signal_the_other(self, number: int, ckpt: asyncckpt.Checkpointer, word: str) -> None:
        """Send a signal when the other rank has done its part, and wait until it has said that it came."""
        await_true((self.folder / "loaded").exists)
        os.kill(self.other_pid, number)
        await_true(lambda: ckpt._together._said(word))


def asked_to_stop_in_restore(event: str, in_block: bool, rank: int, folder: Path) -> None:
    """One rank alone is terminated; none goes on to a step, in which the others would wait for it."""
    training = Restoring(rank, folder)
    if event == "rank 1 is made" and rank == 1:
        make = checkpointer.Saver

        def make_terminated(**arguments: Any) -> asyncckpt.Saver:
            terminate()
            return make(**arguments)

        checkpointer.Saver = make_terminated  # type: ignore[assignment, misc]
    ckpt = training.open(folder / "ckpt", part=training.part)
    if event == f"rank {rank} loads":
        training.part.loading = terminate
    elif event == "rank 1 waits":
        training.part.loading = (folder / "loaded").touch
        if rank == 0:
            training.part.loading = lambda: training.signal_the_other(signal.SIGTERM, ckpt, "asked")
    with ckpt if in_block else nullcontext():
        for step in range(ckpt.restore(), 20):
            training.train(step)
            ckpt.step(step)


def a_rank_dies_in_restore(rank: int, folder: Path) -> None:
    """Its launcher then sends SIGTERM to the other one, which has a word from it to wait for, and waits no hour."""
    steps_together.ASKED_S_MAX = 0.3
    training = Restoring(rank, folder)
    if rank == 1:
        training.part.loading = lambda: (os.kill(training.other_pid, signal.SIGTERM), os._exit(143))
    with training.open(folder / "ckpt", part=training.part) as ckpt:
        ckpt.restore()
    raise AssertionError


def a_rank_does_not_come(rank: int, folder: Path) -> None:
    """SIGTERM comes to the other one, which waits for the channel of rank 0."""
    steps_together.ASKED_S_MAX = 0.3
    training = Restoring(rank, folder)
    if rank == 0:
        await_true((folder / "ended").exists)  # It is there, with its store, and makes nothing.
        os._exit(143)
    threading.Timer(0.5, terminate).start()
    with pytest.raises(SystemExit) as caught:
        training.open(folder / "ckpt")
    (folder / "ended").touch()
    assert isinstance(caught.value.__context__, SystemExit)  # Not the PeerError of a deadline.
    raise caught.value


def a_rank_is_not_made(rank: int, folder: Path) -> None:
    """For a wrong argument on it alone; its Saver had been made, so the other one restores."""
    training = Restoring(rank, folder)
    with (
        pytest.raises(PeerError if rank == 0 else UsageError, match="every must be"),
        training.open(folder / "ckpt", part=training.part, every=1000 if rank == 0 else 0) as ckpt,
    ):
        ckpt.restore()


def an_error_in_restore(rank: int, folder: Path) -> None:
    """On one rank, wherever it comes: the other one has an error too, and both can restore afterwards."""
    training = Restoring(rank, folder)

    def fails(what: str) -> Callable[[], None]:
        def call() -> None:
            raise IOFailedError(what)

        return call

    with training.open(folder / "ckpt", part=training.part) as ckpt:
        drain = ckpt._periodic.drain
        for failing in (0, 1):
            ckpt._periodic.drain = fails("lost") if rank == failing else drain  # type: ignore[method-assign]
            with pytest.raises(IOFailedError if rank == failing else PeerError, match="lost"):
                ckpt.restore()
        ckpt._periodic.drain = drain  # type: ignore[method-assign]
        training.part.loading = (folder / "loaded").touch
        if rank == 0:
            training.part.loading = lambda: training.signal_the_other(signal.SIGINT, ckpt, "failed")
        expected = pytest.raises(PeerError, match="rank 1 cannot restore: KeyboardInterrupt")
        with expected if rank == 0 else pytest.raises(KeyboardInterrupt):
            ckpt.restore()
        training.part.loading = lambda: None
        assert ckpt.restore() == 1
        assert training.x.tolist() == [1.0] * 3

"""Every public function and method, called with arguments that are right, on objects that are in use."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import asyncckpt
import asyncckpt.dcp
import asyncckpt.embcache
from asyncckpt.checkpoints import collect_garbage, pin, pinned_steps, prune, remove, remove_after, unpin
from tests.embcache.models import CachedNet
from tests.worlds.gates import nothing
from tests.worlds.threads import awaited

DEADLINE_S = 12.0
WAIT = asyncckpt.BusyPolicy("wait", DEADLINE_S)


class SavedSteps:
    """A directory with a full checkpoint and a delta, and everything that somebody may have at hand beside it."""

    def __init__(self, path: Path) -> None:
        path.mkdir(0o750, parents=True, exist_ok=True)
        self.path = path
        self.run = path / "run"
        self.table = asyncckpt.HashTable("t", 2)
        self.table.insert(torch.arange(8), torch.ones(8, 2))
        self.state: dict[str, Any] = {"x": torch.arange(4.0)}
        self.net = CachedNet().trained(range(1))
        self.saver = self.open(self.run)
        self.saver.save(0)
        self.table.insert(torch.arange(2), torch.zeros(2, 2))
        self.saver.save(1, kind="delta")
        self.done = self.saver.save_async(2)
        self.done.result(DEADLINE_S)
        self.others = [self.open(path / f"other-{number}") for number in range(2)]
        self.sparse = asyncckpt.embcache.Saver(rank=0, world_size=1)
        self.periodic = asyncckpt.PeriodicSaver(self.saver, every_steps=1)
        self.checkpointer = asyncckpt.Checkpointer(
            path / "ckpt", every=1, x=torch.zeros(4), t=asyncckpt.HashTable("t", 2)
        )
        self.loader = self.load_with("raise")
        for step in range(3):
            asyncckpt.save(path / "done", {"x": 1}, step, durability="none")
        self.steps = iter(range(10, 1 << 20))

    def open(self, path: Path, **options: Any) -> asyncckpt.Saver:
        return asyncckpt.Saver(path=path, tensors=self.state, hashtables={"t": self.table}, **options)

    def load_with(self, on_busy: Any) -> asyncckpt.Loader:
        """A Loader of the full step into other tables and tensors."""
        return asyncckpt.Loader(
            self.run,
            tensors={"x": torch.zeros(4)},
            hashtables={"t": asyncckpt.HashTable("t", 2)},
            step=0,
            on_busy=on_busy,
        )

    def follow_one(self) -> int:
        async def one() -> int:
            async with asyncckpt.follow(self.run, poll_seconds=0.01) as follower:
                update = await anext(follower)
                await update.rows("t")
                await update.removed("t")
                await update.load({"t": asyncckpt.HashTable("t", 2)}, {"x": torch.zeros(4)})
                update.done()
                return update.step

        return run_coroutine(one())

    def dcp_save(self, name: str) -> None:
        writer = asyncckpt.dcp.StorageWriter(self.path / name)
        dcp.save({"x": torch.ones(4)}, storage_writer=writer, no_dist=True)

    def close(self) -> None:
        """Close all; errors are those of what was called, and told there."""
        for saver in (self.checkpointer, self.saver, *self.others, self.sparse):
            with contextlib.suppress(asyncckpt.CheckpointError):
                saver.close()


def run_coroutine(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it on a loop of its own, on the thread of another loop too."""
    running = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return asyncio.run(asyncio.wait_for(work, DEADLINE_S))
    finally:
        asyncio._set_running_loop(running)


def calls(world: SavedSteps) -> dict[str, Callable[[], Any]]:
    """By name. Saves take steps that nobody else takes; what closes something comes last."""
    saver, other, ids = world.saver, world.others[0], torch.arange(3)
    load = world.load_with(WAIT)
    target = {"x": torch.zeros(4)}
    return {
        "list_steps": lambda: asyncckpt.list_steps(world.run),
        "describe": lambda: asyncckpt.describe(world.run, 0),
        "verify": lambda: asyncckpt.verify(world.run, 0),
        "follow": world.follow_one,
        "pin": lambda: (pin(world.run, 0), pinned_steps(world.run), unpin(world.run, 0)),
        "prune": lambda: prune(world.run, 1000),
        "remove": lambda: remove(world.path / "done", 0),
        "remove_after": lambda: remove_after(world.path / "done", 1),
        "collect_garbage": lambda: collect_garbage(world.run),
        "Saver": lambda: world.open(world.path / "new").close(),
        "Saver.statistics": saver.statistics,
        "Saver.prepare": lambda: saver.prepare().result(DEADLINE_S),
        "Saver.save_async": lambda: saver.save_async(next(world.steps)),
        "Saver.save_async, queued": lambda: saver.save_async(next(world.steps), on_busy="queue"),
        "Saver.save_async, waiting": lambda: saver.save_async(next(world.steps), on_busy=WAIT),
        "Saver.save_async of another": lambda: other.save_async(next(world.steps), on_busy="skip"),
        "Saver.save": lambda: saver.save(next(world.steps)),
        "Saver.save, waiting": lambda: saver.save(next(world.steps), on_busy=WAIT),
        "Saver.save of another": lambda: other.save(next(world.steps), on_busy=WAIT),
        "Saver.compact": lambda: saver.compact(1).result(DEADLINE_S),
        "compact": lambda: asyncckpt.compact(world.run, 1),
        "Loader": lambda: world.load_with("raise"),
        "Loader.load": world.loader.load,
        "Loader.load, waiting": load.load,
        "Loader.load_async": lambda: load.load_async().result(DEADLINE_S),
        "SaveFuture.result": lambda: world.done.result(DEADLINE_S),
        "SaveFuture.exception": lambda: world.done.exception(DEADLINE_S),
        "SaveFuture.wait_staged": lambda: world.done.wait_staged(DEADLINE_S),
        "SaveFuture.wait_uploaded": lambda: world.done.wait_uploaded(DEADLINE_S),
        "SaveFuture.fence": world.done.fence,
        "SaveFuture.cancel": world.done.cancel,
        "SaveFuture.done": world.done.done,
        "SaveFuture.progress": lambda: (world.done.progress, world.done.state, repr(world.done)),
        "SaveFuture.add_done_callback": lambda: world.done.add_done_callback(nothing),
        "await SaveFuture": lambda: run_coroutine(awaited(world.done)),
        "PeriodicSaver.step": lambda: world.periodic.step(next(world.steps)),
        "PeriodicSaver.drain": lambda: world.periodic.drain(DEADLINE_S),
        "PeriodicSaver.save_now": lambda: world.periodic.save_now(next(world.steps)),
        "PeriodicSaver.statistics": world.periodic.statistics,
        "Checkpointer.restore": world.checkpointer.restore,
        "Checkpointer.begin_anew": world.checkpointer.begin_anew,
        "Checkpointer.step": lambda: world.checkpointer.step(next(world.steps)),
        "Checkpointer.compact": world.checkpointer.compact,
        "Checkpointer.save_now": lambda: world.checkpointer.save_now(next(world.steps)),
        "Checkpointer.statistics": world.checkpointer.statistics,
        "HashTable.lookup": lambda: world.table.lookup(ids),
        "HashTable.insert": lambda: world.table.insert(ids, torch.ones(3, 2)),
        "HashTable.update": lambda: world.table.update(world.table.lookup(ids), lambda rows: rows.embedding.add_(1.0)),
        "HashTable.remove": lambda: world.table.remove(torch.tensor([7])),
        "HashTable.export": lambda: (len(world.table), world.table.read(world.table.ids())),
        "SparseAdagrad.step": lambda: train(world),
        "dcp.save": lambda: world.dcp_save("dcp"),
        "dcp.load": lambda: dcp.load(
            target, storage_reader=asyncckpt.dcp.StorageReader(world.run, step=0), no_dist=True
        ),
        "embcache.Saver.save": lambda: world.sparse.save(world.net, world.path / "sparse" / str(next(world.steps))),
        "embcache.Saver.save_async": lambda: world.sparse.save_async(world.net, world.path / "sparse" / "background"),
        "embcache.Saver.wait_idle": lambda: world.sparse.wait_idle(DEADLINE_S),
        "Saver.when_free": lambda: run_coroutine(saver.when_free(DEADLINE_S)),
        "Loader.when_free": lambda: run_coroutine(world.loader.when_free(DEADLINE_S)),
        "embcache.Saver.when_free": lambda: run_coroutine(world.sparse.when_free(DEADLINE_S)),
        "embcache.Saver.close": world.sparse.close,
        "embcache.Saver.aclose": lambda: run_coroutine(world.sparse.aclose()),
        "Saver.wait_idle": lambda: saver.wait_idle(DEADLINE_S),
        "Checkpointer.close": world.checkpointer.close,
        "Saver.close of another": other.close,
        "Saver.aclose of another": lambda: run_coroutine(world.others[1].aclose()),
    }


def train(world: SavedSteps) -> None:
    with torch.enable_grad():  # Tables are loaded without.
        world.net.train_step(1)

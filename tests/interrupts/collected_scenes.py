"""Everything that takes locks, while the collector finds garbage wherever a lock has just been taken.

    python -m tests.interrupts.collected_scenes <finalizers|destructors|control> <folder> <n: every nth place>

The garbage: objects of the library in cycles, whose finalizers run (finalizers, and control, in which one of them takes
its lock like everybody else), or an object of somebody else whose destructor calls every public function (destructors).
Each scene is played once to learn at which places it takes locks, and then once for every place that no scene before
it has taken one at. Prints what was found as JSON.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch  # Before the locks are watched: it has many of its own.

from tests.interrupts import watched_locks
from tests.interrupts.watched_locks import Place

watched_locks.install()

import asyncckpt  # noqa: E402
import asyncckpt.dcp  # noqa: E402
import asyncckpt.embcache  # noqa: E402
from asyncckpt.commit.attempt import claims  # noqa: E402
from asyncckpt.coordination import file_channel, rendezvous  # noqa: E402
from asyncckpt.dcp.attempt import CoordinatedAttempt  # noqa: E402
from asyncckpt.engine.process.save_lock import save_lock  # noqa: E402
from asyncckpt.engine.save import staged_tensors  # noqa: E402
from asyncckpt.options import SaveOptions  # noqa: E402
from asyncckpt.storage import owner_lock  # noqa: E402
from tests.interrupts.public_calls import DEADLINE_S, SavedSteps, calls, run_coroutine  # noqa: E402

HANG_S_MAX = 300.0
AT_ONCE_S = 10.0


class Cycle:
    """Garbage as soon as nobody else holds it: only the collector finds it."""

    def __init__(self, *held: Any) -> None:
        self.held = held
        self.itself = self


class Garbage:
    """Makes garbage in a folder; `make` once for each collection."""

    def __init__(self, folder: Path, world: SavedSteps) -> None:
        self.folder = folder
        self.world = world
        self.count = 0
        self.held: dict[Any, Any] = {}

    def make(self) -> None:
        self.count += 1
        self.held = dict(owner_lock._registry.held)
        own = self.folder / f"garbage-{self.count}"
        own.mkdir(parents=True)
        state = {"x": torch.ones(16)}
        saver = asyncckpt.Saver(path=own / "saver", tensors=state, durability="none")
        saver.save_async(0).result(DEADLINE_S)
        Cycle(saver, self.world.load_with("raise"), asyncckpt.Saver(path=self.world.run, tensors=state))
        Cycle(*two_ranks(own / "ranks"))
        Cycle(CoordinatedAttempt(own / "dcp", 0, SaveOptions()))
        Cycle(staged_tensors.StagedTensors([torch.ones(64)], SaveOptions()))
        table = asyncckpt.HashTable("t", 2)
        table.insert(torch.arange(4), torch.ones(4, 2))
        Cycle(table, asyncckpt.MultiLevelTable("m", 2, cache_rows=4))
        Cycle(begun_update(self.world.run))

    def is_gone(self) -> None:
        """What the garbage held is given back, or is just being given back on another thread."""
        until = time.monotonic() + DEADLINE_S
        while (left := self.left()) and time.monotonic() < until:
            time.sleep(0.001)
        assert left == []

    def left(self) -> list[str]:
        directories = owner_lock._registry
        held = dict(directories.held)
        more = {key: share for key, share in held.items() if self.held.get(key, share) != share}
        wrong = {
            "shares of locks are not counted": directories.released,
            "directories have more shares than before": more,
            "directories stay locked": len(held) > len(self.held) + 1,
            "claims": claims.held,
            "sessions": rendezvous._sessions,
            "lent arenas": staged_tensors._lent,
        }
        return [f"{what}: {found}" for what, found in wrong.items() if found]


def two_ranks(path: Path) -> list[asyncckpt.Saver]:
    """Two ranks that share nothing but their directory; the other one goes first, so that rank 0 waits for nobody."""
    made: dict[int, asyncckpt.Saver] = {}

    def make(rank: int) -> None:
        made[rank] = asyncckpt.Saver(rank, 2, path=path, tensors={"x": torch.ones(3)})

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return [made[1], made[0]]


def begun_update(path: Path) -> Any:
    async def first() -> Any:
        follower = asyncckpt.follow(path, poll_seconds=0.01)
        return follower, await anext(follower)

    return run_coroutine(first())


class CallsEverything:
    """Its destructor does what World can do, and notes what came of it."""

    def __init__(self, world: SavedSteps, found: list[str]) -> None:
        self.world, self.found = world, found

    def __del__(self) -> None:
        for name, call in calls(self.world).items():
            begun = time.monotonic()
            try:
                call()
            except BaseException as error:
                if not is_ours(error):
                    self.found.append(f"{name} raised {error!r}")
            if time.monotonic() - begun > AT_ONCE_S:
                self.found.append(f"{name} took {time.monotonic() - begun:.1f} s")


def is_ours(error: BaseException) -> bool:
    failures = getattr(error, "failures", None)  # DCP puts errors into one of its own.
    if failures is not None:
        return all(isinstance(failure[0], asyncckpt.CheckpointError) for failure in failures.values())
    return isinstance(error, asyncckpt.CheckpointError)


def scenes(world: SavedSteps) -> dict[str, Callable[[], Any]]:
    """Each takes other locks. None closes what the next one uses."""
    made = calls(world)
    chosen = ["Saver", "Saver.prepare", "Saver.save_async, waiting", "Saver.save, waiting", "Saver.compact",
              "Saver.wait_idle", "Saver.statistics", "Loader.load", "Loader.load_async", "follow", "HashTable.insert",
              "SparseAdagrad.step", "dcp.save", "dcp.load", "embcache.Saver.save", "await SaveFuture"]  # fmt: skip

    def ranks() -> None:
        for saver in two_ranks(world.path / f"ranks-{next(world.steps)}"):
            saver.close()

    def abandoned_waiter() -> None:
        """The coroutine that waits for a save is collected at the end of the save, or where somebody asks for it."""
        import asyncio

        future = world.saver.save_async(next(world.steps), on_busy="wait")
        loop = asyncio.new_event_loop()
        task = loop.create_task(future._wait())
        loop.run_until_complete(asyncio.sleep(0))
        Cycle(task, loop)
        loop.close()
        del task, loop
        future.cancel()
        future.exception(DEADLINE_S)
        world.saver.wait_idle(DEADLINE_S)

    return {**{name: made[name] for name in chosen}, "ranks": ranks, "abandoned waiter": abandoned_waiter}


@contextmanager
def at_places(call: Callable[[Place], None]) -> Iterator[None]:
    watched_locks.taken[:] = [call]
    try:
        yield
    finally:
        watched_locks.taken.clear()


def play(kind: str, folder: Path, every: int) -> dict[str, Any]:
    world = SavedSteps(folder / "world")
    garbage = Garbage(folder, SavedSteps(folder / "of garbage") if kind == "destructors" else world)
    known: set[Place] = set()
    reached: list[str] = []
    found: list[str] = []
    sys.unraisablehook = lambda raised: found.append(f"a finalizer has raised {raised.exc_value!r}")
    gc.disable()
    for name, scene in scenes(world).items():
        seen: dict[Place, None] = {}
        with at_places(lambda place: seen.setdefault(place)):  # noqa: B023 - called within the block
            scene()
        save_async_ends()
        for place in [place for place in seen if place not in known]:
            known.add(place)
            if len(known) % every and not place[0].startswith(watched_locks.NEW):
                continue
            if collect_at(place, scene, kind, garbage, found):
                reached.append(f"{place[0]}:{place[1]} in {name}")
            if watched_locks.deadlocks:  # What comes now may hang.
                return {"reached": reached, "found": found, "deadlocks": watched_locks.deadlocks}
    assert save_lock.in_flight() == []
    world.saver.save(next(world.steps))
    return {"reached": reached, "found": found, "deadlocks": watched_locks.deadlocks}


def collect_at(place: Place, scene: Callable[[], Any], kind: str, garbage: Garbage, found: list[str]) -> bool:
    """Play a scene with a collection at a place, where garbage is found; return whether it came there."""
    if kind == "destructors":
        Cycle(CallsEverything(garbage.world, found))
    else:
        garbage.make()
    save_async_ends()
    collected: list[Place] = []

    def collect(now: Place) -> None:
        if now == place and not collected:
            collected.append(now)
            gc.collect()

    try:
        with at_places(collect):
            scene()
            save_async_ends()
    except (asyncckpt.CheckpointError, watched_locks.WaitsForItself) as error:
        if kind != "destructors" or not isinstance(error, asyncckpt.SaveInProgressError):  # One that it has begun.
            found.append(f"{place}: the call itself failed: {error!r}")
    gc.collect()
    save_async_ends()
    if kind != "destructors" and not watched_locks.deadlocks:
        garbage.is_gone()
    return bool(collected)


def save_async_ends() -> None:
    until = time.monotonic() + DEADLINE_S
    while save_lock.in_flight():
        assert time.monotonic() < until, save_lock.in_flight()
        time.sleep(0.001)


def wait_for_the_lock(registry: Any) -> None:
    """What a finalizer must not do."""
    while registry.released:
        with registry.guard:
            registry._release(registry.released.popleft())


if __name__ == "__main__":
    faulthandler.dump_traceback_later(HANG_S_MAX, exit=True)
    file_channel.CLOSE_S_MAX = 0.1
    if sys.argv[1] == "control":
        registry: Any = owner_lock._registry
        registry.guard = watched_locks.WatchedLock()
        registry.settle = lambda: wait_for_the_lock(registry)
    print(json.dumps(play(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))), flush=True)
    faulthandler.cancel_dump_traceback_later()

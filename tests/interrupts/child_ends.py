"""One rank of a job that forks children in the middle of everything; they end in each way that there is.

    python -m tests.interrupts.child_ends <rank> <ranks> <folder> <alone|files|group>

What is in flight at each fork: a save that keeps old values of a table, the retention of an earlier one, a DCP save
between its plan and its commit, an update of a follower, a Saver of multi-level tables, a call of a queue. Further
children are forked in callbacks of a save, and end there or go on with it. Ends with status 0 when nothing of it was
harmed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

import asyncckpt
import asyncckpt.embcache
from asyncckpt.dcp.attempt import CoordinatedAttempt
from asyncckpt.options import SaveOptions
from asyncckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from asyncckpt.tables.multi_level_cut import MultiLevelCut
from tests.embcache.models import CachedNet

DEADLINE_S = 120.0
CHILDREN_S_MAX = 100.0
# How a child ends, whether inside of a `with` of its parent's Saver, and the status that its parent sees.
WAYS = {
    ("return", False): 0,
    ("return", True): 0,
    ("sys.exit", True): 3,
    ("exception", True): 1,
    ("os._exit", False): 4,
    ("close", False): 0,
    ("drop", False): 0,
    ("tables", False): 0,
}


CALLBACKS = ("state_dict", "filter", "done callback")


class ChildReturns(Exception):
    """The program of a child comes to its end."""


class OpenRank:
    """What a rank has open."""

    def __init__(self, rank: int, ranks_count: int, folder: Path) -> None:
        self.folder = folder
        self.may_write = hold_exports()
        self.forks_in, self.forked_ends_by = "", ""
        self.forked: queue.SimpleQueue[int] = queue.SimpleQueue()
        ranks = asyncckpt.RankOptions(peer_deadline=DEADLINE_S)
        shard = (rank, ranks_count)
        self.table = asyncckpt.MultiLevelTable("t", 2, cache_rows=8, capacity=64, shard=shard, undo_bytes_max=1024)
        self.ids = torch.arange(rank, 64 * ranks_count, ranks_count)
        self.table.insert(self.ids, torch.ones(64, 2))
        self.saver = asyncckpt.Saver(
            rank,
            ranks_count,
            path=folder / "run",
            hashtables={"t": self.table},
            tensors={"x": torch.arange(5.0), "object": self},
            filter_func=self.hold,
            keep=1000,
            device=asyncckpt.DeviceOptions(host_level="first_touch"),
            ranks=ranks,
        )
        self.queue = AsyncCallsQueue()
        own = folder / f"own-{rank}"
        own.mkdir(0o750)
        self.attempt = CoordinatedAttempt(own / "dcp", 0, SaveOptions())
        self.net = CachedNet().trained(range(1))
        self.sparse = asyncckpt.embcache.Saver(rank=0, world_size=1) if ranks_count == 1 else None
        if self.sparse is not None:
            self.sparse.save(self.net, own / "sparse")
        with asyncckpt.Saver(path=own / "followed", tensors={"x": torch.arange(5.0)}) as saver:
            saver.save(0)
        # On a loop that ends here: a child that drops one takes from its parent's what wakes it.
        self.follower = asyncckpt.follow(own / "followed")
        self.update = asyncio.run(next_of(self.follower))

    def hold(self, blocks: Any) -> Any:
        assert self.may_write.wait(DEADLINE_S)
        self.fork_in("filter")
        return blocks

    def state_dict(self) -> dict[str, Any]:
        self.fork_in("state_dict")
        return {}

    def fork_in(self, place: str) -> None:
        if place == self.forks_in:
            self.forks_in = ""
            child = os.fork()
            if child:
                self.forked.put(child)
            elif self.forked_ends_by == "sys.exit":
                sys.exit(3)

    def fork_in_callbacks(self, step: int) -> int:
        """Save, and fork a child in each callback; it ends there, or goes on with the save. Return the next step."""
        for place in CALLBACKS:
            for ending in ("sys.exit", "return"):
                self.forks_in, self.forked_ends_by = place, ending
                future = self.saver.save_async(step)
                future.add_done_callback(lambda _: self.fork_in("done callback"))
                child = self.forked.get(timeout=DEADLINE_S)
                wait_for(child, time.monotonic() + CHILDREN_S_MAX)
                assert future.result(DEADLINE_S).step == step, (place, ending)
                step += 1
        return step

    def fork_all(self, step: int) -> None:
        """Fork all children in the middle of a save, await their ends, and then that of the save."""
        self.may_write.clear()
        future = self.saver.save_async(step)
        self.table.insert(self.ids[:4], torch.full((4, 2), 2.0))
        self.queue.schedule_async_request(AsyncRequest(self.may_write.wait, (DEADLINE_S,), []))
        memory = self.saver._target.memory
        behind, memory.behind = memory.behind, {"retention": concurrent.futures.Future()}
        before, until = opened(), time.monotonic() + CHILDREN_S_MAX
        children = {}
        for ending, is_inside in WAYS:
            child = os.fork()
            if child == 0:
                self.be_child(ending, is_inside=is_inside)
            children[ending, is_inside] = child
        try:
            ended = {way: wait_for(child, until) for way, child in children.items()}
            assert ended == WAYS
            now = opened()
            assert {number: path for number, path in before.items() if now.get(number) != path} == {}
            assert not future.done()
        finally:
            memory.behind = behind
            self.may_write.set()
        assert future.result(DEADLINE_S).step == step
        assert self.queue.maybe_finalize_async_calls(blocking=True) == [step]
        assert self.attempt.transaction.place.path.is_dir(), "the attempt of DCP is gone"

    def be_child(self, ending: str, *, is_inside: bool) -> None:
        if ending == "close":
            self.close()
        elif ending == "drop":
            self.__dict__.clear()
        elif ending == "tables":  # More rows than the parent's save keeps, and then more than there is room for.
            self.table.insert(self.ids, torch.zeros(64, 2))
            self.table.insert(self.ids + 1024 * self.saver.ranks_count, torch.zeros(64, 2))
        if is_inside:
            with self.saver:
                end(ending)
        end(ending)

    def close(self) -> None:
        assert self.queue.maybe_finalize_async_calls(blocking=True) == []
        self.queue.close()
        self.attempt.close()
        if self.sparse is not None:
            self.sparse.close()
        self.saver.wait_idle(DEADLINE_S)
        self.saver.close()

    def check_usable(self, step: int) -> None:
        """A last save of each, and the rest of the update."""
        assert self.saver.save(step).step == step
        if self.sparse is not None:
            self.sparse.save(self.net, self.folder / "own-0" / "sparse")
        target = {"x": torch.zeros(5)}
        asyncio.run(self.update.load(tensors=target))
        assert torch.equal(target["x"], torch.arange(5.0))
        asyncio.run(self.follower.aclose())
        self.close()


def hold_exports() -> threading.Event:
    """Let the rows of multi-level tables leave for files only while the event is set."""
    may_write, export = threading.Event(), MultiLevelCut.export
    may_write.set()

    def hold(cut: MultiLevelCut, index: int, targets: Mapping[str, int]) -> None:
        assert may_write.wait(DEADLINE_S)
        export(cut, index, targets)

    setattr(MultiLevelCut, "export", hold)  # noqa: B010 - mypy forbids to assign a method.
    return may_write


async def next_of(follower: Any) -> Any:
    return await anext(follower)


def end(ending: str) -> None:
    if ending == "sys.exit":
        sys.exit(3)
    if ending == "exception":
        os.close(2)  # Where its traceback would go.
        raise ValueError("the end of a child")
    if ending == "os._exit":
        os._exit(4)
    raise ChildReturns


def opened() -> dict[int, str]:
    """What descriptors of this process are open on, but those that were opened only for a moment."""
    found: list[dict[int, str]] = []
    for _ in range(3):
        found.append({})
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # That of the listing.
                found[-1][int(name)] = os.readlink(f"/proc/self/fd/{name}")
        time.sleep(0.01)
    return {number: path for number, path in found[0].items() if all(look.get(number) == path for look in found)}


def wait_for(child: int, until: float) -> int:
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, 6)
            raise AssertionError("a child has not ended")
        time.sleep(0.005)


def main(rank: int, ranks_count: int, folder: Path, kind: str) -> None:
    if kind == "group":
        # A group of gloo crashes or hangs when a forked child of its own ends, whatever else the process does.
        store = dist.FileStore(str(folder / "group"), ranks_count)
        dist.init_process_group("fake", store=store, rank=rank, world_size=ranks_count)
    own = OpenRank(rank, ranks_count, folder)
    own.fork_all(0)
    own.check_usable(own.fork_in_callbacks(1))
    if kind == "group":
        dist.destroy_process_group()


if __name__ == "__main__":
    with contextlib.suppress(ChildReturns):
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])

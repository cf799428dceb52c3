"""Removals, compactions and saves in one process, all at once: python -m tests.strategies.many_at_once FOLDER

Prints what has not ended, and leaves without waiting for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

import asyncckpt
from asyncckpt.strategies.mapping import ShardedTensor
from asyncckpt.strategies.sharded_state import ShardedLoad, ShardedSave

EACH_COUNT = 22
DEADLINE_S = 60
ROWS_COUNT = 200


def removal(path: Path) -> Callable[[], None]:
    """Take the optimizer's tensors out of a checkpoint."""
    names = ("optimizer.a", "model.b")
    state = {name: ShardedTensor.from_rank_offsets(name, torch.ones(ROWS_COUNT)) for name in names}
    path.mkdir()
    ShardedSave().save(state, path)

    def run() -> None:
        ShardedLoad().remove_sharded_tensors(str(path), "optimizer.")
        assert set(ShardedLoad().load_tensors_metadata(path)) == {"model.b"}

    return run


def compaction(path: Path, stack: list[asyncckpt.Saver]) -> Callable[[], None]:
    """Fold a chain: every second one by the Saver that holds the directory, the others without one."""
    table = asyncckpt.HashTable("rows", 4)
    ids = torch.arange(ROWS_COUNT)
    table.lookup(ids)
    saver = asyncckpt.Saver(path=path, hashtables={"rows": table})
    saver.save(0, kind="full")
    table.touch(table.lookup(ids[:9]))
    saver.save(1, kind="delta")
    if len(stack) % 2:
        saver.close()
    stack.append(saver)
    by_saver = len(stack) % 2

    def run() -> None:
        result = saver.compact().result(DEADLINE_S) if by_saver else asyncckpt.compact(path)
        assert (result.step, result.kind, result.skipped) == (1, "full", False)
        assert asyncckpt.verify(path).step == 1

    return run


def save(path: Path, *, staged: bool) -> Callable[[], None]:
    """Three saves that wait for each other's turn, through an arena or through chunk buffers."""
    saver = asyncckpt.Saver(path=path, tensors={"x": torch.ones(ROWS_COUNT)}, on_busy="wait", busy_deadline=DEADLINE_S)

    def run() -> None:
        with saver:
            for step in range(3):
                saver.save_async(step).result(DEADLINE_S) if staged else saver.save(step)
        assert asyncckpt.verify(path).step == 2

    return run


def main() -> None:
    folder = Path(sys.argv[1])
    savers: list[asyncckpt.Saver] = []
    work: dict[str, Callable[[], None]] = {}
    for index in range(EACH_COUNT):
        work[f"removal {index}"] = removal(folder / f"r{index}")
        work[f"compaction {index}"] = compaction(folder / f"c{index}", savers)
        work[f"save {index}"] = save(folder / f"s{index}", staged=bool(index % 2))
    begin = threading.Barrier(len(work))
    ended: set[str] = set()

    def run(name: str) -> None:
        begin.wait(DEADLINE_S)
        work[name]()
        ended.add(name)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in work]
    for thread in threads:
        thread.start()
    until = time.monotonic() + DEADLINE_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    left = sorted(work.keys() - ended)
    print("not ended:", ", ".join(left) or "none", flush=True)
    if any(thread.is_alive() for thread in threads):
        os._exit(1)
    for saver in savers:
        saver.close()
    sys.exit(bool(left))


if __name__ == "__main__":
    main()

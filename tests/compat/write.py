"""Write a directory of every kind, as this code writes them, below tests/compat/<commit>.

python -m tests.compat.write tests/compat/<commit>

Done once at a commit whose directories later ones must read, and again only into a folder of another commit.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from obstore.store import S3Store

import asyncckpt
from asyncckpt import filters
from tests.cloud import seaweed
from tests.compat import states

RANKS = (1, 2, 3)
STEPS = (1, 2, 3)
BUCKET = "compat"


def write_one(path: str | Path) -> None:
    """A full checkpoint of one process, with all that a state may hold."""
    found = states.tables()
    states.fill(found, 1)
    asyncckpt.save(path, states.state(1), 1, hashtables=found, metadata={"loss": 0.25, "who": ["a", None]})


def write_chain(path: str | Path, *, ranks_count: int = 1, compact: bool = False) -> None:
    """A full checkpoint, and deltas upon it, of so many ranks."""
    if ranks_count == 1:
        write_rank(0, 1, path, None)
    else:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(write_in_group, (ranks_count, path, folder), nprocs=ranks_count)
    if compact:
        asyncckpt.compact(path, STEPS[1])


def write_in_group(rank: int, ranks_count: int, path: str | Path, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks_count)
    write_rank(rank, ranks_count, path, dist.group.WORLD)
    dist.destroy_process_group()


def write_rank(rank: int, ranks_count: int, path: str | Path, group: Any) -> None:
    found, tensors = states.tables(rank, ranks_count), states.rank_state(rank, ranks_count, 0)
    ranks = asyncckpt.RankOptions(process_group=group)
    with asyncckpt.Saver(path=path, hashtables=found, tensors=tensors, ranks=ranks) as saver:
        for step in STEPS:
            states.fill(found, step)
            tensors.update(states.rank_state(rank, ranks_count, step))
            saver.save(step, kind="full" if step == STEPS[0] else "delta")


def write_encoded(path: Path) -> None:
    """Columns and tensors that filters have compressed, and rows of zeros left out."""
    found = states.tables()
    states.fill(found, 1)
    chosen = [filters.skip_zero_rows("user@sum"), filters.compress("zstd")]
    with asyncckpt.Saver(path=path, hashtables=found, tensors=states.state(1), filters=chosen) as saver:
        saver.save(1)


def main(folder: Path) -> None:
    write_one(folder / "full")
    write_encoded(folder / "encoded")
    for count in RANKS:
        write_chain(folder / f"chain-{count}", ranks_count=count)
        write_chain(folder / f"compacted-{count}", ranks_count=count, compact=True)
    with tempfile.TemporaryDirectory() as data, seaweed.running(Path(data), buckets=(BUCKET,)) as server:
        os.environ.update(seaweed.environment(server.endpoint))
        store = S3Store(BUCKET)
        write_chain(f"s3://{BUCKET}/store-1", ranks_count=1)
        for item in store.list().collect():
            to = folder / item["path"]
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(store.get(item["path"]).bytes())
    for lock in folder.glob("*/LOCK"):  # It names this machine; readers need none.
        lock.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

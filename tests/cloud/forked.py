"""A process that has torch and asyncckpt imported and forks a child for each line it is sent: a Saver that uploads.

A line is JSON: the directory, the URL (none where the directory is in a store itself), the first and the last step,
whether to plant a fault, what to do (save, or compact the newest step), and the environment of the store. The child
says "pid" and its number, then each step that is uploaded, or compacted; at its end, however that comes, the server
says "end". Neither has used a store before the fork.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import asyncckpt
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.upload import upload_attempt, uploads
from asyncckpt.plan import image
from asyncckpt.storage import object_store
from asyncckpt.storage.object_store import ObjectStore

PART_BYTES = 5 << 20
FILE_BYTES = 8 << 20
CHAIN_LAST = 2
Work = Literal["save", "compact"]


def small_parts() -> None:
    """Let small checkpoints have several files, one of them of several parts."""
    object_store.PART_BYTES_MIN, uploads.FIRST_PAUSE_S = PART_BYTES, 0.01
    setattr(image, "FILE_TARGET_BYTES", FILE_BYTES)  # noqa: B010  # Of another room.


def state(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(step)) for name, size in (("large", 2 << 20), ("small", 1000), ("b", 9999))}


def publish_first(root: CheckpointRoot, store: ObjectStore, name: str, options: asyncckpt.UploadOptions) -> None:
    """A planted fault: the manifest comes before its files."""
    raw = root.manifests.read_file(name, bytes_max=1 << 20)
    upload_attempt._publish(store, f"manifests/{name}", raw)
    store.below("data")  # Time to be killed.


def save_steps(path: str, url: str, first: int, last: int, plant: bool = False) -> None:
    small_parts()
    if plant:
        upload_attempt._upload = publish_first
    tensors = state(first)
    with asyncckpt.Saver(path=path, tensors=tensors, upload=url or None, parallel=2, keep=1) as saver:
        for step in range(first, last + 1):
            for name, tensor in state(step).items():
                tensors[name].copy_(tensor)
            saver.save_async(step).wait_uploaded()
            print("step", step, flush=True)


def save_chain(path: str) -> None:
    """Save a table in full, and a delta for each step up to CHAIN_LAST."""
    table = asyncckpt.HashTable("t", 4)
    with asyncckpt.Saver(path=path, hashtables={"t": table}) as saver:
        for step in range(CHAIN_LAST + 1):
            table.insert(torch.arange(step * 10, step * 10 + 100), torch.full((100, 4), float(step)))
            table.remove(torch.tensor([step * 10]))
            saver.save(step, kind="delta" if step else "full")


def chain_rows(step: int) -> dict[str, torch.Tensor]:
    """Return the ids and rows of a step of that chain."""
    values = dict.fromkeys(range(0), 0.0)
    for own in range(step + 1):
        values |= dict.fromkeys(range(own * 10, own * 10 + 100), float(own))
        del values[own * 10]
    ids = sorted(values)
    return {"ids": torch.tensor(ids), "rows": torch.tensor([[values[one]] * 4 for one in ids])}


def compact_newest(path: str) -> None:
    print("step", asyncckpt.compact(path).step, flush=True)


def serve() -> None:
    for line in sys.stdin:
        path, url, first, last, plant, work, variables = json.loads(line)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.environ.update(variables)
                print("pid", os.getpid(), flush=True)
                if work == "compact":
                    compact_newest(path)
                else:
                    save_steps(path, url, first, last, plant)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print("end", os.waitpid(pid, 0)[1], flush=True)


@dataclass
class Forks:
    process: subprocess.Popen[str]

    def run(
        self, path: Path | str, url: str, *, first: int, last: int, plant: bool, work: Work
    ) -> Iterator[tuple[str, int]]:
        """Fork a child and give what it says, its end last."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        arguments = [str(path), url, first, last, plant, work, variables]
        self.process.stdin.write(json.dumps(arguments) + "\n")
        self.process.stdin.flush()
        word = ""
        while word != "end":
            word, number = self.process.stdout.readline().split()
            yield word, int(number)


if __name__ == "__main__":
    serve()

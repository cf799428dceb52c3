"""`python -m bench endurance`: what a process holds after thousands of saves.

A small state (tensors, and a table of which every save writes some rows) is saved in every way in turn: full, delta,
queued behind another one, blocking, cancelled, with an error of a filter. Descriptors, threads and resident memory are
noted on the way, each time when the background has ended.

Expected, before measuring: the same number of descriptors and threads from the first hundred saves on; memory within a
few MiB.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch

import asyncckpt
from asyncckpt.errors import CheckpointError
from bench.report import machine, make_console, print_table, write_json
from bench.rounds import scratch_folder

ROWS = 2000
WAYS = ("full", "delta", "queued", "blocking", "cancelled", "failed")
NOTES_COUNT = 10
WAIT_S = 60.0


@dataclass(frozen=True)
class Held:
    """What the process holds after so many saves."""

    saves_count: int
    descriptors_count: int
    threads_count: int
    resident_mib: float
    saves_per_second: float


def run_endurance(*, saves: int, directory: Path | None, out: Path) -> None:
    """Save, note and report."""
    console = make_console()
    with scratch_folder(directory) as folder:
        notes = _saved(folder / "checkpoints", saves)
    rows = [
        [f"{item.saves_count:,}", str(item.descriptors_count), str(item.threads_count), f"{item.resident_mib:.1f}"]
        for item in notes
    ]
    print_table(console, "after so many saves", ["saves", "descriptors", "threads", "resident MiB"], rows)
    console.save_text(f"{out}.txt")
    write_json(Path(f"{out}.json"), {"machine": machine(), "notes": [asdict(item) for item in notes]})


def _saved(path: Path, saves: int) -> Sequence[Held]:
    fails = False

    def filter_func(blocks: list[asyncckpt.filters.WriteBlock]) -> list[asyncckpt.filters.WriteBlock]:
        if fails:
            raise ValueError("a filter fails")
        return blocks

    table = asyncckpt.HashTable("t", 8)
    table.lookup(torch.arange(ROWS))
    tensors = {"w": torch.ones(1000), "n": 1}
    notes = []
    begun = time.perf_counter()
    with asyncckpt.Saver(
        path=path, hashtables={"t": table}, tensors=tensors, filter_func=filter_func, keep=3, durability="none"
    ) as saver:
        for number in range(saves):
            way = WAYS[number % len(WAYS)]
            fails = way == "failed"
            table.insert(torch.randint(0, ROWS, (20,)), torch.rand(20, 8))
            with contextlib.suppress(CheckpointError):
                _save(saver, way)
            if (number + 1) % max(1, saves // NOTES_COUNT) == 0 or number == min(99, saves - 1):
                saver.wait_idle(WAIT_S)
                notes.append(_held(number + 1, time.perf_counter() - begun))
    return notes


def _save(saver: asyncckpt.Saver, way: str) -> None:
    if way == "blocking":
        saver.save()
    elif way == "queued":
        futures = [saver.save_async(on_busy="queue") for _ in range(2)]
        for future in futures:
            future.result(WAIT_S)
    else:
        future = saver.save_async(kind="delta" if way == "delta" else "full")
        if way == "cancelled":
            future.cancel()
        future.result(WAIT_S)


def _held(saves_count: int, seconds: float) -> Held:
    until = time.monotonic() + WAIT_S
    while any(thread.name.startswith("asyncckpt") for thread in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.001)
    return Held(
        saves_count=saves_count,
        descriptors_count=len(os.listdir("/proc/self/fd")),
        threads_count=threading.active_count(),
        resident_mib=psutil.Process().memory_info().rss / (1 << 20),
        saves_per_second=saves_count / seconds,
    )

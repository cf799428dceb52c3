"""`python -m bench.table_memory [ROWS]`: the memory that a table takes while it grows, beside what statistics() says.

Row-wise Adagrad over 16 columns, 20 million rows by default, which lookups insert 1 % at a time. Resident memory is
that of a process of its own, less what it had before the first row, sampled every 2 ms. Peaks from a tenth of the rows
on are compared with what statistics() says right after the growth.

Expected, before measuring: columns, ids and marks take 77 bytes a row; the index 27 to 54 for each row that there is
room for. While it grows, the embedding exists twice, for the rows that were there: up to 64 bytes a row more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass

import psutil
import torch

import asyncckpt
from asyncckpt import optim

DIM, PARTS_COUNT = 16, 100


@dataclass(frozen=True)
class TableMemory:
    """Bytes a row: measured, and by statistics(). growing: the largest ratio of a peak to what statistics() says."""

    rows_count: int
    measured: float
    said: float
    growing: float
    shrunk: float
    said_shrunk: float


def measured(rows_count: int) -> TableMemory:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "bench.table_memory", str(rows_count), "--here"]
    return TableMemory(**json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def _measured_here(rows_count: int) -> TableMemory:
    slots = optim.SparseAdagrad.optimizer_slots(rowwise=True)
    table = asyncckpt.HashTable("table", DIM, optimizer_slots=slots)
    process, step = psutil.Process(), rows_count // PARTS_COUNT
    before, peak, ratios = process.memory_info().rss, 0, [0.0]

    def resident() -> int:
        return int(process.memory_info().rss) - before

    def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident())
            time.sleep(0.002)

    threading.Thread(target=watch, daemon=True).start()
    for begin in range(0, rows_count, step):
        peak, growths_count = 0, table.statistics().growths_count
        table.lookup(torch.arange(begin, min(begin + step, rows_count)) * 7919)
        if table.statistics().growths_count > growths_count and begin >= rows_count // 10:
            ratios.append(peak / table.statistics().bytes)
    found, said = resident(), table.statistics().bytes
    table.shrink()
    each = [bytes / rows_count for bytes in (found, said, resident(), table.statistics().bytes)]
    return TableMemory(rows_count, each[0], each[1], max(ratios), each[2], each[3])


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000_000
    if sys.argv[2:] == ["--here"]:
        print(json.dumps(asdict(_measured_here(count))))
    else:
        print(measured(count))

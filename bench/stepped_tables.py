"""`python -m bench stepped-tables`: repeated full saves of a table that only an optimizer changes, with and without
`DeviceOptions(optimizers=...)`.

Before each save a share of the rows is trained. Then one forward and backward of a few rows runs beside the background,
and a step of these waits for what is not copied yet. Beside that step is the same one before the save.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import asyncckpt
from asyncckpt.nn import HashEmbedding
from asyncckpt.optim import SparseAdagrad
from bench.report import machine, make_console, number, print_table, write_json
from bench.rounds import scratch_folder

SHARES = (0.01, 0.05, 0.2, 1.0)
DIM = 64
BATCH_ROWS = 2000
UNDER_WAY_S = 0.05
Saved = dict[str, float]


def run_stepped_tables(
    *, gib: float, rounds: int, saves: int, directory: Path | None, out: Path
) -> list[dict[str, Any]]:
    """Measure, print and write `out`.json and .txt; return what each save took."""
    torch.set_num_threads(1)
    rows_count = max(2 * BATCH_ROWS, int(gib * (1 << 30)) // (2 * DIM * 4))
    table = asyncckpt.HashTable("t", DIM, optimizer_slots=SparseAdagrad.optimizer_slots(), capacity=rows_count)
    table.insert(torch.arange(rows_count), torch.zeros(rows_count, DIM))
    module = HashEmbedding(table)
    optimizer = SparseAdagrad([module], lr=0.1)
    found: list[dict[str, Any]] = []
    with scratch_folder(directory) as folder:
        for index in range(rounds):
            for share in SHARES:
                for ours in ((), (optimizer,))[:: -1 if index % 2 else 1]:
                    path = folder / f"{index}-{share}-{len(ours)}"
                    taken = _saves(path, module, optimizer, ours, rows=int(rows_count * share), saves=saves)
                    found += [{"share": share, "optimizers": bool(ours), **one} for one in taken]
    console = make_console()
    names = ("call ms", "step behind it ms", "step before ms", "durable ms")
    lines = [
        [f"{share:.0%}", "yes" if with_it else "no"]
        + [
            number(median(one[name] for one in found if (one["share"], one["optimizers"]) == (share, with_it)), 2)
            for name in names
        ]
        for share in SHARES
        for with_it in (False, True)
    ]
    title = f"{rows_count:,} rows of {2 * DIM * 4} bytes, trainer on one core, medians of {rounds * saves} saves"
    print_table(console, title, ["rows trained", "optimizers=", *names], lines)
    write_json(out.with_suffix(".json"), {"machine": machine(), "saves": found})
    console.save_text(str(out.with_suffix(".txt")))
    return found


def _saves(
    path: Path,
    module: HashEmbedding,
    optimizer: SparseAdagrad,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    rows: int,
    saves: int,
) -> list[Saved]:
    table = module.table

    def train(count: int) -> None:
        module(torch.randperm(len(table))[:count]).sum().backward()

    device = asyncckpt.DeviceOptions(optimizers=optimizers)
    found = []
    with asyncckpt.Saver(path=path, hashtables={"t": table}, device=device, keep=1) as saver:
        saver.prepare().result()
        for step in range(saves + 2):
            train(rows)
            optimizer.step()
            train(BATCH_ROWS)
            before = _seconds(optimizer.step)
            begun = time.perf_counter()
            future = saver.save_async(step)
            call = time.perf_counter() - begun
            train(BATCH_ROWS)
            time.sleep(UNDER_WAY_S)  # The rest of forward and backward.
            behind = _seconds(optimizer.step)
            future.result()
            durable = time.perf_counter() - begun
            if step >= 2:  # Of two arenas each is filled once.
                seconds = {"call": call, "step behind it": behind, "step before": before, "durable": durable}
                found.append({f"{name} ms": 1e3 * value for name, value in seconds.items()})
    return found


def _seconds(step: Any) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun

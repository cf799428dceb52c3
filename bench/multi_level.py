"""`python -m bench multi-level`: what a save of a multi-level table costs, beside the size of the table.

A table with a cache level of 5 % of its rows is trained on Zipf-distributed ids while it is saved: once by copying both
levels in the call (`copy`), once by copying the cache level alone and exporting the host level behind the fence
(`first_touch`). Sizes and ways are interleaved, each in a fresh process.

Expected, before measuring: the call of `copy` takes the bytes of both levels at the rate of the copy kernel, 45 ms a
GiB; that of `first_touch` a twentieth of it, plus what planning costs. Its export reads the host level once and keeps
old values of the rows that are written back meanwhile, a few hundred bytes each.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.clocks import CpuClock
from bench.figures import SaveFigures
from bench.report import machine, make_console, number, print_table, write_json
from bench.round import measure_save, step_seconds
from bench.rounds import run_child, scratch_folder
from bench.state import GIB, adagrad
from bench.trainer import MATRIX_SIDE, calibrate, zipf

WAYS = ("first_touch", "copy")
CACHE_SHARE = 0.05
DIM = 32
ROW_BYTES = 2 * 4 * DIM + 8  # Embedding, Adagrad sums, id.
IDS_PER_STEP = 8192
BATCHES_COUNT = 64
STEP_SECONDS = 0.020
FILL_IDS = 1 << 18
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class MultiLevelSpec:
    """What one process shall do."""

    directory: str
    figures_path: str
    table_bytes: int
    way: str
    saves_count: int
    idle_steps_count: int
    warmup_steps_count: int
    step_seconds: float


class TableTrainer:
    """One step: the rows of a batch come into the cache, Adagrad updates them, matrix products take the rest."""

    def __init__(self, table: Any, rows_count: int, *, matmuls: int) -> None:
        self._table, self._matmuls = table, matmuls
        generator = np.random.default_rng(11)
        self._batches = [np.unique(zipf(generator, rows_count, IDS_PER_STEP)) for _ in range(BATCHES_COUNT)]
        self._gradient = torch.randn(IDS_PER_STEP, DIM)
        self._left = torch.rand(MATRIX_SIDE, MATRIX_SIDE)
        self._product = torch.empty(MATRIX_SIDE, MATRIX_SIDE)
        self._index = 0

    def step(self) -> None:
        ids = self._batches[self._index % BATCHES_COUNT]
        self._index += 1
        rows = self._table.lookup(ids)
        gradient = self._gradient[: len(ids)]
        self._table.update(rows, adagrad(gradient, lr=LEARNING_RATE))
        for _ in range(self._matmuls):
            torch.mm(self._left, self._left, out=self._product)


class _Saved:
    """A Saver as `measure_save` wants it."""

    def __init__(self, saver: Any) -> None:
        self._saver = saver

    def save_async(self, step: int) -> _Saved:
        self._future = self._saver.save_async(step)
        return self

    def wait_durable(self) -> None:
        self._future.result()


def run_one(spec: MultiLevelSpec) -> dict[str, Any]:
    from asyncckpt import DebugOptions, DeviceOptions, MultiLevelTable, Saver

    rows_count = spec.table_bytes // ROW_BYTES
    cache_rows = max(2 * IDS_PER_STEP, int(rows_count * CACHE_SHARE))
    table = MultiLevelTable(
        "table", DIM, cache_rows=cache_rows, optimizer_slots={"sum": torch.float32}, capacity=rows_count
    )
    for begin in range(0, rows_count, FILL_IDS):
        ids = np.arange(begin, min(begin + FILL_IDS, rows_count))
        rows = torch.full((len(ids), DIM), 0.5)
        table.insert(ids, rows, sum=rows)
    matmuls = calibrate(spec.step_seconds) if spec.step_seconds else 1
    trainer = TableTrainer(table, rows_count, matmuls=matmuls)
    step_seconds(trainer, spec.warmup_steps_count)
    clock = CpuClock()  # Only threads of training are there yet.
    # Without refresh: the copy of all of both levels is what first touch is held against.
    with Saver(
        path=spec.directory,
        hashtables={"table": table},
        device=DeviceOptions(host_level=spec.way),
        keep=1,
        debug=DebugOptions(refresh=False),
    ) as saver:
        begin_s = time.perf_counter()
        saver.prepare().result()
        prepare_seconds = time.perf_counter() - begin_s
        peer: Any = _Saved(saver)
        saves = [
            measure_save(peer, trainer, clock, step, spec.idle_steps_count) for step in range(1, spec.saves_count + 1)
        ]
    return {
        "way": spec.way,
        "table_bytes": spec.table_bytes,
        "cache_rows": cache_rows,
        "prepare_seconds": prepare_seconds,
        "saves": [asdict(save) for save in saves],
        "table": repr(table.statistics()),
    }


def run_multi_level(
    *,
    sizes_gib: Sequence[float] = (1.0, 2.0, 4.0),
    rounds: int = 3,
    saves: int = 3,
    directory: Path | None = None,
    out: Path,
    smoke: bool = False,
) -> list[dict[str, Any]]:
    """Run it, print the table, write `out`.json and .txt; return what every process measured."""
    console = make_console()
    if smoke:
        sizes_gib, rounds, saves = (0.02,), 1, 2
    answers: list[dict[str, Any]] = []
    for index in range(rounds):
        for size in sizes_gib:
            for way in WAYS if index % 2 == 0 else WAYS[::-1]:
                with scratch_folder(directory) as folder:
                    spec = MultiLevelSpec(
                        directory=str(folder / "checkpoints"),
                        figures_path=str(folder / "figures.json"),
                        table_bytes=int(size * GIB),
                        way=way,
                        saves_count=saves,
                        idle_steps_count=5 if smoke else 40,
                        warmup_steps_count=5 if smoke else 2 * BATCHES_COUNT,  # Then the cache is warm.
                        step_seconds=0.0 if smoke else STEP_SECONDS,
                    )
                    answer, _ = run_child("bench.multi_level", asdict(replace(spec)))
                answers.append(answer)
                last = SaveFigures(**answer["saves"][-1])
                console.print(
                    f"round {index + 1}/{rounds} {size:g} GiB {way}: stall {last.stall_seconds * 1e3:.1f} ms, "
                    f"lost {last.lost_seconds:.3f} s, durable {last.durable_seconds:.2f} s",
                    highlight=False,
                )
    columns = ["way", "GiB", "stall ms", "time lost s", "durable s", "worst step ms", "background CPU s"]
    print_table(console, f"a table with a {CACHE_SHARE:.0%} cache, medians of {rounds} rounds", columns, _rows(answers))
    content = {"machine": machine(), "cache_share": CACHE_SHARE, "row_bytes": ROW_BYTES, "rounds": answers}
    write_json(Path(f"{out}.json"), content)
    console.save_text(f"{out}.txt")
    return answers


def _rows(answers: Sequence[dict[str, Any]]) -> list[list[str]]:
    """One row per way and size; the first save of a process touches fresh memory and is left out."""
    rows = []
    for way in WAYS:
        for size in sorted({answer["table_bytes"] for answer in answers}):
            saves = [
                SaveFigures(**save)
                for answer in answers
                if answer["way"] == way and answer["table_bytes"] == size
                for save in answer["saves"][1:]
            ]
            rows.append(
                [
                    way,
                    f"{size / GIB:.2g}",
                    number(median(save.stall_seconds for save in saves) * 1e3, 1),
                    number(median(save.lost_seconds for save in saves)),
                    number(median(save.durable_seconds for save in saves), 2),
                    number(median(save.step_worst_seconds for save in saves) * 1e3, 1),
                    number(median(save.background_cpu_seconds for save in saves), 2),
                ]
            )
    return rows


if __name__ == "__main__":
    child_spec = MultiLevelSpec(**json.loads(sys.argv[1]))
    Path(child_spec.figures_path).write_text(json.dumps(run_one(child_spec)))

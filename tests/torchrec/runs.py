"""Train, save, go on; load into a fresh model, go on; compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import asyncckpt
from asyncckpt.adapters import dense_state_of, tables_of, track_lookups
from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table, TracksRows
from asyncckpt.testing.mark_tests import Remembered
from tests.torchrec.models import EVICTION_INTERVAL, Training

# Between two evictions of a managed collision module.
SAVED_STEP = EVICTION_INTERVAL + 1
STEPS = 3 * EVICTION_INTERVAL


def run(make: Callable[[int], Training], folder: Path) -> list[str]:
    """Return what went wrong."""
    path = folder / f"rank{dist.get_rank()}"
    uninterrupted = make(0)
    for number in range(SAVED_STEP):
        uninterrupted.step(number)
    with asyncckpt.Saver(path=path, hashtables=tables_of(uninterrupted.model), tensors=dense(uninterrupted)) as saver:
        at_cut = uninterrupted.image()
        future = saver.save_async(SAVED_STEP)
        for number in range(SAVED_STEP, STEPS):
            uninterrupted.step(number)
        future.result(120)
    resumed = make(7)
    problems = [] if differences(resumed.image(), at_cut) else ["a fresh model is equal to the saved one"]
    report = asyncckpt.Loader(path, tables_of(resumed.model), dense(resumed)).load()
    if report.missing or report.unexpected:
        problems.append(f"missing {report.missing}, unexpected {report.unexpected}")
    problems += [f"after the load: {name}" for name in differences(resumed.image(), at_cut)]
    for number in range(SAVED_STEP, STEPS):
        resumed.step(number)
    problems += [f"after going on: {name}" for name in differences(resumed.image(), uninterrupted.image())]
    if not differences(uninterrupted.image(), at_cut):
        problems.append("training changed nothing after the save")
    return problems


def run_tracked(make: Callable[[int], Training], folder: Path) -> list[str]:
    """Every row that a step changed must be touched, and not all rows may be."""
    training = make(0)
    tracking = track_lookups(training.model)
    tables = tables_of(training.model)
    problems = [] if tracking.tables_count == len(tables) else [f"{tracking.tables_count} of {len(tables)} tracked"]
    before = {name: remembered(table)[0] for name, table in tables.items()}
    spared_count = 0
    for number in range(STEPS):
        training.step(number)
        for name, table in tables.items():
            now, touched = remembered(table, before[name])
            missed = np.setdiff1d(now.changed_rows(before[name]), touched)
            if missed.size:
                problems.append(
                    f"step {number} changed rows {missed.tolist()} of {name}, touched are {touched.tolist()}"
                )
            spared_count += len(now.rows) - touched.size
            before[name] = now
    tracking.remove()
    return problems if spared_count else [*problems, "every row was touched in every step"]


def run_untracked(make: Callable[[int], Training], folder: Path) -> list[str]:
    """Rows are written without a lookup here, so tracking must be refused."""
    try:
        track_lookups(make(0).model)
    except UsageError:
        return []
    return ["lookups are tracked"]


def remembered(table: Table, since: Remembered | None = None) -> tuple[Remembered, Any]:
    """The table at a cut of its own, and the rows touched since an earlier one."""
    cut = table.begin_cut()
    try:
        assert isinstance(cut, TracksRows)
        touched = None if since is None else cut.touched_since(since.version)
        return Remembered.of(cut, table.schema()), touched
    finally:
        cut.end(True)


def dense(training: Training) -> dict[str, Any]:
    state: dict[str, Any] = {"model": dense_state_of(training.model)}
    return state if training.optimizer is None else {**state, "optimizer": training.optimizer}


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))

"""Train, save, go on; load into a fresh model, go on; compare."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torchrec.distributed import DistributedModelParallel

import asyncckpt
from asyncckpt.adapters import dense_state_of, tables_of, track_lookups
from asyncckpt.adapters.fbgemm import tbe_counters
from asyncckpt.adapters.torchrec import kernels_of
from asyncckpt.errors import UsageError
from asyncckpt.model.table import Table, TracksRows
from asyncckpt.testing.mark_tests import Remembered
from tests.torchrec.models import EVICTION_INTERVAL, ROWS, ModelTraining

# Between two evictions of a managed collision module.
SAVED_STEP = EVICTION_INTERVAL + 1
STEPS = 3 * EVICTION_INTERVAL


def run(make: Callable[[int], ModelTraining], folder: Path) -> list[str]:
    """All ranks save into one directory. Return what went wrong."""
    path, group = folder / "run", dist.group.WORLD
    uninterrupted = make(0)
    for number in range(SAVED_STEP):
        uninterrupted.step(number)
    tables = tables_of(uninterrupted.model)
    with asyncckpt.Saver(
        path=path, hashtables=tables, tensors=dense(uninterrupted), ranks=asyncckpt.RankOptions(process_group=group)
    ) as saver:
        at_cut = uninterrupted.image()
        keep_image(uninterrupted, folder)
        future = saver.save_async(SAVED_STEP)
        for number in range(SAVED_STEP, STEPS):
            uninterrupted.step(number)
        future.result(120)
    resumed = make(7)
    problems = [] if differences(resumed.image(), at_cut) else ["a fresh model is equal to the saved one"]
    report = asyncckpt.Loader(
        path, tables_of(resumed.model), dense(resumed), ranks=asyncckpt.RankOptions(process_group=group)
    ).load()
    unexpected = [name for name in report.unexpected if not is_of_another_rank(name)]
    if report.missing or unexpected:
        problems.append(f"missing {report.missing}, unexpected {unexpected}")
    problems += [f"after the load: {name}" for name in differences(resumed.image(), at_cut)]
    for number in range(SAVED_STEP, STEPS):
        resumed.step(number)
    problems += [f"after going on: {name}" for name in differences(resumed.image(), uninterrupted.image())]
    if not differences(uninterrupted.image(), at_cut):
        problems.append("training changed nothing after the save")
    return problems


def run_tracked(make: Callable[[int], ModelTraining], folder: Path) -> list[str]:
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
    problems += loaded_optimizer_missed(training)
    tracking.remove()
    return problems if spared_count else [*problems, "every row was touched in every step"]


def loaded_optimizer_missed(training: ModelTraining) -> list[str]:
    """Rows that the state of a fused optimizer has changed, which is copied past all hooks, must be touched."""
    if not isinstance(training.model, DistributedModelParallel):
        return []
    optimizer = training.model.fused_optimizer
    earlier = copy.deepcopy(optimizer.state_dict())
    training.step(STEPS)
    tables = tables_of(training.model)
    before = {name: remembered(table)[0] for name, table in tables.items()}
    optimizer.load_state_dict(earlier)
    problems = []
    for name, table in tables.items():
        now, touched = remembered(table, before[name])
        changed = now.changed_rows(before[name])
        if touched is not None and np.setdiff1d(changed, touched).size:
            problems.append(
                f"a loaded optimizer changed rows {changed.tolist()} of {name}, touched are {touched.tolist()}"
            )
    return problems


def run_untracked(make: Callable[[int], ModelTraining], folder: Path) -> list[str]:
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


def dense(training: ModelTraining) -> dict[str, Any]:
    state: dict[str, Any] = {"model": dense_state_of(training.model)}
    return state if training.optimizer is None else {**state, "optimizer": training.saved_optimizer()}


def run_resharded(make: Callable[[int], ModelTraining], folder: Path) -> list[str]:
    """Load what two ranks have saved into the one there is here: every shard of every table, optimizers' rows too, and
    the counters of fused optimizers, which are named by kernel and rank."""
    training = make(7)
    report = asyncckpt.Loader(folder / "run", tables_of(training.model), dense(training)).load()
    problems = [] if report.rows == {f"sparse.{name}": rows for name, rows in ROWS.items()} else [f"rows {report.rows}"]
    counters, expected = counters_of(training), json.loads((folder / "counters.json").read_text())
    problems += [] if counters == expected else [f"counters {counters}, saved {expected}"]
    found = training.image()
    count = 0
    for rank in range(2):
        for name, (dtype, shape, bits) in json.loads((folder / f"image{rank}.json").read_text()).items():
            name, _, at = name.partition("@")
            begin = json.loads(at)[0]
            whole = np.frombuffer(found[f"{name}@{[0] * len(shape)}"][2], dtype=np.float32).reshape(-1, *shape[1:])
            here = whole[begin : begin + shape[0]].tobytes().hex()
            problems += [] if here == bits and dtype == "torch.float32" else [f"rank {rank}: {name}{at}"]
            count += 1
    return problems if count >= len(ROWS) else [*problems, f"only {count} shards were saved"]


def counters_of(training: ModelTraining) -> list[dict[str, list[int]]]:
    """The different counters of its kernels, which are the same on all ranks."""
    found = [tbe_counters(kernel._emb_module) for kernel in kernels_of(training.model.module.sparse)]
    by_kernel = [{name: counter.tolist() for name, counter in each.items()} for each in found]
    return [each for number, each in enumerate(by_kernel) if each not in by_kernel[:number]]


def keep_image(training: ModelTraining, folder: Path) -> None:
    """Leave every shard of this rank for run_resharded."""
    held = {name: bits for name, bits in training.image().items() if "@" in name and bits[1][0]}
    shards = {name: (dtype, shape, bits.hex()) for name, (dtype, shape, bits) in held.items()}
    (folder / f"image{dist.get_rank()}.json").write_text(json.dumps(shards))
    if dist.get_rank() == 0 and isinstance(training.model, DistributedModelParallel):
        (folder / "counters.json").write_text(json.dumps(counters_of(training)))


def is_of_another_rank(name: str) -> bool:
    """Whether it is the other rank's own; a table that is there whole is named, too."""
    return f"rank_{1 - dist.get_rank()}_of_2" in name or name.startswith("sparse.t")


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what is not the same. Statistics of the batch norm are every rank's own; those of rank 0 are saved."""
    names = {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}
    if dist.get_rank() > 0:
        names -= {name for name in names if ".over.1.running_" in name}
    return sorted(names)

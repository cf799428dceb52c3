"""Load a directory of RecIS into live tables and tensors: RecIS' Loader, with the checks of ours.

1. Open and check the directory, match it with the targets, check these: no target is touched before.
2. Read the ids of what is wanted and check them, still before.
3. Fill, as any load does: straight into place, or window by window where rows are scattered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from asyncckpt.arguments import check_int, check_type
from asyncckpt.engine.load.run_load import (
    empty_companions,
    fill,
    give_state_dicts,
    report_of,
    warn_if_empty,
    with_scalars,
)
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.format.names import check_step
from asyncckpt.format.tree import path_name, unique_names
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.stored import Columns, RecisReader, StoredAs, as_chain, check_columns, step_of
from asyncckpt.model.result import LoadReport
from asyncckpt.model.table import Table
from asyncckpt.modules.walk import tables_of
from asyncckpt.native import Progress
from asyncckpt.options import PARALLEL_MAX, BusyPolicy
from asyncckpt.plan.contents import contents_of
from asyncckpt.plan.load_offer import LoadFilter
from asyncckpt.plan.load_plan import LoadPlan, make_load_plan
from asyncckpt.plan.load_targets import DenseTargets, dense_targets
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.state import TensorsArgument, named_state
from asyncckpt.shard.reader import read_threads
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path
from asyncckpt.tables.left_out import tables_left_out


class Loader:
    """Load what RecIS wrote.

    checkpoint_path, hashtables, tensors, parallel, filter_func  as RecIS' Loader has them, and as asyncckpt.Loader
                takes them; tables of any sharding take the ids that they own, whatever the number of shards was
    columns     slot of RecIS -> column of the table, where the default does not fit: a slot fills the column of its own
                name, else `sparse_adam_exp_avg` fills `exp_avg` (likewise of the other optimizers), and `step_filter`
                fills `last_seen`
    strict, cast, merge  see asyncckpt.Loader. A table is emptied first, unless merge=True adds rows, as RecIS does
    """

    def __init__(
        self,
        checkpoint_path: str | os.PathLike[str],
        hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
        tensors: TensorsArgument | None = None,
        parallel: int = 16,
        filter_func: LoadFilter | None = None,
        *,
        columns: Columns | None = None,
        strict: bool = True,
        cast: bool = False,
        merge: bool = False,
    ) -> None:
        check_int("parallel", parallel, at_least=1, at_most=PARALLEL_MAX)
        for name, value in (("strict", strict), ("cast", cast), ("merge", merge)):
            check_type(name, value, bool)
        self._path = check_path(checkpoint_path)
        found = tables_of(hashtables) if isinstance(hashtables, torch.nn.Module) else hashtables
        self._tables = dict(named_tables(found))
        self._state = named_state(tensors)
        self._threads = read_threads(parallel)
        self._filter_func, self._columns = filter_func, columns
        self._strict, self._cast, self._merge = strict, cast, merge

    @uninterrupted
    def load(self) -> LoadReport:
        """Load now; waits while a save or load of this process is in flight. `step` is that of a folder `ckpt_<step>`.

        Touches no target before everything but the rows themselves has been read and checked. Raises NotFoundError,
        CorruptError, IncompatibleError, UnsupportedError, UsageError, IOFailedError, DeviceError.
        """
        begun = time.perf_counter()
        busy = BusyPolicy("wait")
        with save_lock.held("load", self._path, None, busy=busy), RecisDirectory.open(self._path) as directory:
            report = self._load(directory)
        return replace(report, seconds=time.perf_counter() - begun)

    def _load(self, directory: RecisDirectory) -> LoadReport:
        targets = dense_targets(self._state, tables=iter(self._tables))
        wanted = StoredAs(
            step=check_step(step_of(directory.path) or 0),
            schemas={name: table.schema() for name, table in self._tables.items()},
            columns=check_columns(self._columns, directory.slots),
            paths=_paths(targets),
        )
        chain = as_chain(directory, wanted)
        contents = contents_of(chain)
        plan = make_load_plan(
            chain,
            contents,
            targets,
            self._tables,
            filter_func=self._filter_func,
            strict=self._strict,
            cast=self._cast,
            left_out=partial(tables_left_out, self._state, self._tables.values()),
        )
        report = report_of(self._path, chain, contents, targets, plan)
        reader = RecisReader(directory, chain, threads=self._threads, progress=Progress())
        with reader:
            reader.check_ids(_slices(plan))
            before = reader.bytes_read
            rebuilt, rows = fill(plan, reader, clear=not self._merge)
            if not self._merge:
                empty_companions(plan.tables, plan)
            read = reader.bytes_read - before
        give_state_dicts(plan, contents, rebuilt)
        warn_if_empty(report, strict=self._strict)
        return replace(with_scalars(report, targets), rows=rows, bytes_read=read)


def _paths(targets: DenseTargets) -> dict[str, tuple[Any, ...]]:
    """Return where the targets have the tensor of each name: RecIS knows names alone, whatever tables are called."""
    names = unique_names(map(path_name, targets.leaf_paths))
    filled = {leaf.path for leaf in targets.in_place}
    return {name: path for name, path in zip(names, targets.leaf_paths, strict=True) if path in filled}


def _slices(plan: LoadPlan) -> set[tuple[int, str]]:
    return {(shard.rank, shard.name) for item in plan.tables for shard, _ in item.sources}

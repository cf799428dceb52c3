"""Load a directory of RecIS into live tables and tensors: RecIS' Loader, with the checks of ours.

1. Open and check the directory, match it with the targets, check these: no target is touched before.
2. Read the ids of what is wanted and check them, still before.
3. Fill, as any load does: straight into place, or window by window where rows are scattered.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from asyncckpt.adapters import tables_of
from asyncckpt.adapters.left_out import tables_left_out
from asyncckpt.arguments import check_int, check_type
from asyncckpt.engine.load.run_load import fill, give_state_dicts, report_of, with_scalars
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.format.limits import check_step
from asyncckpt.formats.recis.directory import RecisDirectory
from asyncckpt.formats.recis.stored import Columns, RecisReader, StoredAs, as_chain, check_columns, step_of
from asyncckpt.model.result import LoadReport
from asyncckpt.model.table import Table
from asyncckpt.native import Progress
from asyncckpt.options import PARALLEL_MAX, BusyPolicy
from asyncckpt.plan.contents import Contents, contents_of
from asyncckpt.plan.load_plan import LoadFilter, LoadInfo, LoadPlan, make_load_plan
from asyncckpt.plan.load_targets import DenseTargets, dense_targets
from asyncckpt.plan.named_tables import named_tables
from asyncckpt.plan.state import named_state
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path

READ_THREADS_MAX = 4


class Loader:
    """Load what RecIS wrote.

    checkpoint_path, hashtables, tensors, parallel, filter_func  as RecIS' Loader has them, and as asyncckpt.Loader
                takes them; tables of any sharding take the ids that they own, whatever the number of shards was
    columns     slot of RecIS -> column of the table, where the default does not fit: a slot fills the column of its own
                name, else `sparse_adam_exp_avg` fills `exp_avg` (likewise of the other optimizers), and `step_filter`
                fills `last_seen`
    filter_func gets the entries of the model, as RecIS' does, also those that the checkpoint lacks under that name: it
                may give them another source
    strict, cast, merge  as of asyncckpt.Loader. A table is emptied first, unless merge=True adds rows, as RecIS does
    """

    def __init__(
        self,
        checkpoint_path: str | os.PathLike[str],
        hashtables: Mapping[str, Table] | torch.nn.Module | None = None,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]] | None = None,
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
        self._threads = min(parallel, READ_THREADS_MAX)
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
            step=check_step(step_of(directory)),
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
            filter_func=self._filter(contents, targets),
            strict=self._strict,
            cast=self._cast,
            left_out=tables_left_out(self._state, self._tables.values()),
        )
        report = report_of(self._path, chain, contents, targets, plan)
        reader = RecisReader(directory, chain, threads=self._threads, progress=Progress())
        with reader:
            reader.check_ids(_slices(plan))
            before = reader.bytes_read
            rebuilt, rows = fill(plan, reader, clear=not self._merge)
            read = reader.bytes_read - before
        give_state_dicts(plan, contents, rebuilt)
        return replace(with_scalars(report, targets), rows=rows, bytes_read=read)

    def _filter(self, contents: Contents, targets: DenseTargets) -> LoadFilter | None:
        """Return the filter with what RecIS shows it: everything of the model. What it leaves under a name that the
        checkpoint does not have is missing."""
        chosen = self._filter_func
        if chosen is None:
            return None
        tables = {name: [c.name for c in table.schema().columns] for name, table in self._tables.items()}
        wanted = {name: {name: columns} for name, columns in tables.items()}
        wanted |= {leaf.name: {leaf.name: []} for leaf in targets.in_place}
        known = contents.tables.keys() | contents.dense.keys()

        def filtered(info: LoadInfo) -> Mapping[str, Mapping[str, list[str]]]:
            answer = chosen({**wanted, **info})
            if not isinstance(answer, Mapping):
                return answer
            left = [name for name, item in wanted.items() if name not in known and answer.get(name) == item]
            return {name: item for name, item in answer.items() if name not in left}

        return filtered


def _paths(targets: DenseTargets) -> dict[str, tuple[Any, ...]]:
    """Return where the targets have the tensor of each name: RecIS knows names alone."""
    return {leaf.name: leaf.path for leaf in targets.in_place}


def _slices(plan: LoadPlan) -> set[tuple[int, str]]:
    return {(shard.rank, shard.name) for item in plan.tables for shard, _ in item.sources}

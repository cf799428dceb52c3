"""Bring tables and tensors from the step they hold to the next one by applying a delta.

As in every load, no target is touched before the reads begin, and everything has been checked to fit by then. Tables
that hold the previous step get the changes: removals first, then rows. Others are loaded completely.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from asyncckpt.engine.load.run_load import fill, give_state_dicts, report_of
from asyncckpt.errors import CheckpointError, IncompatibleError
from asyncckpt.format.manifest import Chain
from asyncckpt.model.result import LoadReport
from asyncckpt.model.table import Table
from asyncckpt.native import I64
from asyncckpt.plan.contents import Contents
from asyncckpt.plan.load_plan import TableLoadPlan, make_load_plan
from asyncckpt.plan.load_targets import dense_targets
from asyncckpt.plan.stored_tables import StoredShard, StoredTable
from asyncckpt.shard.reader import ChainReader
from asyncckpt.snapshot.layer_rows import IdsReader


@runtime_checkable
class RemovesIds(Protocol):
    """A table that can remove ids."""

    def remove(self, ids: torch.Tensor, /) -> int:
        """Remove ids, int64 [n]; skip those that are not there."""
        ...


def can_take(table: Table, change: StoredTable) -> bool:
    """Return whether a change can be applied to a table: a change that removes ids needs a RemovesIds."""
    return isinstance(table, RemovesIds) or not any(layer.removed_count for layer in change.layers)


def load_update(
    path: Path,
    chain: Chain,
    contents: Contents,
    reader: ChainReader,
    tables: Mapping[str, Table],
    state: Mapping[str, Any],
    *,
    changes: Mapping[str, StoredTable],
    strict: bool,
) -> LoadReport:
    """Load a step. changes: what is new in it, for the tables that hold the previous one.

    Raises like Loader.load; then the content of the targets is undefined.
    """
    begun = time.perf_counter()
    bytes_before = reader.bytes_read
    targets = dense_targets(state, tables=iter(tables))
    plan = make_load_plan(chain, contents, targets, tables, strict=strict)
    report = report_of(path, chain, contents, targets, plan)
    whole = replace(plan, tables=tuple(item for item in plan.tables if item.name not in changes))
    changed = [_change(item, changes[item.name]) for item in plan.tables if item.name in changes]
    removed = read_removed([[shard for shard, _ in item.sources] for item in changed], reader)
    rebuilt, rows = fill(whole, reader, clear=True)
    for item, ids in zip(changed, removed, strict=True):
        _remove(item, ids)
    # A change that only removes ids has no rows to load, and perhaps no columns.
    over = [item for item in changed if any(layer.rows_count for shard, _ in item.sources for layer in shard.layers)]
    _, rows_over = fill(replace(plan, dense=(), tables=tuple(over), objects=()), reader, clear=False)
    give_state_dicts(plan, contents, rebuilt)
    return replace(
        report,
        rows={item.name: 0 for item in changed} | rows | rows_over,
        bytes_read=reader.bytes_read - bytes_before,
        seconds=time.perf_counter() - begun,
    )


def read_removed(changes: Sequence[Sequence[StoredShard]], reader: ChainReader) -> list[I64]:
    """Return the ids that the shards of each change remove, verified: distinct int64 [n]."""
    ids = IdsReader(reader)
    layers = [
        [ids.add(layer.removed, layer.removed_count) for shard in shards for layer in shard.layers]
        for shards in changes
    ]
    ids.run()
    return [np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found])) for found in layers]


def _change(item: TableLoadPlan, change: StoredTable) -> TableLoadPlan:
    """Return the plan of a table with only its newest layers. Without a load filter, a table has one source."""
    by_rank = {shard.rank: shard for shard in change.shards}
    return replace(item, sources=tuple((by_rank[shard.rank], columns) for shard, columns in item.sources))


def _remove(item: TableLoadPlan, ids: I64) -> None:
    if not len(ids):
        return
    assert isinstance(item.table, RemovesIds)
    try:
        item.table.remove(torch.from_numpy(ids))
    except CheckpointError:
        raise
    except Exception as error:
        raise IncompatibleError(
            f"table {item.name!r} could not remove ids: {type(error).__name__}: {error}",
            hint="the next load of it is complete",
        ) from error

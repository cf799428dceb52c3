"""One update of a follower: a committed step, with its files open, as a change of the previous step.

1. Find the oldest step after the last finished one; read its chain and open all files. While there is none, and the
   last finished one is gone or was saved again, training has gone back: then it is the newest step that there is.
2. It is a delta if its chain contains the last finished step, with one of that step's digests, and only deltas after
   it. Then the layers after that step are the change.
3. Load: tables that hold the last finished step get the change, removals first, then rows; others the whole chain.
   As in every load, no target is touched before the reads begin, and everything has been checked to fit by then.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import committed_steps, look_again, read_manifest
from asyncckpt.commit.root import ReadRoot, open_root
from asyncckpt.engine.compact.fold import copies_of_column
from asyncckpt.engine.follow.cursor import SeenStep
from asyncckpt.engine.load.run_load import empty_companions, fill, give_state_dicts, report_of, with_scalars
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError, UsageError, nearest
from asyncckpt.format.manifest import Chain
from asyncckpt.format.names import compacted_manifest_name, manifest_name
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.result import LoadReport
from asyncckpt.model.store_url import Place
from asyncckpt.model.table import Table
from asyncckpt.native import I64, Progress
from asyncckpt.plan.contents import contents_of, metadata_of
from asyncckpt.plan.load_offer import as_targets_name_it
from asyncckpt.plan.load_plan import TableLoadPlan, make_load_plan
from asyncckpt.plan.load_targets import dense_targets
from asyncckpt.plan.stored_tables import StoredShard, StoredTable
from asyncckpt.shard.reader import READ_THREADS, ChainReader
from asyncckpt.signals import uninterrupted
from asyncckpt.snapshot.layer_rows import IdsReader, layers_that_count
from asyncckpt.storage.store_answers import NoBucketError
from asyncckpt.tables.left_out import tables_left_out


@runtime_checkable
class RemovesIds(Protocol):
    """A table that can remove ids."""

    def remove(self, ids: torch.Tensor, /) -> int:
        """Remove ids, int64 [n]; skip those that are not there."""
        ...


@dataclass(frozen=True)
class TableUpdate:
    """What an update holds of a table: rows, and ids to remove first. whole: these are all rows of the table."""

    rows_count: int
    removed_count: int
    whole: bool


def seen_step(path: Place, step: int) -> SeenStep:
    """Return a step that a consumer has finished, with its digests if it still exists."""
    try:
        with open_root(path) as root:
            return SeenStep.of(read_manifest(root, step))
    except (NotFoundError, CorruptError):
        return SeenStep(step=step, digests=())


def find_update(path: Place, seen: SeenStep | None) -> OpenUpdate | None:
    """Open the oldest step after the last finished one, or the newest when training has gone back before that; None
    while there is nothing new.

    Raises CorruptError if it is damaged, IncompatibleError, UnsupportedError, IOFailedError.
    """
    try:
        root = open_root(path)
    except NoBucketError:
        raise
    except NotFoundError:
        return None
    with root:

        def look() -> OpenUpdate | None:
            steps = committed_steps(root)
            step = next((step for step in steps if seen is None or step > seen.step), None)
            if step is None and steps and seen is not None and not _is_there(root, seen):
                step = steps[-1]
            return None if step is None else OpenUpdate(root, step, seen)

        return look_again(root, look)


def _is_there(root: ReadRoot, seen: SeenStep) -> bool:
    """Return whether the checkpoint that was seen, or a compacted one of it, still is the one of its step."""
    now = _versions(root, seen.step)
    if seen.digests and now not in seen.versions:
        try:
            if not {*SeenStep.of(read_manifest(root, seen.step)).digests} & {*seen.digests}:
                return False
        except NotFoundError:
            return False
        except CheckpointError:
            return True  # It was sound when it was seen.
        seen.versions.add(now)
    return True


def _versions(root: ReadRoot, step: int) -> object:
    found = []
    for name in (manifest_name(step), compacted_manifest_name(step)):
        with contextlib.suppress(NotFoundError):
            found.append((name, root.manifests.version(name)))
    return tuple(found)


class OpenUpdate:
    """A step, opened. Used by one thread at a time.

    previous: the last finished step, if the update is a change of that. tables: what the change holds.
    """

    def __init__(self, root: ReadRoot, step: int, seen: SeenStep | None) -> None:
        versions = _versions(root, step)  # Before it is read: it may be replaced meanwhile.
        chain = read_chain(root, step)
        self.path = root.path
        self.step = step
        self.seen = replace(SeenStep.of(chain.newest), versions={versions})
        self._base = seen if seen is not None and _is_change_of(chain, seen) else None
        self.previous = None if self._base is None else self._base.step
        self.metadata: Mapping[str, Any] = metadata_of(chain.newest)
        self._chain = chain
        self._contents = contents_of(chain)
        self._changes = {name: self._change_of(table) for name, table in self._contents.tables.items()}
        self.tables: Mapping[str, TableUpdate] = {name: self._table_update(name) for name in self._changes}
        self._reader: ChainReader | None = self._open(root)

    def close(self) -> None:
        """Close all files. Idempotent."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()

    def load(
        self,
        tables: Mapping[str, Table],
        state: Mapping[str, Any],
        *,
        held: dict[str, tuple[Table, SeenStep]],
        strict: bool,
        progress: Progress,
    ) -> LoadReport:
        """Bring tables and state to this step. held: the tables of the follower, and the step that each holds.

        Raises like Loader.load; then the content of the targets is undefined.
        """
        before = {name: held.pop(name, (None, None)) for name in tables}  # After an error, their content is unknown.
        changes = {
            name: change
            for name, change in self._changes.items()
            if name in tables and before[name][0] is tables[name] and before[name][1] == self._base
            if not self._is_whole(name) and _can_take(tables[name], change)
        }
        with self._reading(progress) as reader:
            report = self._load(tables, state, changes, reader, strict=strict)
        held |= {name: (table, self.seen) for name, table in tables.items()}
        return report

    def _load(
        self,
        tables: Mapping[str, Table],
        state: Mapping[str, Any],
        changes: Mapping[str, StoredTable],
        reader: ChainReader,
        *,
        strict: bool,
    ) -> LoadReport:
        """Load the step. changes: what is new in it, for the tables that hold the previous one."""
        begun, bytes_before = time.perf_counter(), reader.bytes_read
        targets = dense_targets(state, tables=iter(tables))
        contents = as_targets_name_it(self._contents, targets, self._chain)
        left_out = partial(tables_left_out, state, tables.values())
        plan = make_load_plan(self._chain, contents, targets, tables, strict=strict, left_out=left_out)
        report = report_of(self.path, self._chain, contents, targets, plan)
        whole = replace(plan, tables=tuple(item for item in plan.tables if item.name not in changes))
        changed = [_plan_of_change(item, changes[item.name]) for item in plan.tables if item.name in changes]
        removed = _read_removed([[shard for shard, _ in item.sources] for item in changed], reader)
        for item, ids in zip(changed, removed, strict=True):  # First: of an id, it removes also what waits for a row.
            _remove(item, ids)
        rebuilt, rows = fill(whole, reader, clear=True)
        empty_companions(whole.tables, plan)
        # A change that only removes ids has no rows to load, and perhaps no columns.
        over = [
            item for item in changed if any(layer.rows_count for shard, _ in item.sources for layer in shard.layers)
        ]
        _, rows_over = fill(replace(plan, dense=(), tables=tuple(over), objects=(), apart=()), reader, clear=False)
        give_state_dicts(plan, contents, rebuilt)
        return replace(
            with_scalars(report, targets),
            rows={item.name: 0 for item in changed} | rows | rows_over,
            bytes_read=reader.bytes_read - bytes_before,
            seconds=time.perf_counter() - begun,
        )

    def rows(self, table: str) -> dict[str, torch.Tensor]:
        """Return the rows of the change, by column; each id once."""
        change = self._change(table)
        with self._reading() as reader:
            chosen = [layers_that_count(shard, reader) for shard in change.shards]
            return {column: _read_column(change, column, chosen, reader) for column in change.columns}

    def removed(self, table: str) -> torch.Tensor:
        """Return the ids to remove before the rows are inserted: distinct, int64 [n]."""
        change = self._change(table)
        with self._reading() as reader:
            (ids,) = _read_removed([change.shards], reader)
        return torch.from_numpy(ids)

    def _change(self, table: str) -> StoredTable:
        if table not in self._changes:
            known, hint = sorted(self._changes), nearest(table, self._changes)
            raise UsageError(f"table {table!r} is not in step {self.step}", expected=known, hint=hint)
        return self._changes[table]

    def _change_of(self, table: StoredTable) -> StoredTable:
        """Return the layers of a table after the last finished step.

        Returns all layers if the table was not in that step, or in other shards, or if a shard is whole here.
        """
        if self.previous is None:
            return table
        shards = [_layers_after(self.previous, shard) for shard in table.shards]
        is_whole = any(len(new.layers) == len(old.layers) for new, old in zip(shards, table.shards, strict=True))
        before = next(manifest for manifest in self._chain.manifests if manifest.step == self.previous)
        ranks_before = {part.rank for part in before.parts for facts in part.tables if facts.name == table.name}
        if is_whole or ranks_before != {shard.rank for shard in shards}:
            return table
        return replace(table, shards=tuple(shards))

    def _is_whole(self, name: str) -> bool:
        return self._changes[name] is self._contents.tables[name]

    def _table_update(self, name: str) -> TableUpdate:
        whole = self._is_whole(name)
        layers = self._changes[name].layers
        return TableUpdate(
            rows_count=sum(layer.rows_count for layer in layers),
            removed_count=0 if whole else sum(layer.removed_count for layer in layers),
            whole=whole,
        )

    def _open(self, root: ReadRoot) -> ChainReader:
        reader = ChainReader(root.data, self._chain, threads=READ_THREADS, verify=True, progress=Progress())
        weakref.finalize(self, uninterrupted(reader.close))  # A loop that is left with `break` closes nothing.
        return reader

    @contextmanager
    def _reading(self, progress: Progress | None = None) -> Iterator[ChainReader]:
        """Yield the reader. Close it after an error, when its queue may hold reads; the next use opens a new one."""
        if self._reader is None:
            with open_root(self.path) as root:
                self._reader = self._open(root)
        self._reader.progress = progress or Progress()
        try:
            with enough_memory(f"step {self.step} of {str(self.path)!r}"):
                yield self._reader
        except BaseException:
            self.close()
            raise


def _layers_after(step: int, shard: StoredShard) -> StoredShard:
    return replace(shard, layers=tuple(itertools.takewhile(lambda layer: layer.step > step, shard.layers)))


def _is_change_of(chain: Chain, seen: SeenStep) -> bool:
    """Return whether a chain leads from the newest step over deltas alone to exactly the step that was seen."""
    for number, parent in enumerate(chain.newest.head.parents):
        if parent.step == seen.step:
            deltas = all(manifest.head.kind == "delta" for manifest in chain.manifests[: number + 1])
            return deltas and parent.digest in seen.digests
    return False


def _read_column(change: StoredTable, column: str, chosen: list[list[I64 | None]], reader: ChainReader) -> torch.Tensor:
    parts = []
    for shard, own in zip(change.shards, chosen, strict=True):
        for copy in copies_of_column(shard, column, own, reader):
            values = reader.array(copy.number)
            parts.append(values if copy.rows is None else values[torch.from_numpy(copy.rows)])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _can_take(table: Table, change: StoredTable) -> bool:
    """Return whether a change can be applied to a table: a change that removes ids needs a RemovesIds."""
    return isinstance(table, RemovesIds) or not any(layer.removed_count for layer in change.layers)


def _read_removed(changes: Sequence[Sequence[StoredShard]], reader: ChainReader) -> list[I64]:
    """Return the ids that the shards of each change remove, verified: distinct int64 [n]."""
    ids = IdsReader(reader)
    layers = [
        [ids.add(layer.removed, layer.removed_count) for shard in shards for layer in shard.layers]
        for shards in changes
    ]
    ids.run()
    return [np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found])) for found in layers]


def _plan_of_change(item: TableLoadPlan, change: StoredTable) -> TableLoadPlan:
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

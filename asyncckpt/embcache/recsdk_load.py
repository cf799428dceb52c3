"""Load what RecSDK wrote into the tables of this rank.

RecSDK's files know a key, an embedding row, momenta, an admission count and an eviction timestamp. They become the id,
the embedding, the optimizer slots in their order, the metadata column `count` and the metadata column `last_seen`,
where the table has these. A table takes the ids it owns by their unsigned value, so the number of ranks does not
matter, and negative ids, which RecSDK's own load loses, come back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.embcache.find_collections import SavedTables, empty_tables
from asyncckpt.embcache.load_ranks import SparseLoadReport, check_names, emptied_on_error
from asyncckpt.embcache.recsdk_files import (
    ADMIT_COUNT,
    EVICT_TIMESTAMP,
    MOMENTUM,
    RecsdkCheckpoint,
    StoredArray,
    StoredPart,
    read_recsdk_checkpoint,
)
from asyncckpt.errors import CorruptError, IncompatibleError, UsageError, Words
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table import Column, Role, Table, TableLoad, TableSchema
from asyncckpt.tables.embedding import COUNT_COLUMN, LAST_SEEN_COLUMN
from asyncckpt.tables.slots import EMBEDDING_COLUMN

WINDOW_BYTES = 64 << 20


@dataclass(frozen=True)
class TableTargets:
    """Where the parts of a stored table go: one column per momentum (None: left out), `count` and `last_seen`."""

    table: Table
    momenta: tuple[str | None, ...]
    takes_counts: bool
    takes_times: bool

    def arrays(self, part: StoredPart) -> Iterator[tuple[str, StoredArray]]:
        """Yield (column, stored array) of what is written for every row of a part."""
        yield EMBEDDING_COLUMN, part.embedding
        for column, momentum in zip(self.momenta, part.momenta, strict=True):
            if column is not None:
                yield column, momentum
        if self.takes_counts and part.counts is not None:
            yield COUNT_COLUMN, part.counts


@dataclass(frozen=True)
class RecsdkLoad:
    """A load that has passed its checks. `run` changes the tables."""

    found: RecsdkCheckpoint
    saved: SavedTables
    targets: Mapping[str, TableTargets]
    ignored: tuple[str, ...]
    step: None = None

    def run(self) -> SparseLoadReport:
        """Fill the tables. Raises what reading raises; then all of them are empty."""
        begun = time.perf_counter()
        rows: dict[str, int] = {}
        bytes_read = 0
        is_merged, clear = self.found.is_merged, not self.found.is_incremental
        with emptied_on_error(self.saved), torch.no_grad():
            if clear:
                empty_tables(self.saved.companions.values())
            for name, targets in self.targets.items():
                parts = self.found.tables[name]
                rows[name] = _fill(targets, parts, clear=clear)
                bytes_read += sum(array.bytes for part in parts for _, array in targets.arrays(part))
        return SparseLoadReport(
            path=self.found.base,
            layout="recsdk merged" if is_merged else "recsdk ranks",
            world_size=None if is_merged else len(next(iter(self.found.tables.values()))),
            rows=rows,
            ignored=self.ignored,
            bytes_read=bytes_read,
            seconds=time.perf_counter() - begun,
        )


def prepare_recsdk_load(
    path: Path, saved: SavedTables, *, incremental: bool, momentum_slots: Mapping[str, str | None] | None
) -> RecsdkLoad:
    """Find and check a checkpoint of RecSDK, and match it with the tables. Changes nothing.

    Raises NotFoundError, CorruptError, IncompatibleError, UsageError, UnsupportedError, IOFailedError.
    """
    if momentum_slots is not None and not isinstance(momentum_slots, Mapping):
        raise UsageError("momentum_slots is not a mapping of momentum to slot", found=type(momentum_slots))
    found = read_recsdk_checkpoint(path)
    if found.is_incremental is not incremental:
        is_part = "holds only rows that were used since an earlier save" if found.is_incremental else "holds all rows"
        hint = "load the full one first, then this one with incremental=True" if found.is_incremental else None
        raise UsageError(f"checkpoint in {str(path)!r} {is_part}", found=Words(f"incremental={incremental}"), hint=hint)
    check_names(set(found.tables), saved, owner=f"checkpoint in {str(found.base)!r}")
    targets = {name: _targets(name, saved.tables[name], parts, momentum_slots) for name, parts in found.tables.items()}
    ignored = [text for name, parts in found.tables.items() for text in _ignored(name, targets[name], parts)]
    return RecsdkLoad(found=found, saved=saved, targets=targets, ignored=tuple(ignored))


def _targets(
    name: str, table: Table, parts: tuple[StoredPart, ...], momentum_slots: Mapping[str, str | None] | None
) -> TableTargets:
    schema = table.schema()
    for part in parts:
        if len(part.momenta) != len(parts[0].momenta):
            what = f"{part.shown!r} has not as many momenta as the other ranks"
            raise CorruptError(what, found=len(part.momenta), expected=len(parts[0].momenta))
    momenta = _momentum_columns(name, schema, len(parts[0].momenta), momentum_slots)
    targets = TableTargets(
        table=table,
        momenta=momenta,
        takes_counts=_is_scalar_metadata(schema.column(COUNT_COLUMN)),
        takes_times=_is_scalar_metadata(schema.column(LAST_SEEN_COLUMN)),
    )
    for part in parts:
        for column, array in targets.arrays(part):
            wanted = schema.column(column)
            assert wanted is not None
            if column != COUNT_COLUMN and (wanted.dtype is not torch.float32 or wanted.row_shape != array.shape[1:]):
                raise IncompatibleError(
                    f"file {array.shown!r} does not fit column {column!r} of table {name!r}",
                    found=Words(f"torch.float32 rows {array.shape[1:]}"),
                    expected=f"{wanted.dtype} rows {wanted.row_shape}",
                    hint="nothing was changed",
                )
    return targets


def _momentum_columns(
    name: str, schema: TableSchema, momenta_count: int, momentum_slots: Mapping[str, str | None] | None
) -> tuple[str | None, ...]:
    """Return the optimizer slot of momentum1, momentum2, ...; by default the slots in their order, as many as there
    are momenta."""
    slots = [column.name for column in schema.columns if column.role is Role.OPTIMIZER]
    stored = [f"{MOMENTUM}{number}" for number in range(1, momenta_count + 1)]
    if momentum_slots is None:
        if len(slots) != momenta_count:
            raise IncompatibleError(
                f"table {name!r} has other optimizer slots than were saved",
                found=stored,
                expected=slots,
                hint="nothing was changed; momentum_slots={'momentum1': slot, 'momentum2': None} chooses",
            )
        return tuple(slots)
    if set(momentum_slots) != set(stored):
        what = f"momentum_slots do not name the momenta of table {name!r}"
        raise UsageError(what, found=dict(momentum_slots), expected=stored)
    chosen = tuple(momentum_slots[momentum] for momentum in stored)
    used = [slot for slot in chosen if slot is not None]
    if not set(used) <= set(slots) or len(set(used)) != len(used):
        raise UsageError(f"momentum_slots do not name slots of table {name!r}", found=chosen, expected=slots)
    return chosen


def _is_scalar_metadata(column: Column | None) -> bool:
    return (
        column is not None
        and column.role is Role.METADATA
        and column.dtype is torch.int64
        and tuple(column.row_shape) == ()
    )


def _ignored(name: str, targets: TableTargets, parts: tuple[StoredPart, ...]) -> Iterator[str]:
    for number, column in enumerate(targets.momenta, start=1):
        if column is None:
            yield f"{name}/{MOMENTUM}{number}"
    if not targets.takes_counts and any(part.counts is not None for part in parts):
        yield f"{name}/{ADMIT_COUNT}"
    if not targets.takes_times and any(part.seen is not None for part in parts):
        yield f"{name}/{EVICT_TIMESTAMP}"


def _fill(targets: TableTargets, parts: tuple[StoredPart, ...], *, clear: bool) -> int:
    """Write the rows that the table owns; return how many."""
    table = targets.table
    mine = [np.flatnonzero(owned_mask(part.ids, shard=table.shard)) for part in parts]
    filled = set.intersection(*({column for column, _ in targets.arrays(part)} for part in parts))
    count = sum(len(own) for own in mine)
    load = table.begin_load(clear=clear, rows_count=count, filled=filled)
    try:
        for part, own in zip(parts, mine, strict=True):
            _fill_part(load, targets, part, own)
    except BaseException:
        load.end(False)
        raise
    load.end(True)
    return count


def _fill_part(load: TableLoad, targets: TableTargets, part: StoredPart, own: NDArray[np.int64]) -> None:
    ids = part.ids[own]
    rows = load.insert(torch.from_numpy(ids))
    for column, array in targets.arrays(part):
        _scatter(load.column(column), rows, own, array)
    if targets.takes_times and part.seen is not None:
        keys, times = part.seen
        order = np.argsort(keys)
        place = np.searchsorted(keys, ids, sorter=order)
        place = order[np.minimum(place, len(keys) - 1)] if len(keys) else np.zeros(len(ids), dtype=np.int64)
        known = np.flatnonzero(keys[place] == ids) if len(keys) else np.empty(0, dtype=np.int64)
        _put(load.column(LAST_SEEN_COLUMN), rows[torch.from_numpy(known)], times[place[known]])


def _scatter(target: torch.Tensor, rows: torch.Tensor, own: NDArray[np.int64], array: StoredArray) -> None:
    """Bring rows `own` (ascending positions in the array) over to `rows` of the target, window by window."""
    window_rows = max(1, WINDOW_BYTES // array.row_bytes)
    for begin in range(0, array.shape[0], window_rows):
        end = min(begin + window_rows, array.shape[0])
        low, high = (int(edge) for edge in np.searchsorted(own, [begin, end]))
        if low < high:
            values = array.read(begin, end)[own[low:high] - begin]
            if array.dtype == np.int64:
                values = np.maximum(values, 0)  # -1 means that there is no count.
            _put(target, rows[low:high], values)


def _put(target: torch.Tensor, rows: torch.Tensor, values: NDArray[np.generic]) -> None:
    if len(rows):
        target[rows.to(target.device)] = torch.from_numpy(np.ascontiguousarray(values)).to(target.device)

"""Compare rows with those of the last committed checkpoint by their fingerprints, in the background, on the snapshot.

    the table           the Saver          what for
    without marks       makes deltas       a delta writes the rows that have changed, and removes the ids that are gone
    whose marks do not  makes deltas       the same; code that the table cannot follow has written to it since, or it
    go back far enough                     was loaded or cleared
    with marks          audits its tables  rows that have changed without a mark are reported, and are in a delta too

Fingerprints of all rows are taken at every such staged save and kept when it commits; only for tables in regions, whose
rows are in plain memory. So the first delta of a table whose marks were lost holds all of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from asyncckpt.engine.save.save_job import SaveJob
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64
from asyncckpt.pipeline.fingerprints import RowFingerprints, changed_since, take_fingerprints
from asyncckpt.plan.regions import CapturedTable


@dataclass(frozen=True)
class Selection:
    """Rows that a delta writes of a table in a region: their positions, ascending, and the ids that it removes."""

    positions: I64
    removed: I64


@dataclass(frozen=True)
class Selections:
    """What a delta writes of each table, by number; by name its fingerprints now, and ids whose mark was missing."""

    rows: Mapping[int, Selection] = field(default_factory=dict)
    fingerprints: Mapping[str, RowFingerprints] = field(default_factory=dict)
    missed: Mapping[str, I64] = field(default_factory=dict)


def select_rows(job: SaveJob) -> Selections:
    """Fingerprint the rows of the tables that are compared, and choose those that a delta writes."""
    rows: dict[int, Selection] = {}
    fingerprints: dict[str, RowFingerprints] = {}
    missed: dict[str, I64] = {}
    for table in job.captured:
        if not _is_compared(job, table):
            continue
        name, number = table.facts.name, table.region.table
        fingerprints[name] = now = _fingerprints(job, table)
        before = _comparable(job, table)
        if before is None:
            continue
        positions, removed = changed_since(now, before)
        marked = job.rows[number].marked
        if marked is not None:
            assert table.places is not None
            marked_positions = table.places.of_rows(marked)
            unmarked = np.setdiff1d(positions, marked_positions)
            if len(unmarked):
                missed[name] = now.ids[unmarked]
            positions = np.union1d(positions, marked_positions)
        if job.base is not None and name in job.base.tables:
            rows[number] = Selection(positions=positions, removed=removed)
    return Selections(rows=rows, fingerprints=fingerprints, missed=missed)


def _is_compared(job: SaveJob, table: CapturedTable) -> bool:
    if not table.facts.whole:
        return False
    options = job.target.options
    if table.version is None:
        return options.deltas is not None
    return options.debug.audit or job.rows[table.region.table].is_lost


def _fingerprints(job: SaveJob, table: CapturedTable) -> RowFingerprints:
    assert job.staged is not None
    arena, regions = job.staged.arena, table.region.columns
    begin, count = regions[ID_COLUMN].offset, table.facts.rows_count
    ids = arena.view()[begin : begin + 8 * count].view(np.int64)
    columns = [
        (arena.address + region.offset, region.row_bytes) for name, region in regions.items() if name != ID_COLUMN
    ]
    return take_fingerprints(ids, columns)


def _comparable(job: SaveJob, table: CapturedTable) -> RowFingerprints | None:
    """Return those of the table in the last committed checkpoint; None if there is none, or it was another table."""
    newest = job.newest
    link = None if newest is None else newest.tables.get(table.facts.name)
    return link.fingerprints if link is not None and link.is_of(table.schema, table.facts.shard) else None

"""What the next delta of a Saver builds upon: the newest checkpoint that it has committed, and which rows it needs.

A link is set when a save has committed, never before: so a save that fails, is cancelled or skipped leaves the one
before, with the versions of its cuts, and the next delta holds all rows written since then.

Of several ranks, one may capture a queued save before the save in front of it has committed, and another one after
that. So what it builds upon is settled in the background (`settle`), where all saves before it have ended.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from asyncckpt.engine.ranks.holdings import is_whole
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.errors import UsageError
from asyncckpt.format import limits
from asyncckpt.format.head import ParentFacts
from asyncckpt.model.table import CutVersion, TableSchema, tracks_rows
from asyncckpt.model.table_shard import Shard
from asyncckpt.options import DeltaPolicy, SaveKind
from asyncckpt.pipeline.fingerprints import RowFingerprints
from asyncckpt.plan.regions import TableRows, row_bytes_of
from asyncckpt.plan.save_plan import CutTable


@dataclass(frozen=True)
class TableLink:
    """A table as it is in a committed checkpoint. `fingerprints` where it has no marks and deltas are wanted."""

    schema: TableSchema
    shard: Shard
    version: CutVersion | None
    fingerprints: RowFingerprints | None

    def is_of(self, schema: TableSchema, shard: Shard) -> bool:
        """Return whether rows of a table like that can be laid over this one."""
        return self.schema == schema and self.shard == shard


@dataclass(frozen=True)
class ChainLink:
    """A committed checkpoint: itself as a parent, its own parents, and its tables.

    bytes: of this rank in each checkpoint of the chain, newest first. full_time: of the full one at the end.
    """

    parent: ParentFacts
    parents: tuple[ParentFacts, ...]
    tables: Mapping[str, TableLink]
    bytes: tuple[int, ...]
    full_time: float

    @property
    def chain(self) -> tuple[ParentFacts, ...]:
        """The parents of a delta on top of it, newest first."""
        return (self.parent, *self.parents)

    def ending(self, count: int, *, full_bytes: int | None = None) -> ChainLink:
        """Return the link when its chain ends with the checkpoint of this number, because that was compacted.

        full_bytes: of this rank in it; None: as many as in the full one before.
        """
        if count == len(self.chain):
            return self
        end = self.bytes[-1] if full_bytes is None else full_bytes
        return replace(
            self, parents=self.parents[: count - 1], bytes=(*self.bytes[: count - 1], end), full_time=time.monotonic()
        )


@dataclass(frozen=True)
class Choice:
    """What kind of checkpoint a save makes: on top of `base`, or (None) a full one; and the rows of every table.

    newest: the newest committed checkpoint at the call, which rows are compared with. asked: the kind that was asked
    for; of a delta, base is None while the save that it builds upon is in flight, and all rows are there.
    """

    base: ChainLink | None
    newest: ChainLink | None
    tables: tuple[TableRows, ...]
    asked: SaveKind = "auto"


def choose_kind(
    full: Choice, cut: Cut, *, step: int, kind: SaveKind, policy: DeltaPolicy | None, audit: bool, may_settle: bool
) -> Choice:
    """Decide whether a save is a delta or full. UsageError for a delta without a committed checkpoint to build upon.

    may_settle: an earlier save of several ranks is in flight, and `settle` is called when it has ended.
    """
    full = replace(full, asked=kind)
    if kind == "delta" and full.newest is None and may_settle:
        return full
    choice, base = _choose(full, cut, step, kind, policy), full.newest
    if base is None or not (audit or policy is not None):
        return choice
    compared = _audited if audit else _compared
    tables = tuple(compared(chosen, cut.tables[chosen.table], base) for chosen in choice.tables)
    return replace(choice, tables=tables)


def _choose(full: Choice, cut: Cut, step: int, kind: SaveKind, policy: DeltaPolicy | None) -> Choice:
    base = full.newest
    if kind == "full" or (kind == "auto" and (policy is None or base is None or _is_due(base, step, policy))):
        return full
    base = _checked(base, step)
    rows = tuple(_rows_of(number, item, base, cut) for number, item in enumerate(cut.tables))
    if kind == "auto" and policy is not None:
        bytes_share = (sum(base.bytes[:-1]) + _bytes_of(rows, base, cut)) / max(1, base.bytes[-1])
        if bytes_share > policy.bytes_share_max:
            return full
    return replace(full, base=base, tables=rows)


def settle(choice: Choice, newest: ChainLink | None, *, step: int) -> Choice:
    """Return the choice of a save when all saves before it have ended: a delta builds upon the newest checkpoint.

    Rows written since an older checkpoint, and ids removed since then, include those since a newer one. UsageError as
    of `choose_kind`.
    """
    if choice.asked == "auto" and (choice.base is None or newest is None or not _can_build_upon(newest, step)):
        return choice  # Ranks whose call came later save in full beside it.
    if choice.asked == "full" or (choice.base is not None and (newest is None or newest.parent == choice.base.parent)):
        return choice
    newest = _checked(newest, step)
    return replace(choice, base=newest, newest=newest)


def _checked(base: ChainLink | None, step: int) -> ChainLink:
    """Return what a delta of this step builds upon; UsageError when it cannot."""
    if base is None:
        raise UsageError(
            "a delta has nothing to build upon: this Saver knows of no checkpoint of its own that has committed",
            hint="the first save of a Saver is a full one, as is that after one whose end it did not hear from rank 0; "
            "kind='auto' sees to that",
        )
    if step <= base.parent.step:
        raise UsageError(
            f"a delta of step {step} cannot build upon step {base.parent.step}, which this Saver has committed last",
            expected=f"a step above {base.parent.step}",
            hint="save a full checkpoint: kind='full' or 'auto'",
        )
    limits.check_chain_length(len(base.chain))
    return base


def _can_build_upon(base: ChainLink, step: int) -> bool:
    return step > base.parent.step and len(base.chain) <= limits.CHAIN_STEPS_MAX


def _is_due(base: ChainLink, step: int, policy: DeltaPolicy) -> bool:
    age_s = time.monotonic() - base.full_time
    if not _can_build_upon(base, step):
        return True
    return len(base.parents) >= policy.deltas_max or (policy.seconds_max is not None and age_s > policy.seconds_max)


def _rows_of(number: int, item: CutTable, base: ChainLink, whole: Cut) -> TableRows:
    """Return the rows of a table that a delta needs: all of them where it is not known which were written, or which
    rank has written the table last: rows can be laid only over a table of the same rank."""
    version, cut = _version_of(item, base), item.cut
    if whole.share is not None and not whole.share.is_known and is_whole(item.table):
        return TableRows(number)
    if version is not None and tracks_rows(cut):
        rows, removed = cut.touched_since(version), cut.removed_since(version)
        if rows is not None and removed is not None and len(rows) < cut.rows_count:
            return TableRows(number, rows=rows, removed=removed)
    return TableRows(number)


def _audited(chosen: TableRows, item: CutTable, newest: ChainLink) -> TableRows:
    """Return all rows of a table with marks, to be compared with those that are marked."""
    version, cut = _version_of(item, newest), item.cut
    if version is None or not tracks_rows(cut):
        return chosen
    return TableRows(chosen.table, marked=cut.touched_since(version))


def _compared(chosen: TableRows, item: CutTable, newest: ChainLink) -> TableRows:
    """Note of a whole table whose marks do not go back to the last checkpoint that its rows have to be compared."""
    version, cut = _version_of(item, newest), item.cut
    if not chosen.is_whole or version is None or not tracks_rows(cut):
        return chosen
    return replace(chosen, is_lost=cut.removed_since(version) is None)  # Which costs less than touched rows.


def _version_of(item: CutTable, newest: ChainLink) -> CutVersion | None:
    """Return the version of a table in a checkpoint over which its rows can be laid."""
    link = newest.tables.get(item.name)
    return link.version if link is not None and link.is_of(item.schema, item.shard) else None


def _bytes_of(rows: Sequence[TableRows], base: ChainLink, cut: Cut) -> int:
    """Return about what a delta will write, without tables that are compared row by row: nobody knows it yet."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in cut.flat.held)
    for chosen, item in zip(rows, cut.tables, strict=True):
        link = base.tables.get(item.name)
        if chosen.is_whole and link is not None and link.fingerprints is not None:
            continue
        total += chosen.count(item.cut.rows_count) * row_bytes_of(item.schema) + chosen.removed.nbytes
    return total

"""The base of the next delta of a Saver: the newest checkpoint that it has committed, and which rows it needs.

A link is set when a save has committed, never before: so a save that fails, is cancelled or skipped leaves the one
before, with the versions of its cuts, and the next delta holds all rows written since then.

With several ranks, one may capture a queued save before the save in front of it has committed, and another one after
that. So its base is settled in the background (`settle`), where all saves before it have ended.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import asyncckpt.commit.chain  # noqa: F401  # The first delta imports nothing.
from asyncckpt.engine.features.chosen_blocks import write_chosen
from asyncckpt.engine.process.future import SaveFuture
from asyncckpt.engine.process.log import log_warning
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save.feature import SaveFeature
from asyncckpt.engine.save.save_job import ChainLink, Committed, SaveCall, SaveJob, SaveTarget
from asyncckpt.engine.save.stage import StageChoice
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.errors import ConflictError, SaveCancelledError, UsageError, warn
from asyncckpt.format import limits
from asyncckpt.model.table import CutVersion, tracks_rows
from asyncckpt.options import DeltaPolicy
from asyncckpt.plan.leaf_memory import check_leaves
from asyncckpt.plan.regions import TableRows, row_bytes_of
from asyncckpt.plan.save_plan import CutTable

COMPACTION = "a compaction"


class Deltas(SaveFeature):
    """Deltas of one Saver, and audits of its tables. policy: when a save of kind "auto" is one; None: never."""

    def __init__(self, policy: DeltaPolicy | None, *, audit: bool = False) -> None:
        self._policy, self._audit = policy, audit

    def chosen(self, job: SaveJob) -> None:
        """Decide whether it is a delta or full, and which rows it writes. UsageError for a delta without a committed
        checkpoint as its base; ConflictError where others have removed that.
        """
        job.newest, kind = _hold_newest(job), job.call.kind
        if job.newest is not None and (kind == "delta" or (kind == "auto" and self._policy is not None)):
            job.newest = _look(job, job.newest)
        # What is in flight beside this one may be the save that a delta builds upon.
        may_settle = job.target.ranks_count > 1 and len(save_lock.in_flight()) > 1
        if kind == "delta" and job.newest is None and may_settle:
            job.claim.parents.clear()
            return  # All rows; see `settle`.
        self._choose(job)
        if job.newest is not None and (self._audit or self._policy is not None):
            compared = _audited if self._audit else _compared
            job.rows = tuple(compared(rows, job.cut.tables[rows.table], job.newest) for rows in job.rows)
        if job.base is None:
            job.claim.parents.clear()

    def _choose(self, job: SaveJob) -> None:
        """Let the save be a delta if that is asked for, or due and small enough."""
        base, kind, policy, step = job.newest, job.call.kind, self._policy, job.step
        if kind == "full" or (kind == "auto" and (policy is None or base is None or _is_due(base, step, policy))):
            return
        base = _checked(base, step)
        rows = tuple(_rows_of(number, item, base, job.cut) for number, item in enumerate(job.cut.tables))
        if kind == "auto" and policy is not None:
            bytes_share = (sum(base.bytes[:-1]) + _bytes_of(rows, base, job.cut)) / max(1, base.bytes[-1])
            if bytes_share > policy.bytes_share_max:
                return
        job.base, job.rows = base, rows

    def planned(self, job: SaveJob, stage: StageChoice) -> None:
        """Choose rows when the save is written, unless a region has just those that it writes. UsageError if a table
        with marks is not staged in a region, where an audit could compare its rows.
        """
        staged = {region.name for region in stage.regions.tables}
        are_left_out = any(not rows.is_whole and job.cut.tables[rows.table].name not in staged for rows in job.rows)
        if self._audit or self._policy is not None or are_left_out:
            job.write = write_chosen
        if not self._audit:
            return
        left_out = [item.name for item in job.cut.tables if item.name not in staged and tracks_rows(item.cut)]
        if left_out:
            reason = stage.fallback or "their columns are not plain memory, or a filter_func wants whole blocks"
            raise UsageError(f"audit=True cannot compare the rows of tables: {reason}", found=left_out)

    def committed(self, job: SaveJob, committed: Committed) -> None:
        """Log by table the ids whose mark was missing.

        When the save has committed: one that is refused may have copied what was written, and marked, after its call.
        """
        for table, ids in committed.written.missed.items():
            log_warning(
                "%d rows of table %r were changed without a mark, the first one of id %d, in a way that torch does not "
                "count: write them by update(rows, function), or call touch(rows)",
                len(ids),
                table,
                int(ids[0]),
            )
        most = None if self._policy is None else self._policy.compact_after
        if most is not None and job.base is not None and len(job.base.parents) + 1 >= most:
            self._compact(job)

    def _compact(self, job: SaveJob) -> None:
        """Begin to compact the step that was just committed, unless an earlier one still is, on rank 0."""
        from asyncckpt.engine.compact.run_compaction import start_compaction

        target = job.target
        earlier = target.memory.behind.get(COMPACTION)
        if target.rank or (earlier is not None and not earlier.done()):
            return
        try:
            compaction = start_compaction(target, job.step)
        except Exception as error:  # Of any kind: the step is committed.
            log_warning("step %d of %s is not compacted: %s", job.step, target.root.path, error)
            return
        target.memory.behind[COMPACTION] = compaction._inner
        compaction.add_done_callback(_log_failed)


def _log_failed(compaction: SaveFuture) -> None:
    error = compaction.exception(0)
    if error is not None and not isinstance(error, SaveCancelledError):
        log_warning("step %d of %s is not compacted: %s", compaction.step, compaction.path, error)


def as_delta(call: SaveCall, target: SaveTarget) -> SaveCall:
    """Return a call for a delta, of a Saver that need not have been asked for any."""
    if any(isinstance(feature, Deltas) for feature in target.features):
        return call
    return replace(call, features=(*target.features, Deltas(None)))


def _hold_newest(job: SaveJob) -> ChainLink | None:
    """Return the newest link of the chain. Retention keeps its checkpoint from now on, whatever commits meanwhile."""
    memory = job.target.memory
    while True:
        newest = memory.newest
        job.claim.parents[:] = [] if newest is None else [newest.parent.step]
        if memory.newest is newest:
            return newest


def _look(job: SaveJob, base: ChainLink) -> ChainLink | None:
    """Return what a delta can be based on now: the chain down to what was compacted since, or None, with a warning,
    where others have removed some of it. ConflictError for a delta that was asked for.

    With several ranks, rank 0 looks again when all have called (rank_save.py), and what it sees counts.
    """
    target = job.target
    try:
        heads = target.commits.chain.look(base.chain)
    except ConflictError as error:
        if job.call.kind == "delta":
            raise
        if target.rank == 0:
            warn(f"asyncckpt: {error.what}; this save is a full one", RuntimeWarning)
        return None
    end = heads[-1]
    full_bytes = None if end is None else sum(file.bytes for file in end.files if file.rank == target.rank)
    return base.ending(len(heads), full_bytes=full_bytes)


def settle(job: SaveJob) -> None:
    """Settle the base of a save when all saves before it have ended: the newest checkpoint.

    Rows written since an older checkpoint, and ids removed since then, include those since a newer one. UsageError as
    of `Deltas.chosen`.
    """
    newest, asked = job.target.memory.newest, job.call.kind
    if asked == "auto" and (job.base is None or newest is None or not _can_build_upon(newest, job.step)):
        return  # Ranks whose call came later save in full beside it.
    if asked == "full" or (job.base is not None and (newest is None or newest.parent == job.base.parent)):
        return
    job.base = job.newest = _checked(newest, job.step)


def _checked(base: ChainLink | None, step: int) -> ChainLink:
    """Return the base of a delta of this step; UsageError when there cannot be one."""
    if base is None:
        raise UsageError(
            "kind='delta' needs a base, and this Saver has not committed a checkpoint yet, as far as it knows",
            hint="use kind='auto', which saves a full checkpoint first",
        )
    if step <= base.parent.step:
        raise UsageError(
            f"a delta needs a step above its base: step {step} is not above step {base.parent.step}, the last one that "
            "this Saver has committed",
            hint="save a full checkpoint: kind='full' or 'auto'",
        )
    if len(base.chain) > limits.CHAIN_STEPS_MAX:
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
    if item.name in whole.undecided:
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
    try:
        total = sum(tensor.numel() * tensor.element_size() for tensor in cut.flat.held)
    except ValueError:  # One has no sizes.
        check_leaves(cut.flat)
        raise
    for chosen, item in zip(rows, cut.tables, strict=True):
        link = base.tables.get(item.name)
        if chosen.is_whole and link is not None and link.fingerprints is not None:
            continue
        total += chosen.count(item.cut.rows_count) * row_bytes_of(item.schema) + chosen.removed.nbytes
    return total

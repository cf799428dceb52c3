"""How a save is staged: all of it in an arena, or with tables deferred, or not at all.

    what fits the memory limit               host_level="auto"   "copy"    "first_touch"
    everything                               arena               arena     arena, tables deferred
    the caches, but not the host levels      deferred            blocking  deferred
    not even that                            blocking            blocking  blocking

A deferred table has only its cache level copied while training waits; its host level is exported behind the
fence. A filter needs whole blocks, so with one no table is deferred; a table of which a delta writes some rows is
not deferred either, and with audit=True none is.

Tables whose columns are plain memory get regions in the arena (plan/regions.py), so that a full save need copy only
the rows written since the arena was filled. What the user's own filter function sees are blocks of the plan, so with
one there are no regions. Filters name tensors, so with any each of them has blocks of its own, whatever memory it
shares.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from asyncckpt.devices.current_runtime import device_of
from asyncckpt.engine.ranks.holdings import is_whole, slice_of
from asyncckpt.engine.save.delta_chain import Choice
from asyncckpt.engine.save.save_job import SaveTarget
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.errors import UsageError
from asyncckpt.model.table import tracks_rows
from asyncckpt.pipeline.filters import identity
from asyncckpt.plan.deferred_tables import can_be_exported
from asyncckpt.plan.regions import Regions, RegionWish, plan_regions, row_bytes_of
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.staging.pool import pool

NO_REGIONS = Regions(tables=(), bytes=0)


@dataclass(frozen=True)
class StageChoice:
    """The plan of a save and its regions, which are before it in the arena.

    layout    the regions, if a later save may bring them up to date
    fallback  why it cannot be staged; None when it can
    """

    plan: SavePlan
    regions: Regions = NO_REGIONS
    layout: Regions | None = None
    fallback: str | None = None

    @property
    def arena_bytes(self) -> int:
        return self.regions.bytes + self.plan.arena_bytes


def choose_stage(target: SaveTarget, cut: Cut, choice: Choice, *, by_tree: bool = False) -> StageChoice:
    """Choose for a save that shall not block. by_tree: see PlanCache.plan."""
    options, limit = target.options, target.options.host_memory_limit
    host_level = "copy" if options.debug.audit else options.device.host_level
    if host_level != "first_touch":
        last = _stage(target, cut, choice, deferred=(), by_tree=by_tree)
        if pool.fits(last.arena_bytes, limit_bytes=limit):
            return last
    deferred = [] if host_level == "copy" else _can_be_left_open(target, cut, choice)
    if deferred or host_level == "first_touch":
        last = _stage(target, cut, choice, deferred=deferred, by_tree=by_tree)
        if pool.fits(last.arena_bytes, limit_bytes=limit):
            return last
    shown = "a share of what is available" if limit is None else f"{limit} bytes"
    return unstaged(target, cut, f"a snapshot of {last.arena_bytes} bytes does not fit the host memory limit ({shown})")


def unstaged(target: SaveTarget, cut: Cut, fallback: str | None = None) -> StageChoice:
    """Return the choice to write the live state while the caller waits."""
    shares = not _is_filtered(target)
    plan = target.memory.plans.plan(cut.flat, cut.tables, by_peers=cut.leaves_by_peers, shares=shares)
    return StageChoice(plan, fallback=fallback)


def check_audited(cut: Cut, stage: StageChoice) -> None:
    """Raise UsageError if a table with marks is not staged in a region, where an audit could compare its rows."""
    staged = {region.name for region in stage.regions.tables}
    left_out = [item.name for item in cut.tables if item.name not in staged and tracks_rows(item.cut)]
    if left_out:
        reason = stage.fallback or "their columns are not plain memory, or a filter_func wants whole blocks"
        raise UsageError(f"audit=True cannot compare the rows of tables: {reason}", found=left_out)


def _is_filtered(target: SaveTarget) -> bool:
    return target.filter_func is not identity or bool(target.filters)


def _can_be_left_open(target: SaveTarget, cut: Cut, choice: Choice) -> list[str]:
    if _is_filtered(target):
        return []
    some_rows = {cut.tables[chosen.table].name for chosen in choice.tables if not chosen.is_whole}
    # Of several ranks whether a table that holds all ids is written here, is perhaps known too late for its cut; and
    # the ids of one with a rule of its own are compared before anything is written.
    is_share_known = cut.share is None or cut.share.is_known
    return [
        item.name
        for item in cut.tables
        if can_be_exported(item.cut, row_bytes_of(item.schema))
        and item.name not in some_rows
        and (is_share_known or (not is_whole(item.table) and slice_of(item.table).is_known))
    ]


def _stage(target: SaveTarget, cut: Cut, choice: Choice, *, deferred: Collection[str], by_tree: bool) -> StageChoice:
    in_regions = [
        (number, item)
        for number, item in enumerate(cut.tables)
        if target.filter_func is identity and item.name not in deferred and _is_plain(item)
    ]
    names = [item.name for _, item in in_regions]
    plan = target.memory.plans.plan(
        cut.flat,
        cut.tables,
        deferred=deferred,
        in_regions=names,
        by_peers=cut.leaves_by_peers,
        shares=not _is_filtered(target),
        by_tree=by_tree,
    )
    wishes = [
        RegionWish(
            table=number,
            name=item.name,
            schema=item.schema,
            rows_count=choice.tables[number].count(item.cut.rows_count),
            removed_count=len(choice.tables[number].removed),
        )
        for number, item in in_regions
    ]
    if not wishes:
        return StageChoice(plan)
    if choice.base is not None:
        return StageChoice(plan, plan_regions(wishes))
    regions = target.memory.regions.regions(wishes)
    return StageChoice(plan, regions, regions if target.options.refreshes and regions.bytes else None)


def _is_plain(item: CutTable) -> bool:
    columns = (item.cut.column(column.name) for column in item.schema.columns)
    return all(column.is_contiguous() and (column.is_cpu or device_of(column) is not None) for column in columns)

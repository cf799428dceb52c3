"""Stage a save: choose how, and capture the state in an arena.

    what fits the memory limit               host_level="auto"   "copy"    "first_touch"
    everything                               arena               arena     arena, tables deferred
    the caches, but not the host levels      deferred            blocking  deferred
    not even that                            blocking            blocking  blocking

A deferred table has only its cache level copied while training waits; its host level is exported after the fence. A
filter needs whole blocks, so with one no table is deferred; a table of which a delta writes some rows is not deferred
either, and with audit=True none is.

Tables whose columns are plain memory get regions in the arena (plan/regions.py), so that a full save need copy only
the rows written since the arena was filled. What the user's own filter function sees are blocks of the plan, so with
one there are no regions. Filters name tensors, so with any each of them has blocks of its own, whatever memory it
shares.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from asyncckpt.engine.process.event_loop import check_may_wait_here
from asyncckpt.engine.save.save_job import SaveJob, SaveTarget, Staged
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.model.row_places import ArenaContents
from asyncckpt.model.torch_use import uses_devices
from asyncckpt.options import CHUNK_BYTES
from asyncckpt.plan.regions import Regions, RegionWish, TableRows, plan_regions, row_bytes_of
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.snapshot.capture import CopiesOnHost, NotAsPlanned, capture, first_look
from asyncckpt.snapshot.table_capture import TableCapture
from asyncckpt.staging.limits import DEFAULT_SHARE, spare_bytes

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


def device_of(tensor: torch.Tensor) -> int | None:
    """Return the number of the device that a tensor is on; None for the host and for unknown kinds of devices."""
    if not uses_devices():
        return None
    from asyncckpt.devices.current_runtime import device_of as found  # Many processes use none.

    return found(tensor)


# -- how ---------------------------------------------------------------------------------------------------------------


def choose_stage(
    target: SaveTarget, cut: Cut, rows: Sequence[TableRows], *, is_delta: bool = False, by_tree: bool = False
) -> StageChoice:
    """Choose for a save that shall not block.

    rows: what it writes of each table, by its number among the cuts. by_tree: see PlanCache.plan.
    """
    options, arenas, limit = target.options, target.arenas, target.options.host_memory_limit
    host_level = "copy" if options.debug.audit else options.device.host_level
    if host_level != "first_touch":
        last = _stage(target, cut, rows, is_delta, by_tree, deferred=())
        if arenas.fits(last.arena_bytes, limit_bytes=limit):
            return last
    if by_tree:  # What does not fit is perhaps an earlier, larger state.
        return choose_stage(target, cut, rows, is_delta=is_delta)
    deferred = [] if host_level == "copy" else _can_be_left_open(target, cut, rows)
    if deferred or host_level == "first_touch":
        last = _stage(target, cut, rows, is_delta, by_tree, deferred=deferred)
        chunks_bytes = 2 * CHUNK_BYTES if deferred and limit is None else 0  # Through which they are exported.
        if arenas.fits(last.arena_bytes + chunks_bytes, limit_bytes=limit):
            return last
    shown = f"{limit} bytes" if limit is not None else f"{DEFAULT_SHARE:.0%} of the {spare_bytes()} bytes to spare"
    return unstaged(target, cut, f"a snapshot of {last.arena_bytes} bytes does not fit the host memory limit ({shown})")


def unstaged(target: SaveTarget, cut: Cut, fallback: str | None = None) -> StageChoice:
    """Return the choice to write the live state while the caller waits."""
    plans, shares = target.memory.plans, not target.is_filtered
    plan = plans.plan(cut.flat, cut.tables, by_peers=cut.left_out.leaves, shares=shares)
    return StageChoice(plan, fallback=fallback)


def _can_be_left_open(target: SaveTarget, cut: Cut, rows: Sequence[TableRows]) -> list[str]:
    if target.is_filtered:
        return []
    from asyncckpt.plan.deferred_tables import can_be_exported

    some_rows = {cut.tables[chosen.table].name for chosen in rows if not chosen.is_whole}
    left_out = some_rows | cut.undecided | cut.open_ids
    names = (item.name for item in cut.tables if can_be_exported(item.cut, row_bytes_of(item.schema)))
    return [name for name in names if name not in left_out]


def _stage(
    target: SaveTarget, cut: Cut, rows: Sequence[TableRows], is_delta: bool, by_tree: bool, *, deferred: Collection[str]
) -> StageChoice:
    wishes = [
        RegionWish(
            table=number,
            name=item.name,
            schema=item.schema,
            rows_count=rows[number].count(item.cut.rows_count),
            removed_count=len(rows[number].removed),
        )
        for number, item in enumerate(cut.tables)
        if target.filter_func is None and item.name not in deferred and _is_plain(item)
    ]
    plan = target.memory.plans.plan(
        cut.flat,
        cut.tables,
        deferred=deferred,
        in_regions=[wish.name for wish in wishes],
        by_peers=cut.left_out.leaves,
        shares=not target.is_filtered,
        by_tree=by_tree,
    )
    if not wishes:
        return StageChoice(plan)
    if is_delta:
        return StageChoice(plan, plan_regions(wishes))
    regions = target.memory.regions.regions(wishes)
    return StageChoice(plan, regions, regions if target.options.refreshes and regions.bytes else None)


def _is_plain(item: CutTable) -> bool:
    columns = (item.cut.column(column.name) for column in item.schema.columns)
    return all(column.is_contiguous() and (column.is_cpu or device_of(column) is not None) for column in columns)


# -- capture -----------------------------------------------------------------------------------------------------------


def fill_arena(job: SaveJob, stage: StageChoice) -> None:
    """Capture the state in an arena, or let devices and threads begin to: `staged` and `captured` of the job.

    NotAsPlanned, when nothing was captured.
    """
    options, arenas, layout, copies = job.target.options, job.target.arenas, stage.layout, job.copies
    if copies is None and uses_devices():
        from asyncckpt.engine.save.device_stage import DeviceStage  # See device_of.

        copies = DeviceStage(options)
    has_waited = False

    def before_wait() -> None:
        nonlocal has_waited
        check_may_wait_here("a staging arena", holding=arenas.guard)
        if not has_waited:  # What changes from here on does so while the call waits.
            first_look(stage.plan, job.cut.flat)
            has_waited = True

    arena = arenas.acquire(
        stage.arena_bytes,
        deadline_s=job.call.busy.deadline,
        limit_bytes=options.host_memory_limit,
        layout=layout,
        before_wait=before_wait,
    )
    job.staged = Staged(arena, arenas, base=stage.regions.bytes)
    try:
        contents, arena.contents = arena.contents, None  # Until all of it is there.
        image, on_host = arena.view(), CopiesOnHost()
        tables: Sequence[TableCapture] = ()
        if stage.regions.tables:
            held = {} if contents is None else contents.tables
            tables = [
                TableCapture(
                    job.cut.tables[region.table],
                    region,
                    job.rows[region.table],
                    held=held.get(region.name),
                    image=image,
                    copies=copies or on_host,
                    compare=options.device.fingerprints and layout is not None,
                )
                for region in stage.regions.tables
            ]
        dense = image[stage.regions.bytes :]
        capture(stage.plan, job.cut.flat, job.cut.tables, image=dense, copies=copies or on_host, tables=tables)
        if copies is not None:
            job.staged = replace(job.staged, pending=copies.launch_into(arena))
        if layout is not None:
            there = {table.name: table.contents for table in tables if table.contents is not None}
            arena.contents = ArenaContents(layout=layout, tables=there)
        arenas.seal(arena)
        job.captured = tuple(table.captured for table in tables)
    except NotAsPlanned as found:
        found.has_waited = has_waited
        job.staged.give_back()
        job.staged = None
        raise
    except BaseException:  # An interrupt may come when devices write to the arena already.
        if copies is not None:
            job.staged = replace(job.staged, pending=copies.pending)
        raise

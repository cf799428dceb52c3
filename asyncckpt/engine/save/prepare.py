"""Plan and stage ahead of the first save: touching fresh memory takes ten times as long as copying into it, and pinning
it for devices takes long too.
"""

from __future__ import annotations

from collections.abc import Iterator

from asyncckpt.devices.current_runtime import device_of, runtime
from asyncckpt.engine.process.background import workers
from asyncckpt.engine.process.event_loop import check_may_wait_for
from asyncckpt.engine.process.future import CheckpointFuture, as_checkpoint_error
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save.device_stage import pin
from asyncckpt.engine.save.save_job import SaveTarget
from asyncckpt.engine.save.stage import StageChoice, choose_stage
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.model.table import is_overlaid
from asyncckpt.plan.regions import TableRows
from asyncckpt.plan.save_plan import CutTable
from asyncckpt.staging.pool import pool


class PrepareFuture(CheckpointFuture[None]):
    """Done when the arena is there."""

    def cancel(self) -> bool:
        """Return False: it goes on to its end."""
        return False


def prepare_arena(target: SaveTarget) -> PrepareFuture:
    """Make the plan now, on the caller's thread, because it reads the live state; touch the arena on a worker.

    SaveInProgressError on an event loop which that would stop, as it would a queued save.
    """
    for other in save_lock.in_flight():
        if not other.is_captured:  # It may hold tables.
            check_may_wait_for(other)
    cut = Cut.begin(target.state, target.tables, target.features, like=target.memory.plans.tree)
    try:
        stage = choose_stage(target, cut, tuple(map(TableRows, range(len(cut.tables)))))
        found = runtime()
        extents = [] if found is None else list(_device_extents(stage, cut))
    finally:
        cut.end(ok=False)

    size, limit = stage.arena_bytes, target.options.host_memory_limit
    # A save in flight has the arena already; and what does not fit will not be staged.
    to_do = not save_lock.in_flight() and stage.fallback is None
    arena = pool.take_to_prepare(size, layout=stage.layout) if to_do else None

    def touch() -> None:
        if arena is None:
            return
        try:
            arena.ensure(size)
            if target.tables:
                pool.touch_ahead(arena, size, limit_bytes=limit)
            if found is not None and extents:
                begin, end = min(begin for begin, _ in extents), max(end for _, end in extents)
                pin(arena, begin, end, found, limit_bytes=target.options.device.pinned_memory_limit)
        except (MemoryError, OSError) as error:
            raise as_checkpoint_error(error, None, target.root.path) from error
        finally:
            pool.release(arena)

    try:
        future = PrepareFuture(step=None, path=target.root.path, what="preparation")
        workers.submit(future.end_with, touch)
        return future
    except BaseException:
        if arena is not None:
            pool.release(arena)
        raise


def _device_extents(stage: StageChoice, cut: Cut) -> Iterator[tuple[int, int]]:
    """Yield the bytes [begin, end) of the arena that devices will write. Before the fence."""
    plan, regions, cuts = stage.plan, stage.regions, cut.tables
    for region in regions.tables:
        for name, column in region.columns.items():
            if _is_on_device(cuts[region.table], name):
                yield column.offset, column.offset + region.rows_max * column.row_bytes
    on_devices = [device_of(cut.flat.held[tensor]) is not None for tensor in plan.pieces.tensor.tolist()]
    numbers = [plan.block_of_piece(piece) for piece, is_on_device in enumerate(on_devices) if is_on_device]
    numbers += [number for number, (table, column) in plan.columns.items() if _is_on_device(cuts[table], column)]
    for number in numbers:
        begin = regions.bytes + int(plan.image.offsets[number])
        yield begin, begin + int(plan.image.lengths[number])
    for item in plan.deferred.tables:
        for name, (begin, length) in item.cache.columns.items():
            if _is_on_device(cuts[item.table], name):
                yield regions.bytes + begin, regions.bytes + begin + length


def _is_on_device(item: CutTable, column: str) -> bool:
    """Return whether either level of a column is on a device."""
    cached = item.cut.cached_column(column) if is_overlaid(item.cut) else None
    return any(level is not None and device_of(level) is not None for level in (item.cut.column(column), cached))

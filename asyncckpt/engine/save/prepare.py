"""Plan and stage ahead of the first save: touching fresh memory takes ten times as long as copying into it, and pinning
it for devices takes long too.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterator, Sequence

from asyncckpt.devices.current_runtime import device_of, runtime
from asyncckpt.engine.process.background import check_may_wait, workers
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save.delta_chain import choose_kind
from asyncckpt.engine.save.device_stage import pin
from asyncckpt.engine.save.save_job import SaveTarget
from asyncckpt.engine.save.stage_choice import choose_stage
from asyncckpt.engine.save.state_cut import Cut
from asyncckpt.errors import DeadlineError
from asyncckpt.model.table import is_overlaid
from asyncckpt.plan.regions import Regions
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState
from asyncckpt.staging.pool import pool


class PrepareFuture:
    """Done when the arena is there."""

    def __init__(self, inner: concurrent.futures.Future[None]) -> None:
        self._inner = inner

    def done(self) -> bool:
        return self._inner.done()

    def result(self, timeout: float | None = None) -> None:
        """Wait; raises what went wrong, or DeadlineError; UsageError on the background thread."""
        if not self._inner.done():
            check_may_wait("the arena")
        try:
            self._inner.result(timeout)
        except concurrent.futures.TimeoutError:
            raise DeadlineError(f"the arena was not ready within {timeout} s") from None


def prepare_arena(target: SaveTarget) -> PrepareFuture:
    """Make the plan now (on the caller's thread, for it reads the live state), touch the arena on a worker."""
    cut = Cut.begin(target.state, target.tables, target.ranks, call=None)
    try:
        choice = choose_stage(target, cut, choose_kind(cut, None, step=0, kind="full", policy=None))
        found = runtime()
        begin, end = (0, 0) if found is None else _device_extent(choice.plan, cut.flat, cut.tables, choice.regions)
    finally:
        cut.fence()
        cut.end(ok=False)

    size, limit = choice.arena_bytes, target.options.host_memory_limit
    # A save in flight has the arena already; and what does not fit will not be staged.
    to_do = not save_lock.in_flight() and choice.fallback is None
    layout = choice.regions if target.options.refreshes and choice.regions.bytes else None
    arena = pool.take_to_prepare(size, layout=layout) if to_do else None

    def touch() -> None:
        if arena is None:
            return
        try:
            arena.ensure(size)
            if target.tables:
                pool.touch_ahead(arena, size, limit_bytes=limit)
            if found is not None and begin < end:
                pin(arena, begin, end, found, limit_bytes=target.options.device.pinned_memory_limit)
        finally:
            pool.release(arena)

    return PrepareFuture(workers.submit(touch))


def _device_extent(plan: SavePlan, flat: FlatState, cuts: Sequence[CutTable], regions: Regions) -> tuple[int, int]:
    """The bytes [begin, end) of the arena between which devices will write; (0, 0): none. Before the fence."""
    found = list(_extents(plan, flat, cuts, regions))
    return min((begin for begin, _ in found), default=0), max((end for _, end in found), default=0)


def _extents(plan: SavePlan, flat: FlatState, cuts: Sequence[CutTable], regions: Regions) -> Iterator[tuple[int, int]]:
    for region in regions.tables:
        for name, column in region.columns.items():
            if _is_on_device(cuts[region.table], name):
                yield column.offset, column.offset + region.rows_max * column.row_bytes
    on_devices = [device_of(flat.held[tensor]) is not None for tensor in plan.pieces.tensor.tolist()]
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
    """Whether either level of a column is on a device."""
    cached = item.cut.cached_column(column) if is_overlaid(item.cut) else None
    return any(level is not None and device_of(level) is not None for level in (item.cut.column(column), cached))

"""Plan and stage ahead of the first save: touching fresh memory takes ten times as long as copying into it, and pinning
it for devices takes long too.
"""

from __future__ import annotations

import concurrent.futures

from asyncckpt.devices.current_runtime import runtime
from asyncckpt.engine.process.background import check_may_wait, workers
from asyncckpt.engine.process.save_lock import save_lock
from asyncckpt.engine.save.delta_chain import choose_kind
from asyncckpt.engine.save.device_stage import pin
from asyncckpt.engine.save.save_target import SaveTarget, begin_cut
from asyncckpt.engine.save.stage_choice import choose_stage
from asyncckpt.errors import DeadlineError
from asyncckpt.snapshot.device_extent import device_extent
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
    cut, share = begin_cut(target)
    try:
        choice = choose_stage(target, cut, choose_kind(cut, None, step=0, kind="full", policy=None), share)
        found = runtime()
        begin, end = (0, 0) if found is None else device_extent(choice.plan, cut.flat, cut.tables, choice.regions)
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

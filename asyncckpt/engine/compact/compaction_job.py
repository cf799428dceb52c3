"""Compaction beside training: on a thread of its own, without the save lock."""

from __future__ import annotations

from asyncckpt.commit.discover import newest_step
from asyncckpt.engine.compact.run_compaction import run_compaction
from asyncckpt.engine.process.background import rewriters
from asyncckpt.engine.process.future import FutureState, SaveFuture
from asyncckpt.engine.save.save_target import SaveTarget
from asyncckpt.errors import SaveCancelledError
from asyncckpt.format.limits import check_step
from asyncckpt.model.result import SaveResult


def skipped_compaction(target: SaveTarget, step: int | None) -> SaveFuture:
    """What a rank gets that leaves the work to rank 0."""
    chosen = newest_step(target.root) if step is None else step
    future = SaveFuture(step=chosen, path=target.root.path, what=f"compaction of step {chosen}")
    result = SaveResult(step=chosen, kind="full", path=target.root.path, skipped=True)
    future.resolve(result, FutureState.SKIPPED)
    return future


def start_compaction(target: SaveTarget, step: int | None) -> SaveFuture:
    """Begin to compact a step (None: the newest). UsageError, NotFoundError when there is no step at all."""
    target.commits.check_not_in_doubt()
    check_step(step)
    chosen = newest_step(target.root) if step is None else step
    what = f"compaction of step {chosen}"
    future = SaveFuture(step=chosen, path=target.root.path, what=what, pools=(rewriters,))

    def work() -> None:
        try:
            future.enter(FutureState.WRITING)
            result = run_compaction(
                target.commits,
                chosen,
                options=target.options,
                progress=future.native_progress,
                may_commit=lambda: future.enter(FutureState.COMMITTING),
            )
        except BaseException as error:
            cancelled = isinstance(error, SaveCancelledError)
            future.fail(error, FutureState.CANCELLED if cancelled else FutureState.FAILED)
        else:
            future.resolve(result, FutureState.COMMITTED)

    rewriters.submit(work)
    return future

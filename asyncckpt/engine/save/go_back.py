"""Let a Saver go back: what was saved after a step is discarded, and nothing builds upon it any more."""

from __future__ import annotations

from asyncckpt.commit.discover import forget_verified
from asyncckpt.commit.retention import remove_steps
from asyncckpt.engine.process.background import check_may_wait, result_or_end, retainer
from asyncckpt.engine.save.save_job import SaveTarget
from asyncckpt.options import SAVE_DEADLINE_S
from asyncckpt.signals import uninterrupted


@uninterrupted
def go_back(target: SaveTarget, step: int) -> None:
    """Discard all steps after this one, newest first and durably, when nothing of this Saver is in flight.

    Of several ranks, rank 0 discards them; all call this. The next save is a full one. Raises as `check_may_go_back`;
    then all stay.
    """
    target.memory.newest = None  # Before anything goes: an interrupted wait lets the rest go.
    forget_verified(target.root, lambda verified: verified > step)
    if target.rank == 0:
        _discard_after(target, step, dry_run=False)


def check_may_go_back(target: SaveTarget, step: int) -> None:
    """Raise UsageError when a step after this one is pinned, ConflictError when a save of this process needs one."""
    _discard_after(target, step, dry_run=True)


def _discard_after(target: SaveTarget, step: int, *, dry_run: bool) -> None:
    what = f"discarding what was saved after step {step}"
    check_may_wait(what)
    commits = target.commits
    discarding = retainer.submit(
        remove_steps,
        commits.root,
        commits.heads,
        lambda there: [other for other in there if other > step],
        dry_run=dry_run,
    )
    result_or_end(discarding, what, SAVE_DEADLINE_S, lambda: None)

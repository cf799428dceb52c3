"""Which step a loop goes on from; and let a Saver go back: what was saved after a step is discarded, and is the base of
nothing any more.
"""

from __future__ import annotations

from asyncckpt.commit.discover import committed_steps, read_head
from asyncckpt.commit.doubt import forget_after
from asyncckpt.commit.foreign import check_may_begin
from asyncckpt.commit.retention import remove_steps
from asyncckpt.commit.store_root import StoreRoot
from asyncckpt.engine.process.background import check_may_wait, result_or_end, retainer
from asyncckpt.engine.save.save_job import SaveTarget
from asyncckpt.engine.upload.uploads import Uploads
from asyncckpt.errors import UsageError
from asyncckpt.format.strict_json import Json
from asyncckpt.options import SAVE_DEADLINE_S
from asyncckpt.signals import uninterrupted


def store_of(uploads: Uploads | None) -> StoreRoot | None:
    """Return the directory in the store, for readers; None where nothing is uploaded."""
    return None if uploads is None else uploads.there()


def choose_step(target: SaveTarget, uploads: Uploads | None, step: int | None, *, discard_newer: bool) -> Json:
    """Return the step to load and, as the second item, the URL where it is not in the directory; None if there is none.

    With several ranks, rank 0 asks. A directory without checkpoints that is uploaded has lost its disk, or is on
    another machine now: the store has them.
    """
    root, there = target.root, store_of(uploads)
    steps = committed_steps(root)
    is_there = not steps and there is not None
    if is_there:
        assert there is not None
        root = there
        steps = committed_steps(there)
    path = str(root.path)
    url = path if is_there else None  # The directory may have another path on another rank.
    if step is None and not steps:
        check_may_begin(target.root.root)
        return None
    if step is None:
        return [steps[-1], url]
    if step not in steps:
        read_head(root, step)  # It says what there is.
    newer = [other for other in steps if other > step]
    if discard_newer and not is_there:
        check_may_go_back(target, step)
    elif newer:
        removes = f"asyncckpt rm {path} --after {step}" if is_there else f"restore({step}, discard_newer=True)"
        count = "is 1 newer checkpoint" if len(newer) == 1 else f"are {len(newer)} newer checkpoints, up to"
        raise UsageError(
            f"cannot resume from step {step} of {path!r}: there {count} step {newer[-1]}",
            hint=f"{removes} deletes {'it' if len(newer) == 1 else 'them'}; asyncckpt.load({path!r}, {step}) only "
            f"reads step {step}",
        )
    return [step, url]


@uninterrupted
def go_back(target: SaveTarget, uploads: Uploads | None, step: int) -> None:
    """Discard all steps after this one, newest first and durably, when nothing of this Saver is in flight.

    With several ranks, rank 0 discards them; all call this. The next save is a full one. Raises as `check_may_go_back`;
    then all stay.
    """
    target.memory.newest = None  # Before anything goes: an interrupted wait lets the rest go.
    if target.rank == 0:
        _discard_after(target, step, dry_run=False)
        forget_after(target.commits.in_doubt, step)
        if uploads is not None:
            uploads.discarded_after(step)


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

"""Remove attempts, with the manifests that name them, so that nothing is acknowledged that needs what goes.

LOCK keeps other writers away. Where it does not work, others may save, remove and sweep at the same time. So whoever
removes says so first, by a mark, which is an empty file; and nothing gets another name that a reader looks for:

1. Announce: make manifests/.r-<id>-<folder> for each attempt; the id is new, and that of this one removal.
2. Look once more whether all of them may still go.
3. Decide: rename the marks to manifests/.d-<id>-<folder>, children before what they build upon. Stop at the first that
   is not there any more: another one has taken it back.
4. Of each, children first: unlink its manifest, sync manifests/, remove its folder, and last its mark, in this order.
   Stop at a manifest that cannot be removed.

A writer looks for marks after it has published, and then whether all that it needs is there. If it published before 2,
it is seen there; if later, it sees a mark, or that something is gone, and does not acknowledge.

Whoever comes upon marks of another process takes back what is announced, and completes what is decided: it may have
crashed, and if not, it finds that out in 3. No step of 4 is wrong when two do it.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.root import ReadRoot, StoreRoot, WriteRoot
from asyncckpt.errors import CheckpointError, CorruptError, IOFailedError, NotFoundError
from asyncckpt.format.names import Mark, attempt_of_directory, compacted_manifest_name, manifest_name
from asyncckpt.system import register_at_fork

FAILED_SHOWN_MAX = 8
_under_way: set[str] = set()  # Ids of the removals of this process.
register_at_fork(after_in_child=_under_way.clear)


def being_removed(root: ReadRoot) -> set[str]:
    """Return the folders that somebody is about to remove. Look whether something is there only after this."""
    # A mark is renamed once, and one listing, which is not atomic, may miss it then.
    return {mark.folder for _ in range(2) for mark in _marks(root)}


def remove_each(root: WriteRoot, names: Iterable[str]) -> list[str]:
    """Remove files of manifests/; return which were there. One that cannot be removed keeps no other: IOFailedError,
    at the end."""
    removed: list[str] = []
    failed: list[CheckpointError] = []
    for name in names:
        with noted(failed):
            if root.manifests.remove_file(name):
                removed.append(name)
    raise_noted(failed)
    return removed


@contextlib.contextmanager
def noted(failed: list[CheckpointError]) -> Iterator[None]:
    """Go on after an error of a removal, to raise it at the end."""
    try:
        yield
    except CheckpointError as error:
        failed.append(error)


def raise_noted(failed: Sequence[CheckpointError]) -> None:
    """Raise what has failed, as one error."""
    if len(failed) == 1:
        raise failed[0]
    if failed:
        raise IOFailedError("; ".join(error.what for error in failed[:FAILED_SHOWN_MAX])) from failed[0]


def take_over(root: WriteRoot, failed: list[CheckpointError]) -> list[Mark]:
    """Take back what other processes, or failed removals of this one, have announced; return what they have decided.

    In a store nothing is taken back, for nobody could see that it was: a mark changes its name there by two requests.
    failed: gets why marks stay.
    """
    others = [mark for mark in _marks(root) if mark.id not in _under_way]
    if not isinstance(root, StoreRoot):
        with noted(failed):
            remove_each(root, [mark.name for mark in others if not mark.is_decided])
    return sorted((mark for mark in others if mark.is_decided), key=lambda mark: mark.folder, reverse=True)


def complete_decided(root: WriteRoot) -> None:
    """Complete what other processes, which may have crashed, have decided to remove. Raises as `remove`.

    Whoever is going to write does it before anybody looks for the newest step: else training could go on from one that
    goes behind its back, by its next sweep.
    """
    remove(root, KnownHeads(root), (), lambda: True)


def remove(root: WriteRoot, heads: KnownHeads, folders: Sequence[str], may_go: Callable[[], bool]) -> list[str]:
    """Remove attempts, children first, and what others have decided to; return the folders that are gone.

    None of `folders` when they may not go any more, fewer when another one says so. IOFailedError naming those that
    cannot be removed, at the end; ConflictError where the directory was moved: somebody keeps it elsewhere.
    """
    if folders:
        root.check_in_place("checkpoints were to be removed")
    number = uuid.uuid4().hex
    _under_way.add(number)
    failed: list[CheckpointError] = []
    try:
        decided = take_over(root, failed)
        theirs = {mark.folder for mark in decided}
        decided += _decide(root, [Mark(number, folder) for folder in folders if folder not in theirs], may_go)
        with noted(failed):
            _complete(root, heads, decided)
        raise_noted(failed)
    finally:
        _under_way.discard(number)
    return [mark.folder for mark in decided]


def _marks(root: ReadRoot) -> list[Mark]:
    return [mark for name in root.manifests.names() if (mark := Mark.of(name)) is not None]


def _decide(root: WriteRoot, marks: Sequence[Mark], may_go: Callable[[], bool]) -> list[Mark]:
    decided: list[Mark] = []
    may_come = 0  # Of a request that was not answered: nobody may build upon what it may yet decide.
    try:
        for mark in marks:
            root.manifests.make_empty(mark.name)
        for mark in marks if marks and may_go() else ():
            may_come = 1 if isinstance(root, StoreRoot) else 0
            root.manifests.move(mark.name, replace(mark, is_decided=True).name)
            may_come = 0
            decided.append(replace(mark, is_decided=True))
    except IOFailedError as error:
        may_come = may_come if error.errno == errno.ETIMEDOUT else 0
        if error.errno != errno.ENOENT:
            raise
    finally:
        for mark in marks[len(decided) + may_come :]:
            root.manifests.remove_file(mark.name)
    return decided


def _complete(root: WriteRoot, heads: KnownHeads, decided: Iterable[Mark]) -> None:
    failed: dict[str, CheckpointError] = {}
    gone: set[str] = set()
    for mark in sorted(decided, key=_step, reverse=True):
        try:
            _remove_manifests(root, heads, mark)
        except CorruptError as error:  # Nobody can read it, so it needs nothing.
            failed[mark.folder] = error
            continue
        except CheckpointError as error:  # It stays, and may build upon all that come after it.
            failed[mark.folder] = error
            break
        try:
            root.data.remove_folder(mark.folder)
            root.manifests.remove_file(mark.name)
            gone.add(mark.folder)
        except CheckpointError as error:
            failed[mark.folder] = error
    if isinstance(root, StoreRoot):  # There, what others have announced and not decided is never taken back.
        for other in _marks(root) if gone else ():
            if other.folder in gone:
                root.manifests.remove_file(other.name)
        root.look_anew()
    if failed:
        first = next(iter(failed.values()))
        what = f"{len(failed)} folders cannot be removed, {sorted(failed)[:8]}: {first}"
        raise IOFailedError(what, errno=first.errno if isinstance(first, IOFailedError) else None) from first


def _remove_manifests(root: WriteRoot, heads: KnownHeads, mark: Mark) -> None:
    for name in (manifest_name(_step(mark)), compacted_manifest_name(_step(mark))):
        with contextlib.suppress(NotFoundError):
            if heads.of(name).head.folder_name == mark.folder:
                root.manifests.remove_file(name, version=heads.version(name))
    # Also what another one has unlinked, who may have died before that was durable.
    root.manifests.sync()


def _step(mark: Mark) -> int:
    attempt = attempt_of_directory(mark.folder)
    assert attempt is not None
    return attempt.step

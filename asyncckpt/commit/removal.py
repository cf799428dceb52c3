"""Remove attempts, with the manifests that name them, and what failed saves left; and keep steps from that by marks.

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

Two other empty files keep a step from retention, for as long as it is there:

manifests/<step>.pin. Whoever pins needs no LOCK, so it works beside a job that trains. It makes the file durable, and
only then looks whether nobody is about to remove the step, and it is there. If the file was there at 2, it is seen, and
the step stays; if it came later, who pins sees the mark, and says so. Who pins in vain leaves the file, for another one
may have pinned the step by it meanwhile. So may a crash.

manifests/.u-<step>-<attempt>, made right before the rename that commits an attempt which goes to an object store, too;
both are durable together. Whoever uploads the attempt removes it after that. A crash before leaves it, and the next
writer goes on. Who names the step may remove it all the same.

A sweep removes these two where the step or attempt is gone, temporary manifests, and attempt folders that no manifest
names. Only a manifest of step N can name a folder of step N; as long as one cannot be read, the folders of its step
stay. A store has no LOCK: there a Saver sweeps nothing, and who asks for it ends the saves that others are making.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from asyncckpt.commit.discover import KnownHeads, by_step, is_committed, read_head
from asyncckpt.commit.root import ReadRoot, StoreRoot, WriteRoot
from asyncckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IOFailedError,
    NotFoundError,
)
from asyncckpt.format.names import (
    Attempt,
    Mark,
    attempt_id_of_temporary,
    attempt_of_directory,
    attempt_of_upload_mark,
    compacted_manifest_name,
    manifest_name,
    pin_name,
    step_of_pin,
    upload_mark_name,
)
from asyncckpt.model.result import GarbageReport
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.store_folder import StoreFolder
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


def mark_upload(root: WriteRoot, attempt: Attempt) -> None:
    root.manifests.make_empty(upload_mark_name(attempt))


def unmark_upload(root: WriteRoot, attempt: Attempt) -> None:
    """Remove a mark. Not synced: one that comes back is of what is in the store already."""
    root.manifests.remove_file(upload_mark_name(attempt))


def uploads_among(names: Iterable[str]) -> list[Attempt]:
    """Return the attempts that are to be uploaded, in the order of their steps, given the names in manifests/."""
    found = [attempt for name in names if (attempt := attempt_of_upload_mark(name)) is not None]
    return sorted(found, key=lambda attempt: attempt.step)


def remove_upload_marks(root: WriteRoot, listed: Iterable[str], keep_attempts: Container[str]) -> list[str]:
    """Remove the marks among these whose attempts have no folder and are not running; return their names."""
    marked = [attempt for attempt in uploads_among(listed) if attempt.id not in keep_attempts]
    folders = set(root.data.names()) if marked else set()  # Behind the marks, which are made later.
    names = [upload_mark_name(attempt) for attempt in marked if attempt.directory not in folders]
    return remove_each(root, names)


def pins_among(names: Iterable[str]) -> set[int]:
    """Return the steps that are pinned, given the names in manifests/; some may be gone."""
    return {step for name in names if (step := step_of_pin(name)) is not None}


def is_pinned(root: ReadRoot, step: int) -> bool:
    return root.manifests.exists(pin_name(step))


def pin_step(root: WriteRoot, step: int) -> None:
    """Pin a step, durably. NotFoundError, ConflictError for one that is being removed."""
    read_head(root, step)  # A damaged one, or none, leaves no file.
    try:
        root.manifests.make_empty(pin_name(step))
    except IOFailedError as error:
        if error.errno != errno.EEXIST:
            raise
    root.manifests.sync()
    going = being_removed(root)  # Before the look at the step: a removal that ends in between has taken its mark away.
    if read_head(root, step).folder_name in going:
        raise ConflictError(f"step {step} of {str(root.path)!r} is being removed", hint="if it stays, pin it again")


def unpin_step(root: WriteRoot, step: int) -> bool:
    """Let retention have a step again, durably; return whether it was pinned."""
    was_pinned = root.manifests.remove_file(pin_name(step))
    root.manifests.sync()
    return was_pinned


def remove_pins(root: WriteRoot, steps: Iterable[int]) -> list[str]:
    """Remove the pins of those of the steps that are gone; return the names of their files."""
    return remove_each(root, [pin_name(step) for step in steps if not is_committed(root, step)])


def sweep(root: WriteRoot, heads: KnownHeads, *, keep_attempts: Container[str] = ()) -> list[str]:
    """Remove data folders and temporary manifests of no checkpoint and no running attempt; return their names.

    keep_attempts: ids of running attempts. Others may add theirs while this runs, before they make their folder, and
    take it out once they have published it or given it up. One that cannot be removed does not keep the others:
    IOFailedError naming those that stay, at the end.
    """
    names = root.data.names()
    find_strays = partial(_strays, root, heads, names, keep_attempts, [])
    strays = find_strays()
    listed = root.manifests.names()
    temporaries = _temporaries(listed, keep_attempts)
    removed: list[str] = []
    failed: list[CheckpointError] = []
    with noted(failed):
        removed += remove_each(root, temporaries)
    with noted(failed):
        removed += remove(root, heads, strays, lambda: set(strays) <= set(find_strays()))
    with noted(failed):
        removed += remove_upload_marks(root, listed, keep_attempts)
    if pins_among(listed):
        now = root.manifests.names()
        with noted(failed):
            removed += remove_pins(root, pins_among(now) - by_step(now).keys())
    raise_noted(failed)
    return removed


def collect_garbage(root: WriteRoot, heads: KnownHeads, *, keep_attempts: Container[str] = ()) -> GarbageReport:
    """Sweep, and say how much that was. Then raises also what keeps folders: that a manifest cannot be read."""
    unread: list[CheckpointError] = []
    strays = _strays(root, heads, root.data.names(), keep_attempts, unread)
    sizes = {name: _sizes_in(root.data, name) for name in {*strays, *being_removed(root)}}
    for name in _temporaries(root.manifests.names(), keep_attempts):
        with contextlib.suppress(CheckpointError):  # What is not there any more, or is no file.
            sizes[name] = [root.manifests.size(name)]
    removed = sweep(root, heads, keep_attempts=keep_attempts)
    if unread:
        raise unread[0]
    emptied = {name for name in removed if step_of_pin(name) is not None or attempt_of_upload_mark(name) is not None}
    files = [size for name in removed for size in sizes.get(name, [0] if name in emptied else [])]
    # Some stores go on listing prefixes without objects.
    is_seen = {name for name in removed if sizes.get(name) or not isinstance(root, StoreRoot)}
    folders = [name for name in removed if attempt_of_directory(name) is not None and name in is_seen]
    return GarbageReport(folders_count=len(folders), files_count=len(files), bytes=sum(files))


def _temporaries(names: Iterable[str], keep_attempts: Container[str]) -> list[str]:
    """Return the temporary manifests among these names, but those of running attempts."""
    attempts = [(name, attempt_id_of_temporary(name)) for name in names]
    return [name for name, attempt in attempts if attempt is not None and attempt not in keep_attempts]


def _sizes_in(data: Directory | StoreFolder, name: str) -> list[int]:
    """Return the bytes of each file of an attempt's folder, which may be gone."""
    sizes: list[int] = []
    with contextlib.suppress(CheckpointError), data.child(name) as folder:
        for file in folder.names():
            with contextlib.suppress(CheckpointError):  # Another one has removed it, or it is no file.
                sizes.append(folder.size(file))
    return sizes


def _strays(
    root: WriteRoot,
    heads: KnownHeads,
    names: list[str],
    keep_attempts: Container[str],
    unread: list[CheckpointError],
) -> list[str]:
    """Return the attempt folders without a manifest. Reads manifests of steps with several folders or manifests only.

    `names` were listed before: a folder of no running attempt whose manifest is published meanwhile is then seen to
    have one. unread: gets why a manifest cannot be read.
    """
    folders_of: dict[int, list[str]] = defaultdict(list)
    for name in names:
        attempt = attempt_of_directory(name)
        if attempt is not None and attempt.id not in keep_attempts:
            folders_of[attempt.step].append(name)
    manifests = by_step(root.manifests.names())
    strays = []
    for step, folders in folders_of.items():
        if step not in manifests:
            strays += folders
        elif len(folders) > 1 or len(manifests[step]) > 1:
            try:
                named = {heads.of(name).head.folder_name for name in manifests[step]}
            except NotFoundError:  # Retention removes the step right now, and its folders.
                continue
            except CheckpointError as error:
                unread.append(error)
                continue
            strays += [folder for folder in folders if folder not in named]
    return strays

"""Remove attempts, with the manifests that name them, and what failed saves left; and keep steps from that by marks.

On a disk, a removal holds LOCK and leaves marks, empty files:

1. Make manifests/.r-<id>-<folder> for each attempt; the id is new, and that of this one removal.
2. Look once more whether all of them may still go.
3. For each, children before their base: unlink its manifest, sync manifests/, remove its folder, and last its mark.
   Stop at a manifest that cannot be removed.
4. Remove the marks that are left, of what stays.

Marks are for those who take no LOCK: a process that pins a step, and another writer, where a lock works on one host
only. Both make a file durable, look for marks, and then whether all that they need is there. If the file was there at
2, it is seen, and the step stays; if it came later, they see a mark, or that something is gone, and raise.

No crash needs to be undone. One before 3 leaves marks alone. One in 3 has removed the newest of what goes, with or
without its folder, which no manifest names then: a sweep removes it. So a manifest that is there names a folder that is
there, and no delta is left without its parents. The next holder of LOCK removes the marks of earlier ones.

In a store, which has no LOCK, others may remove at the same time: store_removal.py.

Two other empty files keep a step from retention, for as long as it is there:

manifests/<step>.pin. A pin that fails leaves the file, because another one may have pinned the step by it meanwhile. So
may a crash.

manifests/.u-<step>-<attempt>, made right before the rename that commits an attempt which goes to an object store, too;
both are durable together. The upload of the attempt removes it at its end. A crash before leaves it, and the next
writer goes on. A removal by name ignores it.

A sweep removes these two where the step or attempt is gone, temporary manifests, and attempt folders that no manifest
names. Only a manifest of step N can name a folder of step N; as long as one cannot be read, the folders of its step
stay. In a store a Saver sweeps nothing, and who asks for it ends the saves that others are making.
"""

from __future__ import annotations

import contextlib
import errno
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from asyncckpt.commit.discover import (
    KnownHeads,
    Leftovers,
    being_removed,
    find_leftovers,
    is_committed,
    read_head,
)
from asyncckpt.commit.root import CheckpointRoot, WriteRoot
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, IOFailedError, NotFoundError
from asyncckpt.format.names import Mark, compacted_manifest_name, manifest_name, parse, pin_name, upload_mark_name
from asyncckpt.model.result import GarbageReport
from asyncckpt.storage.directory import Directory
from asyncckpt.system import register_at_fork

if TYPE_CHECKING:
    from asyncckpt.storage.store_folder import StoreFolder

FAILED_SHOWN_MAX = 8
under_way: set[str] = set()  # Ids of the removals of this process.
register_at_fork(after_in_child=under_way.clear)


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


def remove(root: WriteRoot, heads: KnownHeads, folders: Sequence[str], may_go: Callable[[], bool]) -> list[str]:
    """Remove attempts, children first; return the folders that are gone: none when they may not go any more.

    IOFailedError naming those that cannot be removed, at the end; ConflictError where the directory was moved: somebody
    keeps it elsewhere.
    """
    if folders:
        root.check_in_place("checkpoints were to be removed")
    number = uuid.uuid4().hex
    under_way.add(number)
    try:
        marks = [Mark(number, folder) for folder in folders]
        if isinstance(root, CheckpointRoot):
            return _remove_on_disk(root, heads, marks, may_go)
        from asyncckpt.commit.store_removal import remove_in_store  # Who has a disk does not load it.

        return remove_in_store(root, heads, marks, may_go)
    finally:
        under_way.discard(number)


def _remove_on_disk(
    root: CheckpointRoot, heads: KnownHeads, marks: Sequence[Mark], may_go: Callable[[], bool]
) -> list[str]:
    left = [mark.name for mark in marks]
    gone: list[str] = []
    try:
        for mark in marks:
            root.manifests.make_empty(mark.name)
        if marks and may_go():
            complete(root, heads, marks, gone)
    except Exception:
        with contextlib.suppress(CheckpointError):
            remove_marks(root, left)
        raise
    remove_marks(root, left)
    return gone


def remove_marks(root: CheckpointRoot, names: Iterable[str] = ()) -> None:
    """Remove marks of this holder of LOCK, and those that it could not remove before. IOFailedError."""
    names, root.marks_left = [*root.marks_left, *names], []
    try:
        remove_each(root, names)
    except CheckpointError:
        root.marks_left += names
        raise


def forget_marks(root: CheckpointRoot) -> None:
    """Remove marks of processes that had LOCK before, and have ended; this one has it. IOFailedError."""
    found = [(name, parse(name)) for name in root.manifests.names()]
    others = [name for name, mark in found if mark is not None and mark.removal and mark.removal not in under_way]
    remove_each(root, others)


def complete(root: WriteRoot, heads: KnownHeads, marks: Iterable[Mark], gone: list[str]) -> None:
    """Remove what these marks name, and the marks, children first. gone: gets the folders. IOFailedError."""
    failed: dict[str, CheckpointError] = {}
    for mark in sorted(marks, key=lambda mark: mark.folder[:12], reverse=True):
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
            gone.append(mark.folder)
        except CheckpointError as error:
            failed[mark.folder] = error
    if failed:
        first = next(iter(failed.values()))
        what = f"{len(failed)} folders cannot be removed, {sorted(failed)[:8]}: {first}"
        raise IOFailedError(what, errno=first.errno if isinstance(first, IOFailedError) else None) from first


def _remove_manifests(root: WriteRoot, heads: KnownHeads, mark: Mark) -> None:
    step = int(mark.folder[:12])
    for name in (manifest_name(step), compacted_manifest_name(step)):
        with contextlib.suppress(NotFoundError):
            if heads.of(name).head.folder_name == mark.folder:
                root.manifests.remove_file(name, version=heads.version(name))
    # Also what another one has unlinked, who may have died before that was durable.
    root.manifests.sync()


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
        hint = "if it stays, pin it again; after a removal that was killed: asyncckpt gc"
        raise ConflictError(f"step {step} of {str(root.path)!r} is being removed", hint=hint)


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
    return remove_leftovers(root, heads, find_leftovers(root, heads, keep_attempts), keep_attempts=keep_attempts)


def remove_leftovers(
    root: WriteRoot, heads: KnownHeads, found: Leftovers, *, keep_attempts: Container[str]
) -> list[str]:
    """Remove what was found, as far as it still is a leftover: see sweep."""
    removed: list[str] = []
    failed: list[CheckpointError] = []

    def are_left() -> bool:
        return {*found.folders} <= {*find_leftovers(root, heads, keep_attempts).folders}

    with noted(failed):
        removed += remove_each(root, found.temporaries)
    with noted(failed):
        removed += remove(root, heads, found.folders, are_left)
    with noted(failed):
        # A folder is made before the mark of its attempt; so the one that is not there now will not come.
        left = [one for one in found.uploads if not root.data.has_folder(one.directory)]
        removed += remove_each(root, map(upload_mark_name, left))
    with noted(failed):
        removed += remove_pins(root, found.pins)
    raise_noted(failed)
    return removed


def collect_garbage(root: WriteRoot, heads: KnownHeads, *, keep_attempts: Container[str] = ()) -> GarbageReport:
    """Sweep, and say how much that was. Then raises also what keeps folders: that a manifest cannot be read."""
    found = find_leftovers(root, heads, keep_attempts)
    going = being_removed(root)  # In a store, what others have decided to remove.
    # Some stores go on listing prefixes without objects.
    folders = {name for name in {*found.folders, *going} if root.data.has_folder(name)}
    sizes = {name: _sizes_in(root.data, name) for name in folders}
    for name in found.temporaries:
        with contextlib.suppress(CheckpointError):  # What is not there any more, or is no file.
            sizes[name] = [root.manifests.size(name)]
    sizes |= {name: [0] for name in (*map(upload_mark_name, found.uploads), *map(pin_name, found.pins))}
    removed = remove_leftovers(root, heads, found, keep_attempts=keep_attempts)
    if found.unread:
        raise found.unread[0]
    files = [size for name in removed for size in sizes.get(name, [])]
    return GarbageReport(folders_count=len(folders & {*removed}), files_count=len(files), bytes=sum(files))


def _sizes_in(data: Directory | StoreFolder, name: str) -> list[int]:
    """Return the bytes of each file of an attempt's folder, which may be gone."""
    sizes: list[int] = []
    with contextlib.suppress(CheckpointError), data.child(name) as folder:
        for file in folder.names():
            with contextlib.suppress(CheckpointError):  # Another one has removed it, or it is no file.
                sizes.append(folder.size(file))
    return sizes

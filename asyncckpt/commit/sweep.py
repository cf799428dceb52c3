"""Remove what failed and crashed saves left.

For a writer that holds LOCK, and so that nothing is lost where locks do not work: see removal.py. A store has no LOCK:
there a Saver sweeps nothing, and who asks for it ends the saves that others are making.

Sweep removes temporary manifests, attempt folders that no manifest names, and pins and upload marks of what is gone.
Only a manifest of step N can name a folder of step N. A folder of another process may be about to be published, where
locks do not work. As long as a manifest cannot be read, the folders of its step stay; all others go.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Container, Iterable
from functools import partial

from asyncckpt.commit.discover import KnownHeads, by_step, manifests_by_step
from asyncckpt.commit.pins import pins_among, remove_pins
from asyncckpt.commit.removal import being_removed, noted, raise_noted, remove, remove_each
from asyncckpt.commit.root import StoreRoot, WriteRoot
from asyncckpt.commit.upload_marks import remove_upload_marks
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError, UnsupportedError
from asyncckpt.format.names import (
    attempt_id_of_temporary,
    attempt_of_directory,
    attempt_of_upload_mark,
    step_of_pin,
)
from asyncckpt.model.result import GarbageReport
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.store_folder import StoreFolder

UNREADABLE = (CorruptError, IncompatibleError, UnsupportedError)


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
    manifests = manifests_by_step(root)
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

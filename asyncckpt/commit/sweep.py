"""Sweep what failed and crashed saves left: temporary manifests, and attempt folders that no manifest names.

A folder of step N can only be named by a manifest of step N. LOCK keeps other writers away; where it does not work, a
folder without a manifest may be that of a save that is about to publish. So no folder is removed under its own name:

1. Rename it to data/.s-<folder>. A save that looks for its folder after it has published does not find it from now on,
   and is not acknowledged.
2. Look once more whether a manifest names it. If so, it was published before 1: rename it back. Else remove it.

What a crash leaves between the two goes through 2 with the next sweep.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Container

from asyncckpt.commit.discover import attempt_folder
from asyncckpt.commit.retention import KnownHeads, manifests_by_step, remove_folders
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, NotFoundError, UnsupportedError
from asyncckpt.format.names import attempt_of_directory, attempt_of_swept, is_temporary_manifest, swept_name

_UNREADABLE = (CorruptError, IncompatibleError, UnsupportedError)


def sweep(root: CheckpointRoot, heads: KnownHeads, *, keep_attempts: Container[str] = ()) -> list[str]:
    """Remove data folders and temporary manifests of no checkpoint and no running attempt; returns their names.

    keep_attempts: ids of running attempts. Others may add theirs while this runs, before they make their folder, and
    take it out once they have published it or given it up. One that cannot be removed does not keep the others:
    IOFailedError naming those that stay, at the end.
    """
    names = root.data.names()
    try:
        strays = _strays(root, heads, names, keep_attempts)
    except _UNREADABLE:
        return []
    removed = []
    for name in root.manifests.names():
        if is_temporary_manifest(name) and name.removeprefix(".m-") not in keep_attempts:
            root.manifests.remove_file(name)
            removed.append(name)
    if strays:
        # Whoever unlinked their manifests may have died, or failed, before that was durable; then they would be back.
        root.manifests.sync()
    for name in strays:
        with contextlib.suppress(CheckpointError):  # Somebody else is about it.
            root.data.move_folder(name, swept_name(name))
    swept = [*(name for name in names if attempt_of_swept(name) is not None), *map(swept_name, strays)]
    return removed + _end_swept(root, swept) if swept else removed


def _strays(root: CheckpointRoot, heads: KnownHeads, names: list[str], keep_attempts: Container[str]) -> list[str]:
    """Attempt folders without a manifest; manifests are read only where a step has several folders or manifests.

    `names` were listed before: a folder of no running attempt whose manifest is published meanwhile is then seen to
    have one.
    """
    by_step: dict[int, list[str]] = defaultdict(list)
    for name in names:
        attempt = attempt_of_directory(name)
        if attempt is not None and attempt.id not in keep_attempts:
            by_step[attempt.step].append(name)
    manifests = manifests_by_step(root)
    strays = []
    for step, folders in by_step.items():
        if step not in manifests:
            strays += folders
        elif len(folders) > 1 or len(manifests[step]) > 1:
            named = _named(heads, manifests[step])
            strays += [folder for folder in folders if folder not in named]
    return strays


def _end_swept(root: CheckpointRoot, swept: list[str]) -> list[str]:
    """Remove, or move back, what was moved aside, now or before a crash; returns the attempt folders that are gone."""
    manifests, heads = manifests_by_step(root), KnownHeads(root)
    going = []
    for name in swept:
        attempt = attempt_of_swept(name)
        assert attempt is not None
        try:
            if attempt.directory not in _named(heads, manifests.get(attempt.step, [])):
                going.append(name)
                continue
        except (*_UNREADABLE, NotFoundError):
            pass  # It may name the folder.
        with contextlib.suppress(CheckpointError):  # Another sweep has done so.
            root.data.move_folder(name, attempt.directory)
            root.data.sync()
    remove_folders(root, going)
    return [name.removeprefix(swept_name("")) for name in going]


def _named(heads: KnownHeads, manifests: list[str]) -> set[str]:
    return {attempt_folder(head) for head in heads.of(manifests)}

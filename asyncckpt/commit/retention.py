"""Remove what is not needed: old checkpoints (retention), and what failed and crashed saves left (sweep).

Both are for a writer that holds LOCK, and remove so that nothing is lost where locks do not work: see removal.py.

A checkpoint stays when it is wanted, or when the chain of one that stays needs it. A manifest goes when its step does,
or when a compacted one stands for it. A crash leaves at most data that no manifest names; never a manifest without data
nor a delta without its parents. An unreadable manifest stops everything, for its references are unknown.

Sweep removes temporary manifests, and attempt folders that no manifest names: only one of step N can name a folder of
step N. One of another process may be about to be published, where locks do not work.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial

from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.claims import claims
from asyncckpt.commit.discover import KnownHeads, check_files, manifests_by_step
from asyncckpt.commit.removal import remove
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IncompatibleError,
    NotFoundError,
    UnsupportedError,
)
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.names import attempt_id_of_temporary, attempt_of_directory

# One directory is no place for two retentions at once, and which directory it is does not matter. Saves go on beside
# it: see _keep_latest.
_retaining = threading.Lock()
LOOKS_MAX = 100
_UNREADABLE = (CorruptError, IncompatibleError, UnsupportedError)


def keep_latest(
    root: CheckpointRoot, heads: KnownHeads, *, count: int, protected: Callable[[], Collection[int]] = frozenset
) -> list[int]:
    """Remove all but the `count` newest checkpoints, the protected steps, and what these and running saves build upon.

    Returns the removed steps. A kept checkpoint must have its chain and its files in full; otherwise nothing is removed
    and CorruptError is raised, for an older one may be the only one that loads.
    """
    with _retaining:
        for _ in range(LOOKS_MAX):
            removed = _keep_latest(root, heads, count, protected)
            if removed is not None:
                return removed
        raise ConflictError(f"{str(root.path)!r} changed at each of {LOOKS_MAX} looks: nothing is removed")


def _keep_latest(
    root: CheckpointRoot, heads: KnownHeads, count: int, protected_now: Callable[[], Collection[int]]
) -> list[int] | None:
    """Remove what goes now, and return the steps; None: something was saved meanwhile, look again.

    What is listed is either protected, or of a save that had ended before: what protects its step is asked for last.
    When it is announced, so that nothing can be committed any more upon what goes, nothing new may be there.
    """
    place = root.root.identity
    manifests = manifests_by_step(root)
    steps = sorted(manifests)
    # Twice the saves in flight: one that ends in between is protected by its Saver, as the newest of that.
    protected = {*claims.needed(place), *protected_now(), *claims.needed(place)}
    wanted = [step for step in steps if step in steps[-count:] or step in protected]
    if len(wanted) == len(steps) and all(len(names) == 1 for names in manifests.values()):
        return []
    kept = _with_parents(wanted, heads)
    for head in kept.values():
        check_files(root, head)
    speaking = {head.file_name for head in kept.values()}
    victims = [name for step in reversed(steps) for name in manifests[step] if name not in speaking]
    if not victims:
        return []
    try:
        going = [heads.of(name).head for name in victims]
    except CheckpointError as error:
        raise CorruptError(f"old checkpoints cannot be removed: {error}") from error
    removed = [step for step in steps if step not in kept]
    kept_folders = {head.folder_name for head in kept.values()}
    folders = [head.folder_name for head in going if head.folder_name not in kept_folders]
    gone = remove(
        root, heads, folders, lambda: claims.needed(place).isdisjoint(removed) and manifests_by_step(root) == manifests
    )
    heads.forget(victims)
    root.data.sync()
    return removed if set(folders) <= set(gone) else None


def _with_parents(wanted: Sequence[int], heads: KnownHeads) -> dict[int, ManifestHead]:
    """Return the heads of the wanted steps and of all they build upon, by step."""
    kept: dict[int, ManifestHead] = {}
    for step in wanted:
        newest = heads.of_step(step)
        for found in (newest, *chain_below(newest.head, heads.of_step)):
            kept[found.head.step] = found.head
    return kept


def sweep(root: CheckpointRoot, heads: KnownHeads, *, keep_attempts: Container[str] = ()) -> list[str]:
    """Remove data folders and temporary manifests of no checkpoint and no running attempt; returns their names.

    keep_attempts: ids of running attempts. Others may add theirs while this runs, before they make their folder, and
    take it out once they have published it or given it up. One that cannot be removed does not keep the others:
    IOFailedError naming those that stay, at the end.
    """
    names = root.data.names()
    find_strays = partial(_strays, root, heads, names, keep_attempts)
    try:
        strays = find_strays()
    except _UNREADABLE:
        return []
    removed = []
    for name in root.manifests.names():
        attempt_id = attempt_id_of_temporary(name)
        if attempt_id is not None and attempt_id not in keep_attempts:
            root.manifests.remove_file(name)
            removed.append(name)
    return removed + remove(root, heads, strays, lambda: set(strays) <= set(find_strays()))


def _strays(root: CheckpointRoot, heads: KnownHeads, names: list[str], keep_attempts: Container[str]) -> list[str]:
    """Return the attempt folders without a manifest. Reads manifests of steps with several folders or manifests only.

    `names` were listed before: a folder of no running attempt whose manifest is published meanwhile is then seen to
    have one.
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
            with contextlib.suppress(NotFoundError):  # Retention removes the step right now, and its folders.
                named = {heads.of(name).head.folder_name for name in manifests[step]}
                strays += [folder for folder in folders if folder not in named]
    return strays


def _renew_lock() -> None:
    global _retaining
    _retaining = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

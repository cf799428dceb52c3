"""Remove what is not needed: old checkpoints (retention), and what failed and crashed saves left (sweep).

Retention is for a writer that holds LOCK. A checkpoint stays when it is wanted, or when the chain of one that stays
needs it. A manifest goes when its step does, or when a compacted one stands for it.

1. Rename the manifests to manifests/.r-<manifest>, children before what they build upon. A delta that is published from
   now on does not find them when it looks for what it builds upon, and is not acknowledged.
2. Look once more: when something was published before 1 and not seen, or another retention has removed or set aside
   something else, which it may put back, rename them back, and begin anew.
3. Unlink them, sync manifests/; stop when another one has put one back, for that needs what it builds upon. Only one
   who has unlinked a manifest removes its data folder; then sync data/.

A crash in between leaves what the next sweep renames back, or data that no manifest names; never a manifest without
data nor a delta without its parents. An unreadable manifest stops everything, for its references are unknown.

Sweep removes temporary manifests, and attempt folders that no manifest names: only one of step N can name a folder of
step N. LOCK keeps other writers away; where it does not work, a folder without a manifest may be that of a save that is
about to publish. So no folder is removed under its own name:

1. Rename it to data/.s-<folder>. A save that looks for its folder after it has published does not find it from now on,
   and is not acknowledged.
2. Look once more whether a manifest names it. If so, it was published before 1: rename it back.
3. Else rename it to data/.d-<folder>, and remove it. Another sweep, which may find a manifest by now, does not rename
   that back while its files go.

What a crash leaves aside goes through 2 and 3 with the next sweep.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.claims import claims
from asyncckpt.commit.discover import KnownHeads, by_step, check_files, manifests_by_step
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import (
    CheckpointError,
    ConflictError,
    CorruptError,
    IncompatibleError,
    IOFailedError,
    NotFoundError,
    UnsupportedError,
)
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.names import (
    attempt_id_of_temporary,
    attempt_of_directory,
    attempt_of_swept,
    doomed_name,
    manifest_of_retired,
    retired_name,
    step_of_manifest,
    swept_name,
)

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
    Right before the removal, when nothing can be committed any more upon what goes, nothing new may be there.
    """
    place = root.root.identity
    _put_back(root, _set_aside(root.manifests.names()))  # What a crash has left there builds upon others too.
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
    with claims.removing(place, removed) as is_free:
        if not is_free or manifests_by_step(root) != manifests:
            return None
        gone = _retire(root, dict(zip(victims, going, strict=True)), seen=manifests)
    heads.forget(victims)
    remove_folders(root, sorted({head.folder_name for head in gone} - {head.folder_name for head in kept.values()}))
    root.data.sync()
    return removed if len(gone) == len(victims) else None


def _retire(
    root: CheckpointRoot, victims: dict[str, ManifestHead], *, seen: dict[int, list[str]]
) -> list[ManifestHead]:
    """Remove manifests, children first; return those that are gone: not all when others are there than seen."""
    gone: list[ManifestHead] = []
    try:
        for name in _in_order(root, victims):
            root.manifests.move(name, retired_name(name))
        staying = {name for names in seen.values() for name in names if name not in victims}
        listed = root.manifests.names()
        is_seen = {name for names in by_step(listed).values() for name in names} == staying
        if not is_seen or not victims.keys() >= set(_set_aside(listed)):
            return gone
        for name in _in_order(root, victims):
            # Where putting back is link and unlink, there may be both names for a moment.
            if not root.manifests.remove_file(retired_name(name)) or root.manifests.exists(name):
                break
            gone.append(victims[name])
        root.manifests.sync()
        return gone
    finally:
        _put_back(root, reversed(victims))


def _in_order(root: CheckpointRoot, victims: dict[str, ManifestHead]) -> Iterator[str]:
    """Give manifests, children first; what is done to a delta is durable before its parents' turn comes."""
    for name, head in victims.items():
        yield name
        if head.kind == "delta":
            root.manifests.sync()


def _put_back(root: CheckpointRoot, manifests: Iterable[str]) -> None:
    """Give those of these manifests that are set aside their names again, durably."""
    aside = [name for name in manifests if root.manifests.exists(retired_name(name))]
    for name in aside:
        try:
            root.manifests.publish(retired_name(name), name)
        except ConflictError:  # The step was saved anew, or a crash came between link and unlink.
            root.manifests.remove_file(retired_name(name))
        except CheckpointError:
            continue  # Another one has done so, or removed it.
    if aside:
        root.manifests.sync()


def _set_aside(names: Iterable[str]) -> list[str]:
    """Return the own names of manifests that are set aside, parents first."""
    return sorted(manifest for name in names if (manifest := manifest_of_retired(name)) is not None)


def _with_parents(wanted: Sequence[int], heads: KnownHeads) -> dict[int, ManifestHead]:
    """Return the heads of the wanted steps and of all they build upon, by step."""
    kept: dict[int, ManifestHead] = {}
    for step in wanted:
        newest = heads.of_step(step)
        for found in (newest, *chain_below(newest.head, heads.of_step)):
            kept[found.head.step] = found.head
    return kept


def remove_folders(root: CheckpointRoot, names: Iterable[str]) -> None:
    """Remove folders below data/, each as far as that works; at the end IOFailedError naming those that stay."""
    failed: dict[str, CheckpointError] = {}
    for name in names:
        try:
            root.data.remove_folder(name)
        except CheckpointError as error:
            failed[name] = error
    if failed:
        first = next(iter(failed.values()))
        raise IOFailedError(f"{len(failed)} folders cannot be removed, {sorted(failed)[:8]}: {first}") from first


def sweep(root: CheckpointRoot, heads: KnownHeads, *, keep_attempts: Container[str] = ()) -> list[str]:
    """Remove data folders and temporary manifests of no checkpoint and no running attempt; returns their names.

    keep_attempts: ids of running attempts. Others may add theirs while this runs, before they make their folder, and
    take it out once they have published it or given it up. One that cannot be removed does not keep the others:
    IOFailedError naming those that stay, at the end.
    """
    if _retaining.acquire(blocking=False):  # Else one of this process may be about it; the next sweep will do it.
        try:
            _put_back(root, _set_aside(root.manifests.names()))
        finally:
            _retaining.release()
    names = root.data.names()
    try:
        strays = _strays(root, heads, names, keep_attempts)
    except _UNREADABLE:
        return []
    removed = []
    for name in root.manifests.names():
        attempt_id = attempt_id_of_temporary(name)
        if attempt_id is not None and attempt_id not in keep_attempts:
            root.manifests.remove_file(name)
            removed.append(name)
    if strays:
        # Whoever unlinked their manifests may have died, or failed, before that was durable; then they would be back.
        root.manifests.sync()
    for name in strays:
        with contextlib.suppress(CheckpointError):  # Somebody else is about it.
            root.data.move(name, swept_name(name))
    swept = [*(name for name in names if attempt_of_swept(name) is not None), *map(swept_name, strays)]
    return removed + _end_swept(root, swept) if swept else removed


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
    manifests, retired = _manifests_and_retired(root)
    strays = []
    for step, folders in folders_of.items():
        if step in retired:
            continue
        if step not in manifests:
            strays += folders
        elif len(folders) > 1 or len(manifests[step]) > 1:
            with contextlib.suppress(NotFoundError):  # Retention removes the step right now, and its folders.
                named = _named(heads, manifests[step])
                strays += [folder for folder in folders if folder not in named]
    return strays


def _end_swept(root: CheckpointRoot, swept: list[str]) -> list[str]:
    """Remove, or move back, what was moved aside, now or before a crash; returns the attempt folders that are gone."""
    (manifests, retired), heads = _manifests_and_retired(root), KnownHeads(root)
    going = []
    for name in swept:
        attempt = attempt_of_swept(name)
        assert attempt is not None
        folder = attempt.directory
        if name == doomed_name(folder):
            going.append(folder)
            continue
        try:
            if folder not in _named(heads, manifests.get(attempt.step, [])) and attempt.step not in retired:
                with contextlib.suppress(CheckpointError):  # Another sweep has done so, or moved it back.
                    root.data.move(name, doomed_name(folder))
                going.append(folder)
                continue
        except (*_UNREADABLE, NotFoundError):
            pass  # It may name the folder.
        with contextlib.suppress(CheckpointError):  # Another sweep has done so.
            root.data.move(name, folder)
            root.data.sync()
    remove_folders(root, map(doomed_name, going))
    return going


def _manifests_and_retired(root: CheckpointRoot) -> tuple[dict[int, list[str]], set[int | None]]:
    """Return the manifests of every step, and the steps of which one is set aside, to be removed or put back.

    From one listing: what is put back after one look and before another would be seen by neither.
    """
    names = root.manifests.names()
    return by_step(names), {step_of_manifest(name) for name in _set_aside(names)}


def _named(heads: KnownHeads, manifests: list[str]) -> set[str]:
    return {heads.of(name).head.folder_name for name in manifests}


def _renew_lock() -> None:
    global _retaining
    _retaining = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

"""Let old checkpoints go, and sweep what crashed saves left. Only a writer that holds LOCK does this.

Order: unlink manifests -> sync manifests/ -> remove data folders that no manifest names -> sync data/. A crash in
between leaves unreferenced data, never a manifest without data. An unreadable manifest stops everything, for its
references are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from asyncckpt.commit.discover import check_files, committed_steps, read_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, UnsupportedError
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.names import attempt_of_directory, is_temporary_manifest, manifest_name, split_shard_path

_UNREADABLE = (CorruptError, IncompatibleError, UnsupportedError)


class KnownHeads:
    """Heads of manifests by step. They cannot change while we hold the directory's lock, so each is read once."""

    def __init__(self, root: CheckpointRoot) -> None:
        self._root = root
        self._heads: dict[int, ManifestHead] = {}

    def add(self, head: ManifestHead) -> None:
        """Take note of a manifest that this process has just published."""
        self._heads[head.step] = head

    def of(self, steps: Iterable[int]) -> list[ManifestHead]:
        """The heads of steps; CheckpointError for one that cannot be read."""
        for step in steps:
            if step not in self._heads:
                self._heads[step] = read_head(self._root, step)
        return [self._heads[step] for step in steps]

    def forget(self, steps: Iterable[int]) -> None:
        for step in steps:
            self._heads.pop(step, None)


def sweep(root: CheckpointRoot, heads: KnownHeads, *, keep_attempts: Collection[str] = ()) -> list[str]:
    """Remove data folders and temporary manifests of no checkpoint and no running attempt; returns their names."""
    try:
        strays = [name for name in _strays(root, heads) if name.rpartition("-")[2] not in keep_attempts]
    except _UNREADABLE:
        return []
    removed = []
    for name in root.manifests.names():
        if is_temporary_manifest(name) and name.removeprefix(".m-") not in keep_attempts:
            root.manifests.remove_file(name)
            removed.append(name)
    if strays:
        # Whoever unlinked their manifests may have died, or failed, before that was durable.
        root.manifests.sync()
    for name in strays:
        root.data.remove_folder(name)
        removed.append(name)
    return removed


def _strays(root: CheckpointRoot, heads: KnownHeads) -> list[str]:
    """Attempt folders without a manifest; a manifest is read only where a step has several folders."""
    committed = set(committed_steps(root))
    by_step: dict[int, list[str]] = defaultdict(list)
    for name in root.data.names():
        attempt = attempt_of_directory(name)
        if attempt is not None:
            by_step[attempt.step].append(name)
    strays = []
    for step, names in by_step.items():
        if step not in committed:
            strays += names
        elif len(names) > 1:
            referenced = _folders(heads.of([step]))
            strays += [name for name in names if name not in referenced]
    return strays


def keep_latest(root: CheckpointRoot, heads: KnownHeads, *, count: int, protected: Collection[int]) -> list[int]:
    """Remove all but the `count` newest checkpoints and the protected steps; returns the removed steps.

    A kept checkpoint must have its files in full; otherwise nothing is removed and CorruptError is raised, for an older
    one may be the only one that loads.
    """
    steps = committed_steps(root)
    victims = [step for step in steps[:-count] if step not in protected]
    if not victims:
        return []
    kept = heads.of([step for step in steps if step not in victims])
    for head in kept:
        check_files(root, head)
    needed = {parent for head in kept for parent in head.parents}
    victims = [step for step in victims if step not in needed]
    try:
        folders = _folders(heads.of(victims))
    except CheckpointError as error:
        raise CorruptError(f"old checkpoints cannot be removed: {error}") from error
    for step in victims:
        root.manifests.remove_file(manifest_name(step))
    root.manifests.sync()
    heads.forget(victims)
    for folder in folders - _folders(kept):
        root.data.remove_folder(folder)
    root.data.sync()
    return victims


def _folders(heads: Iterable[ManifestHead]) -> set[str]:
    """Attempt folders that heads name."""
    return {
        split_shard_path(file.path, owner=f"manifest of step {head.step}")[0] for head in heads for file in head.files
    }

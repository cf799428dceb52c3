"""Let old checkpoints go, and sweep what crashed saves left. Only a writer that holds LOCK does this.

A checkpoint stays when it is wanted, or when the chain of one that stays needs it. A manifest goes when its step does,
or when a compacted one stands for it.

Order: unlink manifests, children before what they build upon -> sync manifests/ -> remove data folders that no manifest
names -> sync data/. A crash in between leaves unreferenced data, never a manifest without data nor a delta without its
parents. An unreadable manifest stops everything, for its references are unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.discover import check_files, read_named_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CheckpointError, CorruptError, IncompatibleError, UnsupportedError
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.names import (
    attempt_of_directory,
    compacted_manifest_name,
    is_temporary_manifest,
    manifest_name,
    split_shard_path,
    step_of_manifest,
)

_UNREADABLE = (CorruptError, IncompatibleError, UnsupportedError)


class KnownHeads:
    """Heads of manifests by file name. They cannot change while we hold the directory's lock, so each is read once."""

    def __init__(self, root: CheckpointRoot) -> None:
        self._root = root
        self._heads: dict[str, ManifestHead] = {}

    def add(self, head: ManifestHead) -> None:
        """Take note of a manifest that this process has just published."""
        compacted = head.replaces is not None
        self._heads[compacted_manifest_name(head.step) if compacted else manifest_name(head.step)] = head

    def of(self, names: Iterable[str]) -> list[ManifestHead]:
        """The heads in these files; CheckpointError for one that cannot be read."""
        names = list(names)
        for name in names:
            if name not in self._heads:
                self._heads[name] = read_named_head(self._root, name)
        return [self._heads[name] for name in names]

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._heads.pop(name, None)


def sweep(root: CheckpointRoot, heads: KnownHeads, *, keep_attempts: Collection[str] = ()) -> list[str]:
    """Remove data folders and temporary manifests of no checkpoint and no running attempt; returns their names.

    keep_attempts: ids of running attempts. Others may add theirs while this runs, before they make their folder, and
    take it out once they have published it or given it up.
    """
    try:
        strays = _strays(root, heads, keep_attempts)
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


def _strays(root: CheckpointRoot, heads: KnownHeads, keep_attempts: Collection[str]) -> list[str]:
    """Attempt folders without a manifest; manifests are read only where a step has several folders or manifests.

    In this order: a folder of no running attempt whose manifest is published meanwhile is then seen to have one.
    """
    by_step: dict[int, list[str]] = defaultdict(list)
    for name in root.data.names():
        attempt = attempt_of_directory(name)
        if attempt is not None and attempt.id not in keep_attempts:
            by_step[attempt.step].append(name)
    manifests = _manifests_by_step(root)
    strays = []
    for step, names in by_step.items():
        if step not in manifests:
            strays += names
        elif len(names) > 1 or len(manifests[step]) > 1:
            referenced = _folders(heads.of(manifests[step]))
            strays += [name for name in names if name not in referenced]
    return strays


def keep_latest(root: CheckpointRoot, heads: KnownHeads, *, count: int, protected: Collection[int]) -> list[int]:
    """Remove all but the `count` newest checkpoints, the protected steps, and what these build upon.

    Returns the removed steps. A kept checkpoint must have its chain and its files in full; otherwise nothing is removed
    and CorruptError is raised, for an older one may be the only one that loads.
    """
    manifests = _manifests_by_step(root)
    steps = sorted(manifests)
    wanted = [step for step in steps if step in steps[-count:] or step in protected]
    if len(wanted) == len(steps) and all(len(names) == 1 for names in manifests.values()):
        return []
    kept = _with_parents(wanted, manifests, heads)
    for head in kept.values():
        check_files(root, head)
    speaking = {manifests[step][-1] for step in kept}
    victims = [name for step in reversed(steps) for name in manifests[step] if name not in speaking]
    if not victims:
        return []
    try:
        going = heads.of(victims)
    except CheckpointError as error:
        raise CorruptError(f"old checkpoints cannot be removed: {error}") from error
    for name, head in zip(victims, going, strict=True):
        root.manifests.remove_file(name)
        if head.kind == "delta":
            root.manifests.sync()  # Before what it builds upon goes.
    root.manifests.sync()
    heads.forget(victims)
    for folder in sorted(_folders(going) - _folders(kept.values())):
        root.data.remove_folder(folder)
    root.data.sync()
    return [step for step in steps if step not in kept]


def _with_parents(wanted: Sequence[int], manifests: dict[int, list[str]], heads: KnownHeads) -> dict[int, ManifestHead]:
    """The heads of the wanted steps and of all they build upon, by step."""

    def head_of(step: int) -> ManifestHead | None:
        return heads.of(manifests[step][-1:])[0] if step in manifests else None

    kept: dict[int, ManifestHead] = {}
    for step in wanted:
        head = head_of(step)
        assert head is not None
        kept[step] = head
        kept |= {found.step: found for found in chain_below(head, head_of)}
    return kept


def _manifests_by_step(root: CheckpointRoot) -> dict[int, list[str]]:
    """Names of the manifests of every step; the last of them speaks for it, the compacted one where there is one."""
    names = set(root.manifests.names())
    steps = {step for name in names if (step := step_of_manifest(name)) is not None}
    return {step: [n for n in (manifest_name(step), compacted_manifest_name(step)) if n in names] for step in steps}


def _folders(heads: Iterable[ManifestHead]) -> set[str]:
    """Attempt folders that heads name."""
    return {
        split_shard_path(file.path, owner=f"manifest of step {head.step}")[0] for head in heads for file in head.files
    }

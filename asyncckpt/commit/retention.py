"""Let old checkpoints go. Only a writer that holds LOCK does this.

A checkpoint stays when it is wanted, or when the chain of one that stays needs it. A manifest goes when its step does,
or when a compacted one stands for it.

Order: unlink manifests, children before what they build upon -> sync manifests/ -> remove data folders that no manifest
names -> sync data/. A crash in between leaves unreferenced data, never a manifest without data nor a delta without its
parents. An unreadable manifest stops everything, for its references are unknown.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.claims import claims
from asyncckpt.commit.discover import attempt_folder, check_files, read_named_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CheckpointError, CorruptError, IOFailedError, NotFoundError
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.format.names import compacted_manifest_name, manifest_name, step_of_manifest

# One directory is no place for two retentions at once, and which directory it is does not matter. Saves go on beside
# it: see _keep_latest.
_retaining = threading.Lock()


class KnownHeads:
    """Heads of manifests by file name, without their values. Each is read once, and again when another file has its
    name: another Saver of this process may have removed the step and saved it anew."""

    def __init__(self, root: CheckpointRoot) -> None:
        self._root = root
        self._heads: dict[str, tuple[tuple[int, ...], ManifestHead]] = {}

    def add(self, head: ManifestHead) -> None:
        """Take note of a manifest that this process has just published."""
        compacted = head.replaces is not None
        name = compacted_manifest_name(head.step) if compacted else manifest_name(head.step)
        with contextlib.suppress(CheckpointError):  # Then it is read when it is needed.
            self._keep(name, self._root.manifests.version(name), head)

    def of(self, names: Iterable[str]) -> list[ManifestHead]:
        """The heads in these files; CheckpointError for one that cannot be read."""
        return [self._one(name) for name in names]

    def of_step(self, step: int) -> ManifestHead | None:
        """The head that speaks for a step; None where there is none."""
        compacted = compacted_manifest_name(step)
        # Twice the compacted one: it may be published, and the other removed, between the first two looks.
        for name in (compacted, manifest_name(step), compacted):
            with contextlib.suppress(NotFoundError):
                return self._one(name)
        return None

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._heads.pop(name, None)

    def _one(self, name: str) -> ManifestHead:
        version = self._root.manifests.version(name)
        known = self._heads.get(name)
        if known is not None and known[0] == version:
            return known[1]
        return self._keep(name, version, read_named_head(self._root, name))

    def _keep(self, name: str, version: tuple[int, ...], head: ManifestHead) -> ManifestHead:
        kept = replace(head, values=(), metadata=None)
        self._heads[name] = version, kept
        return kept


def keep_latest(
    root: CheckpointRoot, heads: KnownHeads, *, count: int, protected: Callable[[], Collection[int]] = frozenset
) -> list[int]:
    """Remove all but the `count` newest checkpoints, the protected steps, and what these and running saves build upon.

    Returns the removed steps. A kept checkpoint must have its chain and its files in full; otherwise nothing is removed
    and CorruptError is raised, for an older one may be the only one that loads.
    """
    with _retaining:
        while (removed := _keep_latest(root, heads, count, protected)) is None:
            pass
        return removed


def _keep_latest(
    root: CheckpointRoot, heads: KnownHeads, count: int, protected_now: Callable[[], Collection[int]]
) -> list[int] | None:
    """None: something was saved meanwhile, look again.

    What is listed is either protected, or of a save that had ended before: what protects its step is asked for last.
    Right before the removal, when nothing can be committed any more upon what goes, nothing new may be there.
    """
    place = root.root.identity
    manifests = manifests_by_step(root)
    steps = sorted(manifests)
    # Twice the saves in flight: one that ends in between is protected by its Saver, as the newest of that.
    protected = {*claims.needed(place), *protected_now(), *claims.needed(place)}
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
    removed = [step for step in steps if step not in kept]
    with claims.removing(place, removed) as is_free:
        if not is_free or manifests_by_step(root) != manifests:
            return None
        for name, head in zip(victims, going, strict=True):
            root.manifests.remove_file(name)
            if head.kind == "delta":
                root.manifests.sync()  # Before what it builds upon goes.
        root.manifests.sync()
    heads.forget(victims)
    folders = {attempt_folder(head) for head in going} - {attempt_folder(head) for head in kept.values()}
    remove_folders(root, sorted(folders))
    root.data.sync()
    return removed


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


def manifests_by_step(root: CheckpointRoot) -> dict[int, list[str]]:
    """Names of the manifests of every step; the last of them speaks for it, the compacted one where there is one."""
    names = set(root.manifests.names())
    steps = {step for name in names if (step := step_of_manifest(name)) is not None}
    return {step: [n for n in (manifest_name(step), compacted_manifest_name(step)) if n in names] for step in steps}


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


def _renew_lock() -> None:
    global _retaining
    _retaining = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)

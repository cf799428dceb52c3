"""Put a checkpoint together from its chain: a delta, the deltas below it, and the full checkpoint below all.

A delta pins every parent by step, attempt and digest. A parent is found when

1. its manifest has just that digest and attempt, and its own base is what comes next in the chain; or
2. a compacted checkpoint stands for the manifest of that digest. It is full, so the chain ends there.

Anything else is a CorruptError that prints the chain: the base of a delta must not be guessed.

Retention keeps the newest checkpoint that this process has verified, with its chain. It is known by the digest of its
manifest, so a removed one does not count any more, nor does another one of its step; but the compacted one that stands
for it does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any, TypeVar

from asyncckpt.commit.discover import UNREADABLE, KnownHeads, check_files, read_manifest
from asyncckpt.commit.root import CheckpointRoot, ReadRoot, WriteRoot
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, NotFoundError, Words
from asyncckpt.format.head import ManifestHead, ParentFacts, SealedHead
from asyncckpt.format.manifest import Chain
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name

STEPS_SHOWN_MAX = 16
VERIFIED_MAX = 64  # Of each directory: a follower verifies for weeks.
Sealed = TypeVar("Sealed", bound=SealedHead)

# By directory, which outlives what was in it: its name or inode may be another one's by now. By step, the last verified
# last.
_verified: dict[tuple[Any, ...], dict[int, str]] = {}


def read_chain(root: ReadRoot, step: int) -> Chain:
    """Read and check the manifests that a step is put together from.

    Raises NotFoundError when there is no such step, CorruptError, IncompatibleError, UnsupportedError.
    """
    newest = read_manifest(root, step)
    return Chain((newest, *chain_below(newest.head, partial(read_manifest, root))))


def chain_below(head: ManifestHead, read: Callable[[int], Sealed], *, count: int | None = None) -> list[Sealed]:
    """Return the bases of a checkpoint, newest first; CorruptError when the chain is broken.

    read: the manifest of a step, or its head; NotFoundError where there is none. count: how many of them at most.
    """
    below: list[Sealed] = []
    for number, parent in enumerate(head.parents[:count]):
        try:
            found = read(parent.step)
        except NotFoundError as error:
            raise _broken(head, f"its parent step {parent.step} is missing") from error
        except CorruptError as error:
            raise _broken(head, f"its parent step {parent.step} is damaged: {error}") from error
        below.append(found)
        if _is_end(head, number, found):
            break
    return below


class KnownChain:
    """The bases of the deltas of one writer.

    The bases of a delta are the delta before it, and that one's. So that one is read and checked, and all below it only
    looked at: while its files have the names, sizes and versions that they had, it is what was checked before.
    """

    def __init__(self, root: WriteRoot, heads: KnownHeads) -> None:
        self._root = root
        self._heads = heads
        self._parents: tuple[ParentFacts, ...] = ()
        self._found: list[ManifestHead] = []  # Fewer than parents, where one is compacted.
        self._versions: list[tuple[Any, ...]] = []

    def check(self, head: ManifestHead, *, going: Container[str] = ()) -> None:
        """Check that all bases of a delta are there, with all files, in no folder that goes. CorruptError."""
        is_known = bool(self._found) and all(map(self._is_unchanged, self._found, self._versions))
        # What goes may have been compacted: then it is what stands for it that is needed.
        is_known = is_known and not any(found.folder_name in going for found in self._found)
        if is_known and self._parents == head.parents:
            return
        is_next = is_known and self._parents == head.parents[1:]
        below = chain_below(head, self._heads.of_step, count=1 if is_next else None)
        for sealed in below:
            check_files(self._root, sealed.head)
            if sealed.head.folder_name in going:
                raise CorruptError(f"step {sealed.head.step} is being removed")
        rest = is_next and below[0].head.kind == "delta"
        self._found = [*(sealed.head for sealed in below), *(self._found if rest else ())]
        self._versions = [self._heads.version(found.file_name) for found in self._found]
        self._parents = head.parents

    def look(self, parents: Sequence[ParentFacts]) -> list[ManifestHead | None]:
        """Look, at little cost, whether these can be a delta's bases: by names, and at files whose folder has changed.

        Return the heads, if they were published or read here, of the parents that it has to list: those down to the
        first that is full by now. Raises ConflictError where one is gone. It reads no file, so it may run in a call, on
        any rank; `check` sees to the rest when the delta is published.
        """
        if not isinstance(
            self._root, CheckpointRoot
        ):  # A call does not wait for answers: it knows of the last look alone.
            compacted = [self._root.remembered.exists(compacted_manifest_name(parent.step)) for parent in parents]
            return [None] * (compacted.index(True) + 1 if True in compacted else len(parents))
        found: list[ManifestHead | None] = []
        for parent in parents:
            is_end, head = self._look_at(parent, parents[0])
            found.append(head)
            if is_end:
                break
        return found

    def _look_at(self, parent: ParentFacts, newest: ParentFacts) -> tuple[bool, ManifestHead | None]:
        """Return whether a chain ends with this parent because it was compacted, and its head if it is known."""
        assert isinstance(self._root, CheckpointRoot)
        root, own, compacted = self._root, manifest_name(parent.step), compacted_manifest_name(parent.step)
        is_compacted = root.manifests.exists(compacted)
        try:
            if is_compacted:
                head = self._heads.known(compacted)
                if head is None:
                    return True, None
                if head.replaces == parent.digest and root.data.exists(head.folder_name):
                    self._heads.check_folder(head)
                    return True, head
            head = self._heads.known(own)
            if head is None and not root.manifests.has_listed(own):
                raise NotFoundError(f"manifest {own!r} is missing")
            if head is not None and head.attempt == parent.attempt:
                self._heads.check_folder(head)
            elif not root.data.has_listed(folder := Attempt(parent.step, parent.attempt).directory):
                raise NotFoundError(f"folder {folder!r} is missing")
        except (CorruptError, NotFoundError) as error:
            if not is_compacted and root.manifests.exists(compacted):
                return True, None  # Since the first look, and retention has taken the other.
            below = "" if parent == newest else f"its own base, step {parent.step}: "
            raise base_lost(newest.step, f"{below}{error}") from error
        return False, head

    def is_there(self, parents: tuple[ParentFacts, ...]) -> bool:
        """Return whether these could be a delta's bases; False also when nobody can look."""
        step = parents[0].step + 1
        facts: dict[str, Any] = {"attempt": "", "created": "", "writer": "", "ranks_count": 1, "metadata": None}
        try:
            self.check(ManifestHead(step=step, kind="delta", parents=parents, files=(), values=(), **facts))
        except CheckpointError:
            return False
        return True

    def _is_unchanged(self, found: ManifestHead, version: tuple[Any, ...]) -> bool:
        root = self._root
        with contextlib.suppress(CheckpointError):
            if root.manifests.version(found.file_name) == version:
                if not isinstance(root, CheckpointRoot):
                    check_files(root, found)
                    return True
                return all(root.root.size(file.path) == file.bytes for file in found.files)
        return False


def base_lost(step: int, why: str) -> ConflictError:
    """Return the error of a delta which has lost its base, the checkpoint of this step."""
    return ConflictError(
        f"step {step}, the base of the delta, is missing or damaged: {why}",
        hint="save again with kind='auto' or kind='full', which saves a full checkpoint",
    )


def _is_end(child: ManifestHead, number: int, sealed: SealedHead) -> bool:
    """Return whether the chain of `child` ends with its parent of this number. CorruptError if `sealed` is not it."""
    parent, rest, found = child.parents[number], child.parents[number + 1 :], sealed.head
    if found.replaces == parent.digest:
        return True
    if (found.attempt, sealed.digest) != (parent.attempt, parent.digest):
        what = f"its parent step {parent.step} was rewritten: another checkpoint is there"
        raise _broken(child, what, found=Words(found.replaces or sealed.digest), expected=parent.digest)
    if not rest:
        if found.kind != "full":
            raise _broken(child, "it ends with a delta, not with a full checkpoint")
        return True
    _check_rest(child, parent, rest, found.parents)
    return False


def _check_rest(
    child: ManifestHead, parent: ParentFacts, rest: tuple[ParentFacts, ...], found: tuple[ParentFacts, ...]
) -> None:
    """Check that what comes next is a parent's base; where that was compacted, the chain may end earlier."""
    if [item.step for item in rest] != [item.step for item in found[: len(rest)]]:
        what = f"it has a gap, its parent step {parent.step} has other bases"
        raise _broken(child, what, found=Words(_shown(found)), expected=_shown(rest))
    for theirs, ours in zip(found, rest, strict=False):
        if theirs != ours:
            what = f"its parent step {parent.step} is based on another checkpoint of step {ours.step}"
            pins = [(theirs.digest, ours.digest), (theirs.attempt, ours.attempt)]
            differing = next(pair for pair in pins if pair[0] != pair[1])
            raise _broken(child, what, found=Words(differing[0]), expected=differing[1])


def _broken(child: ManifestHead, what: str, **facts: Any) -> CorruptError:
    chain = f"chain {child.step} -> {_shown(child.parents)} (full)"
    return CorruptError(f"checkpoint of step {child.step} (delta) cannot be put together: {what}; {chain}", **facts)


def _shown(parents: Sequence[ParentFacts]) -> str:
    steps = [str(parent.step) for parent in parents]
    if len(steps) > STEPS_SHOWN_MAX:
        steps = [*steps[: STEPS_SHOWN_MAX - 1], f"... {len(steps) - STEPS_SHOWN_MAX} more ...", steps[-1]]
    return " -> ".join(steps)


def mark_verified(root: ReadRoot, chain: Chain) -> None:
    """Remember that this process has verified a checkpoint."""
    steps = _verified.setdefault(root.root.identity, {})
    steps.pop(chain.step, None)
    steps[chain.step] = chain.newest.digest
    for step in list(steps)[:-VERIFIED_MAX]:
        if step != max(list(steps)):
            steps.pop(step, None)


def newest_verified(root: ReadRoot, heads: KnownHeads) -> set[int]:
    """Return the newest step of this directory that this process has verified, as a set of none or one.

    IOFailedError when nobody can look: then it may be there.
    """
    for step, digest in sorted(_verified.get(root.root.identity, {}).copy().items(), reverse=True):
        with contextlib.suppress(NotFoundError, *UNREADABLE):  # It is gone, or damaged.
            found = heads.of_step(step)
            if digest in (found.digest, found.head.replaces):
                return {step}
    return set()

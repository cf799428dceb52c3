"""Remove checkpoints: those that no rule keeps (retention), and those that somebody names.

Both are for a writer that holds LOCK: see removal.py.

A checkpoint stays when it is wanted or pinned, or when the chain of one that stays needs it (judge.py). A manifest goes
when its step does, or when a compacted one stands for it. A crash leaves at most data that no manifest names; never a
manifest without data nor a delta without its parents.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from asyncckpt.commit.attempt import claims
from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.discover import UNREADABLE, KnownHeads, Listing, look_again
from asyncckpt.commit.judge import Judgement, judge
from asyncckpt.commit.removal import remove, remove_pins, sweep
from asyncckpt.commit.root import WriteRoot
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, IOFailedError, NotFoundError, UsageError
from asyncckpt.format.head import ManifestHead
from asyncckpt.model.result import PruneReport
from asyncckpt.options import KeepPolicy
from asyncckpt.system import register_at_fork

# One directory is no place for two retentions at once, and which directory it is does not matter. Saves go on beside
# it: see _as_judged.
_retaining = threading.Lock()
LOOKS_MAX = 100
BATCH_STEPS_MAX = 64
RANKS_SHOWN_MAX = 8
T = TypeVar("T")


def retain(
    root: WriteRoot,
    heads: KnownHeads,
    policy: KeepPolicy,
    *,
    protected: Callable[[], Collection[int]] = frozenset,
    dry_run: bool = False,
) -> PruneReport:
    """Remove what no rule keeps, but pinned and protected steps, and the bases of all these and of running saves.

    What is damaged stays, with all that may be its bases, and counts for no rule (judge.py); the report says what.
    dry_run: only say what would go. One that cannot be removed keeps no other: IOFailedError at the end.
    """
    damaged: dict[int, str] = {}  # What was found so, and nothing has changed meanwhile.
    removed: set[int] = set()
    freed_bytes = 0

    def look() -> PruneReport | None:
        nonlocal freed_bytes
        try:
            listing, found = look_again(root, lambda: _judged(root, heads, policy, protected, damaged))
        except _DamageFound as error:
            damaged.update(error.damaged)
            return None
        except NotFoundError:  # Others remove faster than it looks.
            root.manifests.names()  # Raises where the bucket is gone, or the folder.
            return None
        if dry_run:
            removed.update({head.step for head in found.going} - found.why.keys())
            freed_bytes = _bytes_of(found.going)
        else:
            failed: list[IOFailedError] = []
            for batch in _batches(found.going):
                gone = {head.step for head in batch} - found.why.keys()
                is_as_judged = _as_judged(heads, listing, found.going, batch, gone)
                try:
                    if not _let_go(root, heads, batch, gone, listing.pins, is_as_judged):
                        return None
                except IOFailedError as error:
                    failed.append(error)
                    if any(root.manifests.exists(head.file_name) for head in batch):
                        break  # It may build upon all that come after it.
                removed.update(gone)
                freed_bytes += _bytes_of(batch)
            if failed:
                raise failed[0]
        return PruneReport(removed=tuple(sorted(removed)), kept=found.why, bytes=freed_bytes, damaged=found.damaged)

    return _until_unchanged(root, look)


class _DamageFound(CorruptError):
    """What nothing had said before, and may be a removal of another process."""

    def __init__(self, damaged: Mapping[int, str]) -> None:
        super().__init__(f"steps {sorted(damaged)} are damaged")
        self.damaged = damaged


def _until_unchanged(root: WriteRoot, look: Callable[[], T | None]) -> T:
    """Return what a look returns that finds nothing changed meanwhile. ConflictError after many."""
    with _retaining:
        for _ in range(LOOKS_MAX):
            found = look()
            if found is not None:
                return found
        raise ConflictError(f"{str(root.path)!r} changed at each of {LOOKS_MAX} looks", hint="try again")


def _judged(
    root: WriteRoot,
    heads: KnownHeads,
    policy: KeepPolicy,
    protected_now: Callable[[], Collection[int]],
    damaged: Mapping[int, str],
) -> tuple[Listing, Judgement]:
    """Judge what is there now. _DamageFound when more is damaged than was known.

    What is listed is either protected, or of a save that had ended before: what protects its step is asked for last.
    """
    place = root.root.identity
    listing = Listing.of(root)
    # Twice the saves in flight: one that ends in between is protected by its Saver, as the newest of that.
    in_use = {*claims.needed(place), *protected_now(), *claims.needed(place)}
    found = judge(root, heads, policy, listing, in_use)
    if not found.damaged.keys() <= damaged.keys():
        raise _DamageFound(found.damaged)
    return listing, found


def _batches(going: Sequence[ManifestHead]) -> list[list[ManifestHead]]:
    """Return what goes together: all manifests of BATCH_STEPS_MAX steps, the newest first.

    Some, for what has gone stays gone when a later batch has to be looked at again.
    """
    steps = sorted({head.step for head in going}, reverse=True)
    together = [{*steps[begin : begin + BATCH_STEPS_MAX]} for begin in range(0, len(steps), BATCH_STEPS_MAX)]
    return [[head for head in going if head.step in batch] for batch in together]


def _as_judged(
    heads: KnownHeads,
    listing: Listing,
    going: Sequence[ManifestHead],
    batch: Sequence[ManifestHead],
    steps: Collection[int],
) -> Callable[[Listing], bool]:
    """Return whether a batch may go still: what stays is there, and nothing new is of its steps or based on it.

    Saves may come faster than anybody can look; what else they publish meanwhile only lets more go.
    """
    stays = listing.names - {head.file_name for head in going}
    folders = {head.folder_name for head in batch}

    def needs_none(name: str) -> bool:
        try:
            head = heads.of(name).head
            below = [found.head.folder_name for found in chain_below(head, heads.of_step)]
        except CheckpointError:
            return False
        return head.step not in steps and folders.isdisjoint(below)

    return lambda now: stays <= now.names and all(map(needs_none, now.names - listing.names))


def _bytes_of(heads: Iterable[ManifestHead]) -> int:
    return sum(file.bytes for head in heads for file in head.files)


def _let_go(
    root: WriteRoot,
    heads: KnownHeads,
    going: Sequence[ManifestHead],
    steps: Collection[int],
    pins: Collection[int],
    is_as_judged: Callable[[Listing], bool],
) -> bool:
    """Remove manifests, children first, with their folders. Return whether all are gone.

    steps: those that are gone then. None goes when a save needs one of them by now, when one is pinned that is not
    among `pins`, or when what is there is not as it was judged any more.
    """

    def may_go() -> bool:
        now = Listing.of(root)
        return (
            is_as_judged(now) and now.pins & {*steps} <= {*pins} and claims.needed(root.root.identity).isdisjoint(steps)
        )

    try:
        gone = remove(root, heads, [head.folder_name for head in going], may_go)
    finally:
        heads.forget(head.file_name for head in going)
    root.data.sync()
    return {head.folder_name for head in going} <= {*gone}


def remove_steps(
    root: WriteRoot,
    heads: KnownHeads,
    choose: Callable[[Sequence[int]], Collection[int]],
    *,
    even_pinned: bool = False,
    dry_run: bool = False,
) -> list[int]:
    """Remove those of the checkpoints that `choose` names, newest first, durably; return their steps, ascending.

    choose: gets all steps that are there or being saved, ascending, at every look. UsageError when one of those is
    pinned, or is the base of a checkpoint that stays; ConflictError when a save or a compaction of this process needs
    it. Then, and when `choose` raises, all stay. A crash leaves those below some step. dry_run: only say what would go.
    """
    removed: set[int] = set()

    def look() -> list[int] | None:
        listing = Listing.of(root)
        there = listing.manifests.keys()
        needed = claims.needed(root.root.identity)
        going = {*choose(sorted({*there, *needed, *removed}))} - (removed - there)
        _check_may_go(root, heads, there, going, needed, () if even_pinned else listing.pins)
        removed.update(going)
        if dry_run:
            return sorted(removed)
        victims = [name for step in sorted(going, reverse=True) for name in listing.manifests[step]]
        unreadable = [name for name in victims if not _is_readable(name, heads)]
        readable = [heads.of(name).head for name in victims if name not in unreadable]
        if readable and not _let_go(
            root, heads, readable, going, listing.pins, lambda now: now.manifests == listing.manifests
        ):
            return None
        _remove_unreadable(root, heads, unreadable)
        remove_pins(root, going & listing.pins)
        return sorted(removed)

    return _until_unchanged(root, lambda: look_again(root, look))


def _is_readable(name: str, heads: KnownHeads) -> bool:
    try:
        heads.of(name)
    except UNREADABLE:
        return False
    return True


def _remove_unreadable(root: WriteRoot, heads: KnownHeads, names: Sequence[str]) -> None:
    """Remove unreadable manifests, which can be no base; their folders are strays then."""
    for name in names:
        root.manifests.remove_file(name)
    if names:
        root.manifests.sync()
        sweep(root, heads, keep_attempts=claims.held)


def _check_may_go(
    root: WriteRoot,
    heads: KnownHeads,
    there: Collection[int],
    going: Collection[int],
    needed: Collection[int],
    pins: Collection[int],
) -> None:
    in_use = sorted({*going} & {*needed})
    if in_use:
        own = [it for it in list(claims.held.values()) if it.place == root.root.identity and it.step == in_use[0]]
        missing = ", ".join(str(rank) for it in own for rank in it.missing[:RANKS_SHOWN_MAX])
        raise ConflictError(
            f"step {in_use[0]} of {str(root.path)!r} is in use by a save or a compaction of this process",
            hint=f"save the parts of ranks {missing} first" if missing else "call Saver.wait_idle() first",
        )
    pinned = sorted({*going} & {*pins})
    if pinned:
        raise UsageError(
            f"step {pinned[0]} of {str(root.path)!r} is pinned",
            hint="unpin it first, or remove it all the same: even_pinned=True, --even-pinned",
        )
    children: dict[int, list[int]] = defaultdict(list)
    for step in sorted(there):
        # What builds upon a step is above it.
        if step not in going and step > min(going, default=step):
            for base in _steps_below(step, heads) & {*going}:
                children[base].append(step)
    if children:
        base = max(children)
        above = ", ".join(map(str, children[base][:8]))
        raise UsageError(
            f"step {base} of {str(root.path)!r} is the base of step {above}, which would stay",
            hint=f"remove that too, or compact step {children[base][0]} first",
        )


def _steps_below(step: int, heads: KnownHeads) -> set[int]:
    """Return the bases of a checkpoint; all that a broken chain names."""
    try:
        head = heads.of_step(step).head
    except UNREADABLE as error:
        raise CorruptError(f"step {step} stays, and its base is unknown: {error}", hint="remove it too") from error
    try:
        return {found.head.step for found in chain_below(head, heads.of_step)}
    except CheckpointError:
        return {parent.step for parent in head.parents}


def _renew_lock() -> None:
    global _retaining
    _retaining = threading.Lock()


register_at_fork(after_in_child=_renew_lock)

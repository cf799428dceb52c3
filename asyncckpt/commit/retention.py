"""Remove checkpoints: those that no rule keeps (retention), and those that somebody names.

Both are for a writer that holds LOCK, and remove so that nothing is lost where locks do not work: see removal.py.

A checkpoint stays when it is wanted or pinned, or when the chain of one that stays needs it. A manifest goes when its
step does, or when a compacted one stands for it. A crash leaves at most data that no manifest names; never a manifest
without data nor a delta without its parents. An unreadable manifest stops everything, for its references are unknown.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncckpt.commit.chain import chain_below
from asyncckpt.commit.claims import claims
from asyncckpt.commit.discover import KnownHeads, by_step, check_files
from asyncckpt.commit.keep import kept_by_rules
from asyncckpt.commit.pins import pins_among, remove_pins
from asyncckpt.commit.removal import remove
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.commit.sweep import UNREADABLE, sweep
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, UsageError
from asyncckpt.format.manifest import ManifestHead
from asyncckpt.model.result import PruneReport
from asyncckpt.options import KeepPolicy
from asyncckpt.system import register_at_fork

# One directory is no place for two retentions at once, and which directory it is does not matter. Saves go on beside
# it: see _retain.
_retaining = threading.Lock()
LOOKS_MAX = 100
T = TypeVar("T")


def retain(
    root: CheckpointRoot,
    heads: KnownHeads,
    policy: KeepPolicy,
    *,
    protected: Callable[[], Collection[int]] = frozenset,
    dry_run: bool = False,
) -> PruneReport:
    """Remove what no rule keeps, but pinned and protected steps, and what all these and running saves build upon.

    A kept checkpoint must have its chain and its files in full; otherwise nothing is removed and CorruptError is
    raised, for an older one may be the only one that loads. dry_run: only say what would go.
    """
    return _until_unchanged(root, lambda: _retain(root, heads, policy, protected, dry_run=dry_run))


def _until_unchanged(root: CheckpointRoot, look: Callable[[], T | None]) -> T:
    """Return what a look returns that finds nothing changed meanwhile. ConflictError after many."""
    with _retaining:
        for _ in range(LOOKS_MAX):
            found = look()
            if found is not None:
                return found
        raise ConflictError(f"{str(root.path)!r} changed at each of {LOOKS_MAX} looks: nothing is removed")


def _retain(
    root: CheckpointRoot,
    heads: KnownHeads,
    policy: KeepPolicy,
    protected_now: Callable[[], Collection[int]],
    *,
    dry_run: bool,
) -> PruneReport | None:
    """Remove what goes now, and return the steps; None: something was saved meanwhile, look again.

    What is listed is either protected, or of a save that had ended before: what protects its step is asked for last.
    When it is announced, so that nothing can be committed any more upon what goes, nothing new may be there.
    """
    place = root.root.identity
    listing = Listing.of(root)
    manifests, steps = listing.manifests, sorted(listing.manifests)
    # Twice the saves in flight: one that ends in between is protected by its Saver, as the newest of that.
    protected = {*claims.needed(place), *protected_now(), *claims.needed(place)}
    why = kept_by_rules(policy, steps, lambda step: heads.of_step(step).head)
    for step in listing.pins & manifests.keys():
        why[step].append("pinned")
    for step in protected & manifests.keys():
        why[step].append("in use")
    wanted = sorted(why)
    kept: dict[int, ManifestHead] = {}
    victims: list[str] = []
    if len(wanted) < len(steps) or any(len(names) > 1 for names in manifests.values()):
        kept = _with_parents(wanted, heads, why)
        for head in kept.values():
            check_files(root, head)
        speaking = {head.file_name for head in kept.values()}
        victims = [name for step in reversed(steps) for name in manifests[step] if name not in speaking]
    going = _heads_of(victims, heads, stay={head.folder_name for head in kept.values()})
    removed = tuple(step for step in steps if step not in why)
    if going and not dry_run and not _let_go(root, heads, going, removed, listing):
        return None
    reasons = {step: tuple(why[step]) for step in sorted(why)}
    return PruneReport(removed=removed, kept=reasons, bytes=sum(file.bytes for head in going for file in head.files))


@dataclass(frozen=True)
class Listing:
    """The manifests by step, and the pinned steps, from one look at manifests/."""

    manifests: Mapping[int, Sequence[str]]
    pins: frozenset[int]

    @staticmethod
    def of(root: CheckpointRoot) -> Listing:
        names = root.manifests.names()
        return Listing(by_step(names), frozenset(pins_among(names)))


def _heads_of(names: Sequence[str], heads: KnownHeads, *, stay: Collection[str] = ()) -> list[ManifestHead]:
    """Return the heads in these files, but those whose folder stays."""
    try:
        found = [heads.of(name).head for name in names]
    except CheckpointError as error:
        raise CorruptError(f"old checkpoints cannot be removed: {error}") from error
    return [head for head in found if head.folder_name not in stay]


def _let_go(
    root: CheckpointRoot, heads: KnownHeads, going: Sequence[ManifestHead], steps: Collection[int], listing: Listing
) -> bool:
    """Remove manifests, children first, with their folders. Return whether all are gone.

    steps: those that are gone then. None goes when a save needs one of them by now, when one is pinned that was not, or
    when other manifests are there than were listed.
    """

    def may_go() -> bool:
        now = Listing.of(root)
        return (
            now.manifests == listing.manifests
            and now.pins & {*steps} <= listing.pins
            and claims.needed(root.root.identity).isdisjoint(steps)
        )

    gone = remove(root, heads, [head.folder_name for head in going], may_go)
    heads.forget(head.file_name for head in going)
    root.data.sync()
    return {head.folder_name for head in going} <= {*gone}


def _with_parents(wanted: Sequence[int], heads: KnownHeads, why: dict[int, list[str]]) -> dict[int, ManifestHead]:
    """Return the heads of the wanted steps and of all they build upon, by step; add why those are kept."""
    kept: dict[int, ManifestHead] = {}
    for step in wanted:
        newest = heads.of_step(step)
        for found in (newest, *chain_below(newest.head, heads.of_step)):
            kept[found.head.step] = found.head
            why.setdefault(found.head.step, [f"base of {step}"])
    return kept


def remove_steps(
    root: CheckpointRoot,
    heads: KnownHeads,
    choose: Callable[[Sequence[int]], Collection[int]],
    *,
    even_pinned: bool = False,
    dry_run: bool = False,
) -> list[int]:
    """Remove those of the checkpoints that `choose` names, newest first, durably; return their steps, ascending.

    choose: gets all steps that are there or being saved, ascending, anew at every look. UsageError when one of those is
    pinned, or a checkpoint that stays builds upon it; ConflictError when a save or a compaction of this process needs
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
        readable = _heads_of([name for name in victims if name not in unreadable], heads)
        if readable and not _let_go(root, heads, readable, going, listing):
            return None
        _remove_unreadable(root, heads, unreadable)
        remove_pins(root, going & listing.pins)
        return sorted(removed)

    return _until_unchanged(root, look)


def _is_readable(name: str, heads: KnownHeads) -> bool:
    try:
        heads.of(name)
    except UNREADABLE:
        return False
    return True


def _remove_unreadable(root: CheckpointRoot, heads: KnownHeads, names: Sequence[str]) -> None:
    """Remove manifests that nobody can build upon, for nobody can read them; their folders are strays then."""
    for name in names:
        root.manifests.remove_file(name)
    if names:
        root.manifests.sync()
        sweep(root, heads, keep_attempts=claims)


def _check_may_go(
    root: CheckpointRoot,
    heads: KnownHeads,
    there: Collection[int],
    going: Collection[int],
    needed: Collection[int],
    pins: Collection[int],
) -> None:
    in_use = sorted({*going} & {*needed})
    if in_use:
        raise ConflictError(
            f"step {in_use[0]} of {str(root.path)!r} is in use by a save or a compaction of this process",
            hint="wait for its end: Saver.wait_idle()",
        )
    pinned = sorted({*going} & {*pins})
    if pinned:
        raise UsageError(f"step {pinned[0]} of {str(root.path)!r} is pinned", hint="unpin it first, or say even_pinned")
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
            f"step {base} of {str(root.path)!r} cannot be removed: deltas that stay build upon it",
            found=f"step {above}",
            hint=f"remove those too, or compact step {children[base][0]} first",
        )


def _steps_below(step: int, heads: KnownHeads) -> set[int]:
    """Return the steps that a checkpoint builds upon; of a broken chain, all that it names."""
    try:
        head = heads.of_step(step).head
    except UNREADABLE as error:
        raise CorruptError(
            f"step {step} stays, and nobody knows what it builds upon: {error}", hint="remove that step too"
        ) from error
    try:
        return {found.head.step for found in chain_below(head, heads.of_step)}
    except CheckpointError:
        return {parent.step for parent in head.parents}


def _renew_lock() -> None:
    global _retaining
    _retaining = threading.Lock()


register_at_fork(after_in_child=_renew_lock)

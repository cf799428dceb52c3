"""Choose what stays in a checkpoint directory: remove, prune, pin, collect garbage. Users find it in `checkpoints`."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TypeVar

from asyncckpt.arguments import check_type
from asyncckpt.commit.attempt import claims
from asyncckpt.commit.chain import newest_verified
from asyncckpt.commit.discover import KnownHeads, Listing, committed_steps, numbers_of
from asyncckpt.commit.removal import collect_garbage as sweep_all
from asyncckpt.commit.removal import pin_step, unpin_step
from asyncckpt.commit.retention import remove_steps, retain
from asyncckpt.commit.root import CheckpointRoot, WriteRoot, open_root
from asyncckpt.coordination.rendezvous import sweep_sessions
from asyncckpt.engine.process.background import check_may_wait, result_or_end, retainer
from asyncckpt.engine.process.held_directory import held_directory
from asyncckpt.errors import CheckpointError, NotFoundError, UsageError, Words, must_be, nearest
from asyncckpt.format.names import check_step
from asyncckpt.model.result import GarbageReport, PruneReport
from asyncckpt.options import SAVE_DEADLINE_S, KeepPolicy
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.folder import check_place

T = TypeVar("T")


@uninterrupted
def remove(
    path: str | os.PathLike[str], steps: int | Iterable[int], *, even_pinned: bool = False, dry_run: bool = False
) -> list[int]:
    """Remove these checkpoints for good, all or none, newest first; return their steps, ascending.

    Blocks until that is durable and their files are gone. A crash meanwhile leaves each in full or not at all: the
    newest are gone then. Raises UsageError when one is the base of a delta that stays, or is pinned; NotFoundError when
    one is not there; ConflictError while another process writes to the directory, or a save of this one needs a step;
    also CorruptError, IOFailedError. dry_run: remove nothing, and need no lock.
    """
    wanted = {check_step(step, or_none=False) for step in (steps if isinstance(steps, Iterable) else [steps])}
    return _remove(path, lambda there: _all_there(path, wanted, there), even_pinned=even_pinned, dry_run=dry_run)


@uninterrupted
def remove_after(
    path: str | os.PathLike[str], step: int, *, even_pinned: bool = False, dry_run: bool = False
) -> list[int]:
    """Remove all checkpoints above a step, which must be there; return their steps, ascending.

    For a run that goes back: what it saves from there on is the only history of the directory. As `remove`, but what
    goes is never the base of what stays. Raises ConflictError also while a save of this process is in flight.
    """
    step = check_step(step, or_none=False)

    def choose(there: Sequence[int]) -> Collection[int]:
        return [other for other in there if _all_there(path, {step}, there) and other > step]

    return _remove(path, choose, even_pinned=even_pinned, dry_run=dry_run)


@uninterrupted
def prune(path: str | os.PathLike[str], keep: int | KeepPolicy, *, dry_run: bool = False) -> PruneReport:
    """Remove what a policy (or a number of newest ones) does not keep, as a Saver does after its saves; tell why the
    rest stays.

    dry_run: remove nothing, and need no lock; another process may write to the directory meanwhile. Otherwise raises
    ConflictError then. A damaged checkpoint that would stay does so, but counts for no rule: `report.damaged` says what
    is wrong. UsageError where no checkpoint has the metric: misspelled, it would let the best one go. Also raises
    NotFoundError, IOFailedError.
    """
    policy = KeepPolicy.of(keep)
    if policy is None:
        raise must_be("keep", "an int of at least 1, or a KeepPolicy", keep)
    check_type("dry_run", dry_run, bool)

    def work(root: WriteRoot) -> PruneReport:
        heads = KnownHeads(root)
        if policy.metric is not None:
            _check_metric(root, heads, policy.metric)
        return retain(root, heads, policy, protected=lambda: newest_verified(root, heads), dry_run=dry_run)

    return _on_thread(path, work, "a removal", holding=not dry_run)


@uninterrupted
def pin(path: str | os.PathLike[str], step: int) -> None:
    """Keep a checkpoint, and its bases, whatever retention says, until `unpin`; durable when it returns.

    Needs no lock, so it works beside a process that writes to the directory. Raises NotFoundError, CorruptError,
    IOFailedError, and ConflictError for a step that is just being removed. After the last two it may be pinned.
    """
    step = check_step(step, or_none=False)
    with open_root(check_place(path)) as root:
        pin_step(root, step)


@uninterrupted
def unpin(path: str | os.PathLike[str], step: int) -> bool:
    """Let retention have a checkpoint again; return whether it was pinned. Raises NotFoundError, IOFailedError."""
    step = check_step(step, or_none=False)
    with open_root(check_place(path)) as root:
        return unpin_step(root, step)


@uninterrupted
def pinned_steps(path: str | os.PathLike[str]) -> list[int]:
    """Return the committed steps that are pinned, ascending, by one look at the names of files. Raises NotFoundError"""
    with open_root(check_place(path)) as root:
        listing = Listing.of(root)
        return sorted(listing.pins & listing.manifests.keys())


@uninterrupted
def collect_garbage(path: str | os.PathLike[str]) -> GarbageReport:
    """Remove what failed saves and crashes have left, as the next save there would, and return how much that was.

    What this process is saving stays. Raises ConflictError while another process writes to the directory; CorruptError
    when some stays because a manifest cannot be read that may need it; also NotFoundError, IOFailedError. Nobody sees
    who else writes to a store: there a save that is being made elsewhere fails, and is not acknowledged.
    """

    def work(root: WriteRoot) -> GarbageReport:
        sessions = sweep_sessions(root.root) if isinstance(root, CheckpointRoot) else 0
        return replace(sweep_all(root, KnownHeads(root), keep_attempts=claims.held), sessions_count=sessions)

    return _on_thread(path, work, "a removal")


def _check_metric(root: WriteRoot, heads: KnownHeads, metric: str) -> None:
    """Raise UsageError unless some checkpoint has the metric, or none can be read."""
    names: set[str] | None = None
    for step in committed_steps(root):
        with suppress(CheckpointError):  # Damaged or just removed: retention sees to it.
            found = numbers_of(heads.of_step(step).head.metadata).keys()
            if metric in found:
                return
            names = found | (names or set())
    if names is not None:
        raise UsageError(
            f"no checkpoint has the metric {metric!r}, by which the best would stay",
            found=Words(f"numbers {sorted(names)}"),
            hint=nearest(metric, names) or "name a number in the metadata of the saves, or leave out best",
        )


def _remove(
    path: str | os.PathLike[str],
    choose: Callable[[Sequence[int]], Collection[int]],
    *,
    even_pinned: bool,
    dry_run: bool,
) -> list[int]:
    check_type("even_pinned", even_pinned, bool)
    check_type("dry_run", dry_run, bool)

    def work(root: WriteRoot) -> list[int]:
        return remove_steps(root, KnownHeads(root), choose, even_pinned=even_pinned, dry_run=dry_run)

    return _on_thread(path, work, "a removal", holding=not dry_run)


def _all_there(path: str | os.PathLike[str], wanted: Collection[int], there: Collection[int]) -> Collection[int]:
    missing = sorted({*wanted} - {*there})
    if missing:
        raise NotFoundError(f"step {missing[0]} is not in {os.fspath(path)!r}, and nothing was removed")
    return wanted


def _on_thread(path: str | os.PathLike[str], work: Callable[[WriteRoot], T], what: str, *, holding: bool = True) -> T:
    """Do work on the thread of retention, while this process holds the directory; wait for its end."""
    checked = check_place(path)
    check_may_wait(what)

    def run() -> T:
        with ExitStack() as held:
            root = open_root(checked)
            held.callback(root.close)
            if holding and isinstance(root, CheckpointRoot):
                held.enter_context(held_directory(root, "fsync"))
            return work(root)

    return result_or_end(retainer.submit(run), what, SAVE_DEADLINE_S, lambda: None)

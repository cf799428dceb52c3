"""Remove attempts in a store, where nobody holds a LOCK, and others may save, remove and sweep at the same time.

1. Announce, and look once more, as on a disk (removal.py).
2. Decide: rename the marks to manifests/.d-<id>-<folder>, children before their bases.
3. Complete what was decided, children first, as on a disk; also what others have decided, who may have crashed. No step
   is wrong when two do it.

A writer that publishes before the look of 1 is seen there; one that publishes later sees a mark, or that something is
gone, and does not acknowledge.

What others have announced and not decided is never taken back, because nobody could see that it was: a mark changes its
name by two requests. It is removed with its folder.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import replace

from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.removal import complete, under_way
from asyncckpt.commit.store_root import StoreRoot
from asyncckpt.errors import IOFailedError
from asyncckpt.format.names import Mark, parse


def complete_decided(root: StoreRoot) -> None:
    """Complete what others, which may have crashed, have decided to remove. IOFailedError.

    A writer does it before anybody looks for the newest step: otherwise training could go on from one that goes later.
    """
    remove_in_store(root, KnownHeads(root), (), lambda: True)


def remove_in_store(root: StoreRoot, heads: KnownHeads, marks: Sequence[Mark], may_go: Callable[[], bool]) -> list[str]:
    """Remove what these marks name, and what others have decided to; return the folders that are gone.

    None of the marks' when they may not go any more. See removal.remove.
    """
    decided = [mark for mark in _marks(root) if mark.is_decided and mark.id not in under_way]
    theirs = {mark.folder for mark in decided}
    decided += _decide(root, [mark for mark in marks if mark.folder not in theirs], may_go)
    gone: list[str] = []
    try:
        complete(root, heads, decided, gone)
    finally:
        for mark in _marks(root) if gone else ():
            if mark.folder in gone:
                root.manifests.remove_file(mark.name)
        root.look_anew()
    return gone


def _marks(root: StoreRoot) -> list[Mark]:
    found = [parse(name) for name in root.manifests.names()]
    return [Mark(one.removal, one.folder, is_decided=one.kind == "decided") for one in found if one and one.removal]


def _decide(root: StoreRoot, marks: Sequence[Mark], may_go: Callable[[], bool]) -> list[Mark]:
    decided: list[Mark] = []
    may_come = 0  # Of a request that was not answered: nobody may build upon what it may yet decide.
    try:
        for mark in marks:
            root.manifests.make_empty(mark.name)
        for mark in marks if marks and may_go() else ():
            may_come = 1
            root.manifests.move(mark.name, replace(mark, is_decided=True).name)
            may_come = 0
            decided.append(replace(mark, is_decided=True))
    except IOFailedError as error:
        may_come = may_come if error.errno == errno.ETIMEDOUT else 0
        raise
    finally:
        for mark in marks[len(decided) + may_come :]:
            root.manifests.remove_file(mark.name)
    return decided

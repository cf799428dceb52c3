"""Which checkpoints this process has verified: retention keeps the newest of them.

A checkpoint is known by the digest of its manifest, so one that somebody removes is none any more, nor is another one
that has its step; but one that stands for it, compacted, is.
"""

from __future__ import annotations

import contextlib
from typing import Any

from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.removal import UNREADABLE
from asyncckpt.commit.root import ReadRoot
from asyncckpt.errors import NotFoundError
from asyncckpt.format.manifest import Chain

VERIFIED_MAX = 64  # Of each directory: a follower verifies for weeks.

# By directory, which outlives what was in it: its name or inode may be another one's by now. By step, the last verified
# last.
_verified: dict[tuple[Any, ...], dict[int, str]] = {}


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

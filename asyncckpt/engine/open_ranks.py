"""Open a checkpoint directory for saving, alone or with other ranks: its folders, its lock, and the way to the others.

Rank 0 makes the directory and holds its LOCK; the others wait until it has, or hear why it could not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.file_channel import open_file_channel
from asyncckpt.coordination.limits import Limits
from asyncckpt.coordination.messages import cause_of
from asyncckpt.coordination.store_channel import open_store_channel
from asyncckpt.engine.ranks import Ranks
from asyncckpt.engine.replicas import Replicas
from asyncckpt.errors import NotFoundError, PeerError, UsageError
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.model.own_rank import rank_in_group
from asyncckpt.storage.owner_lock import OwnerLock

SILENCE_S_MAX = 30.0
POLL_S = 0.05
# The call under which ranks talk before their first save.
OPENING = 0


@dataclass(frozen=True)
class Opened:
    """An open directory. lock: of the rank that holds it. ranks: None for a rank that saves alone."""

    root: CheckpointRoot
    lock: OwnerLock | None
    ranks: Ranks | None = None


def open_directory(
    path: Path, *, index: int, count: int, process_group: Any, peer_deadline_s: float, exact_modes: bool
) -> Opened:
    """Open it as rank `index` of `count`. Ranks wait for each other at most peer_deadline_s seconds: PeerError."""
    if count == 1:
        return _open_alone(path, exact_modes=exact_modes)
    limits = Limits(begin_s=peer_deadline_s, silence_s=min(SILENCE_S_MAX, peer_deadline_s))
    over_store = process_group is not None or rank_in_group() == (index, count)
    join = _join_over_store if over_store else _join_over_files
    root, lock, channel = join(path, process_group, index, count, peer_deadline_s, exact_modes)
    return Opened(root=root, lock=lock, ranks=Ranks(channel=channel, limits=limits, replicas=Replicas(index, count)))


def _open_alone(path: Path, *, exact_modes: bool) -> Opened:
    root = CheckpointRoot.for_writing(path, exact_modes=exact_modes)
    try:
        return Opened(root=root, lock=OwnerLock.acquire(root.root, LOCK_NAME))
    except BaseException:
        root.close()
        raise


def _join_over_store(
    path: Path, process_group: Any, index: int, count: int, deadline_s: float, exact_modes: bool
) -> tuple[CheckpointRoot, OwnerLock | None, Channel]:
    channel: Channel = open_store_channel(process_group, deadline_s=deadline_s)
    try:
        if index == 0:
            try:
                opened = _open_alone(path, exact_modes=exact_modes)
            except BaseException as error:
                channel.put(OPENING, "opened", cause_of(error).encode("utf-8"))
                raise
            channel.put(OPENING, "opened", b"")
            return opened.root, opened.lock, channel
        cause = channel.get(OPENING, "opened", deadline_s).decode("utf-8", "replace")
        if cause:
            raise PeerError("rank 0 cannot open the checkpoint directory", rank=0, cause=cause)
        try:
            return CheckpointRoot.for_joining(path, exact_modes=exact_modes), None, channel
        except NotFoundError as error:
            raise UsageError(
                "the checkpoint directory that rank 0 has opened is not there on this rank",
                found=str(path),
                hint="all ranks need the same path, on a file system that they share",
            ) from error
    except BaseException:
        channel.close()
        raise


def _join_over_files(
    path: Path, _: Any, index: int, count: int, deadline_s: float, exact_modes: bool
) -> tuple[CheckpointRoot, OwnerLock | None, Channel]:
    until = time.monotonic() + deadline_s
    lock = None
    if index == 0:
        alone = _open_alone(path, exact_modes=exact_modes)
        root, lock = alone.root, alone.lock
    else:
        root = _await_root(path, until, deadline_s=deadline_s, exact_modes=exact_modes)
    try:
        left_s = max(0.0, until - time.monotonic())
        return root, lock, open_file_channel(root.root, rank=index, ranks_count=count, deadline_s=left_s)
    except BaseException:
        if lock is not None:
            lock.release()
        root.close()
        raise


def _await_root(path: Path, until: float, *, deadline_s: float, exact_modes: bool) -> CheckpointRoot:
    while True:
        try:
            return CheckpointRoot.for_joining(path, exact_modes=exact_modes)
        except NotFoundError as error:
            if time.monotonic() >= until:
                raise PeerError(
                    "rank 0 has not opened the checkpoint directory",
                    rank=0,
                    cause=f"{str(path)!r} is not there after {deadline_s:g} s",
                    hint="all ranks need the same path, on a file system that they share",
                ) from error
        time.sleep(POLL_S)

"""Open a checkpoint directory for saving, alone or with other ranks: its folders, its lock, and the way to the others.

Rank 0 makes the directory and holds its LOCK; the others wait until it has, or hear why it could not.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from asyncckpt.arguments import check_int
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.coordination.channel import Channel
from asyncckpt.coordination.file_channel import open_file_channel
from asyncckpt.coordination.messages import Limits, cause_of
from asyncckpt.coordination.store_channel import StoreChannel, open_store_channel
from asyncckpt.engine.process.held_directory import Opened, open_alone, open_store
from asyncckpt.engine.ranks.meeting import Meeting, meet
from asyncckpt.engine.ranks.replicas import Replicas
from asyncckpt.engine.ranks.saver_ranks import Ranks
from asyncckpt.errors import CheckpointError, DeadlineError, NotFoundError, PeerError, UnsupportedError, UsageError
from asyncckpt.format import limits
from asyncckpt.model.own_rank import own_rank, rank_in_group
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.options import RankOptions
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.folder import check_place

SILENCE_S_MAX = 30.0
POLL_S = 0.05
# The call under which ranks talk before their first save.
OPENING = 0


@dataclass(frozen=True)
class OwnShard:
    """Which rank this is of those that save together. met: where the others did not come, see meeting.py."""

    index: int
    count: int
    met: Meeting | None = None


class _Place(NamedTuple):
    """Which rank this is, for those that have no channel."""

    rank: int
    ranks_count: int


@dataclass(frozen=True)
class OpenedTogether(Opened):
    """The directory as one of several ranks has opened it, or one that has looked for others.

    ranks: None for a rank that saves alone. owned: closed with the directory; None for ranks that save to other
    directories too. met: ended with it.
    """

    ranks: Ranks | None = None
    owned: Channel | None = None
    met: Meeting | None = None

    def close(self) -> None:
        if self.owned is not None:
            self.owned.close()
        super().close()
        if self.met is not None:
            self.met.end()


def which_shard(shard_index: int, shard_num: int, path: str | os.PathLike[str], options: RankOptions) -> OwnShard:
    """Return which rank this is: as given, or in the process group.

    Where nothing is given, and torch.distributed has several ranks, it waits for them: either all have come and save
    together, or this one saves alone (meeting.py). UsageError when what is given disagrees, ConflictError when it has
    come too late.
    """
    process_group = options.process_group
    if process_group is None:
        check_int("shard_num", shard_num, at_least=1, at_most=limits.RANKS_MAX if not options.alone else 1)
        check_int("shard_index", shard_index, at_least=0, at_most=shard_num - 1)
        met = meet(check_place(path)) if shard_num == 1 and not (options.alone or options.in_turn) else None
        if met is not None and met.is_complete:
            return OwnShard(met.rank, met.ranks_count)
        return OwnShard(shard_index, shard_num, met)
    if isinstance(process_group, Ranks):
        return OwnShard(process_group.rank, process_group.ranks_count)
    index, count = (None, None) if (shard_index, shard_num) == (0, 1) else (shard_index, shard_num)
    return OwnShard(*own_rank(index, count, process_group, names=("shard_index", "shard_num")))


def which_of_all(options: RankOptions) -> tuple[int, int]:
    """Return (rank, number of ranks) of one that saves with all ranks there are, unless it says that it is alone."""
    return (0, 1) if options.alone else own_rank(None, None, options.process_group)


def look_for_all(path: str | os.PathLike[str], options: RankOptions | None) -> None:
    """Warn where nothing says who saves, and the others are not there within some seconds. None: the shard is given."""
    if options is not None and options.process_group is None and not options.alone:
        meet(check_place(path), closes=False, what="Checkpointer")


def open_ranks(process_group: Any, *, peer_deadline_s: float) -> Ranks:
    """Open a channel to the other ranks of a process group, over which they save to any number of directories.

    To be passed as the process group of each Saver. PeerError when rank 0 is not there within the deadline.
    """
    return _ranks_over(open_store_channel(process_group, deadline_s=peer_deadline_s), peer_deadline_s)


def announce_open(ranks: Ranks, error: BaseException | None = None, *, call: int | None = None) -> None:
    """Announce, as rank 0, that the directory of a call, by default the next one, is open, or why it is not.

    A rank may open it later than rank 0 did.
    """
    if ranks.is_coordinator:
        cause = b"" if error is None else cause_of(error).encode("utf-8")
        ranks.channel.put(ranks.call if call is None else call, "opened", cause)


def leave_out_opening(ranks: Ranks, error: BaseException) -> None:
    """Abort the next call on all ranks, also on those that wait for rank 0 to open a directory for it."""
    announce_open(ranks, error)
    ranks.announce_failed(ranks.next_call(), error)


def announce_refused(error: BaseException, own: OwnShard, options: RankOptions) -> None:
    """Let the other ranks of a process group hear that this one is refused before it opens the directory.

    They open it with this rank, or save with it, so they would wait for it; and the meetings of a group are numbered.
    """
    process_group, wait_s = options.process_group, min(SILENCE_S_MAX, float(options.peer_deadline))
    if own.met is not None:
        own.met.end()
    if (
        not isinstance(error, Exception)  # Whoever has interrupted this rank does not want to wait.
        or options.in_turn
        or own.count == 1
        or isinstance(process_group, Ranks)
        or _meets_over_files(process_group, own.index, own.count)
    ):
        return
    with suppress(CheckpointError):
        channel = open_store_channel(process_group, deadline_s=wait_s)
        try:
            ranks = _ranks_over(channel, wait_s)
            if ranks.is_coordinator:
                announce_open(ranks, error, call=OPENING)
                _leave_cause(channel, error)
            else:
                ranks.announce_failed(ranks.next_call(), error)
                ranks.wait_announced()
        finally:
            channel.close()


def _meets_over_files(process_group: Any, index: int, count: int) -> bool:
    return process_group is None and rank_in_group() != (index, count)


def _ranks_over(channel: Channel, peer_deadline_s: float) -> Ranks:
    waits = Limits(begin_s=peer_deadline_s, silence_s=min(SILENCE_S_MAX, peer_deadline_s))
    return Ranks(channel=channel, limits=waits, replicas=Replicas(channel.rank, channel.ranks_count))


def open_directory(path: Place, own: OwnShard, *, options: RankOptions, exact_modes: bool) -> OpenedTogether:
    """Open it as this rank. Ranks wait for each other at most the peer_deadline: PeerError."""
    index, count, met = own.index, own.count, own.met
    if count == 1:
        try:
            return _together(open_alone(path, exact_modes=exact_modes), met=met)
        except BaseException:
            if met is not None:
                met.end()
            raise
    process_group, peer_deadline_s = options.process_group, float(options.peer_deadline)
    if isinstance(path, StoreUrl):
        _check_not_over_files(path, process_group, index=index, count=count, in_turn=options.in_turn)
    if options.in_turn:
        ranks = replace(_ranks_over(cast(Channel, _Place(index, count)), peer_deadline_s), in_turn=True)
        return _together(open_alone(path, exact_modes=exact_modes), ranks=ranks)
    if _meets_over_files(process_group, index, count):
        assert isinstance(path, Path)
        return _join_over_files(path, index, count, peer_deadline_s, exact_modes)
    if isinstance(process_group, Ranks):
        return _join_over_store(path, process_group, process_group.call, peer_deadline_s, exact_modes)
    try:
        channel = open_store_channel(process_group, deadline_s=peer_deadline_s)
    except PeerError as error:
        raise PeerError(f"{str(path)!r} was not opened", rank=error.rank, cause=error.what, hint=error.hint) from None
    ranks = _ranks_over(channel, peer_deadline_s)
    try:
        opened = _join_over_store(path, ranks, OPENING, peer_deadline_s, exact_modes)
    except BaseException as error:
        if channel.rank == 0:
            _leave_cause(channel, error)
        elif not isinstance(error, PeerError):  # The first save of the others would wait for this rank.
            with suppress(CheckpointError):
                ranks.announce_failed(ranks.next_call(), error)
                ranks.wait_announced()
        channel.close()
        raise
    return replace(opened, owned=channel)


def _check_not_over_files(url: StoreUrl, process_group: Any, *, index: int, count: int, in_turn: bool) -> None:
    """Refuse ranks that would find each other by files in a store. UnsupportedError."""
    if not in_turn and _meets_over_files(process_group, index, count):
        raise UnsupportedError(
            "ranks that find each other by files need a directory on a disk",
            found=str(url),
            hint="initialize torch.distributed, or pass RankOptions(process_group=...)",
        )


def _leave_cause(channel: StoreChannel, error: BaseException) -> None:
    channel.leave_cause(f"it cannot open the checkpoint directory: {cause_of(error)}")


def _together(opened: Opened, **more: Any) -> OpenedTogether:
    return OpenedTogether(opened.root, opened.lock, **more)


def _join_over_store(path: Place, ranks: Ranks, call: int, deadline_s: float, exact_modes: bool) -> OpenedTogether:
    """call: under which rank 0 says that it has opened the directory."""
    if ranks.is_coordinator:
        try:
            opened = open_alone(path, exact_modes=exact_modes)
        except BaseException as error:
            announce_open(ranks, error, call=call)
            raise
        try:
            ranks.channel.put(call, "place", str(path).encode("utf-8", "replace"))
            announce_open(ranks, call=call)
        except BaseException:
            opened.close()
            raise
        return _together(opened, ranks=ranks)
    try:
        cause = ranks.channel.get(call, "opened", deadline_s).decode("utf-8", "replace")
    except DeadlineError as error:
        cause = str(error)
    if cause:
        raise PeerError("rank 0 cannot open the checkpoint directory", rank=0, cause=cause)
    try:
        if isinstance(path, StoreUrl):
            place = ranks.channel.get(call, "place", deadline_s).decode("utf-8")
            if place != str(path):
                raise UsageError("ranks save to different places", found=str(path), expected=f"{place!r}")
            return OpenedTogether(open_store(path, joins=True), ranks=ranks)
        return OpenedTogether(CheckpointRoot.for_joining(path, exact_modes=exact_modes), ranks=ranks)
    except NotFoundError as error:
        raise UsageError(
            "this rank does not see the checkpoint directory that rank 0 has opened",
            found=str(path),
            hint="all ranks need the same path, on a file system that they share",
        ) from error


def _join_over_files(path: Path, index: int, count: int, deadline_s: float, exact_modes: bool) -> OpenedTogether:
    until = time.monotonic() + deadline_s
    if index == 0:
        opened = open_alone(path, exact_modes=exact_modes)
    else:
        opened = Opened(_await_root(path, until, deadline_s=deadline_s, exact_modes=exact_modes))
    try:
        assert isinstance(opened.root, CheckpointRoot)
        left_s = max(0.0, until - time.monotonic())
        channel = open_file_channel(opened.root.root, rank=index, ranks_count=count, deadline_s=left_s)
    except BaseException:
        opened.close()
        raise
    return _together(opened, ranks=_ranks_over(channel, deadline_s), owned=channel)


def _await_root(path: Path, until: float, *, deadline_s: float, exact_modes: bool) -> CheckpointRoot:
    while True:
        try:
            return CheckpointRoot.for_joining(path, exact_modes=exact_modes)
        except NotFoundError as error:
            if time.monotonic() >= until:
                raise PeerError(
                    "rank 0 has not opened the checkpoint directory",
                    rank=0,
                    cause=f"{str(path)!r} does not exist after {deadline_s:g} s",
                    hint="all ranks need the same path, on a file system that they share",
                ) from error
        time.sleep(POLL_S)
        uninterrupted.look()

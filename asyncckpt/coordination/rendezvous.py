"""How ranks that share nothing but the checkpoint directory find each other, and nobody else.

What a killed job has left must never be taken for today's, and a file does not show whether its writer
lives. So every process draws a token, and a session counts for those whose tokens it names:

1. Every rank but 0 leaves a hello with its token, and leaves it again whenever it has vanished.
2. Rank 0, which holds the lock of the directory, removes all old sessions and all hellos. Hellos that are there after
   that come from processes that live. Two for the same rank are removed once more: one of them may just have died.
3. When there is exactly one hello for every rank, rank 0 makes a new session with all its folders, and last its roster.
4. A rank joins the session whose roster names its token, and takes its hello away.

Every wait has the deadline of the caller.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator

from asyncckpt.coordination.session_files import (
    GONE_DIR,
    PUT_DIR,
    RANKS_DIR,
    ROSTER,
    Hello,
    hello_of,
    inbox_dir,
    is_session,
    new_pauses,
    new_session_name,
    read_whole,
    write_whole,
)
from asyncckpt.errors import CheckpointError, ConflictError, CorruptError, NotFoundError, PeerError
from asyncckpt.format.strict_json import dumps, loads
from asyncckpt.storage.directory import Directory

ROSTER_BYTES_MAX = 16 << 20
_HINT = "one process that saves all shards, one after the other, says RankOptions(in_turn=True)"


# What this process, as rank 0, has made: several of its Savers may share a directory. Without a lock, for finalizers
# remove sessions: each use of a set is one operation, of which no other one sees a part.
_sessions: set[str] = set()  # Not yet removed: no sweep takes them.
_tokens: set[str] = set()  # Named by a roster: a slow rank may leave such a hello once more; it must not count again.


def make_session(root: Directory, *, ranks_count: int, deadline_s: float) -> str:
    """Gather the ranks, as rank 0, which holds the lock of the directory `root`; return the name of the session.

    PeerError naming the ranks that did not come within `deadline_s` seconds; ConflictError when several processes
    claim to be the same rank.
    """
    until = time.monotonic() + deadline_s
    root.child(RANKS_DIR, create=True).close()
    sweep_sessions(root)
    tokens = _gather(root, ranks_count=ranks_count, deadline_s=deadline_s, until=until)
    session = new_session_name()
    _sessions.add(session)
    _tokens.update(tokens.values())
    with _opened(root) as ranks:
        try:
            with ranks.make_folder(session) as folder:
                for name in (PUT_DIR, GONE_DIR, *map(inbox_dir, range(ranks_count))):
                    folder.make_folder(name).close()
                write_whole(folder, ROSTER, dumps({str(rank): token for rank, token in tokens.items()}))
        except BaseException:
            remove_session(ranks, session)
            raise
    return session


def join_session(root: Directory, *, rank: int, ranks_count: int, deadline_s: float) -> str:
    """Return, on the other ranks, the name of the session that rank 0 has made for this process.

    PeerError when it has made none within `deadline_s` seconds.
    """
    until = time.monotonic() + deadline_s
    hello = Hello(rank, ranks_count, uuid.uuid4().hex)
    root.child(RANKS_DIR, create=True).close()
    pauses = new_pauses()
    try:
        while True:
            with _opened(root) as ranks:
                session = _session_of(ranks, hello)
                if session is not None:
                    return session
                if not ranks.exists(hello.name):
                    os.close(ranks.create_file(hello.name)[0])  # The name says all.
            if not pauses.pause(until):
                cause = f"it has made no session for this rank in {str(root.path)!r} within {deadline_s:.1f} s"
                raise PeerError("no channel to rank 0", rank=0, cause=cause)
    finally:
        with contextlib.suppress(CheckpointError), _opened(root) as ranks:
            ranks.remove_file(hello.name)


def remove_session(ranks: Directory, session: str) -> None:
    """Remove a session and all in it, as rank 0. What cannot be removed is swept by the next job."""
    with contextlib.suppress(CheckpointError, OSError):
        _remove(ranks, session)
    _sessions.discard(session)


@contextlib.contextmanager
def _opened(root: Directory) -> Iterator[Directory]:
    """Reopen the folder of the ranks: on NFS that is what makes it show what others have written."""
    with root.child(RANKS_DIR) as ranks:
        yield ranks


def sweep_sessions(root: Directory) -> int:
    """Remove what earlier jobs have left; return how many sessions. For whoever holds the lock of the directory `root`.

    What cannot be removed is in nobody's way.
    """
    live, count = set(_sessions), 0
    with contextlib.suppress(CheckpointError), _opened(root) as ranks:
        for name in ranks.names():
            if is_session(name) and name not in live:
                with contextlib.suppress(CheckpointError, OSError):
                    _remove(ranks, name)
                    count += 1
            elif hello_of(name) is not None:
                with contextlib.suppress(CheckpointError):
                    ranks.remove_file(name)
    return count


def _remove(ranks: Directory, session: str) -> None:
    """Roster first, so that nobody joins what is going away."""
    with ranks.child(session) as folder:
        folder.remove_file(ROSTER)
        for name in folder.names():
            try:
                folder.remove_folder(name)
            except CorruptError:
                folder.remove_file(name)  # No folder, and a symbolic link is not followed.
    ranks.remove_folder(session)


def _gather(root: Directory, *, ranks_count: int, deadline_s: float, until: float) -> dict[int, str]:
    """Return the token of every other rank."""
    pauses = new_pauses()
    contested: set[int] = set()
    while True:
        with _opened(root) as ranks:
            hellos = [hello for name in ranks.names() if (hello := hello_of(name)) is not None]
            hellos = [hello for hello in hellos if hello.token not in _tokens]
            tokens: defaultdict[int, list[str]] = defaultdict(list)
            for hello in hellos:
                if hello.ranks_count == ranks_count and 0 < hello.rank < ranks_count:
                    tokens[hello.rank].append(hello.token)
            twice = sorted(rank for rank, found in tokens.items() if len(found) > 1)
            if len(tokens) == ranks_count - 1 and not twice:
                return {rank: found[0] for rank, found in tokens.items()}
            if not pauses.pause(until):
                missing = [rank for rank in range(1, ranks_count) if rank not in tokens]
                where = f"in {str(root.path)!r} within {deadline_s:.1f} s"
                if contested and contested.issuperset(missing):
                    raise ConflictError(
                        f"several processes claim to be rank {min(contested)} {where}",
                        hint="give every process its own shard_index",
                    )
                raise _missing(missing, hellos, where, ranks_count=ranks_count)
            contested.update(twice)
            for hello in hellos:
                if hello.rank in twice:
                    ranks.remove_file(hello.name)  # Those that live come again.


def _missing(missing: list[int], hellos: list[Hello], where: str, *, ranks_count: int) -> PeerError:
    others = sorted({hello.ranks_count for hello in hellos} - {ranks_count})
    shown = f"{missing[:8]}" + (" and more" if len(missing) > 8 else "")
    return PeerError(
        "some ranks did not come",
        rank=missing[0],
        cause=f"ranks {shown} of {ranks_count} did not come {where}",
        hint=f"others came that count {others} ranks: shard_num must be alike" if others else _HINT,
    )


def _session_of(ranks: Directory, hello: Hello) -> str | None:
    """Return the session that names this process, if there is one. Other entries are ignored."""
    for name in filter(is_session, ranks.names()):
        try:
            with ranks.child(name) as folder:
                roster = loads(read_whole(folder, ROSTER, bytes_max=ROSTER_BYTES_MAX), owner=f"roster of {name}")
        except (NotFoundError, CorruptError):
            continue  # Not yet, not any more, or not one.
        if isinstance(roster, dict) and roster.get(str(hello.rank)) == hello.token:
            return name
    return None

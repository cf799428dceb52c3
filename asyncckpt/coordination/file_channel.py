"""A channel over files below the checkpoint directory, for ranks that share nothing else.

One file a message, in the folder of its reader (session_files.py), also for what goes to all; readers look again and
again, with pauses that grow to PAUSE_S_MAX. Folders are reopened for every look, for that is what makes NFS show what
others have written. How the ranks find each other: rendezvous.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator

from asyncckpt.coordination.channel import check_own_process, close_at_exit
from asyncckpt.coordination.rendezvous import join_session, make_session, remove_session
from asyncckpt.coordination.session_files import (
    GONE_DIR,
    PUT_DIR,
    RANKS_DIR,
    MessageName,
    call_of_put,
    gone_name,
    inbox_dir,
    message_of,
    new_pauses,
    put_name,
    read_whole,
    write_whole,
)
from asyncckpt.errors import CheckpointError, DeadlineError, IOFailedError, NotFoundError, PeerError
from asyncckpt.signals import Guard
from asyncckpt.storage.directory import Directory

# How long rank 0 keeps the session for others that have not closed yet.
CLOSE_S_MAX = 2.0
DATA_BYTES_MAX = 4 << 30


def open_file_channel(root: Directory, *, rank: int, ranks_count: int, deadline_s: float) -> FileChannel:
    """Open a channel between ranks that all write into the checkpoint directory `root`, which stays the caller's.

    Every rank calls this, in the same order where there are several channels; rank 0 only while it holds the lock of
    the directory. It returns when all ranks have come: PeerError naming those that have not, after `deadline_s`
    seconds; ConflictError when several processes claim to be one rank.
    """
    assert 0 <= rank < ranks_count
    if rank == 0:
        session = make_session(root, ranks_count=ranks_count, deadline_s=deadline_s)
    else:
        session = join_session(root, rank=rank, ranks_count=ranks_count, deadline_s=deadline_s)
    with contextlib.ExitStack() as opened:
        try:
            ranks = opened.enter_context(root.child(RANKS_DIR))
            folder = opened.enter_context(ranks.child(session))
        except NotFoundError as error:
            raise PeerError("no channel to rank 0", rank=0, cause="it has ended its session") from error
        opened.pop_all()
    return FileChannel(ranks, folder, rank=rank, ranks_count=ranks_count)


class _Call:
    """What this rank knows of one call: numbers for what it sends to each rank, and how much of each it has read."""

    def __init__(self, ranks_count: int) -> None:
        self.pauses = new_pauses()
        self.numbers = [itertools.count() for _ in range(ranks_count)]
        self.read_counts: defaultdict[int, int] = defaultdict(int)


class FileChannel:
    """One rank's end; a Channel. Both folders, the one of all sessions and that of this one, belong to it.

    One thread receives, others may send at the same time.
    """

    def __init__(self, ranks: Directory, session: Directory, *, rank: int, ranks_count: int) -> None:
        self.rank = rank
        self.ranks_count = ranks_count
        self._ranks = ranks
        self._session = session
        self._closed = False
        self._pid = os.getpid()
        self._guard = Guard()
        self._calls: dict[int, _Call] = {}
        close_at_exit(self)

    def send(self, call: int, to: int | None, message: bytes) -> None:
        assert to is not None or self.rank == 0, "only rank 0 speaks to all"
        state = self._call(call)
        for reader in [to] if to is not None else range(1, self.ranks_count):
            name = MessageName(call, self.rank, next(state.numbers[reader])).name
            with self._opened(inbox_dir(reader)) as folder:
                write_whole(folder, name, message)

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        until = time.monotonic() + timeout_s
        pauses = self._call(call).pauses
        while True:
            if pauses.are_over():
                messages = self._look(call)
                if messages:
                    pauses.something_came()
                    return messages
                pauses.nothing_came()
            if not pauses.wait_until(until):
                return []

    def put(self, call: int, name: str, data: bytes) -> None:
        with self._opened(PUT_DIR) as folder:
            write_whole(folder, put_name(call, name), data)

    def get(self, call: int, name: str, timeout_s: float) -> bytes:
        until = time.monotonic() + timeout_s
        pauses = new_pauses()
        while True:
            data = self.find(call, name, timeout_s)
            if data is not None:
                return data
            if not pauses.pause(until):
                raise DeadlineError(f"{name!r} of call {call} did not come within {timeout_s} s")

    def find(self, call: int, name: str, timeout_s: float) -> bytes | None:
        with self._opened(PUT_DIR) as folder, contextlib.suppress(NotFoundError):
            return read_whole(folder, put_name(call, name), bytes_max=DATA_BYTES_MAX)
        return None

    def forget(self, call: int) -> None:
        with self._guard:
            for known in [known for known in self._calls if known <= call]:
                del self._calls[known]
        with self._opened(inbox_dir(self.rank)) as folder:
            for name in folder.names():
                message = message_of(name)
                if message is not None and message.call <= call:
                    folder.remove_file(name)
        if self.rank == 0:
            with self._opened(PUT_DIR) as folder:
                for name in folder.names():
                    of_call = call_of_put(name)
                    if of_call is not None and of_call <= call:
                        folder.remove_file(name)

    def close(self) -> None:
        """Say that this rank is gone. Rank 0 keeps the session until all are, or CLOSE_S_MAX has passed.

        In a forked child, which is not a rank, only the folders are closed.
        """
        if self._closed:
            return
        self._closed = True
        if self._pid == os.getpid():
            self._leave()
        self._session.close()
        self._ranks.close()

    def _leave(self) -> None:
        with contextlib.suppress(CheckpointError):
            if self.rank == 0:
                self._wait_for_others()
            else:
                with self._opened(GONE_DIR) as folder:
                    write_whole(folder, gone_name(self.rank), b"")
        if self.rank == 0:
            remove_session(self._ranks, self._session.path.name)

    def _call(self, call: int) -> _Call:
        with self._guard:
            if call not in self._calls:
                self._calls[call] = _Call(self.ranks_count)
            return self._calls[call]

    def _look(self, call: int) -> list[tuple[int, bytes]]:
        """Return new messages, from each sender only consecutive ones: a listing that is made while files come may show
        the later one of two alone."""
        read_counts = self._call(call).read_counts
        found: list[tuple[int, bytes]] = []
        with self._opened(inbox_dir(self.rank)) as folder:
            names = [message for name in folder.names() if (message := message_of(name)) is not None]
            new = [name for name in names if name.call == call and name.number >= read_counts[name.sender]]
            for name in sorted(new, key=lambda name: name.number):
                if name.number == read_counts[name.sender]:
                    found.append((name.sender, read_whole(folder, name.name, bytes_max=DATA_BYTES_MAX)))
                    read_counts[name.sender] += 1
                    with contextlib.suppress(IOFailedError):  # It is not read again in any case.
                        folder.remove_file(name.name)
        return found

    def _wait_for_others(self) -> None:
        until = time.monotonic() + CLOSE_S_MAX
        pauses = new_pauses()
        expected = {gone_name(rank) for rank in range(1, self.ranks_count)}
        while True:
            with self._opened(GONE_DIR) as folder:
                if expected <= set(folder.names()):
                    return
            if not pauses.pause(until):
                return

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[Directory]:
        """Open a folder of the session; PeerError when the session is gone, which only rank 0 takes away."""
        check_own_process(self._pid)
        try:
            folder = self._session.child(name)
        except (NotFoundError, IOFailedError) as error:
            if self.rank == 0 or self._session.fd < 0:
                raise IOFailedError(f"the channel of rank {self.rank} is gone: {error.what}") from error
            raise PeerError("the channel to rank 0 is gone", rank=0, cause="it has ended its session") from error
        with folder:
            yield folder

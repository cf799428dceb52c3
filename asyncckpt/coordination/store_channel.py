"""A channel over a TCPStore of our own: the ranks of a process group, whatever its backend.

The process of rank 0 serves the store, so the channel lives as long as rank 0 does. What is in the store:
rank_store.py.

A send is two writes that wait for no answer. A look is one question: both logs at once. Nobody waits inside the store
(that would hold its connection and, when it ends, fill the log with stacks): ranks look again and again, with pauses
that grow to 50 ms, and with many ranks further, so that all looks together stay below LOOKS_PER_S at the server.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

from asyncckpt.coordination.channel import FIRST_S, Pauses, check_own_process, close_at_exit
from asyncckpt.coordination.rank_store import (
    Answer,
    Inbox,
    LineBroken,
    StoreLine,
    default_store,
    delete_value,
    drop_log,
    find_value,
    log_entry,
    log_key,
    message_key,
    pieces_count,
    put_key,
    write_value,
)
from asyncckpt.coordination.store_address import connect_to_announced, leave_cause, serve_for
from asyncckpt.errors import CheckpointError, DeadlineError, IOFailedError, PeerError, UsageError
from asyncckpt.model.own_rank import rank_in_group
from asyncckpt.signals import Guard

T = TypeVar("T")

PAUSE_S_MAX = 0.05
LOOKS_PER_S = 4000.0
# How long rank 0 keeps the store up for others that have not closed yet (more, where they look more rarely), and how
# long a close waits for its own line.
CLOSE_S_MAX = 2.0
_GONE = "gone"


def open_store_channel(process_group: Any, *, deadline_s: float) -> StoreChannel:
    """Open a channel between the ranks of a process group of torch.distributed (None: the default group).

    Every rank of the group calls this, in the same order where there are several; each call makes a channel of its own.
    Rank and number of ranks are those of the group. Rank 0 returns at once, the others when they have reached it:
    PeerError when that takes longer than `deadline_s` seconds. UsageError without a process group, and in a child
    that was forked from a rank.
    """
    found = rank_in_group(process_group)
    if found is None:
        raise UsageError("torch.distributed has no process group", hint="call torch.distributed.init_process_group")
    rank, ranks_count = found
    dist: Any = import_module("torch.distributed")
    inner = dist.distributed_c10d
    group = process_group if process_group is not None else inner._get_default_group()
    until = time.monotonic() + deadline_s
    place = dist.PrefixStore(f"asyncckpt/{group.group_name}", default_store())
    serving = partial(serve_for, place, timeout_s=deadline_s)
    line = StoreLine(serving if rank == 0 else partial(connect_to_announced, place, rank=rank, until=until))
    try:
        ready = line.ask(lambda store: None)
        # The thread counts the same deadline; a little more, so that its own words are heard.
        if not ready.wait(until - time.monotonic() + 1.0):
            raise PeerError("no channel to rank 0", rank=0, cause=f"no store answers within {deadline_s} s")
        ready.result()
    except LineBroken as error:
        line.hang_up()
        if isinstance(error.__cause__, CheckpointError):
            raise error.__cause__ from None
        raise PeerError("no channel to rank 0", rank=0, cause=str(error)) from error.__cause__
    except BaseException:
        line.hang_up()
        raise
    return StoreChannel(line, rank=rank, ranks_count=ranks_count, place=place)


@dataclass
class _Call:
    """What this rank knows of one call. keys: what it shall delete in the end, with the number of further pieces."""

    inbox: Inbox
    pauses: Pauses
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    looking: Answer[list[tuple[int, bytes]]] | None = None
    keys: dict[str, int] = field(default_factory=dict)


class StoreChannel:
    """One rank's end; a Channel. The line belongs to it. One thread receives, others may send at the same time.

    place: where in the default store the ranks have met.
    """

    def __init__(self, line: StoreLine, *, rank: int, ranks_count: int, place: Any = None) -> None:
        self.rank = rank
        self.ranks_count = ranks_count
        self._line = line
        self._place = place
        self._closed = False
        self._pid = os.getpid()
        self._guard = Guard()
        self._calls: dict[int, _Call] = {}
        close_at_exit(self)

    def send(self, call: int, to: int | None, message: bytes) -> None:
        assert to is not None or self.rank == 0, "only rank 0 speaks to all"
        assert to is None or 0 <= to < self.ranks_count
        state = self._call(call)
        number = next(state.numbers)
        key = message_key(call, to, sender=self.rank, number=number)
        pieces = pieces_count(message)
        if to is None:
            state.keys[key] = pieces  # It stays: nobody knows when all have read it.

        def write(store: Any) -> None:
            write_value(store, key, message)
            store.append(log_key(call, to), log_entry(sender=self.rank, number=number, pieces=pieces))

        self._ask(write)

    def receive(self, call: int, timeout_s: float) -> list[tuple[int, bytes]]:
        until = time.monotonic() + timeout_s
        state = self._call(call)
        while True:
            if state.looking is None and state.pauses.are_over():
                state.looking = self._ask(state.inbox.look)
            if state.looking is not None:
                if not state.looking.wait(until - time.monotonic()):
                    return []  # The answer will be there for the next receive.
                looked, state.looking = state.looking, None
                messages = self._result(looked)
                if messages:
                    state.pauses.something_came()
                    return messages
                state.pauses.nothing_came()
            if not state.pauses.wait_until(until):
                return []

    def put(self, call: int, name: str, data: bytes) -> None:
        key = put_key(call, name)
        self._call(call).keys[key] = pieces_count(data)
        self._ask(lambda store: write_value(store, key, data))

    def get(self, call: int, name: str, timeout_s: float) -> bytes:
        key = put_key(call, name)
        keys = self._call(call).keys  # Whoever puts it may be gone when it is forgotten.
        until = time.monotonic() + timeout_s
        pauses = self._new_pauses()
        while True:
            looking = self._ask(lambda store: find_value(store, key))
            if not looking.wait(until - time.monotonic()):
                break
            data = self._result(looking)
            keys[key] = pieces_count(data or b"")
            if data is not None:
                return data
            if not pauses.pause(until):
                break
        raise DeadlineError(f"{name!r} of call {call} did not come within {timeout_s} s")

    def find(self, call: int, name: str, timeout_s: float) -> bytes | None:
        key = put_key(call, name)
        looking = self._ask(lambda store: find_value(store, key))
        if not looking.wait(timeout_s):
            raise PeerError("no word from rank 0", rank=0, cause=f"its channel did not answer within {timeout_s:g} s")
        return self._result(looking)

    def forget(self, call: int) -> None:
        with self._guard:
            states = {known: self._calls.pop(known) for known in sorted(self._calls) if known <= call}
        # Ranks that are gone forget nothing, and others are later than rank 0: it drops what any of them has not read.
        others = () if self.rank else range(1, self.ranks_count)

        def drop(store: Any) -> None:
            for known, state in states.items():
                state.inbox.drop(store)
                for key, pieces in state.keys.items():
                    delete_value(store, key, pieces=pieces)
                store.delete_key(log_key(known, None))
                for rank in others:
                    drop_log(store, known, rank)

        self._ask(drop)

    def leave_cause(self, cause: str) -> None:
        """Say, as rank 0, to ranks that come later why this channel, the newest of its group, is closed at once."""
        with contextlib.suppress(LineBroken):
            self._line.ask(lambda _: leave_cause(self._place, cause)).wait(CLOSE_S_MAX)

    def close(self) -> None:
        """Say that this rank is gone. Rank 0 keeps the store up until all are, or CLOSE_S_MAX has passed.

        Does nothing in a forked child, which is not a rank, and has no thread that speaks to the store.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        with contextlib.suppress(LineBroken):
            if self.rank == 0:
                self._wait_for_others()
            else:
                self._line.ask(lambda store: store.append(_GONE, b"\1")).wait(CLOSE_S_MAX)
        self._line.hang_up()

    def _wait_for_others(self) -> None:
        def gone_count(store: Any) -> int:
            store.append(_GONE, b"")
            return len(store.get(_GONE))

        until = time.monotonic() + CLOSE_S_MAX + 2 * self._look_s()
        pauses = Pauses(pause_s_max=PAUSE_S_MAX)
        while True:
            asked = self._line.ask(gone_count)
            if not asked.wait(until - time.monotonic()) or asked.result() >= self.ranks_count - 1:
                return
            if not pauses.pause(until):
                return

    def _call(self, call: int) -> _Call:
        with self._guard:
            if call not in self._calls:
                self._calls[call] = _Call(Inbox(call, self.rank), self._new_pauses())
            return self._calls[call]

    def _new_pauses(self) -> Pauses:
        # Rank 0 is alone at its inbox; the others share the server.
        share_s = self._look_s() if self.rank else 0.0
        return Pauses(pause_s_max=max(PAUSE_S_MAX, share_s), first_s=max(FIRST_S, share_s / 8))

    def _look_s(self) -> float:
        """Return the seconds between two looks of a rank when all look."""
        return self.ranks_count / LOOKS_PER_S

    def _ask(self, call: Callable[[Any], T]) -> Answer[T]:
        check_own_process(self._pid)
        with self._broken_line():
            if self._closed:
                raise LineBroken("it was closed")
            return self._line.ask(call)

    def _result(self, answer: Answer[T]) -> T:
        with self._broken_line():
            return answer.result()

    @contextlib.contextmanager
    def _broken_line(self) -> Iterator[None]:
        try:
            yield
        except LineBroken as error:
            if self.rank == 0 or self._closed:
                raise IOFailedError(f"the channel of rank {self.rank} is gone: {error}") from error
            raise PeerError("the channel to rank 0 is gone", rank=0, cause=str(error)) from error

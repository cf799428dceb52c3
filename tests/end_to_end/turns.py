"""Processes none of whose locks work, as threads of one: at each operation of the storage somebody else may go on."""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import asyncckpt
from asyncckpt.commit import removal, retention
from asyncckpt.commit.attempt import Claims
from asyncckpt.commit.discover import KnownHeads
from asyncckpt.commit.removal import sweep
from asyncckpt.commit.retention import retain
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.storage.directory import Directory

WAIT_S_MAX = 60.0
# What others may come before: all that looks at names, or changes them.
OPERATIONS = (
    *("names", "exists", "has", "check_file", "read_file"),
    *("publish", "move", "create_file", "remove_file", "remove_folder"),
)


class OfEach:
    """A lock, or a set, of which every process has its own."""

    def __init__(self, who: Callable[[], int], kind: Callable[[], Any]) -> None:
        self._who = who
        self._own = [kind() for _ in range(2)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own[self._who()], name)

    def __contains__(self, item: object) -> bool:
        return item in self._own[self._who()]

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Turns:
    """Who runs when: (process, operations), and at the end all that are left, each to its end.

    Process 0 writes; 1 sweeps and keeps `keep` steps. sweeps: False: it has swept before. Each time somebody else goes
    on, LOCK is removed.
    made: the operations of each.
    """

    def __init__(self, path: Path, turns: Sequence[tuple[int, float]], *, keep: int, sweeps: bool = True) -> None:
        self._path, self._keep, self._sweeps = path, keep, sweeps
        others = sorted({who for who, _ in turns} - {0})
        self._turns = [[who, count] for who, count in [*turns, *((who, math.inf) for who in (0, *others))]]
        self._threads = {who: threading.Thread(target=self._retain, args=[who]) for who in others}
        self._changed = threading.Condition()
        self.made: list[list[str]] = [[], []]

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Run what process 0 does in here; the others run when it is their turn, and have ended behind it."""
        needed = Claims.needed
        with pytest.MonkeyPatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(Directory, name, self._in_turn(name, getattr(Directory, name)))
            patch.setattr(os, "fsync", lambda _: None)
            patch.setattr(Claims, "needed", lambda *who: set() if self._who() else needed(*who))
            patch.setattr(retention, "_retaining", OfEach(self._who, threading.Lock))
            patch.setattr(removal, "under_way", OfEach(self._who, set))
            for thread in self._threads.values():
                thread.start()
            try:
                yield
            finally:
                self._end(0)
                for thread in self._threads.values():
                    thread.join(WAIT_S_MAX)
                    assert not thread.is_alive()

    def _who(self) -> int:
        return next((who for who, thread in self._threads.items() if thread is threading.current_thread()), 0)

    def _in_turn(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any, **options: Any) -> Any:
            self._wait_for_turn(name)
            return plain(*arguments, **options)

        return operation

    def _wait_for_turn(self, name: str) -> None:
        me = self._who()
        with self._changed:
            while True:
                assert self._changed.wait_for(lambda: self._turns[0][0] == me, WAIT_S_MAX)
                if self._turns[0][1] > 0:
                    break
                self._turns.pop(0)
                (self._path / LOCK_NAME).unlink(missing_ok=True)
                self._changed.notify_all()
            self._turns[0][1] -= 1
            self.made[me].append(name)

    def _end(self, me: int) -> None:
        with self._changed:
            self._turns = [turn for turn in self._turns if turn[0] != me]
            self._changed.notify_all()

    def _retain(self, me: int) -> None:
        try:
            with CheckpointRoot.for_reading(self._path) as root:
                if self._sweeps:
                    sweep(root, KnownHeads(root))
                retain(root, KnownHeads(root), asyncckpt.KeepPolicy(latest=self._keep))
        except asyncckpt.CheckpointError:
            pass  # It finds what the others are about.
        finally:
            self._end(me)

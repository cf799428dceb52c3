"""A forked child touches nothing of its parent's, however it ends: no files, sessions, sockets, threads or saves."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import asyncckpt
from asyncckpt.model.write_block import WriteBlock
from tests.ranks.processes import await_ranks, start_rank
from tests.shares import share_of

DEADLINE_S = 200.0
CHILD_S_MAX = 15.0


@pytest.mark.parametrize("kind", share_of(["alone", "files", "group"], "children"))
def test_a_child_leaves_everything_to_its_parent(tmp_path: Path, kind: str) -> None:
    """child_ends.py says what is in flight."""
    ranks_count = 1 if kind == "alone" else 2
    arguments = [(rank, ranks_count, tmp_path, kind) for rank in range(ranks_count)]
    ranks = [start_rank("tests.interrupts.child_ends", given, tmp_path) for given in arguments]
    ended = await_ranks(ranks, DEADLINE_S)
    assert [rank.status for rank in ended] == [0] * ranks_count, "\n".join(rank.output for rank in ended)
    assert asyncckpt.list_steps(tmp_path / "run") == list(range(8)), "a save beside children failed"
    asyncckpt.verify(tmp_path / "run", 0)
    assert list((tmp_path / "run").glob("ranks/s-*")) == [], "the parent has ended its session"


CALLS: dict[str, Callable[[asyncckpt.Saver], object]] = {
    "save": lambda saver: saver.save(1),
    "save_async behind another one": lambda saver: (saver.save_async(1), saver.save_async(2, on_busy="wait")),
    "result": lambda saver: saver.save_async(1).result(),
    "wait_idle": lambda saver: (saver.save_async(1), saver.wait_idle()),
    "close": lambda saver: (saver.save_async(1), saver.close()),
    "load": lambda saver: (saver.save_async(1), asyncckpt.load(saver.path)),
}


@pytest.mark.parametrize("kind", share_of(list(CALLS), "children of handlers"))
def test_a_child_of_a_signal_handler_does_not_wait_for_what_its_parent_awaits(tmp_path: Path, kind: str) -> None:
    """It returns from the handler into the wait, and the threads that would end that are not there."""
    parent, main = os.getpid(), threading.main_thread().ident
    assert main is not None
    children: queue.SimpleQueue[int] = queue.SimpleQueue()
    codes: list[int] = []

    def fork_in_the_wait(blocks: list[WriteBlock]) -> list[WriteBlock]:
        if not codes:
            until = time.monotonic() + DEADLINE_S
            while not is_in(main, ("wait_in_steps", "_await_turn")) and time.monotonic() < until:
                threading.Event().wait(0.001)
            signal.pthread_kill(main, signal.SIGUSR1)
            codes.append(end_of(children.get(timeout=DEADLINE_S)))
        return blocks

    def fork(*_: object) -> None:
        child = os.fork()
        if child:
            children.put(child)

    before = signal.signal(signal.SIGUSR1, fork)
    try:
        with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}, filter_func=fork_in_the_wait) as saver:
            try:
                CALLS[kind](saver)
            except BaseException as error:
                if os.getpid() == parent:
                    raise
                os._exit(0 if isinstance(error, asyncckpt.UsageError) else 1)
            finally:
                if os.getpid() != parent:
                    os._exit(2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert codes == [0]


def test_a_child_is_refused_by_a_saver_without_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of another rank than 0, or in a store. What writes is refused by a lock or a channel, where there is one."""
    with asyncckpt.Saver(path=tmp_path, tensors={"x": torch.zeros(3)}) as saver:
        with monkeypatch.context() as patch:
            patch.setattr(saver, "_lock", None)
            child = os.fork()
            if not child:
                try:
                    saver.prepare()
                except asyncckpt.UsageError as error:
                    os._exit(0 if "belongs to the parent process" in str(error) else 1)
                finally:
                    os._exit(2)
        assert end_of(child) == 0
        assert saver.save(2).step == 2
    assert asyncckpt.list_steps(tmp_path) == [2]


def is_in(thread: int, functions: Sequence[str]) -> bool:
    """Return whether a thread is in one of these functions."""
    stack = traceback.walk_stack(sys._current_frames()[thread])
    return any(frame.f_code.co_name in functions for frame, _ in stack)


def end_of(child: int) -> int:
    """Return the status of a child, which is ended when it waits too long."""
    until = time.monotonic() + CHILD_S_MAX
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

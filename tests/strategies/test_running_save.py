"""A running save can be waited for on any thread, and in another process too."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from asyncckpt import Saver
from asyncckpt.errors import DeadlineError, IOFailedError, SaveCancelledError, UsageError
from asyncckpt.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from asyncckpt.strategies.running_save import HeldFile, RunningSave, wait_for_release
from asyncckpt.strategies.sharded_state import ShardedSave

pytestmark = pytest.mark.any_core
LONG_S = 60.0


class HeldSave:
    """A save whose filter waits until it is let go."""

    def __init__(self, path: Path, *, error: Exception | None = None, other_processes: bool = False) -> None:
        self.go = threading.Event()
        self._error = error
        saver = Saver(path=path, tensors={"x": torch.ones(3)}, filter_func=self._filter)
        lock = HeldFile() if other_processes else None
        self.running = RunningSave(saver, saver.save_async(), lock=lock, deadline=LONG_S)

    def _filter(self, blocks: list) -> list:
        assert self.go.wait(LONG_S)
        if self._error is not None:
            raise self._error
        return blocks


def in_a_fork(call: Callable[[], object]) -> int:
    """Start a child that calls; returns its process id. It ends with 0 when nothing was raised."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(60)
        call()
        status = 0
    finally:
        os._exit(status)


def has_ended(pid: int) -> bool:
    return os.waitpid(pid, os.WNOHANG) != (0, 0)


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_calling_it_waits_and_closes_the_saver(tmp_path: Path) -> None:
    held = HeldSave(tmp_path / "c")
    held.go.set()
    held.running()
    held.running.result()
    assert held.running.result().step == 0
    Saver(path=tmp_path / "c").close()


def test_what_failed_is_raised_by_the_finalize_function(tmp_path: Path) -> None:
    held = HeldSave(tmp_path / "c", error=ValueError("no"))
    held.go.set()
    held.running()
    with pytest.raises(UsageError, match="no"):
        held.running.result()


def test_what_failed_and_is_never_finalized_is_printed(tmp_path: Path, printed: Callable[[str], str]) -> None:
    held = HeldSave(tmp_path / "c", error=ValueError("no"))
    queue = AsyncCallsQueue()
    queue.schedule_async_request(AsyncRequest(held.running, (), [held.running.result]))
    held.go.set()
    while not queue.async_calls[0].async_caller.is_current_async_call_done():
        time.sleep(0.001)
    del queue, held
    assert "failed and nobody asked: filter" in printed("nobody asked: filter")


def test_it_can_be_cancelled(tmp_path: Path) -> None:
    held = HeldSave(tmp_path / "c")
    assert held.running.cancel()
    held.go.set()
    held.running()
    with pytest.raises(SaveCancelledError):
        held.running.result()


def test_a_forked_process_waits_for_the_end(tmp_path: Path) -> None:
    held = HeldSave(tmp_path / "c", other_processes=True)
    child = in_a_fork(held.running)
    grandchild = in_a_fork(pickle.loads(pickle.dumps(held.running)))
    assert not has_ended(child)
    assert not has_ended(grandchild)
    held.go.set()
    assert exit_status(child) == 0
    assert exit_status(grandchild) == 0
    held.running.result()
    assert not os.path.exists(str(held.running._lock_path))


def test_a_forked_process_waits_for_a_failing_save_too(tmp_path: Path) -> None:
    held = HeldSave(tmp_path / "c", error=ValueError("no"), other_processes=True)
    child = in_a_fork(held.running)
    held.go.set()
    assert exit_status(child) == 0
    with pytest.raises(UsageError, match="no"):
        held.running.result()


def test_a_copy_in_another_process_that_was_not_foreseen_is_refused(tmp_path: Path) -> None:
    held = HeldSave(tmp_path / "c")
    copy = pickle.loads(pickle.dumps(held.running))
    with pytest.raises(UsageError, match="another process"):
        copy()
    held.go.set()
    held.running.result()


def test_waiting_in_another_process_has_a_deadline(tmp_path: Path) -> None:
    held = HeldSave(tmp_path / "c", other_processes=True)

    def wait() -> None:
        with pytest.raises(DeadlineError):
            wait_for_release(str(held.running._lock_path), deadline_s=0.1)

    assert exit_status(in_a_fork(wait)) == 0
    held.go.set()
    held.running.result()


def test_a_file_that_cannot_be_waited_for(tmp_path: Path) -> None:
    wait_for_release(str(tmp_path / "gone"), deadline_s=0.0)
    with pytest.raises(IOFailedError):
        wait_for_release(str(tmp_path), deadline_s=0.0)


def test_no_save_begins_that_other_processes_could_not_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the caller gets an error, and the checkpoint is committed all the same."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    with pytest.raises(IOFailedError):
        ShardedSave(request_type=lambda _: AsyncRequest).async_save({}, tmp_path / "c")
    assert not (tmp_path / "c").exists()

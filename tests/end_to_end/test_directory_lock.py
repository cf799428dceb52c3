"""One writer per directory across processes; forked workers do not keep the lock."""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import asyncckpt
from asyncckpt import system
from asyncckpt.storage import owner_lock

HOLD = """
import sys, asyncckpt, torch
saver = asyncckpt.Saver(path=sys.argv[1], tensors={"w": torch.ones(3)})
saver.save(1)
print("holding", flush=True)
sys.stdin.readline()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process with an open Saver on `path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holding\n"
    return process


def test_second_process_gets_a_clear_error(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    try:
        with pytest.raises(asyncckpt.ConflictError) as caught:
            asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)})
        message = str(caught.value)
        assert str(tmp_path) in message
        assert f"process {holder.pid} on host" in message
        assert "use another directory" in message
        # Reading needs no lock.
        assert asyncckpt.list_steps(tmp_path) == [1]
    finally:
        holder.communicate("\n", timeout=60)
    asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}).close()


def test_lock_vanishes_with_a_killed_process(tmp_path: Path) -> None:
    holder = hold(tmp_path)
    holder.kill()
    holder.wait(60)
    asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}).close()


def test_savers_of_one_process_share_a_directory(tmp_path: Path) -> None:
    one = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)})
    two = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)})
    one.save(1)
    one.close()
    two.save(2)
    two.close()
    assert asyncckpt.list_steps(tmp_path) == [1, 2]


def test_a_lock_that_went_with_its_file_is_shared_with_nobody(tmp_path: Path) -> None:
    """`rm -rf run/*` beside an open Saver: another process may have the directory by now."""
    first = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)})
    (tmp_path / "LOCK").unlink()
    holder = hold(tmp_path)
    try:
        with pytest.raises(asyncckpt.ConflictError, match=f"process {holder.pid} on host"):
            asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)})
    finally:
        holder.communicate("\n", timeout=60)
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}) as second:
        assert second.save(2).step == first.save(3).step - 1
        first.close()
        with pytest.raises(AssertionError):
            hold(tmp_path)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def test_live_dataloader_workers_do_not_keep_the_lock(tmp_path: Path) -> None:
    saver = asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)})
    saver.save(1)
    loader = DataLoader(Numbers(), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    saver.save_async(2).result(60)
    saver.close()
    # The workers are alive and were forked while the lock was held: another process must still get it.
    holder = hold_step(tmp_path)
    assert holder.returncode == 0, holder.stderr
    assert sum(1 for _ in batches) == 63


def hold_step(path: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys, asyncckpt, torch; asyncckpt.Saver(path=sys.argv[1], tensors={'w': torch.ones(3)}).save(3)"
    return subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)


def test_a_saver_that_is_collected_while_a_lock_is_taken_waits_for_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage may be collected anywhere: also where this thread holds what a Saver needs to give its directory back."""

    class Trainer:
        saver: asyncckpt.Saver
        itself: Trainer

    before = set(owner_lock._registry.held)
    trainer = Trainer()
    trainer.saver, trainer.itself = asyncckpt.Saver(path=tmp_path / "first", tensors={"w": torch.ones(3)}), trainer
    write_record, registry = owner_lock._write_record, owner_lock._registry

    def collect_and_write(fd: int) -> None:
        gc.collect()
        write_record(fd)

    monkeypatch.setattr(owner_lock, "_write_record", collect_and_write)
    del trainer
    opened: list[asyncckpt.Saver] = []
    thread = threading.Thread(
        target=lambda: opened.append(asyncckpt.Saver(path=tmp_path / "second", tensors={})), daemon=True
    )
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    opened[0].close()
    assert registry.held.keys() <= before
    assert not registry.released


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"1", b'"x"', b"null", b"[" * 4096, b'{"pid":1}', b"\xff\xfe\x00", b'{"pid":' + b"9" * 4000],
    ids=lambda content: repr(content[:8]),
)
def test_whatever_a_held_lock_says_it_is_held(tmp_path: Path, content: bytes) -> None:
    asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}).close()
    (tmp_path / "LOCK").write_bytes(content)
    holder = os.open(tmp_path / "LOCK", os.O_RDWR)  # A file opened anew is a holder of its own.
    try:
        fcntl.fcntl(holder, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        opened = os.listdir("/proc/self/fd")
        with pytest.raises(asyncckpt.ConflictError, match="is locked by an unknown process"):
            asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)})
        assert os.listdir("/proc/self/fd") == opened
    finally:
        os.close(holder)
    asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}).close()


def test_a_child_forked_while_the_lock_is_taken_does_not_keep_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, between the lock and the note of its descriptor, which tells a child what to close."""
    locked, forked = threading.Event(), threading.Event()
    write_record = owner_lock._write_record

    def wait_and_write(fd: int) -> None:
        locked.set()
        forked.wait(0.3)  # As long as a fork takes, if it does not wait.
        write_record(fd)

    monkeypatch.setattr(owner_lock, "_write_record", wait_and_write)
    savers: list[asyncckpt.Saver] = []
    thread = threading.Thread(
        target=lambda: savers.append(asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}))
    )
    thread.start()
    assert locked.wait(60)
    (end_child, until_end), (begun, begin) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(until_end)
        os.write(begin, b"1")
        os.read(end_child, 1)
        os._exit(0)
    forked.set()
    try:
        assert os.read(begun, 1)
        thread.join(60)
        savers[0].close()
        with open(tmp_path / "LOCK", "r+b") as file:
            fcntl.fcntl(file, system.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        for end in (until_end, end_child, begun, begin):
            os.close(end)
        assert os.waitpid(child, 0)[1] == 0
    with asyncckpt.Saver(path=tmp_path, tensors={"w": torch.ones(3)}) as saver:  # Whoever forks lets the lock go.
        assert saver.save(0).step == 0

"""One writer per checkpoint directory: an OFD lock on `LOCK` (system.py says what else), held while a Saver is open.

OFD locks belong to the open file description: they are released with the last process that holds it, however that
ends, and not when another descriptor of the file is closed. But a forked child (a DataLoader worker) keeps the
description, and so the lock, alive. Therefore every forked child closes the descriptor, and no thread forks while
another one is between opening the file and noting its descriptor.

Several Savers of one process share the lock of a directory (counted by device and inode).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque

from asyncckpt import system
from asyncckpt.errors import ConflictError, UsageError
from asyncckpt.signals import Guard
from asyncckpt.storage.directory import FILE_MODE, Directory, at, io_failed

_RECORD_BYTES_MAX = 4096


class _Registry:
    """The locks of this process: descriptor and number of shares, by device and inode of the directory."""

    def __init__(self) -> None:
        self.guard = Guard()
        self.held: dict[tuple[int, int], tuple[int, int]] = {}
        self.released: deque[tuple[int, int]] = deque()  # Shares that were given back and are still counted.

    def __enter__(self) -> None:
        self.guard.__enter__()

    def __exit__(self, *error: object) -> None:
        try:
            self.guard.__exit__(*error)
        finally:
            self.settle()

    def settle(self) -> None:
        """Count what was released. Waits for nobody: finalizers come here, also on the thread that holds the guard."""
        while self.released and not self.guard.is_held_here() and self.guard.acquire(blocking=False):
            try:
                while self.released:
                    self._release(self.released.popleft())
            finally:
                self.guard.release()

    def _release(self, key: tuple[int, int]) -> None:
        fd, count = self.held[key]
        if count > 1:
            self.held[key] = fd, count - 1
        else:
            del self.held[key]
            with contextlib.suppress(OSError):
                os.close(fd)


_registry = _Registry()


class OwnerLock:
    """A share in this process's lock on one directory."""

    def __init__(self, root: Directory, key: tuple[int, int], name: str) -> None:
        self._root = root
        self._key = key
        self._name = name
        self._released = False
        self._pid = os.getpid()

    @staticmethod
    def acquire(root: Directory, name: str) -> OwnerLock:
        """Lock `name` in `root`. Raises ConflictError, naming the holder, if another process has it."""
        with _registry:
            key = root.identity
            if key in _registry.held:
                _renew(root, name)
            fd, count = _registry.held.get(key) or (_lock_file(root, name), 0)
            _registry.held[key] = fd, count + 1
            return OwnerLock(root, key, name)

    def check(self) -> None:
        """Raise UsageError in a forked child, whose lock was closed at the fork."""
        if self._pid != os.getpid():
            raise UsageError("this Saver belongs to the parent process", hint="make a new Saver in the child")

    def check_held(self) -> None:
        """Ensure that the file of this name in the directory is the one that is locked; lock again if it was removed.

        Raises ConflictError if another process has locked it by now.
        """
        self.check()
        with _registry:
            _renew(self._root, self._name)

    def release(self) -> None:
        """Release the share; the last one unlocks. Never raises, and waits for nobody: finalizers call it."""
        if self._released or self._pid != os.getpid():
            return
        self._released = True
        _registry.released.append(self._key)
        _registry.settle()


def _renew(root: Directory, name: str) -> None:
    """Lock the file again if the one that is locked is not the one of this name any more: see check_held."""
    fd, count = _registry.held[root.identity]
    status = os.fstat(fd)
    if not root.has(name, (status.st_dev, status.st_ino)):
        _registry.held[root.identity] = _lock_file(root, name), count
        os.close(fd)


def _lock_file(root: Directory, name: str) -> int:
    flags = at.O_RDWR | at.O_CREAT | at.O_NOFOLLOW | at.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        try:
            is_new = not root.exists(name)
            fd = at.open(name, flags, FILE_MODE, dir_fd=root.fd)
            opened.callback(os.close, fd)
            if is_new and root.exact_modes:
                at.fchmod(fd, FILE_MODE)
        except OSError as error:
            raise io_failed(f"lock file in {str(root.path)!r} cannot be opened", error) from error
        try:
            system.lock(fd)
        except OSError as error:
            if system.is_locked_elsewhere(error):
                raise ConflictError(
                    f"{str(root.path)!r} is locked by {_read_record(fd)}; only one process may write to a directory",
                    hint="end that process, or use another directory; ranks of one job save together: RankOptions",
                ) from error
            raise io_failed(f"directory {str(root.path)!r} cannot be locked", error) from error
        _write_record(fd)
        opened.pop_all()
    return fd


def _read_record(fd: int) -> str:
    """Return who holds the lock, whatever the file says."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        record = json.loads(system.pread(fd, _RECORD_BYTES_MAX, 0))
        if isinstance(record, dict) and {"pid", "host", "since"} <= record.keys():
            return f"process {record['pid']} on host {record['host']} since {record['since']}"
    return "an unknown process"


def _write_record(fd: int) -> None:
    """Write who holds the lock, for error messages only."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with contextlib.suppress(OSError):
        record = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": since}).encode()
        os.ftruncate(fd, 0)
        system.pwrite(fd, record, 0)


def _forget_in_child() -> None:
    for fd, _ in _registry.held.values():
        with contextlib.suppress(OSError):
            os.close(fd)
    _registry.held.clear()
    _registry.released.clear()


def _end_fork() -> None:
    if _registry.guard.is_held_here():  # An interrupt may have kept `before` from taking it.
        _registry.guard.release()
    _registry.settle()


system.register_at_fork(before=_registry.guard.acquire, after_in_parent=_end_fork, after_in_child=_forget_in_child)

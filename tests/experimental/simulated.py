"""Make this process one of macOS or of Windows, as far as the library can tell, and run tests in it.

    python -m tests.experimental.simulated windows tests/end_to_end/test_round_trip.py ...

What is missing there is taken away, and what behaves otherwise there behaves so here: on Windows, a file that is open
can be neither removed nor replaced, a rename never replaces, a folder cannot be opened, and text is translated unless
a file is opened as a binary one. torch and the modules that it needs are imported before that: these were built for
Linux.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import fcntl
import importlib
import io
import os
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

LINUX_ALONE = {
    os: "O_DIRECT O_PATH O_NOATIME posix_fallocate posix_fadvise memfd_create eventfd pidfd_open splice "
    "copy_file_range RWF_NOWAIT sched_getaffinity sched_setaffinity sched_setscheduler getrandom getxattr setxattr",
    fcntl: "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_ADD_SEALS F_SETPIPE_SZ",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL sigwaitinfo sigtimedwait",
}
UNIX_ALONE = {
    os: "O_CLOEXEC O_NONBLOCK O_NOFOLLOW O_DIRECTORY O_SYNC O_DSYNC O_NOCTTY fork forkpty register_at_fork pread "
    "pwrite preadv pwritev readv writev geteuid getuid getegid getgid getpgid getpgrp setsid killpg statvfs fstatvfs "
    "fchmod fchown chown lchown mkfifo mknod uname nice getloadavg sysconf pathconf sendfile sync "
    "fdatasync lockf posix_spawn",
    signal: "SIGHUP SIGPIPE SIGALRM SIGKILL SIGQUIT SIGUSR1 SIGUSR2 SIGCHLD SIGSTOP SIGBUS SIGTRAP SIGSYS siginterrupt "
    "alarm setitimer pthread_kill pthread_sigmask sigwait sigpending",
}
NOT_ON_WINDOWS = ("fcntl", "resource", "pwd", "grp", "termios", "syslog", "pty")
WINDOWS_SIGNALS = {signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGINT, signal.SIGSEGV, signal.SIGTERM}
O_BINARY = 0x8000
F_FULLFSYNC = 51
IMPORTED_BEFORE = (
    "_pytest.tmpdir",
    "aiofiles",
    "asyncio",
    "hypothesis",
    "multiprocessing.spawn",
    "numpy",
    "psutil",
    "pytest",
)
IMPORTED_BEFORE += (
    "pytest_asyncio",
    "pytest_timeout",
    "safetensors",
    "torch",
    "torch.distributed.checkpoint",
    "xdist",
    "xxhash",
)
PACKAGE = str(Path(__file__).resolve().parents[2] / "asyncckpt")

full_syncs: list[int] = []


def become(name: str) -> None:
    """Make this process one of `name`: "macos" or "windows"."""
    assert not any(module.split(".")[0] == "asyncckpt" for module in sys.modules)
    for module in IMPORTED_BEFORE:
        importlib.import_module(module)
    _take_away(LINUX_ALONE)
    _hide_proc()
    if name == "macos":
        _hide_renameat2()
        _sync_fully()
    else:
        _work_by_paths()
        _refuse_open_files()
        _take_away(UNIX_ALONE)
        _take_away_modules()
        signal.valid_signals = lambda: set(WINDOWS_SIGNALS)


def _take_away(names: dict[ModuleType, str]) -> None:
    for module, text in names.items():
        for name in text.split():
            if hasattr(module, name):
                delattr(module, name)


def _hide_proc() -> None:
    for module in (builtins, io):
        opened: Any = module.open

        def guarded(path: Any, *arguments: Any, _opened: Any = opened, **named: Any) -> Any:
            by_psutil = f"{os.sep}psutil{os.sep}" in sys._getframe(1).f_code.co_filename  # It was built for Linux.
            if str(path).startswith(("/proc/", "/sys/")) and not by_psutil:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return _opened(path, *arguments, **named)

        module.open = guarded  # type: ignore[attr-defined]


# -- macOS -------------------------------------------------------------------------------------------------------------


def _hide_renameat2() -> None:
    class Library(ctypes.CDLL):
        def __getattr__(self, name: str) -> Any:
            if name == "renameat2":
                raise AttributeError(name)
            return super().__getattr__(name)

    ctypes.CDLL = Library  # type: ignore[misc]


def _sync_fully() -> None:
    control = fcntl.fcntl

    def fcntl_(fd: int, command: int, argument: Any = 0) -> Any:
        if command == F_FULLFSYNC:
            full_syncs.append(fd)
            return os.fsync(fd)
        return control(fd, command, argument)

    fcntl.F_FULLFSYNC = F_FULLFSYNC  # type: ignore[attr-defined]
    fcntl.fcntl = fcntl_


# -- Windows -----------------------------------------------------------------------------------------------------------


def _work_by_paths() -> None:
    for known in (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd):
        known.clear()
    shutil._use_fd_functions = shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
    shutil.disk_usage = partial(_disk_usage, os.statvfs)  # type: ignore[assignment]
    for name in ("stat", "mkdir", "rmdir", "link", "chmod", "access", "utime", "readlink", "symlink"):
        setattr(os, name, _without_descriptors(getattr(os, name)))
    os.listdir = _without_descriptors(os.listdir)
    opened, synced, control = os.open, os.fsync, fcntl.fcntl

    def open_(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        _check_no_descriptor(path, dir_fd)
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        if sys._getframe(1).f_code.co_filename.startswith(PACKAGE):
            assert flags & O_BINARY, f"{path} is opened as text"
        return opened(path, flags & ~O_BINARY, mode)

    def fsync(fd: int) -> None:
        if control(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        synced(fd)

    os.open, os.fsync, os.O_BINARY = open_, fsync, O_BINARY  # type: ignore[attr-defined]


def _check_no_descriptor(path: object, *descriptors: object) -> None:
    if isinstance(path, int):
        raise TypeError("path should be string, bytes, os.PathLike or None, not int")
    if any(descriptor is not None for descriptor in descriptors):
        raise NotImplementedError("dir_fd unavailable on this platform")


def _without_descriptors(call: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(path: Any = ".", *arguments: Any, **named: Any) -> Any:
        _check_no_descriptor(
            path, *(named.get(name) for name in ("dir_fd", "src_dir_fd", "dst_dir_fd", "effective_ids"))
        )
        return call(path, *arguments, **named)

    return wrapped


def _open_places(
    path: Any, listed: Callable[..., list[str]] = os.listdir, link: Callable[..., str] = os.readlink
) -> list[str]:
    """What this process has open at or below a path."""
    found, place = [], os.path.realpath(path)
    for fd in listed("/proc/self/fd"):
        try:
            target = link(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target == place or target.startswith(place + os.sep):
            found.append(target)
    return found


def _disk_usage(statvfs: Callable[[Any], Any], path: Any) -> SimpleNamespace:
    """What `shutil` says of a disk."""
    found = statvfs(path)
    return SimpleNamespace(free=found.f_bavail * found.f_frsize)


def _refuse_open_files() -> None:
    unlink, rename, replace = os.unlink, os.rename, os.replace

    def check(*paths: Any) -> None:
        is_ours = sys._getframe(2).f_code.co_filename.startswith(PACKAGE)  # Not what Python itself does on Linux.
        for path in paths:
            if is_ours and _open_places(path):
                raise PermissionError(errno.EACCES, "it is being used by another process", path)

    def unlink_(path: Any, *, dir_fd: int | None = None) -> None:
        _check_no_descriptor(path, dir_fd)
        check(path)
        unlink(path)

    def rename_(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        _check_no_descriptor(source, src_dir_fd, dst_dir_fd)
        check(source)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        rename(source, target)

    def replace_(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
        _check_no_descriptor(source, src_dir_fd, dst_dir_fd)
        check(source, target)
        if os.path.isdir(target):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), target)
        replace(source, target)

    os.unlink = os.remove = unlink_
    os.rename, os.replace = rename_, replace_


def _take_away_modules() -> None:
    control, record_lock, set_lock = fcntl.fcntl, fcntl.F_WRLCK, 37

    class Msvcrt(ModuleType):
        LK_UNLCK, LK_LOCK, LK_NBLCK = 0, 1, 2

        @staticmethod
        def locking(fd: int, mode: int, count: int) -> None:
            assert mode == Msvcrt.LK_NBLCK
            begin = os.lseek(fd, 0, os.SEEK_CUR)
            try:
                control(fd, set_lock, struct.pack("hhqqi4x", record_lock, os.SEEK_SET, begin, count, 0))
            except OSError as error:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from error

    def no_library(name: str | None = None, *_: Any, **__: Any) -> Any:
        assert name is not None, "TypeError: argument of type 'NoneType' is not iterable"
        raise OSError(f"Could not find module {name!r}")

    sys.modules["msvcrt"] = Msvcrt("msvcrt")
    for name in NOT_ON_WINDOWS:
        sys.modules[name] = None  # type: ignore[assignment]
    ctypes.CDLL = ctypes.PyDLL = no_library  # type: ignore[misc, assignment]


class Platform:
    """A plugin: `sys.platform` changes when pytest has set itself up, which it does by what it really runs on."""

    def __init__(self, name: str) -> None:
        self.name = {"macos": "darwin", "windows": "win32"}[name]

    def pytest_collection(self) -> None:
        sys.platform = self.name


if __name__ == "__main__":
    import pytest

    become(sys.argv[1])
    sys.modules["tests.experimental.simulated"] = sys.modules["__main__"]
    plugins = [Platform(sys.argv[1])]
    sys.exit(
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout-method=thread", *sys.argv[2:]],
            plugins=plugins,
        )
    )

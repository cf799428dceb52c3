"""The calls of `os` that Directory uses, by paths: for a system whose calls know no folder descriptors (Windows).

The descriptor of a folder is a number here that stands for its path and for what it was when it was opened. So a
folder that was replaced is noticed where Directory compares identities, but not between such a check and the next call.
Folders cannot be synced: whether a new name survives a loss of power is up to the journal of the file system. A file
that somebody has open cannot be removed or replaced: the call raises PermissionError, and what was to go stays.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat as modes
from os import O_CREAT, O_EXCL, O_RDONLY, O_RDWR, O_WRONLY, W_OK, X_OK

__all__ = ["O_CREAT", "O_EXCL", "O_RDONLY", "O_RDWR", "O_WRONLY", "W_OK", "X_OK"]

O_DIRECTORY, O_NOFOLLOW = 1 << 28, 1 << 29
O_CLOEXEC = O_NONBLOCK = 0  # No descriptor is inherited, and there are no FIFOs to wait for.
_O_BINARY: int = getattr(os, "O_BINARY", 0)

_folders: dict[int, tuple[str, os.stat_result]] = {}
_numbers = itertools.count(1 << 30)


def _place(path: str | os.PathLike[str], folder: int | None) -> str:
    return os.fspath(path) if folder is None else os.path.join(_folders[folder][0], path)


def _error(number: int, place: str) -> OSError:
    return OSError(number, os.strerror(number), place)


def open(path: str | os.PathLike[str], flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
    place = _place(path, dir_fd)
    if flags & O_NOFOLLOW and os.path.islink(place):
        raise _error(errno.ELOOP, place)
    if flags & O_DIRECTORY:
        status = os.stat(place)
        if not modes.S_ISDIR(status.st_mode):
            raise _error(errno.ENOTDIR, place)
        number = next(_numbers)
        _folders[number] = place, status
        return number
    if os.path.isdir(place):
        raise _error(errno.ENXIO, place)  # Else it would be refused as if there were no right to open it.
    return os.open(place, flags & ~O_NOFOLLOW | _O_BINARY, mode)


def close(fd: int) -> None:
    if _folders.pop(fd, None) is None:
        os.close(fd)


def fstat(fd: int) -> os.stat_result:
    return _folders[fd][1] if fd in _folders else os.fstat(fd)


def fsync(fd: int) -> None:
    """Do nothing: see above. Files are synced by system.fsync."""


def fchmod(fd: int, mode: int) -> None:
    """Do nothing: rights are not in these bits here."""


def chmod(path: str, mode: int, *, dir_fd: int) -> None:
    """Do nothing, like fchmod."""


def listdir(fd: int) -> list[str]:
    return os.listdir(_folders[fd][0])


def stat(path: str | os.PathLike[str], *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
    return os.stat(_place(path, dir_fd), follow_symlinks=follow_symlinks)


def access(path: str, mode: int, *, dir_fd: int, effective_ids: bool) -> bool:
    return os.access(_place(path, dir_fd), mode)


def mkdir(path: str, mode: int, *, dir_fd: int) -> None:
    os.mkdir(_place(path, dir_fd), mode)


def unlink(path: str, *, dir_fd: int) -> None:
    os.unlink(_place(path, dir_fd))


def rmdir(path: str, *, dir_fd: int) -> None:
    os.rmdir(_place(path, dir_fd))


def rename(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
    os.replace(_place(source, src_dir_fd), _place(target, dst_dir_fd))


def rename_noreplace(source: str, target: str, *, dir_fd: int) -> None:
    os.rename(_place(source, dir_fd), _place(target, dir_fd))

"""A folder held open by descriptor; every name is one component below it and never followed if it is a symbolic link.

Working by descriptor means that a root replaced behind our back (renamed, mounted over) cannot redirect a save: bytes
go on into the folder that was checked at the start. Each method is one step of the commit protocol
(asyncckpt/commit/transaction.py); system calls are looked up at call time, so that tests may put faults into them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from asyncckpt import system
from asyncckpt.errors import ConflictError, CorruptError, IOFailedError, NotFoundError, UsageError
from asyncckpt.storage import os_by_path

FILE_MODE = 0o640
FOLDER_MODE = 0o750
COMPONENT_BYTES_MAX = 255
PATH_BYTES_MAX = 4096
_RENAME_NOREPLACE = 1
_NO_RENAMEAT2 = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
# Calls on folders by descriptor; where there are none, by path.
if TYPE_CHECKING or os.open in os.supports_dir_fd:  # noqa: SIM108  # mypy reads the first alone.
    at = os
else:
    at = os_by_path
_libc = ctypes.CDLL(None, use_errno=True) if at is os else None


def io_failed(what: str, error: OSError) -> IOFailedError:
    """Wrap an OSError once, at this door."""
    hints = {
        errno.ENOSPC: "free space or inodes (`df -i`): a directory needs room for one checkpoint more than `keep`",
        errno.EDQUOT: "free space there (`asyncckpt prune`), or ask for a larger quota",
        errno.EFBIG: "raise the limit of a file's size (ulimit -f), or take a file system that allows larger ones",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.EROFS: "mount it for writing; a disk that fails is made read-only (dmesg)",
        errno.EACCES: "check owner and permission",
        errno.EIO: "a disk or a server fails: look at the log of the system (dmesg)",
    }
    reason = os.strerror(error.errno) if error.errno else str(error)
    hint = hints.get(error.errno or 0, "try again; if it stays, `asyncckpt doctor DIR` may tell more")
    return IOFailedError(f"{what}: {reason}", errno=error.errno, hint=hint)


@contextlib.contextmanager
def _door(what: str, *, but: tuple[int, ...] = ()) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in but:
            raise io_failed(what, error) from error


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path. Raises UsageError for what cannot be a local folder."""
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError("path is not a path", found=type(path), expected="str or os.PathLike")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise UsageError("path is bytes", found=text, expected="str or os.PathLike of str")
    if text == "" or "\0" in text:
        raise UsageError("path is empty or holds a NUL character", found=text)
    scheme = text.partition("/")[0]
    if "://" in text or (scheme.endswith(":") and len(scheme) > 2):  # Of a URL, a Path takes a slash away.
        raise UsageError(
            "path is a URL",
            found=text.partition(":")[0] + "://",  # Up to where secrets could be.
            expected="a folder of a local file system, or where a store can be, its URL as a str, not as a Path",
            hint="what can read from a store, and write to one, is in docs/object-stores.md",
        )
    if text.startswith("~"):
        raise UsageError("path starts with '~'", found=text, hint="expand it with os.path.expanduser")
    try:
        absolute = Path(os.path.abspath(text))
        too_long = max(len(os.fsencode(part)) for part in absolute.parts) > COMPONENT_BYTES_MAX
    except FileNotFoundError as error:
        raise UsageError("the current folder is gone", found=text, hint="give the path in full") from error
    except UnicodeEncodeError as error:
        raise UsageError("path is not in the encoding of file names", found=text, hint="PYTHONUTF8=1") from error
    # Below the root come `data`, an attempt folder and a shard file.
    if too_long or len(os.fsencode(absolute)) > PATH_BYTES_MAX - 128:
        raise UsageError("path is too long", found=text[:80] + "...", expected=f"{COMPONENT_BYTES_MAX} bytes a part")
    return absolute


def _close(fd: int) -> None:
    """Close where nothing can be lost by it: an error would hide the one that matters."""
    with contextlib.suppress(OSError):
        at.close(fd)


class Directory:
    """An open folder. Close it, or use it as a context manager.

    exact_modes: files and folders made here and below get FILE_MODE and FOLDER_MODE, whatever the umask takes away.
    made: device and inode of every file that was created through this object, and is still under its name.
    """

    def __init__(self, fd: int, path: Path, *, exact_modes: bool = False) -> None:
        self.fd, self.path, self.exact_modes = fd, path, exact_modes
        self.made: dict[str, tuple[int, int]] = {}

    @staticmethod
    def open(path: Path, *, exact_modes: bool = False) -> Directory:
        """Open an existing folder; NotFoundError, UsageError or IOFailedError."""
        folder = Directory(-1, path, exact_modes=exact_modes)  # First: a descriptor that nobody has is never closed.
        try:
            folder.fd = at.open(path, at.O_RDONLY | at.O_DIRECTORY | at.O_CLOEXEC)
            return folder
        except FileNotFoundError as error:
            raise NotFoundError(f"folder {str(path)!r} does not exist") from error
        except NotADirectoryError as error:
            hint = "give another path, or move that file away"
            raise UsageError("path is not a folder", found=str(path), hint=hint) from error
        except OSError as error:
            raise io_failed(f"folder {str(path)!r} cannot be opened", error) from error

    def child(self, name: str, *, create: bool = False) -> Directory:
        """Open a folder below this one; with `create`, make it if it is missing, and sync this folder."""
        if create:
            made = _door(f"folder {name!r} in {str(self.path)!r} cannot be made")
            with made, contextlib.suppress(FileExistsError):
                at.mkdir(name, FOLDER_MODE, dir_fd=self.fd)
                if self.exact_modes:
                    at.chmod(name, FOLDER_MODE, dir_fd=self.fd)
            # Also when it is there: the process that made it may have died before it synced.
            self.sync()
        flags = at.O_RDONLY | at.O_DIRECTORY | at.O_NOFOLLOW | at.O_CLOEXEC
        folder = Directory(-1, self.path / name, exact_modes=self.exact_modes)
        try:
            folder.fd = at.open(name, flags, dir_fd=self.fd)
            return folder
        except FileNotFoundError as error:
            raise NotFoundError(f"folder {str(self.path / name)!r} does not exist") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise CorruptError(f"{str(self.path / name)!r} is not a folder of its own") from error
            raise io_failed(f"folder {str(self.path / name)!r} cannot be opened", error) from error

    def close(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                at.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sync(self) -> None:
        """Make the entries of this folder durable. Ignores folders that cannot be synced (some FUSE, SMB)."""
        with _door(f"folder {str(self.path)!r} cannot be synced", but=_NO_FOLDER_SYNC):
            at.fsync(self.fd)

    def check_writable(self) -> None:
        """Raise IOFailedError when files cannot be made here, without making one."""
        if not at.access(".", at.W_OK | at.X_OK, dir_fd=self.fd, effective_ids=True):
            is_read_only = hasattr(os, "fstatvfs") and os.fstatvfs(self.fd).f_flag & os.ST_RDONLY
            error = OSError(errno.EROFS if is_read_only else errno.EACCES, "")
            raise io_failed(f"folder {str(self.path)!r} is not writable", error)

    def make_folder(self, name: str) -> Directory:
        """Make a folder that must be new."""
        with _door(f"folder {str(self.path / name)!r} cannot be made"):
            at.mkdir(name, FOLDER_MODE, dir_fd=self.fd)
            if self.exact_modes:
                at.chmod(name, FOLDER_MODE, dir_fd=self.fd)
        return self.child(name)

    def create_file(self, name: str, *, direct: bool = False, readable: bool = False) -> tuple[int, bool]:
        """Create a file that must be new; returns (descriptor, whether O_DIRECT is on)."""
        flags = (at.O_RDWR if readable else at.O_WRONLY) | at.O_CREAT | at.O_EXCL | at.O_NOFOLLOW | at.O_CLOEXEC
        fd = -1
        try:
            with _door(f"file {str(self.path / name)!r} cannot be created"):
                fd = at.open(name, flags, FILE_MODE, dir_fd=self.fd)
                if self.exact_modes:
                    at.fchmod(fd, FILE_MODE)
                self.made[name] = _identity(at.fstat(fd))
                # O_DIRECT is asked for afterwards: an open that fails for it would leave an empty file behind.
                is_direct = direct and set_direct(fd)
        except BaseException:
            if fd >= 0:
                _close(fd)
            raise
        return fd, is_direct

    def make_empty(self, name: str) -> None:
        """Create a file without bytes that must be new. Others may remove it, so nothing of it is remembered."""
        _close(self.create_file(name)[0])
        self.made.pop(name, None)

    def open_file(self, name: str, *, writable: bool = False) -> int:
        """Open a regular file for reading; a link, FIFO, socket or device is a CorruptError."""
        flags = (at.O_RDWR if writable else at.O_RDONLY) | at.O_NOFOLLOW | at.O_NONBLOCK | at.O_CLOEXEC
        shown = repr(f"{self.path}/{name}")  # Not by a Path: lists open thousands.
        try:
            fd = at.open(name, flags, dir_fd=self.fd)
        except FileNotFoundError as error:
            raise NotFoundError(f"file {shown} does not exist") from error
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise CorruptError(f"{shown} is not a regular file") from error
            raise io_failed(f"file {shown} cannot be opened", error) from error
        try:
            if not stat.S_ISREG(at.fstat(fd).st_mode):
                raise CorruptError(f"{shown} is not a regular file")
        except BaseException as error:
            _close(fd)
            if isinstance(error, OSError):
                raise io_failed(f"file {shown} cannot be looked at", error) from error
            raise
        return fd

    def read_file(self, name: str, *, bytes_max: int) -> bytes:
        """Return the bytes of a small regular file. Raises CorruptError if it is larger than bytes_max."""
        fd, shown = self.open_file(name), repr(f"{self.path}/{name}")
        try:
            with _door(f"file {shown} cannot be read"):
                size = at.fstat(fd).st_size
                if size > bytes_max:
                    raise CorruptError(f"{str(self.path / name)!r} is too large", found=size, expected=bytes_max)
                read = os.read(fd, size)
                while len(read) < size and (more := os.read(fd, size - len(read))):
                    read += more
                return read
        finally:
            with contextlib.suppress(OSError):
                at.close(fd)

    def names(self) -> list[str]:
        """Return what is in this folder, even if others list it at the same time."""
        with _door(f"folder {str(self.path)!r} cannot be listed"):
            # A descriptor has one position, also for threads and forked children: a listing needs one of its own.
            fd = at.open(".", at.O_RDONLY | at.O_DIRECTORY | at.O_CLOEXEC, dir_fd=self.fd)
            try:
                return at.listdir(fd)
            finally:
                at.close(fd)

    def exists(self, name: str) -> bool:
        return self.entry_status(name) is not None

    def has_folder(self, name: str) -> bool:
        return self.exists(name)

    def has_listed(self, name: str) -> bool:
        """Return whether a name is there, also where a network file system remembers that it was not."""
        return self.exists(name) or name in self.names()

    def has(self, name: str, identity: tuple[int, int]) -> bool:
        """Return whether this name leads to the file or folder with this device and inode. Raises IOFailedError."""
        status = self.entry_status(name)
        return status is not None and _identity(status) == identity

    def version(self, name: str) -> tuple[int, ...]:
        """Return what differs when another file has this name. NotFoundError, CorruptError, IOFailedError."""
        status = self._file_status(name)
        return *_identity(status), status.st_size, status.st_mtime_ns

    def folder_version(self, name: str) -> tuple[int, ...]:
        """Return what differs when this folder is another one or has other names in it; () when it is not there."""
        status = self.entry_status(name)
        return () if status is None else (*_identity(status), status.st_mtime_ns)

    def size(self, name: str) -> int:
        """Return the bytes of a regular file. Raises NotFoundError, CorruptError, IOFailedError."""
        return self._file_status(name).st_size

    def check_file(self, name: str, *, bytes: int) -> None:
        """Raise CorruptError unless this is the name of a regular file of this size: the one created here, if any."""
        status = self._file_status(name)
        if status.st_size != bytes:
            what = f"{str(self.path / name)!r} has the wrong size"
            raise CorruptError(what, found=status.st_size, expected=bytes)
        if self.made.get(name, _identity(status)) != _identity(status):
            raise CorruptError(f"{str(self.path / name)!r} is another file than the one that was written")

    def _file_status(self, name: str) -> os.stat_result:
        status = self.entry_status(name)
        if status is None:
            raise NotFoundError(f"file {str(self.path / name)!r} does not exist")
        if not stat.S_ISREG(status.st_mode):
            raise CorruptError(f"{str(self.path / name)!r} is not a regular file")
        return status

    def entry_status(self, name: str) -> os.stat_result | None:
        """Return what the system says of a name, which is not followed; None where there is nothing."""
        try:
            return at.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise io_failed(f"{str(self.path / name)!r} cannot be looked up", error) from error

    def publish(self, source: str, target: str) -> None:
        """Rename without replacing, in this folder; ConflictError when the target exists."""
        try:
            _rename_noreplace(self.fd, source, target)
        except FileExistsError as error:
            raise ConflictError(f"{str(self.path / target)!r} already exists") from error
        except OSError as error:
            raise io_failed(f"{str(self.path / target)!r} cannot be published", error) from error
        self.made.pop(source, None)

    def move(self, source: str, target: str, *, to: Directory | None = None) -> None:
        """Rename a file or a folder, also into another one; a file is replaced, a folder that is not empty never is."""
        with _door(f"{str(self.path / source)!r} cannot be moved to {target!r}"):
            at.rename(source, target, src_dir_fd=self.fd, dst_dir_fd=(to or self).fd)
        self.made.pop(source, None)

    def remove_file(self, name: str, *, version: tuple[int, ...] = ()) -> bool:
        """Remove a file; return whether it was there. version: leave another file alone that has the name by now."""
        self.made.pop(name, None)
        if version and self.version(name) != version:
            return False
        with _door(f"file {str(self.path / name)!r} cannot be removed"), contextlib.suppress(FileNotFoundError):
            at.unlink(name, dir_fd=self.fd)
            return True
        return False

    def remove_folder(self, name: str, *, depth: int = 0) -> None:
        """Remove a folder of plain files, and of folders of such, `depth` levels deep; ignore what others remove
        meanwhile."""
        failed: list[OSError] = []
        with _door(f"folder {str(self.path / name)!r} cannot be removed"):
            with contextlib.suppress(NotFoundError), self.child(name) as folder:
                for entry in folder.names():
                    try:
                        if depth and (found := folder.entry_status(entry)) is not None and stat.S_ISDIR(found.st_mode):
                            folder.remove_folder(entry, depth=depth - 1)
                        else:
                            at.unlink(entry, dir_fd=folder.fd)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        failed.append(error)  # The others take up room too.
            if failed:
                raise failed[0]
            with contextlib.suppress(FileNotFoundError):
                at.rmdir(name, dir_fd=self.fd)

    def status(self) -> os.stat_result:
        """Return what the system says of this folder."""
        with _door(f"folder {str(self.path)!r} cannot be looked at"):
            return at.fstat(self.fd)

    @property
    def identity(self) -> tuple[int, int]:
        """Device and inode."""
        return _identity(self.status())

    def is_still(self, path: Path) -> bool:
        """Return whether `path` still leads to this folder."""
        try:
            return _identity(at.stat(path)) == _identity(at.fstat(self.fd))
        except OSError:
            return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def set_direct(fd: int) -> bool:
    """Turn O_DIRECT on; False where the file system or platform has none."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    try:
        system.fcntl.fcntl(fd, system.fcntl.F_SETFL, system.fcntl.fcntl(fd, system.fcntl.F_GETFL) | flag)
    except OSError:
        return False
    return True


def _rename_noreplace(fd: int, source: str, target: str) -> None:
    """renameat2(RENAME_NOREPLACE), or link + unlink where there is none. Both fail on an existing target."""
    if _libc is None:
        return os_by_path.rename_noreplace(source, target, dir_fd=fd)
    renameat2 = getattr(_libc, "renameat2", None)
    if renameat2 is not None:
        if renameat2(fd, os.fsencode(source), fd, os.fsencode(target), _RENAME_NOREPLACE) == 0:
            return
        code = ctypes.get_errno()
        if code not in _NO_RENAMEAT2:
            raise OSError(code, os.strerror(code), target)
    at.link(source, target, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
    at.unlink(source, dir_fd=fd)

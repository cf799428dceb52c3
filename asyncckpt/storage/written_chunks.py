"""Which bytes of new files are written already, noted chunk by chunk, for whoever writes the same files again after a
kill.

1. `open` makes the file `.written` in the folder of the files, and locks it while this process writes there. Its first
   line says what is written, and of what: the identity, which the caller makes.
2. After each chunk that was written comes a line: file, offset, bytes, digest.
3. `open` again, in a folder that was left with the same identity: files of which nothing is noted are removed.
4. In each other file those bytes are sound, from its start, that are read back with their digests. They are not written
   again. A note that is older or newer than its bytes does no harm, so notes are not synced.
5. `end` removes `.written`; then the files may be published.

A folder of another user is never gone on with, nor a file with a second name: somebody else could have laid it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from typing import Any

import numpy as np

from asyncckpt import system
from asyncckpt.errors import CheckpointError, CorruptError
from asyncckpt.native import CoreIOError, Progress, Reads, ShortFile, core
from asyncckpt.storage.directory import Directory, io_failed

WRITTEN_NAME = ".written"
NOTES_BYTES_MAX = 1 << 30
WINDOW_BYTES = 64 << 20
FOLDERS_DEPTH_MAX = 3
_Notes = dict[str, dict[int, tuple[int, str]]]  # Of every file, by offset: bytes and digest.


class WrittenChunks:
    """The notes of one folder; see above. End or close it.

    reused_bytes: those that were found sound. folder: whose files these are; names of others count from there.
    """

    def __init__(self, folder: Directory, fd: int, notes: _Notes) -> None:
        self.folder = folder
        self._fd = fd
        self._notes = notes
        self.reused_bytes = 0

    @staticmethod
    def open(folder: Directory, identity: str) -> WrittenChunks:
        """Continue a folder if it was left with the same identity; else start over, and remove what is in it."""
        found = WrittenChunks.go_on(folder, identity)
        if found is not None:
            return found
        for name in folder.names():
            _remove(folder, name, {})
        fd = folder.create_file(WRITTEN_NAME, readable=True)[0]
        try:
            with contextlib.suppress(OSError):  # Where there are no locks, nobody goes on.
                system.lock(fd)
            written = WrittenChunks(folder, fd, {})
            written._append(identity)
            return written
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def go_on(folder: Directory, identity: str) -> WrittenChunks | None:
        """Return the notes of a folder that was left with this identity; None where there are none, or somebody has
        them."""
        fd = _opened(folder)
        if fd is None:
            return None
        try:
            system.lock(fd)
            raw = _read(fd)
            notes, end = _parsed(raw, identity)
            is_there = os.fstat(fd).st_nlink == 1  # Who had the lock before may have ended.
            if notes is None or not is_there:
                os.close(fd)
                return None
            os.ftruncate(fd, end)
            for name in folder.names():
                if name != WRITTEN_NAME:
                    _remove(folder, name, notes)
            return WrittenChunks(folder, fd, notes)
        except OSError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise

    @staticmethod
    def noted_bytes(folder: Directory, identity: str) -> int | None:
        """Return how much is noted with this identity, read back or not; None where there is nothing of it."""
        fd = _opened(folder)
        if fd is None:
            return None
        try:
            notes, _ = _parsed(_read(fd), identity)
        except OSError:
            return None
        finally:
            os.close(fd)
        return None if notes is None else sum(_noted_bytes(own) for own in notes.values())

    def has(self, folder: Directory, name: str) -> bool:
        """Return whether something of a file is noted, so that it is there."""
        return self._key(folder, name) in self._notes

    def sound_bytes(self, folder: Directory, name: str) -> int:
        """Read back what is noted of a file; return how many bytes from its start are what was written."""
        own = self._notes.get(self._key(folder, name), {})
        at = 0
        while at in own:
            size, digest = own[at]
            if size <= 0 or self._digest(folder, name, at, size) != digest:
                break
            at += size
        self._notes[self._key(folder, name)] = {begin: note for begin, note in own.items() if begin < at}
        return at

    def read(self, folder: Directory, name: str, address: int, *, offset: int, bytes: int) -> None:
        """Read bytes of a file to an address. CorruptError, IOFailedError."""
        fd = folder.open_file(name)
        try:
            places = np.array([(address, offset, bytes)], dtype=np.uint64)
            reads = Reads(places, np.array([fd], dtype=np.int32), np.zeros(1, dtype=np.int32))
            core.read(reads, digests=False, threads=1, progress=Progress())
        except ShortFile as error:
            raise CorruptError(f"file {name!r} of {str(folder.path)!r} ended while it was read") from error
        except OSError as error:
            raise io_failed(f"file {name!r} of {str(folder.path)!r} cannot be read", error) from error
        finally:
            os.close(fd)

    def note(self, folder: Directory, name: str, address: int, *, offset: int, bytes: int) -> None:
        """Note that bytes, which are at an address, were written. IOFailedError."""
        digester = core.digester()
        digester.update(address, bytes)
        self._append([self._key(folder, name), offset, bytes, digester.end().hex()])

    def end(self) -> None:
        """Remove the notes: what they tell of is complete."""
        if system.fcntl is None:  # Windows removes no file that is open.
            self.close()
        self.folder.remove_file(WRITTEN_NAME)
        self.close()

    def close(self) -> None:
        """Let others go on. Idempotent, never raises."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _key(self, folder: Directory, name: str) -> str:
        return (folder.path / name).relative_to(self.folder.path).as_posix()

    def _append(self, line: Any) -> None:
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
            rest = memoryview(json.dumps(line).encode("ascii") + b"\n")
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise io_failed(f"file {str(self.folder.path / WRITTEN_NAME)!r} cannot be written", error) from error

    def _digest(self, folder: Directory, name: str, offset: int, size: int) -> str | None:
        """Return the digest of bytes of a file; None where they cannot be read."""
        digester = core.digester()
        try:
            if offset + size > folder.size(name):
                return None
            window = np.empty(min(WINDOW_BYTES, size), dtype=np.uint8)
            for begin in range(offset, offset + size, WINDOW_BYTES):
                count = min(WINDOW_BYTES, offset + size - begin)
                self.read(folder, name, window.ctypes.data, offset=begin, bytes=count)
                digester.update(window.ctypes.data, count)
        except (CheckpointError, CoreIOError):
            return None
        return digester.end().hex()


def _opened(folder: Directory) -> int | None:
    """Open the notes of a folder of this user."""
    try:
        if hasattr(os, "geteuid") and folder.status().st_uid != os.geteuid():
            return None
        return reopen_file(folder, WRITTEN_NAME)
    except CheckpointError:
        return None


def reopen_file(folder: Directory, name: str) -> int:
    """Open a file that was left, to write on in it. CorruptError for one that has a second name."""
    fd = folder.open_file(name, writable=True)
    status = os.fstat(fd)
    if status.st_nlink != 1:
        os.close(fd)
        raise CorruptError(f"file {name!r} of {str(folder.path)!r} has a second name")
    folder.made[name] = status.st_dev, status.st_ino
    return fd


def _read(fd: int) -> bytes:
    size = min(os.fstat(fd).st_size, NOTES_BYTES_MAX)
    raw = b""
    while len(raw) < size and (part := system.pread(fd, size - len(raw), len(raw))):
        raw += part
    return raw


def _parsed(raw: bytes, identity: str) -> tuple[_Notes | None, int]:
    """Return the notes, None if they are of something else, and where they end: the last line may be torn."""
    notes: _Notes = {}
    end = 0
    for number, line in enumerate(raw.splitlines(keepends=True)):
        try:
            found: Any = json.loads(line)
            if number == 0 and found != identity:
                return None, 0
            if number:
                name, offset, size, digest = found
                notes.setdefault(str(name), {})[int(offset)] = (int(size), str(digest))
        except (ValueError, TypeError):
            break
        if not line.endswith(b"\n"):
            break
        end += len(line)
    return (notes if end else None), end


def _noted_bytes(own: dict[int, tuple[int, str]]) -> int:
    at = 0
    while at in own and own[at][0] > 0:
        at += own[at][0]
    return at


def _remove(folder: Directory, name: str, notes: _Notes, place: str = "") -> None:
    """Remove what is in a folder, except noted files."""
    key = f"{place}{name}"
    if key in notes:
        return
    status = folder.entry_status(name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        if any(noted.startswith(f"{key}/") for noted in notes):
            with folder.child(name) as below:
                for entry in below.names():
                    _remove(below, entry, notes, f"{key}/")
        else:
            folder.remove_folder(name, depth=FOLDERS_DEPTH_MAX)
    else:
        folder.remove_file(name)

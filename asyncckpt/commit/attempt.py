"""How the manifest of an attempt gets to its place: on a disk by a rename, in a store by a conditional PUT.

    a disk                                               a store
    a temporary file, written and synced                 nothing is made before the PUT
    a rename that refuses to replace                     PUT with If-None-Match
    the folder above is synced, else it is in doubt      it is read back, else it is in doubt
    the attempt's folder is where it was made            a key holds the id of the attempt: nobody else uses it

A PUT that was not answered may still come to its end: until the manifest is found, such a commit is in doubt.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import IO, Protocol

from aiofiles.threadpool import wrap

from asyncckpt import system
from asyncckpt.commit.claims import Claim, step_exists
from asyncckpt.commit.discover import is_committed
from asyncckpt.commit.root import CheckpointRoot, StoreRoot, WriteRoot
from asyncckpt.errors import CheckpointError, ConflictError, IOFailedError
from asyncckpt.format.names import MANIFESTS_DIR, Attempt, temporary_manifest_name
from asyncckpt.storage.directory import Directory, io_failed
from asyncckpt.storage.store_answers import is_timeout
from asyncckpt.storage.store_folder import StoreFolder

REFUSED_S_MAX = 10.0
PAUSE_S = 0.05


class Publication(Protocol):
    """One manifest on its way to its place. Blocking calls are for the threads of commits."""

    def prepare(self) -> None:
        """Make the files of the attempt durable, and what the manifest is written to. ConflictError."""
        ...

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None: ...

    def settle(self) -> None:
        """Make the manifest durable, where it has no name yet that a reader looks for."""
        ...

    def check_folder(self, what: str) -> Directory | None:
        """Check that the attempt's folder is the one that was made; return it where files are held by it."""
        ...

    def publish(self, name: str) -> None:
        """Commit. ConflictError when the name is taken, be it by ourselves; IOFailedError."""
        ...

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        """Return whether it is not known, after an error of `publish`, what will be there. is_ours: it was found."""
        ...

    def sync(self, name: str) -> None:
        """Make what was published durable, or look that it is. IOFailedError."""
        ...

    def discard(self) -> None:
        """Remove what was written and not published. Never raises."""
        ...


class FilePublication:
    """On a disk."""

    def __init__(self, root: CheckpointRoot, folder: Directory, attempt: Attempt, *, durable: bool) -> None:
        self._root, self._folder, self._attempt, self._durable = root, folder, attempt, durable
        self._file: IO[bytes] = io.BytesIO()  # From `prepare` on, one on the disk.

    def prepare(self) -> None:
        if self._durable:
            self._folder.sync()
        fd, _ = self._root.manifests.create_file(temporary_manifest_name(self._attempt))
        self._file = os.fdopen(fd, "wb", buffering=0)

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None:
        """Write all bytes; a raw file may take less than it is given."""
        with self._writing():
            file, rest = wrap(self._file, executor=threads), memoryview(raw)
            while rest:
                written = await file.write(rest)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                rest = rest[written:]

    def settle(self) -> None:
        with self._writing(), self._file:
            if self._durable:
                system.fsync(self._file.fileno())

    def check_folder(self, what: str) -> Directory | None:
        if not self._root.data.has(self._attempt.directory, self._folder.identity):
            raise folder_removed(self._folder, what)
        return self._folder

    def publish(self, name: str) -> None:
        self._root.manifests.publish(temporary_manifest_name(self._attempt), name)

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        return is_ours

    def sync(self, name: str) -> None:
        if self._durable:
            self._root.manifests.sync()

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(CheckpointError, OSError):
            self._root.manifests.remove_file(temporary_manifest_name(self._attempt))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise io_failed(f"manifest of step {self._attempt.step} cannot be written", error) from error


class ObjectPublication:
    """In a store."""

    def __init__(self, root: StoreRoot, attempt: Attempt) -> None:
        self._root, self._attempt = root, attempt
        self._raw: bytes | bytearray = b""

    def prepare(self) -> None:
        """Nothing is there yet."""

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None:
        self._raw = raw

    def settle(self) -> None:
        """Objects are durable."""

    def check_folder(self, what: str) -> Directory | None:
        return None

    def publish(self, name: str) -> None:
        key, until, is_under_way = f"{MANIFESTS_DIR}/{name}", time.monotonic() + REFUSED_S_MAX, False
        what = f"object {str(self._root.store.url / key)!r}"
        while True:
            try:
                if self._root.store.put_new(key, bytes(self._raw)):
                    return
            except CheckpointError as error:
                if is_under_way:  # Perhaps by a try of ours.
                    raise IOFailedError(error.what, errno=errno.ETIMEDOUT, hint=error.hint) from None
                raise
            if self._root.manifests.exists(name):
                raise ConflictError(f"{what} exists already")
            if time.monotonic() >= until:
                raise IOFailedError(f"{what} is neither there nor can be made", errno=errno.ETIMEDOUT)
            is_under_way = True  # Stores also refuse while another request for that key is.
            time.sleep(PAUSE_S)

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        return not is_ours and (is_timeout(error) or not isinstance(error, CheckpointError))

    def sync(self, name: str) -> None:
        self._root.store.check_kept(f"{MANIFESTS_DIR}/{name}", self._raw)

    def discard(self) -> None:
        """What was not published was not put."""


def folder_removed(folder: Directory | StoreFolder, what: str) -> ConflictError:
    return ConflictError(
        f"folder {str(folder.path)!r} was removed while {what}",
        hint="does something else write to, or clean up, the checkpoint directory?",
    )


def begin_attempt(
    root: WriteRoot, claim: Claim, *, goes_on: bool, durable: bool
) -> tuple[Directory | StoreFolder, Publication]:
    """Make the attempt's folder, durable in data/, and what publishes it. The folder must be new, unless `goes_on`."""
    attempt = claim.attempt
    if isinstance(root, StoreRoot):
        root.remembered.look()
        if claim.kind == "save" and is_committed(root.in_calls, attempt.step):
            raise step_exists(root, attempt.step)
        return root.data.child(attempt.directory), ObjectPublication(root, attempt)
    is_there = goes_on and root.data.has_folder(attempt.directory)
    folder = root.data.child(attempt.directory) if is_there else root.data.make_folder(attempt.directory)
    try:
        root.data.sync()
    except BaseException:
        folder.close()
        raise
    return folder, FilePublication(root, folder, attempt, durable=durable)

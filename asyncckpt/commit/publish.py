"""Make a finished save visible, all at once.

A checkpoint exists from the moment its manifest has its final name; before that, readers do not see it.

1. `begin_attempt`: make data/<step>-<attempt>/ and sync data/. The shard room writes and syncs files in it.
2. `publish`: sync the attempt's folder, so that the files' names are durable.
3. Write manifests/.m-<attempt>, sync it.
4. Rename it to manifests/<step>.json, refusing to replace. This is the commit. A compacted checkpoint, which stands for
   one that is there, gets the name manifests/<step>.full.json.
5. Sync manifests/. Only now is the save acknowledged.

A crash before 4 leaves an unreferenced folder and perhaps a .m- file; retention.sweep removes them. Between 4 and 5 the
checkpoint may be seen but is not durable; an error there is an IndeterminateError, never a plain failure. A sync that
failed is never tried again on the same file.
"""

from __future__ import annotations

import contextlib
import errno
import os
from concurrent.futures import Executor

import aiofiles

from asyncckpt.commit.discover import read_named_head
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.errors import CheckpointError, ConflictError, IndeterminateError, IOFailedError
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name, temporary_manifest_name
from asyncckpt.storage.directory import Directory, io_failed


def begin_attempt(root: CheckpointRoot, attempt: Attempt) -> Directory:
    """Make the attempt's folder, durable in data/."""
    folder = root.data.make_folder(attempt.directory)
    try:
        root.data.sync()
    except BaseException:
        folder.close()
        raise
    return folder


def abandon_attempt(root: CheckpointRoot, attempt: Attempt) -> None:
    """Remove what a failed attempt left, as far as that works; what stays is unreferenced and swept later."""
    with contextlib.suppress(CheckpointError, OSError):
        root.manifests.remove_file(temporary_manifest_name(attempt))
    with contextlib.suppress(CheckpointError, OSError):
        root.data.remove_folder(attempt.directory)


async def publish(
    root: CheckpointRoot,
    folder: Directory,
    attempt: Attempt,
    raw: bytes | bytearray,
    *,
    durable: bool,
    threads: Executor,
    compacted: bool = False,
) -> None:
    """Commit a save whose shard files are written; `raw` is the manifest. Blocking calls run on `threads`.

    compacted: it stands for the checkpoint of its step that is there already.
    """
    temporary, final = temporary_manifest_name(attempt), _final_name(attempt, compacted=compacted)
    if durable:
        folder.sync()
    if not root.root.is_still(root.path):
        raise ConflictError(f"checkpoint directory {str(root.path)!r} was moved or replaced during the save")
    fd, _ = root.manifests.create_file(temporary)
    try:
        try:
            # Not `async with`: its end goes to asyncio's own threads, which take no work once the interpreter has
            # begun to end.
            file = await aiofiles.open(fd, "wb", buffering=0, closefd=False, executor=threads)
            try:
                await _write_all(file, raw)
            finally:
                await file.close()
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise io_failed(f"manifest of step {attempt.step} cannot be written", error) from error
    _rename(root, temporary, final, attempt)
    if durable:
        _make_rename_durable(root, final, attempt)


async def _write_all(file: aiofiles.threadpool.binary.AsyncFileIO, raw: bytes | bytearray) -> None:
    """A raw file may take less than it is given."""
    rest = memoryview(raw)
    while rest:
        written = await file.write(rest)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        rest = rest[written:]


def _final_name(attempt: Attempt, *, compacted: bool) -> str:
    return compacted_manifest_name(attempt.step) if compacted else manifest_name(attempt.step)


def _rename(root: CheckpointRoot, temporary: str, final: str, attempt: Attempt) -> None:
    try:
        # A step whose own manifest is gone, because a compacted one stands for it, exists all the same.
        if final == manifest_name(attempt.step) and root.manifests.exists(compacted_manifest_name(attempt.step)):
            raise ConflictError(f"{compacted_manifest_name(attempt.step)!r} exists already")
        root.manifests.publish(temporary, final)
    except (ConflictError, IOFailedError) as error:
        try:
            is_ours = _is_ours(root, final, attempt)
        except IOFailedError:
            # Nobody can tell now whether the manifest is there, so its data must stay.
            raise _indeterminate(root, final, attempt, error) from error
        if isinstance(error, ConflictError):
            if is_ours:
                return  # A replayed rename (NFS) reports EEXIST for our own success.
            raise ConflictError(
                f"step {attempt.step} exists already in {str(root.path)!r}",
                hint="steps are never overwritten: save another step, or remove that checkpoint first",
            ) from error
        if is_ours:
            raise _indeterminate(root, final, attempt, error) from error
        raise


def _make_rename_durable(root: CheckpointRoot, final: str, attempt: Attempt) -> None:
    try:
        root.manifests.sync()
    except IOFailedError as error:
        raise _indeterminate(root, final, attempt, error) from error


def _indeterminate(root: CheckpointRoot, final: str, attempt: Attempt, error: Exception) -> IndeterminateError:
    path = root.path

    def resolve() -> bool:
        with CheckpointRoot.for_reading(path) as again:
            if not _is_ours(again, final, attempt):
                return False
            again.manifests.sync()
            return True

    return IndeterminateError(
        f"checkpoint of step {attempt.step} may be visible, but is perhaps not durable: {error}",
        resolve=resolve,
        hint="call resolve() on this error; older checkpoints are kept",
    )


def _is_ours(root: CheckpointRoot, name: str, attempt: Attempt) -> bool:
    """Whether the manifest of this name is that of this attempt; IOFailedError when it cannot be looked at."""
    try:
        return read_named_head(root, name).attempt == attempt.id
    except IOFailedError:
        raise
    except CheckpointError:
        return False  # None there, or a damaged one: ours was complete and synced before it got its name.

"""A checkpoint directory, held open: the root, `manifests/` and `data/`; and how a manifest gets to its place there.

A writer makes what is missing, also parents of the root, and syncs it; a reader makes nothing. This is a directory on a
disk; store_root.py has one in an object store. They differ in how a manifest is published:

    a disk                                               a store
    a temporary file, written and synced                 nothing is made before the PUT
    a rename that refuses to replace                     PUT with If-None-Match
    the folder above is synced, else it is in doubt      it is read back, else it is in doubt
    the attempt's folder is where it was made            a key holds the id of the attempt: nobody else uses it
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Protocol, TypeAlias, TypeVar

from asyncckpt import system
from asyncckpt.commit.discover import check_listed
from asyncckpt.errors import CheckpointError, ConflictError, NotFoundError, UnsupportedError, UsageError, warn
from asyncckpt.format.names import DATA_DIR, MANIFESTS_DIR, Attempt, temporary_manifest_name
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.storage.directory import FOLDER_MODE, Directory, io_failed
from asyncckpt.storage.folder import ReadFolder

if TYPE_CHECKING:
    from asyncckpt.commit.attempt import Claim
    from asyncckpt.commit.store_root import StoreRoot
    from asyncckpt.format.head import ManifestHead
    from asyncckpt.storage.store_folder import StoreFolder

# A checkpoint directory that is written to.
WriteRoot: TypeAlias = "CheckpointRoot | StoreRoot"
Self = TypeVar("Self", bound="ReadRoot")


class ReadRoot(Protocol):
    """A checkpoint directory that is read: on a disk or in a store.

    looks_for_marks: how many looks at its names show every mark of a removal.
    """

    looks_for_marks: ClassVar[int]

    @property
    def path(self) -> Place: ...
    @property
    def root(self) -> ReadFolder: ...
    @property
    def manifests(self) -> ReadFolder: ...
    @property
    def data(self) -> ReadFolder: ...
    def close(self) -> None: ...
    def __enter__(self: Self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


class Publication(Protocol):
    """One manifest on its way to its place. Blocking calls are for the threads of commits.

    folder: the attempt's, where its files are written.
    """

    @property
    def folder(self) -> Directory | StoreFolder: ...

    def prepare(self) -> None:
        """Make the files of the attempt durable, and what the manifest is written to. ConflictError."""
        ...

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None: ...

    def settle(self) -> None:
        """Make the manifest durable, where it has no name yet that a reader looks for."""
        ...

    def check_files(self, head: ManifestHead, what: str) -> None:
        """Check that all files are there: see discover.check_files. ConflictError when their folder was removed."""
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

    def can_send_again(self, name: str) -> bool:
        """Return whether a commit in doubt can be settled by publishing it once more. Takes its name as taken."""
        ...

    def discard(self) -> None:
        """Remove what was written and not published. Never raises."""
        ...


class CheckpointRoot:
    """Open folders of one checkpoint directory.

    in_calls: what a call of the training loop may look at. sweeps: whether a Saver removes here what failed saves left.
    marks_left: of removals, which could not be removed yet.
    """

    looks_for_marks: ClassVar[int] = 1
    sweeps: ClassVar[bool] = True

    def __init__(self, root: Directory, manifests: Directory, data: Directory) -> None:
        self.path = root.path
        self.root = root
        self.manifests = manifests
        self.data = data
        self.in_calls = self
        self.marks_left: list[str] = []

    @staticmethod
    def for_writing(path: Path, *, exact_modes: bool = False) -> CheckpointRoot:
        """Open or make the directory, with its parents; UsageError when one of them is a file, or it is in use.

        exact_modes: what is made here gets its modes whatever the umask (see Directory).
        """
        check_host()
        _check_not_here(path)
        if not os.path.exists(path):
            _make_root(path, exact_modes=exact_modes)
        with contextlib.ExitStack() as opened:
            root = opened.enter_context(Directory.open(path, exact_modes=exact_modes))
            _sync_parent(path)
            _warn_if_others_may_write(root)
            manifests = opened.enter_context(root.child(MANIFESTS_DIR, create=True))
            data = opened.enter_context(root.child(DATA_DIR, create=True))
            for folder in (manifests, data):
                folder.check_writable()
            opened.pop_all()
        return CheckpointRoot(root, manifests, data)

    @staticmethod
    def for_joining(path: Path, *, exact_modes: bool) -> CheckpointRoot:
        """Open a directory that another rank holds, to write beside it; NotFoundError, IOFailedError."""
        root = CheckpointRoot.for_reading(path, exact_modes=exact_modes)
        try:
            root.data.check_writable()
        except BaseException:
            root.close()
            raise
        return root

    @staticmethod
    def for_reading(path: Path, *, exact_modes: bool = False) -> CheckpointRoot:
        """Open an existing checkpoint directory; NotFoundError when there is none."""
        check_host()
        with contextlib.ExitStack() as opened:
            root = opened.enter_context(Directory.open(path, exact_modes=exact_modes))
            try:
                manifests = opened.enter_context(root.child(MANIFESTS_DIR))
                data = opened.enter_context(root.child(DATA_DIR))
            except NotFoundError as error:
                from asyncckpt.commit.foreign import what_is_there  # Looked for when nothing of ours is there.

                what = f"{str(path)!r} is not a checkpoint directory: {error.what}"
                raise NotFoundError(what, **what_is_there(root)) from error
            opened.pop_all()
        return CheckpointRoot(root, manifests, data)

    def note(self, name: str) -> None:
        """Note that this process, or rank 0, has published a manifest: it is seen here by itself."""

    def look_anew(self) -> bool:
        """Return whether a call that looks again may see something else: not where it sees what is there."""
        return False

    def check_in_place(self, what: str) -> None:
        """Check that the path leads to what is open here still, and to its folders. ConflictError. what: was done
        meanwhile.
        """
        folders = ((MANIFESTS_DIR, self.manifests), (DATA_DIR, self.data))
        is_there = all(self.root.has(name, folder.identity) for name, folder in folders)
        if not is_there or not self.root.is_still(self.path):
            raise ConflictError(f"checkpoint directory {str(self.path)!r} was moved or replaced while {what}")

    def begin(self, claim: Claim, *, goes_on: bool, durable: bool) -> FilePublication:
        """Make the attempt's folder, durable in data/. It must be new, unless `goes_on`."""
        attempt = claim.attempt
        is_there = goes_on and self.data.has_folder(attempt.directory)
        folder = self.data.child(attempt.directory) if is_there else self.data.make_folder(attempt.directory)
        try:
            self.data.sync()
        except BaseException:
            folder.close()
            raise
        return FilePublication(self, folder, attempt, durable=durable)

    def close(self) -> None:
        for folder in (self.data, self.manifests, self.root):
            folder.close()

    def __enter__(self) -> CheckpointRoot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def folder_removed(folder: Directory | StoreFolder, what: str) -> ConflictError:
    return ConflictError(
        f"folder {str(folder.path)!r} was removed while {what}",
        hint="does something else write to, or clean up, the checkpoint directory?",
    )


class FilePublication:
    """On a disk."""

    def __init__(self, root: CheckpointRoot, folder: Directory, attempt: Attempt, *, durable: bool) -> None:
        self.folder = folder
        self._root, self._attempt, self._durable = root, attempt, durable
        self._temporary = temporary_manifest_name(attempt)
        self._file: IO[bytes] = io.BytesIO()  # From `prepare` on, one on the disk.

    def prepare(self) -> None:
        if self._durable:
            self.folder.sync()
        fd, _ = self._root.manifests.create_file(self._temporary)
        self._file = os.fdopen(fd, "wb", buffering=0)

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None:
        """Write all bytes; a raw file may take less than it is given."""
        from aiofiles.threadpool import wrap  # It loads asyncio, which who only reads does not need.

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

    def check_files(self, head: ManifestHead, what: str) -> None:
        if not self._root.data.has(self._attempt.directory, self.folder.identity):
            raise folder_removed(self.folder, what)
        check_listed(self.folder, head.files, step=head.step)

    def publish(self, name: str) -> None:
        self._root.manifests.publish(self._temporary, name)

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        return is_ours

    def sync(self, name: str) -> None:
        if self._durable:
            self._root.manifests.sync()

    def can_send_again(self, name: str) -> bool:
        return False

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(CheckpointError, OSError):
            self._root.manifests.remove_file(self._temporary)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            what = f"manifest of step {self._attempt.step} in {str(self._root.path)!r} cannot be written"
            raise io_failed(what, error) from error


def open_root(place: Place) -> WriteRoot:
    """Open an existing checkpoint directory, wherever it is; NotFoundError when there is none."""
    if not isinstance(place, StoreUrl):
        return CheckpointRoot.for_reading(place)
    from asyncckpt.commit.store_root import StoreRoot  # Who has a disk does not load it.
    from asyncckpt.storage.object_store import ObjectStore

    return StoreRoot.for_reading(ObjectStore(place))


def check_host() -> None:
    """Refuse a host whose memory is not as it is in the files: arrays are written and read without being turned."""
    if sys.byteorder != "little":
        raise UnsupportedError("checkpoints are written and read on little-endian hosts", found=sys.byteorder)


def make_folder(path: Path) -> None:
    """Make a folder above a checkpoint directory, and its parents, durably, where they are missing.

    Raises IOFailedError; UsageError when one of them is a file.
    """
    missing = []
    for folder in (path, *path.parents):
        if not os.path.lexists(folder):  # First: another rank may make it between two looks.
            missing.append(folder)
        elif os.path.isdir(folder):
            break
        else:
            raise UsageError("path is not in a folder", found=str(folder))
    for folder in reversed(missing):
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise io_failed(f"folder {str(folder)!r} cannot be made", error) from error
        _sync_parent(folder)


def _check_not_here(path: Path) -> None:
    """Refuse to make a checkpoint directory of the current folder of a program among other things that are there."""
    try:
        is_here = os.path.samefile(path, os.curdir)
        if not is_here or os.path.lexists(path / MANIFESTS_DIR) or not os.listdir(path):
            return
    except OSError:
        return
    raise UsageError(
        "path is the current folder, which holds other things", found=str(path), hint="name a folder of its own: 'ckpt'"
    )


def _make_root(path: Path, *, exact_modes: bool) -> None:
    if os.path.islink(path):
        raise UsageError("path is a symbolic link to nothing", found=str(path))
    make_folder(path.parent)
    try:
        path.mkdir(FOLDER_MODE)
        if exact_modes:
            path.chmod(FOLDER_MODE)
    except FileExistsError:  # Another process has made it meanwhile; which of them may write is decided by its lock.
        return
    except OSError as error:
        raise io_failed(f"folder {str(path)!r} cannot be made", error) from error


def _sync_parent(path: Path) -> None:
    """Make the root's own name durable, if its parent may be opened: its maker may have died before that."""
    try:
        parent = Directory.open(path.parent)
    except CheckpointError:
        return
    with parent:
        parent.sync()


def _warn_if_others_may_write(root: Directory) -> None:
    if not hasattr(os, "geteuid"):  # Windows says nothing of owners in these numbers.
        return
    status = root.status()
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        danger = "is writable for everybody: others can replace its files"
    elif status.st_uid not in (os.geteuid(), 0):
        danger = f"belongs to user {status.st_uid}, who can replace its files"
    else:
        return
    warn(f"checkpoint directory {str(root.path)!r} {danger}")

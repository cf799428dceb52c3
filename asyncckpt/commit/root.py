"""A checkpoint directory, held open: the root, `manifests/` and `data/`.

On a disk a writer makes what is missing, also parents of the root, and syncs it; a reader makes nothing. In an object
store there are no folders to make.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from pathlib import Path
from typing import Protocol, TypeVar

from asyncckpt.commit.foreign import what_is_there
from asyncckpt.errors import CheckpointError, ConflictError, NotFoundError, UnsupportedError, UsageError, warn
from asyncckpt.format.names import DATA_DIR, MANIFESTS_DIR
from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.storage.directory import FOLDER_MODE, Directory, io_failed
from asyncckpt.storage.folder import ReadFolder
from asyncckpt.storage.object_store import ObjectStore
from asyncckpt.storage.store_folder import RememberedFolder, StoreFolder

PROBE_NAME = ".probe"
Self = TypeVar("Self", bound="ReadRoot")


class ReadRoot(Protocol):
    """A checkpoint directory that is read: on a disk or in a store."""

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


class CheckpointRoot:
    """Open folders of one checkpoint directory."""

    def __init__(self, root: Directory, manifests: Directory, data: Directory) -> None:
        self.path = root.path
        self.root = root
        self.manifests = manifests
        self.data = data

    @staticmethod
    def for_writing(path: Path, *, exact_modes: bool = False) -> CheckpointRoot:
        """Open or make the directory, with its parents; UsageError when one of them is a file, or it is in use.

        exact_modes: what is made here gets its modes whatever the umask (see Directory).
        """
        _check_host()
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
        _check_host()
        with contextlib.ExitStack() as opened:
            root = opened.enter_context(Directory.open(path, exact_modes=exact_modes))
            try:
                manifests = opened.enter_context(root.child(MANIFESTS_DIR))
                data = opened.enter_context(root.child(DATA_DIR))
            except NotFoundError as error:
                what = f"{str(path)!r} is not a checkpoint directory: {error.what}"
                raise NotFoundError(what, **what_is_there(root)) from error
            opened.pop_all()
        return CheckpointRoot(root, manifests, data)

    @property
    def in_calls(self) -> CheckpointRoot:
        """What a call of the training loop may look at."""
        return self

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

    def close(self) -> None:
        for folder in (self.data, self.manifests, self.root):
            folder.close()

    def __enter__(self) -> CheckpointRoot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class StoreRoot:
    """A checkpoint directory in an object store. remembered: what its manifests were called at the last look."""

    def __init__(self, store: ObjectStore, remembered: RememberedFolder | None = None) -> None:
        self.store = store
        self.path = store.url
        self.root = StoreFolder(store)
        self.remembered = remembered or RememberedFolder(store, MANIFESTS_DIR)
        self.manifests: StoreFolder = remembered or self.root.child(MANIFESTS_DIR)
        self.data = self.root.child(DATA_DIR)

    @staticmethod
    def for_writing(store: ObjectStore) -> StoreRoot:
        """Check that the store takes what a writer puts there, and look at what it holds: see check_store."""
        _check_host()
        check_store(store)
        return StoreRoot.for_joining(store)

    @staticmethod
    def for_joining(store: ObjectStore) -> StoreRoot:
        """Open a directory that another rank has checked, to write beside it."""
        root = StoreRoot(store)
        root.remembered.look()
        return root

    @staticmethod
    def for_reading(store: ObjectStore) -> StoreRoot:
        _check_host()
        root = StoreRoot(store)
        if not root.root.has_folder(MANIFESTS_DIR):
            what = f"{str(root.path)!r} is not a checkpoint directory: there are no manifests"
            raise NotFoundError(what, **what_is_there(root.root))
        return root

    @property
    def in_calls(self) -> StoreRoot:
        """What a call of the training loop may look at: what was there at the last look, and is made here since."""
        return StoreRoot(self.store, self.remembered)

    def note(self, name: str) -> None:
        """Note that this process, or rank 0, has published a manifest."""
        self.remembered.note(name)

    def look_anew(self) -> bool:
        """Ask the store what is there; a call does so before it refuses something by its memory."""
        self.remembered.look()
        return True

    def check_in_place(self, what: str) -> None:
        """A URL leads where it led."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> StoreRoot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# A checkpoint directory that is written to.
WriteRoot = CheckpointRoot | StoreRoot


def open_root(place: Place) -> WriteRoot:
    """Open an existing checkpoint directory, wherever it is; NotFoundError when there is none."""
    if isinstance(place, StoreUrl):
        return StoreRoot.for_reading(ObjectStore(place))
    return CheckpointRoot.for_reading(place)


def check_store(store: ObjectStore) -> None:
    """Check that a store can be written to, and that its conditional PUT replaces nothing.

    Makes an empty object that stays, so that nothing need be removed. UnsupportedError, NotFoundError, IOFailedError.
    """
    key = f"{MANIFESTS_DIR}/{PROBE_NAME}"
    store.put_new(key, b"")
    if store.put_new(key, b""):
        raise UnsupportedError(
            f"the store of {str(store.url)!r} replaces objects in spite of If-None-Match",
            hint="two writers could replace each other's checkpoints there: use another store",
        )


def _check_host() -> None:
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
    """Make the root's own name durable, where its parent may be opened. Whoever made it may have died before that."""
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

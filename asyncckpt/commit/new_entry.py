"""A file or folder that is there all at once: made beside its place under a name of its own, then renamed.

1. Make `.<kind>-<id>.tmp` beside the target: a folder, or a file.
2. The caller writes into it, syncs what is in it, and reads it back.
3. `give_name` renames it to the target's name, which must be free, and syncs the folder above.

An error before 3 removes it; a crash leaves it, and nothing of it counts. A folder that was left is gone on with by
whoever makes the same once more (storage/written_chunks.py).
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from pathlib import Path

from asyncckpt.commit.root import make_folder
from asyncckpt.errors import CheckpointError, ConflictError, IndeterminateError
from asyncckpt.options import Durability
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.written_chunks import WrittenChunks

FOLDERS_DEPTH_MAX = 3  # Of what is made: RecSDK has tables, ranks and parts.


def check_is_free(path: Path) -> None:
    """Raise ConflictError when there is something under this name."""
    if os.path.lexists(path):
        raise ConflictError(f"{str(path)!r} already exists", hint="choose a name that does not")


class NewEntry:
    """What is going to be `path`; see above. Close it in any case, or use it as a context manager.

    temporary: where it is until then. Folders above are made. ConflictError for a name that is taken. written: what of
    a folder is written, if it can be gone on with.
    """

    def __init__(self, path: Path, *, kind: str, durability: Durability) -> None:
        check_is_free(path)
        make_folder(path.parent)
        self.path, self._durability = path, durability
        self._kind = kind
        self._name = f".{kind}-{uuid.uuid4().hex}.tmp"
        self.written: WrittenChunks | None = None
        self._folder: Directory | None = None
        self._is_published = False
        self._parent = Directory.open(path.parent)

    @property
    def temporary(self) -> Path:
        return self.path.parent / self._name

    def make_folder(self, identity: str | None = None) -> Directory:
        """Make it a folder, which stays open until the end. identity: go on with one that was left with the same."""
        for name in [] if identity is None else _left(self._parent, self._kind):
            with contextlib.ExitStack() as opened, contextlib.suppress(CheckpointError):
                folder = opened.enter_context(self._parent.child(name))
                self.written = WrittenChunks.go_on(folder, str(identity))
                if self.written is not None:
                    opened.pop_all()
                    self._name, self._folder = name, folder
                    return folder
        self._folder = self._parent.make_folder(self._name)
        if identity is not None:
            self.written = WrittenChunks.open(self._folder, identity)
        return self._folder

    def make_file(self) -> int:
        """Make it a file; return the descriptor, which is the caller's."""
        return self._parent.create_file(self._name)[0]

    def scratch_file(self) -> int | None:
        """Make a file on the same disk that has no name; return the descriptor, which is the caller's.

        None on systems where a file keeps its name while it is open.
        """
        name = f"{self._name}.scratch"
        fd = self._parent.create_file(name, readable=True)[0]
        try:
            self._parent.remove_file(name)
        except CheckpointError:
            os.close(fd)
            self._parent.remove_file(name)
            return None
        return fd

    def sync(self) -> None:
        """Make the names in the folder durable."""
        if self._folder is not None:
            self._sync(self._folder)

    def give_name(self, is_whole: Callable[[], bool]) -> None:
        """Give it its name. ConflictError when that is taken by now, or the folder above is elsewhere;
        IndeterminateError when it may not be durable.

        is_whole: whether what is under the name is complete; NotFoundError where there is nothing.
        """
        if self.written is not None:
            self.written.end()
            self.sync()
        self._check_in_place()
        self._rename()
        self._is_published = True
        try:
            self._sync(self._parent)
        except CheckpointError as error:
            what = f"{str(self.path)!r} is there, but perhaps not durable: {error}"
            raise IndeterminateError(what, resolve=lambda: _is_durable(self.path, is_whole)) from error
        self._check_in_place()

    def close(self) -> None:
        """Remove what is not published."""
        if self.written is not None:
            self.written.close()
        if not self._is_published:
            with contextlib.suppress(CheckpointError):
                if os.path.isdir(self.temporary):
                    self._parent.remove_folder(self._name, depth=FOLDERS_DEPTH_MAX)
                else:
                    self._parent.remove_file(self._name)
        if self._folder is not None:
            self._folder.close()
        self._parent.close()

    def __enter__(self) -> NewEntry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_in_place(self) -> None:
        if not self._parent.is_still(self.path.parent):
            what = f"folder {str(self.path.parent)!r} was moved or replaced while {self.path.name!r} was made in it"
            raise ConflictError(what)

    def _rename(self) -> None:
        try:
            self._parent.publish(self._name, self.path.name)
        except ConflictError:
            raise
        except CheckpointError:  # No rename that refuses to replace: then one that replaces only an empty folder.
            check_is_free(self.path)
            self._parent.move(self._name, self.path.name)

    def _sync(self, folder: Directory) -> None:
        if self._durability == "fsync":
            folder.sync()


def noted_bytes(path: Path, *, kind: str, identity: str) -> int:
    """Return how much of what is going to be `path` was written and left with an identity, as far as it is noted."""
    try:
        with Directory.open(path.parent) as parent:
            for name in _left(parent, kind):
                with parent.child(name) as folder:
                    found = WrittenChunks.noted_bytes(folder, identity)
                if found is not None:
                    return found
    except CheckpointError:
        return 0
    return 0


def _left(parent: Directory, kind: str) -> list[str]:
    """Return the names of what is being made of a kind, or was left."""
    return sorted(name for name in parent.names() if name.startswith(f".{kind}-") and name.endswith(".tmp"))


def _is_durable(path: Path, is_whole: Callable[[], bool]) -> bool:
    if not is_whole():
        return False
    with Directory.open(path.parent) as parent:
        parent.sync()
    return True

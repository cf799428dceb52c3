"""A checkpoint directory in an object store, and how a manifest is published there. There are no folders to make.

A PUT that was not answered may still succeed: until the manifest is found, such a commit is in doubt.
"""

from __future__ import annotations

import errno
import time
from concurrent.futures import Executor
from typing import ClassVar

from asyncckpt.commit.attempt import Claim, step_exists
from asyncckpt.commit.discover import check_files, is_committed
from asyncckpt.commit.foreign import what_is_there
from asyncckpt.commit.root import check_host
from asyncckpt.errors import CheckpointError, ConflictError, IOFailedError, NotFoundError, UnsupportedError
from asyncckpt.format.head import ManifestHead
from asyncckpt.format.names import DATA_DIR, MANIFESTS_DIR, Attempt
from asyncckpt.storage.object_store import ObjectStore, StoreLimits
from asyncckpt.storage.store_answers import is_timeout
from asyncckpt.storage.store_folder import RememberedFolder, StoreFolder

PROBE_NAME = ".probe"
STORE_LIMITS = StoreLimits()  # Of a writer.
REFUSED_S_MAX = 10.0  # Of a PUT, while the name is not taken.
PAUSE_S = 0.05


class StoreRoot:
    """A checkpoint directory in an object store. remembered: what its manifests were called at the last look."""

    looks_for_marks: ClassVar[int] = 2  # A mark changes its name once, and one listing may miss it then.
    sweeps: ClassVar[bool] = False  # Nobody knows there whose attempt is still under way.

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
        check_host()
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
        check_host()
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

    def begin(self, claim: Claim, *, goes_on: bool, durable: bool) -> ObjectPublication:
        """Look whether the step is free still. A prefix is there with its first object. ConflictError."""
        self.remembered.look()
        if claim.kind == "save" and is_committed(self.in_calls, claim.step):
            raise step_exists(self, claim.step)
        return ObjectPublication(self, claim.attempt)

    def check_in_place(self, what: str) -> None:
        """A URL leads where it led."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> StoreRoot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


class ObjectPublication:
    """In a store."""

    def __init__(self, root: StoreRoot, attempt: Attempt) -> None:
        self.folder = root.data.child(attempt.directory)
        self._root = root
        self._raw: bytes | bytearray = b""

    def prepare(self) -> None:
        """Nothing is there yet."""

    async def write(self, raw: bytes | bytearray, threads: Executor) -> None:
        self._raw = raw

    def settle(self) -> None:
        """Objects are durable."""

    def check_files(self, head: ManifestHead, what: str) -> None:
        check_files(self._root, head)

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
                raise ConflictError(f"{what} already exists")
            if time.monotonic() >= until:
                raise IOFailedError(f"{what} is neither there nor can be made", errno=errno.ETIMEDOUT)
            is_under_way = True  # Stores also refuse while another request for that key is.
            time.sleep(PAUSE_S)

    def is_open(self, error: Exception, *, is_ours: bool) -> bool:
        return not is_ours and (is_timeout(error) or not isinstance(error, CheckpointError))

    def sync(self, name: str) -> None:
        self._root.note(name)  # Also where the answer to our own request was lost.
        self._root.store.check_kept(f"{MANIFESTS_DIR}/{name}", self._raw)

    def can_send_again(self, name: str) -> bool:
        self._root.note(name)  # Until a look says that it is not there.
        return True

    def discard(self) -> None:
        """What was not published was not put."""

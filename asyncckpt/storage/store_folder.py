"""A prefix of an object store, used like a folder. It is there as long as an object is below it."""

from __future__ import annotations

from typing import Any

from asyncckpt.errors import CorruptError, NotFoundError
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore


class StoreFolder:
    """A folder of a checkpoint directory in a store; `key` is its prefix below the URL of that.

    What a call of a writer has made is durable, and seen by all, when it returns. See Directory for what else they do.
    """

    def __init__(self, store: ObjectStore, key: str = "") -> None:
        self.store = store
        self._key = key
        self.path: StoreUrl = store.url / key if key else store.url
        self._listed: dict[str, int] | None = None

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("store", str(self.path))

    def child(self, name: str) -> StoreFolder:
        return StoreFolder(self.store, self.key(name))

    def close(self) -> None:
        """Nothing is open: clients keep their connections, and end them."""

    def __enter__(self) -> StoreFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> list[str]:
        return self.store.names(self._key)

    def exists(self, name: str) -> bool:
        """Return whether there is an object of this name."""
        return self.store.find(self.key(name)) is not None

    def has_folder(self, name: str) -> bool:
        return bool(self.store.below(self.key(name), count_max=1))

    def has_listed(self, name: str) -> bool:
        return self.exists(name)

    def version(self, name: str) -> tuple[Any, ...]:
        found = self.store.find(self.key(name))
        if found is None:
            raise NotFoundError(f"object {str(self.path / name)!r} does not exist")
        return found.tag, found.bytes

    def size(self, name: str) -> int:
        return int(self.version(name)[1])

    def folder_version(self, name: str) -> tuple[Any, ...]:
        """Return (): a prefix has no version."""
        return ()

    def read_file(self, name: str, *, bytes_max: int) -> bytes:
        return self.store.read_whole(self.key(name), bytes_max=bytes_max)

    def check_file(self, name: str, *, bytes: int) -> None:
        """Raise unless there is an object of this size, as listed by the first such call of this folder."""
        if self._listed is None:
            self._listed = {found.key: found.bytes for found in self.store.below(self._key)}
        size = self._listed.get(self.key(name))
        if size is None:
            raise NotFoundError(f"object {str(self.path / name)!r} does not exist")
        if size != bytes:
            raise CorruptError(f"{str(self.path / name)!r} has the wrong size", found=size, expected=bytes)

    # -- of writers ----------------------------------------------------------------------------------------------------

    def make_empty(self, name: str) -> None:
        """Make an object without bytes. One that is there already is as good: an earlier try of this call has made it,
        where its name holds a random id; nobody else asks for more than that it is there."""
        self.store.put_new(self.key(name), b"")
        self.store.check_kept(self.key(name), b"")

    def move(self, source: str, target: str) -> None:
        """Give an empty object another name, by two requests: others may see both meanwhile."""
        self.make_empty(target)
        self.remove_file(source)

    def remove_file(self, name: str, *, version: tuple[Any, ...] = ()) -> bool:
        """Remove an object, but not one of another version; return whether it was there."""
        found = self.store.find(self.key(name))
        if found is None or (version and (found.tag, found.bytes) != version):
            return False
        self.store.remove(self.key(name))
        return True

    def remove_folder(self, name: str) -> None:
        for found in self.store.below(self.key(name)):
            self.store.remove(found.key)

    def sync(self) -> None:
        """Nothing waits to become durable."""

    def key(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name


class RememberedFolder(StoreFolder):
    """A folder whose names are those of the last look, so that calls of a training loop wait for no answer."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        super().__init__(store, key)
        self._names: set[str] = set()

    def look(self) -> None:
        """Ask the store for the names; what is noted meanwhile may have come after its list."""
        before, listed = self._names, super().names()
        self._names = {*listed, *(self._names - before)}

    def note(self, name: str) -> None:
        self._names = {*self._names, name}

    def names(self) -> list[str]:
        return sorted(self._names)

    def exists(self, name: str) -> bool:
        return name in self._names

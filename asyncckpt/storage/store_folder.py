"""A prefix of an object store, read like a folder. It is there as long as an object is below it."""

from __future__ import annotations

from asyncckpt.errors import NotFoundError
from asyncckpt.model.store_url import StoreUrl
from asyncckpt.storage.object_store import ObjectStore


class StoreFolder:
    """A folder of a checkpoint directory in a store; `key` is its prefix below the URL of that."""

    def __init__(self, store: ObjectStore, key: str = "") -> None:
        self.store = store
        self._key = key
        self.path: StoreUrl = store.url / key if key else store.url

    @property
    def identity(self) -> tuple[str, ...]:
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

    def version(self, name: str) -> tuple[object, ...]:
        found = self.store.find(self.key(name))
        if found is None:
            raise NotFoundError(f"object {str(self.path / name)!r} does not exist")
        return found.tag, found.bytes

    def read_file(self, name: str, *, bytes_max: int) -> bytes:
        return self.store.read_whole(self.key(name), bytes_max=bytes_max)

    def key(self, name: str) -> str:
        return f"{self._key}/{name}" if self._key else name

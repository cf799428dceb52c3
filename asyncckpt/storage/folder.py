"""What a reader needs of a folder, of a disk or of an object store; and where such a folder is."""

from __future__ import annotations

import os
from typing import Any, Protocol, TypeVar

from asyncckpt.model.store_url import Place, StoreUrl
from asyncckpt.storage.directory import check_path

Self = TypeVar("Self", bound="ReadFolder")


class ReadFolder(Protocol):
    """A folder that is read. `Directory` and `StoreFolder`; see Directory for what its calls do and raise."""

    @property
    def path(self) -> Place: ...
    @property
    def identity(self) -> tuple[Any, ...]:
        """Differs from that of any other folder."""
        ...

    def child(self, name: str) -> ReadFolder: ...
    def close(self) -> None: ...
    def __enter__(self: Self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def names(self) -> list[str]: ...
    def exists(self, name: str) -> bool: ...
    def has_folder(self, name: str) -> bool: ...
    def version(self, name: str) -> tuple[Any, ...]: ...
    def read_file(self, name: str, *, bytes_max: int) -> bytes: ...


def check_place(path: str | os.PathLike[str]) -> Place:
    """Return an absolute path, or the parts of a URL of a store. Raises UsageError for what can be neither."""
    return StoreUrl.of(str(path)) if StoreUrl.is_url(path) else check_path(path)

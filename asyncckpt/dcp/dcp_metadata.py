"""Read the `.metadata` of a DCP checkpoint: a pickle, so it is read by an unpickler that knows only DCP's records.

It makes the dataclasses of DCP's metadata, sizes, dtypes and layouts of torch, and plain paths. Anything else that a
pickle names is refused before it is even imported; nothing of what is admitted runs foreign code.

A pickle may set members of whatever it names, classes too. So what it gets are classes and functions made for it alone,
which nobody else has; DCP's own records are made of what it has put into them, when all of that is checked.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError, Words
from asyncckpt.format.weights_only import why_refused
from asyncckpt.storage.real_folder import real_folder

METADATA_NAME = ".metadata"
METADATA_BYTES_MAX = 4 << 30
_DCP = "torch.distributed.checkpoint"
_RECORDS = {
    f"{_DCP}.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_DCP}.filesystem": {"_StorageInfo"},
    # Where older versions of torch had them.
    "torch.distributed._shard.sharded_tensor.metadata": {"TensorProperties", "MEM_FORMAT_ENCODING"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


class _Record:
    """What a pickle has said of one record: its members, or what its class has made of one argument."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, Mapping):  # TensorProperties, whose other members nobody asks for.
            state = dict(zip(("dtype", "layout", "requires_grad", "memory_format", "pin_memory"), state, strict=True))
        self.__dict__.update(state)

    def __hash__(self) -> int:
        return hash((getattr(self, "fqn", None), getattr(self, "offset", None), getattr(self, "index", None)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and self.__dict__ == other.__dict__


class _RecordsOnly(pickle.Unpickler):
    """Knows what is in the lists above, and torch's dtypes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.kinds: dict[str, Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype  # Not getattr, for which torch would import modules.
        if name not in _RECORDS.get(module, ()):
            raise self._refused(module, name)
        if name.endswith(("WindowsPath", "PosixPath")):
            return lambda *parts: "/".join(parts)
        if name == "_get_layout":
            return lambda layout: layout
        if module in ("torch", "collections"):  # Nobody can set members of these.
            return super().find_class(module, name)
        return self.kinds.setdefault(name, type(name, (_Record,), {}))

    def _refused(self, module: str, name: str) -> UnsupportedError:
        return UnsupportedError(
            "the metadata of the DCP checkpoint names something that is not one of DCP's own records",
            found=Words(f"{module}.{name}"),
            hint="nothing of it was run",
        )


def read_dcp_metadata(folder: Path) -> Metadata:
    """Read the metadata of a FileSystemWriter. Raises NotFoundError, CorruptError, UnsupportedError."""
    path = folder / METADATA_NAME
    try:
        with real_folder(path) as (real, name):
            raw = real.read_file(name, bytes_max=METADATA_BYTES_MAX)
    except NotFoundError as error:
        raise NotFoundError(f"{str(folder)!r} holds no DCP checkpoint: it has no {METADATA_NAME!r}") from error
    unpickler = _RecordsOnly(io.BytesIO(raw))
    try:
        found = unpickler.load()
    except UnsupportedError:
        raise
    except Exception as error:
        raise CorruptError(f"{str(path)!r} is damaged: {type(error).__name__}: {why_refused(error)}") from error
    if type(found) is not unpickler.kinds.get("Metadata"):
        raise CorruptError(f"{str(path)!r} is not the metadata of a DCP checkpoint", found=type(found))
    try:
        return _made(found, unpickler.kinds)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # A member is missing, or is something else.
        raise CorruptError(f"{str(path)!r} is damaged: its records are not what DCP writes") from error


def _made(found: Any, kinds: Mapping[str, Any]) -> Metadata:
    """Make DCP's own records of what a pickle has said. ValueError and its like where these have other types."""
    items, places, paths = found.state_dict_metadata, found.storage_data, getattr(found, "planner_data", None)
    _check(type(items) is dict and type(places) is dict and _are_paths(paths))
    return Metadata(
        state_dict_metadata={name: _made_item(name, item, kinds) for name, item in items.items()},
        planner_data=paths if isinstance(paths, dict) else None,
        storage_data={
            MetadataIndex(**vars(_of(index, kinds["MetadataIndex"]))): _StorageInfo(
                **vars(_of(place, kinds["_StorageInfo"]))
            )
            for index, place in places.items()
        },
    )


def _made_item(name: object, item: Any, kinds: Mapping[str, Any]) -> TensorStorageMetadata | BytesStorageMetadata:
    _check(type(name) is str)
    if type(item) is kinds.get("BytesStorageMetadata"):
        return BytesStorageMetadata()
    _of(item, kinds["TensorStorageMetadata"])
    _check(isinstance(item.properties.dtype, torch.dtype) and _is_shape(item.size) and type(item.chunks) is list)
    chunks = [_of(chunk, kinds["ChunkStorageMetadata"]) for chunk in item.chunks]
    for chunk in chunks:
        _check(_is_shape(chunk.offsets) and _is_shape(chunk.sizes))
        _check(len(chunk.offsets) == len(chunk.sizes) == len(item.size))
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=item.properties.dtype),
        size=torch.Size(item.size),
        chunks=[ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks],
    )


def _of(record: Any, kind: Any) -> Any:
    _check(type(record) is kind)
    return record


def _check(is_sound: bool) -> None:
    if not is_sound:
        raise ValueError("a record has a member of another type")


def _is_shape(found: object) -> bool:
    return isinstance(found, tuple) and all(type(size) is int and size >= 0 for size in found)


def _are_paths(found: object) -> bool:
    """Return whether these are the paths that a planner has flattened, below names."""
    return not isinstance(found, dict) or all(
        isinstance(path, tuple) and path and type(path[0]) is str and all(type(key) in (str, int) for key in path)
        for path in found.values()
    )

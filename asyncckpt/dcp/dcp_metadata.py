"""Read the `.metadata` of a DCP checkpoint: a pickle, so it is read by an unpickler that knows only DCP's records.

It makes the dataclasses of DCP's metadata, sizes, dtypes and layouts of torch, and plain paths. Anything else that a
pickle names is refused before it is even imported; nothing of what is admitted runs foreign code.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError
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


class _RecordsOnly(pickle.Unpickler):
    """Knows what is in the lists above, and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _RECORDS.get(module, ()):
            if name.endswith(("WindowsPath", "PosixPath")):
                return lambda *parts: "/".join(parts)
            return super().find_class(module, name)
        raise UnsupportedError(
            "the metadata of the DCP checkpoint names something that is not one of DCP's own records",
            found=f"{module}.{name}",
            hint="nothing of it was run",
        )


def read_dcp_metadata(folder: Path) -> Metadata:
    """Read the metadata of a FileSystemWriter. Raises NotFoundError, CorruptError, UnsupportedError."""
    path = folder / METADATA_NAME
    try:
        with real_folder(path) as (real, name):
            raw = real.read_file(name, bytes_max=METADATA_BYTES_MAX)
    except NotFoundError as error:
        raise NotFoundError(f"{str(folder)!r} holds no DCP checkpoint: {METADATA_NAME!r} is not there") from error
    try:
        found = _RecordsOnly(io.BytesIO(raw)).load()
    except UnsupportedError:
        raise
    except Exception as error:
        raise CorruptError(f"{str(path)!r} is damaged: {type(error).__name__}: {why_refused(error)}") from error
    if not isinstance(found, Metadata):
        raise CorruptError(f"{str(path)!r} is not the metadata of a DCP checkpoint", found=type(found).__name__)
    try:
        is_sound = (
            type(found.state_dict_metadata) is dict
            and all(_is_sound(name, item) for name, item in found.state_dict_metadata.items())
            and type(found.storage_data) is dict
            and _are_paths(found.planner_data)
        )
    except AttributeError:  # A record that lacks a member.
        is_sound = False
    if not is_sound:
        raise CorruptError(f"{str(path)!r} is damaged: its records are not what DCP writes")
    return found


def _is_sound(name: object, item: object) -> bool:
    """Return whether a record has the types that it should have: a pickle may put anything anywhere."""
    if type(name) is not str or not isinstance(item, TensorStorageMetadata):
        return type(name) is str and isinstance(item, BytesStorageMetadata)
    return (
        isinstance(getattr(item.properties, "dtype", None), torch.dtype)
        and _is_shape(item.size)
        and type(item.chunks) is list
        and all(
            isinstance(chunk, ChunkStorageMetadata)
            and _is_shape(chunk.offsets)
            and _is_shape(chunk.sizes)
            and len(chunk.offsets) == len(chunk.sizes) == len(item.size)
            for chunk in item.chunks
        )
    )


def _is_shape(found: object) -> bool:
    return isinstance(found, tuple) and all(type(size) is int and size >= 0 for size in found)


def _are_paths(found: object) -> bool:
    """Return whether these are the paths that a planner has flattened, below names."""
    return not isinstance(found, dict) or all(
        isinstance(path, tuple) and path and type(path[0]) is str and all(type(key) in (str, int) for key in path)
        for path in found.values()
    )

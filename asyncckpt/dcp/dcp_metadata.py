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
from torch.distributed.checkpoint.metadata import Metadata

from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError
from asyncckpt.storage.directory import io_failed

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
        if path.stat().st_size > METADATA_BYTES_MAX:
            raise CorruptError(f"{str(path)!r} is too large", found=path.stat().st_size, expected=METADATA_BYTES_MAX)
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise NotFoundError(f"{str(folder)!r} holds no DCP checkpoint: {METADATA_NAME!r} is not there") from error
    except OSError as error:
        raise io_failed(f"{str(path)!r} cannot be read", error) from error
    try:
        found = _RecordsOnly(io.BytesIO(raw)).load()
    except UnsupportedError:
        raise
    except Exception as error:
        raise CorruptError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}") from error
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise CorruptError(f"{str(path)!r} is not the metadata of a DCP checkpoint", found=type(found).__name__)
    return found

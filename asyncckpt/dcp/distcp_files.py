"""The `.distcp` files of a checkpoint of DCP: found by its metadata, read item by item."""

from __future__ import annotations

import io
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from asyncckpt.arguments import is_text
from asyncckpt.dcp.planned_data import from_stream
from asyncckpt.errors import CorruptError, NotFoundError, UnsupportedError, Words
from asyncckpt.format import limits
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.weights_only import why_refused
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import U64
from asyncckpt.plan.leaf_memory import BLOW_UP_BYTES_MAX
from asyncckpt.plan.tree_size import check_tree_size
from asyncckpt.storage.directory import io_failed
from asyncckpt.storage.real_folder import real_folder


class DcpFiles:
    """The `.distcp` files of a DCP checkpoint; its metadata says what is where."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._places: dict[MetadataIndex, Any] = metadata.storage_data
        self._files: dict[str, io.BufferedReader] = {}
        self._text_bytes = 0
        self._held: weakref.WeakValueDictionary[MetadataIndex, torch.Tensor] = weakref.WeakValueDictionary()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def names(self) -> list[str]:
        """The names of the opened files."""
        return sorted(self._files)

    def check(self, index: MetadataIndex, *, bytes: int) -> None:
        """Raise CorruptError unless there is a place for an item, in a file that is long enough; UnsupportedError.

        bytes: how large it is in memory, where that is known. A stored tensor may be an expanded one.
        """
        place, _ = self._place(index)
        if bytes > place.length + BLOW_UP_BYTES_MAX:
            what = f"the metadata of the DCP checkpoint says more of {index.fqn!r} than there is"
            raise CorruptError(what, found=Words(f"{place.length} bytes"), expected=f"{bytes} bytes")

    def value(self, name: str) -> Any:
        found = from_stream(self._stream(MetadataIndex(name)), name=name)
        self._text_bytes += check_tree_size(found, owner=f"value {name!r}")
        limits.check_manifest_bytes(self._text_bytes, last=name)
        return found

    def tensor(self, index: MetadataIndex, *, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a chunk, contiguous on the CPU; the one that was read before while it is still held."""
        held = self._held.get(index)
        if held is not None:
            return held
        stream = self._stream(index)
        what = f"chunk {list(index.offset or ())} of {index.fqn!r}"
        try:
            found = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptError(f"{what} cannot be read: {why_refused(error)}") from error
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape or found.dtype is not dtype:
            raise CorruptError(
                f"{what} is not what the metadata says",
                found=(tuple(found.shape), found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__,
                expected=(shape, dtype),
            )
        self._held[index] = read = found.detach().resolve_conj().resolve_neg().contiguous()
        return read

    def _stream(self, index: MetadataIndex) -> io.BytesIO:
        place, file = self._place(index)
        try:
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))
        except OSError as error:
            raise io_failed(f"file {place.relative_path!r} of the DCP checkpoint cannot be read", error) from error

    def _place(self, index: MetadataIndex) -> tuple[Any, io.BufferedReader]:
        """Return where an item is, and the open file."""
        place: Any = self._places.get(index)
        name: Any = getattr(place, "relative_path", None)
        begin: Any = getattr(place, "offset", None)
        count: Any = getattr(place, "length", None)
        is_place = type(name) is str and type(begin) is int and type(count) is int
        if not is_place or Path(name).name != name or name in ("", ".", "..") or "\0" in name or not is_text(name):
            raise CorruptError(f"the metadata of the DCP checkpoint has no place for {index.fqn!r}", found=name)
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedError(f"{index.fqn!r} was changed by a DCP extension", found=place.transform_descriptors)
        if name not in self._files:
            self._files[name] = self._open(name)
        file = self._files[name]
        try:
            size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise io_failed(f"file {name!r} of the DCP checkpoint cannot be looked at", error) from error
        if not 0 <= begin <= begin + count <= size:
            what = f"{index.fqn!r} of the DCP checkpoint is not within file {name!r} of {size} bytes"
            raise CorruptError(what, found=Words(f"bytes {begin} to {begin + count}"))
        return place, file

    def _open(self, name: str) -> io.BufferedReader:
        try:
            with real_folder(self._folder / name) as (folder, real):
                return os.fdopen(folder.open_file(real), "rb")
        except NotFoundError as error:
            raise CorruptError(f"file {name!r} of the DCP checkpoint is missing") from error


class ChunkSource:
    """The bytes of a block from a chunk of a DCP checkpoint, which is held from the block's first byte to its last.

    box: the whole chunk. block: the rows of it that are asked for; less than all for a chunk over the limit.
    """

    def __init__(self, files: DcpFiles, index: MetadataIndex, box: BlockSpec, block: BlockSpec) -> None:
        self._files = files
        self._index = index
        self._box = box
        self._block_bytes = block.bytes
        row_bytes = box.bytes // box.shape[0] if box.shape and box.shape[0] else 0
        self._begin = (block.row_begin - box.row_begin) * row_bytes
        self._held: torch.Tensor | None = None
        self._is_done = False

    def pieces(self, begin: int, end: int) -> U64:
        if self._held is None:
            dtype = dtype_by_name(self._box.dtype, owner=self._box.name).dtype
            self._held = self._files.tensor(self._index, shape=self._box.shape, dtype=dtype)
        self._is_done = end == self._block_bytes
        return np.array([[self._held.data_ptr() + self._begin + begin, end - begin]], dtype=np.uint64)

    def release(self) -> None:
        if self._is_done:
            self._held = None

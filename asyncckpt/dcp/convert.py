"""Convert checkpoints from DCP's own format and back to it, in one process.

import_checkpoint   reads what dcp.FileSystemWriter wrote: chunk by chunk, so memory holds a chunk and two buffers
export_checkpoint   writes it with dcp.FileSystemWriter: the whole checkpoint is in memory, and the result holds
                    pickles, as that format does
"""

from __future__ import annotations

import io
import os
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from asyncckpt.commit.proof import Draft
from asyncckpt.dcp.attempt import CoordinatedAttempt, save_lock_held
from asyncckpt.dcp.dcp_metadata import METADATA_NAME, read_dcp_metadata
from asyncckpt.dcp.planned_data import from_stream
from asyncckpt.dcp.rank_part import ChunkFacts, DcpPath, LocalKeys, plan_chunks
from asyncckpt.dcp.reader import StorageReader
from asyncckpt.dcp.writer import check_whole
from asyncckpt.engine.save.box_files import BoxPlan, stream_boxes
from asyncckpt.errors import ConflictError, CorruptError, UnsupportedError, warn
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.values import encode_value
from asyncckpt.model.block import BlockSpec
from asyncckpt.native import U64, Progress
from asyncckpt.options import Durability, SaveOptions
from asyncckpt.shard.target import ShardTarget
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path, io_failed


@uninterrupted
def import_checkpoint(
    dcp_dir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
) -> int:
    """Import a checkpoint of dcp.FileSystemWriter as a step of an asyncckpt directory; returns the step.

    step: None: one more than the newest. Chunks stay as they are: one of a tensor that was spread is a block. Nothing
    but plain values and tensors is taken: UnsupportedError naming what is not. Raises NotFoundError, CorruptError,
    ConflictError, IOFailedError too; there is no manifest then.
    """
    folder = check_path(dcp_dir)
    metadata = read_dcp_metadata(folder)
    check_whole(metadata)
    with closing(_DcpFiles(folder, metadata)) as files:
        plan, names, chunks = _plan(metadata, parallel=parallel)
        values = [encode_value(files.value(name), owner=repr(name)) for name in names]
        options = SaveOptions(durability=durability, parallel=parallel)
        with closing(CoordinatedAttempt(check_path(path), step, options)) as begun:
            sources = [
                _ChunkSource(files, chunks[box], plan.boxes[box], placed.spec)
                for box, placed in zip(plan.pieces.tensor.tolist(), plan.image.blocks, strict=True)
            ]
            target = ShardTarget(begun.transaction.folder, begun.attempt, options, Progress())
            with save_lock_held("save", begun.root.path, begun.attempt.step):
                written, digests = stream_boxes(plan, sources, target)
            begun.commit(Draft(begun.transaction.head(files=written, values=tuple(values)), plan.body, digests))
    return begun.attempt.step


def export_checkpoint(
    path: str | os.PathLike[str], dcp_dir: str | os.PathLike[str], *, step: int | None = None
) -> None:
    """Write a checkpoint (default: the newest) as dcp.FileSystemWriter would, in this one process.

    The dense tensors in full, and the plain values; tables are left out, with a RuntimeWarning. Needs memory for all
    of it. What is written holds pickles: that is the format of the target, and keys of mappings become text there, as
    in all of DCP; for a file of torch.save, save what asyncckpt.load returns. ConflictError when there is a checkpoint
    in dcp_dir already.
    """
    folder = check_path(dcp_dir)
    if (folder / METADATA_NAME).exists():
        raise ConflictError(f"{str(folder)!r} holds a DCP checkpoint already")
    reader = StorageReader(path, step=step)
    metadata = reader.read_metadata()
    tables = reader.tables()
    if tables:
        warn(f"tables {tables} are left out: DCP has none", RuntimeWarning)
    state: dict[str, Any] = {}
    for name, item in metadata.state_dict_metadata.items():
        value = torch.empty(item.size, dtype=item.properties.dtype) if isinstance(item, TensorStorageMetadata) else None
        set_element(state, metadata.planner_data[name], value)
    # As torch's own converters (format_utils) do it: `load` and `save` of torch 2.4 lack no_dist.
    _load_state_dict(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    _save_state_dict(state, storage_writer=FileSystemWriter(folder), no_dist=True)


def _plan(metadata: Metadata, *, parallel: int) -> tuple[BoxPlan, list[str], list[MetadataIndex]]:
    """Return the plan of all chunks, the names of the values in the order of the tree, and the chunk of every box."""
    items = metadata.state_dict_metadata
    tensors = {name: item for name, item in items.items() if isinstance(item, TensorStorageMetadata)}
    keys = LocalKeys(tensors=tuple(tensors), values=tuple(name for name in items if name not in tensors))
    paths: dict[str, DcpPath] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    chunks: list[ChunkFacts] = [
        (name, chunk.offsets, chunk.sizes, item.size, item.properties.dtype)
        for name, item in tensors.items()
        for chunk in item.chunks
    ]
    plan, stored, value_names = plan_chunks(chunks, keys, paths, rank=0, parallel=parallel)
    return plan, value_names, [MetadataIndex(name, begin) for name, begin, *_ in map(chunks.__getitem__, stored)]


class _DcpFiles:
    """The `.distcp` files of a DCP checkpoint; its metadata says what is where, and is checked."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder = folder
        self._places: dict[MetadataIndex, Any] = metadata.storage_data if type(metadata.storage_data) is dict else {}
        self._files: dict[str, io.BufferedReader] = {}
        self._held: weakref.WeakValueDictionary[MetadataIndex, torch.Tensor] = weakref.WeakValueDictionary()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def value(self, name: str) -> Any:
        return from_stream(self._stream(MetadataIndex(name)), name=name)

    def tensor(self, index: MetadataIndex, *, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a chunk, contiguous on the CPU; the one that was read before while it is still held."""
        held = self._held.get(index)
        if held is not None:
            return held
        stream = self._stream(index)
        try:
            found = torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CorruptError(f"chunk {list(index.offset or ())} of {index.fqn!r} cannot be read: {error}") from error
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != shape or found.dtype is not dtype:
            raise CorruptError(
                f"chunk {list(index.offset or ())} of {index.fqn!r} is not what the metadata says",
                found=(tuple(found.shape), found.dtype) if isinstance(found, torch.Tensor) else type(found).__name__,
                expected=(shape, dtype),
            )
        self._held[index] = read = found.detach().resolve_conj().resolve_neg().contiguous()
        return read

    def _stream(self, index: MetadataIndex) -> io.BytesIO:
        place: Any = self._places.get(index)
        name = getattr(place, "relative_path", None)
        if type(name) is not str or Path(name).name != name or name in ("", ".", ".."):
            raise CorruptError(f"the metadata of the DCP checkpoint has no place for {index.fqn!r}", found=name)
        if getattr(place, "transform_descriptors", None):
            raise UnsupportedError(
                f"{index.fqn!r} was transformed by an extension of DCP", found=place.transform_descriptors
            )
        try:
            if name not in self._files:
                self._files[name] = (self._folder / name).open("rb")
            file = self._files[name]
            size = os.fstat(file.fileno()).st_size
            if not 0 <= place.offset <= place.offset + place.length <= size:
                raise CorruptError(
                    f"file {name!r} of the DCP checkpoint is too short",
                    found=size,
                    expected=place.offset + place.length,
                )
            file.seek(place.offset)
            return io.BytesIO(file.read(place.length))
        except OSError as error:
            raise io_failed(f"file {name!r} of the DCP checkpoint cannot be read", error) from error


class _ChunkSource:
    """The bytes of a block from a chunk of a DCP checkpoint, which is held from the block's first byte to its last.

    box: the whole chunk. block: the rows of it that are asked for; less than all for a chunk over the limit.
    """

    def __init__(self, files: _DcpFiles, index: MetadataIndex, box: BlockSpec, block: BlockSpec) -> None:
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

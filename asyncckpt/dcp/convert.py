"""Convert checkpoints from DCP's own format and back to it, in one process.

import_checkpoint   reads what dcp.FileSystemWriter wrote: chunk by chunk, so memory holds a chunk and two buffers
export_checkpoint   writes it with dcp.FileSystemWriter, which wants all tensors at once: their memory is a file on the
                    disk of the target (staging/file_memory.py). The result holds pickles, as that format does
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import get_element, set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

from asyncckpt.arguments import check_type
from asyncckpt.commit.attempt import Draft
from asyncckpt.commit.import_source import ImportSource, check_is_apart, reading
from asyncckpt.commit.new_entry import NewEntry, check_is_free
from asyncckpt.dcp.attempt import CoordinatedAttempt, save_lock_held
from asyncckpt.dcp.dcp_metadata import read_dcp_metadata
from asyncckpt.dcp.distcp_files import ChunkSource, DcpFiles
from asyncckpt.dcp.rank_part import ChunkFacts, DcpPath, LocalKeys, plan_chunks
from asyncckpt.dcp.reader import StorageReader
from asyncckpt.dcp.stored import check_keys
from asyncckpt.dcp.writer import check_whole
from asyncckpt.engine.load.verify import verify_new
from asyncckpt.engine.process.background import senders
from asyncckpt.engine.save.box_files import BoxPlan, stream_boxes
from asyncckpt.errors import CheckpointError, CorruptError, UnsupportedError, UsageError, warn
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.names import check_step
from asyncckpt.format.strict_json import Json
from asyncckpt.format.values import encode_value
from asyncckpt.format.weights_only import why_refused
from asyncckpt.model.store_url import Place
from asyncckpt.native import Progress
from asyncckpt.options import Durability, SaveOptions
from asyncckpt.plan.layouts import check_without
from asyncckpt.plan.rename import Names
from asyncckpt.shard.files import ShardTarget
from asyncckpt.signals import uninterrupted
from asyncckpt.staging.file_memory import FileMemory
from asyncckpt.storage.directory import check_path, io_failed
from asyncckpt.storage.folder import check_place


@dataclass(frozen=True)
class Converted:
    """What was converted, or would be: names of tensors, values and tables, and how many files.

    bytes: those of the tensors, or those written. tables: those that are left out.
    """

    step: int | None
    tensors: tuple[str, ...]
    values: tuple[str, ...]
    files_count: int
    bytes: int
    tables: tuple[str, ...] = ()
    seconds: float = 0.0


def import_checkpoint(
    dcp_dir: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    durability: Durability = "fsync",
    parallel: int = 8,
    verify: bool = True,
) -> int:
    """Import a checkpoint of dcp.FileSystemWriter as a step of an asyncckpt directory; returns the step.

    step: None: one more than the newest. Chunks stay as they are: one of a tensor that was spread is a block. Nothing
    but plain values and tensors is taken: UnsupportedError naming what is not. verify: read the step once more in the
    end. Raises NotFoundError, CorruptError, ConflictError, IOFailedError too; there is no manifest then.
    """
    check_type("verify", verify, bool)
    options = SaveOptions(durability=durability, parallel=parallel)
    source, target = check_path(dcp_dir), check_place(path)
    found = run_import(source, target, check_step(step), options, Progress(), Names(), verify=verify)
    assert found.step is not None
    return found.step


@uninterrupted
def run_import(
    source: Path,
    path: Place,
    step: int | None,
    options: SaveOptions,
    progress: Progress,
    names: Names,
    *,
    verify: bool,
) -> Converted:
    """Do the same, with arguments that are checked, and say how far it is."""
    begun = time.perf_counter()
    check_is_apart(source, path)
    still = ImportSource([source])
    with reading(source), closing(OpenDcp(source, options, names)) as found:
        with closing(CoordinatedAttempt(path, step, options)) as attempt:
            progress.bytes_expected = found.facts().bytes * (2 if verify else 1)
            target = ShardTarget(attempt.transaction.place, attempt.attempt, options, progress, sender=senders)
            with save_lock_held("save", attempt.root.path, attempt.attempt.step):
                written, digests = stream_boxes(found.plan, found.sources(), target)
            still.check_still()
            head = attempt.transaction.head(files=written, values=tuple(found.values))
            attempt.commit(Draft(head, found.plan.body, digests))
        if verify:
            verify_new(path, attempt.attempt.step, progress)
        bytes = sum(file.bytes for file in written)
        seconds = time.perf_counter() - begun
        return replace(found.facts(), step=attempt.attempt.step, bytes=bytes, seconds=seconds)


class OpenDcp:
    """A checkpoint of DCP, with its files open and everything checked but the chunks; its plain values are read."""

    def __init__(self, folder: Path, options: SaveOptions, names: Names) -> None:
        """NotFoundError, CorruptError, UnsupportedError, UsageError, IOFailedError."""
        metadata = read_dcp_metadata(folder)
        new = _renamed(metadata, names)
        self._files = DcpFiles(folder, metadata)
        try:
            _check_places(metadata, self._files)
            _check_whole(metadata)
            self.plan, self._names, self._chunks = _plan(metadata, new, parallel=options.parallel)
            values = [(name, self._files.value(name)) for name in self._names]
            self.values: list[Json] = [encode_value(value, owner=repr(name)) for name, value in values]
        except UsageError as error:  # The checkpoint is wrong, and not the call.
            self.close()
            raise UnsupportedError(f"the DCP checkpoint cannot be imported: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._files.close()

    def facts(self) -> Converted:
        tensors = tuple(dict.fromkeys(index.fqn for index in self._chunks))
        size = sum(box.bytes for box in self.plan.boxes)
        return Converted(None, tensors, tuple(self._names), len(self._files.names), size)

    def sources(self) -> list[ChunkSource]:
        """Return the bytes of all blocks."""
        pairs = zip(self.plan.pieces.tensor.tolist(), self.plan.image.blocks, strict=True)
        return [ChunkSource(self._files, self._chunks[box], self.plan.boxes[box], placed.spec) for box, placed in pairs]


def export_checkpoint(
    path: str | os.PathLike[str], dcp_dir: str | os.PathLike[str], *, step: int | None = None, verify: bool = True
) -> None:
    """Write a checkpoint (default: the newest) as dcp.FileSystemWriter would, in this one process.

    dcp_dir is made, and is there all at once, or not: ConflictError when there is something under this name. verify:
    read all of it once more before that, and compare. The dense tensors in full, and the plain values; tables are left
    out, with a RuntimeWarning. Tensors take room on the disk once more, until it has ended, and memory one by one. What
    is written holds pickles: that is the format of the target, and keys of mappings become text there, as in all of
    DCP; asyncckpt.formats.torch_file keeps them.
    """
    check_type("verify", verify, bool)
    done = run_export(check_place(path), check_path(dcp_dir), check_step(step), Progress(), Names(), verify=verify)
    if done.tables:
        warn(f"tables {list(done.tables)} are left out: DCP has none", RuntimeWarning)


class _OneStep(StorageReader):
    """Reads its step once: DCP, which asks again, gets the same one, whose files stay open meanwhile.

    What a Saver has saved as arrays becomes tensors.
    """

    _keeps_values = False

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._read_once().metadata

    def facts(self) -> Converted:
        """Return what is in it. UnsupportedError for tensors that would be left out."""
        stored = self._read_once()
        for part in stored.chain.newest.parts:
            check_keys(part.tree)
            check_without(part.tree, "a checkpoint of DCP")
        for block in stored.chain.newest.blocks:
            spec = block.placed.spec
            if spec.table is None:
                dtype_by_name(spec.dtype, owner=spec.name)
        items = stored.metadata.state_dict_metadata
        tensors = {name: item for name, item in items.items() if isinstance(item, TensorStorageMetadata)}
        size = sum(item.size.numel() * item.properties.dtype.itemsize for item in tensors.values())
        return Converted(stored.chain.step, tuple(tensors), tuple(stored.values), 1, size, tuple(self.tables()))


def plan_export(path: Place, step: int | None, names: Names) -> Converted:
    """Return what an export would write; reads no data."""
    reader = _OneStep(str(path), step=step)
    try:
        _renamed(reader.read_metadata(), names)
        return reader.facts()
    finally:
        reader.reset()


@uninterrupted
def run_export(
    path: Place, folder: Path, step: int | None, progress: Progress, names: Names, *, verify: bool
) -> Converted:
    """Do the same, with arguments that are checked, and say how far it is. Warns of nothing."""
    begun = time.perf_counter()
    check_is_free(folder)
    reader = _OneStep(str(path), step=step)
    planned, metadata = reader.facts(), reader.read_metadata()
    new = _renamed(metadata, names)
    progress.bytes_expected = planned.bytes * (2 if verify else 1)
    with NewEntry(folder, kind="dcp", durability="fsync") as entry, FileMemory(entry.scratch_file()) as memory:
        made = entry.make_folder()
        state: dict[str, Any] = {}
        for name, item in metadata.state_dict_metadata.items():
            value = None
            if isinstance(item, TensorStorageMetadata):
                value = memory.empty(item.size, item.properties.dtype)
            set_element(state, metadata.planner_data[name], value)
        state = _convert(state, reader, entry.temporary, new, step=planned.step)
        entry.sync()
        bytes = sum(made.size(name) for name in made.names())
        progress.advance(bytes)
        if verify:
            _compare(entry.temporary, state, new, folder, progress)
        entry.give_name(lambda: folder.is_dir())
    return replace(planned, bytes=bytes, seconds=time.perf_counter() - begun)


def _convert(
    state: dict[str, Any], reader: _OneStep, folder: Path, new: Mapping[str, DcpPath], *, step: int | None
) -> dict[str, Any]:
    """Fill a state from a checkpoint, and write it by torch's own means, under its new names; return it."""
    try:
        # As torch's own converters (format_utils) do it: `load` and `save` of torch 2.4 lack no_dist.
        _load_state_dict(state, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
        places: Any = reader.read_metadata().planner_data
        out: dict[str, Any] = {}
        for name, path in new.items():
            set_element(out, path, get_element(state, places[name]))
        _save_state_dict(out, storage_writer=FileSystemWriter(folder), no_dist=True)
    except (CheckpointException, Exception) as error:
        # What fails on the one rank that there is, DCP wraps once more.
        causes = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause: BaseException = next((found[0] for found in causes if isinstance(found[0], BaseException)), error)
        if isinstance(cause, CheckpointError):
            raise cause from error
        if isinstance(cause, OSError):
            raise io_failed(f"folder {str(folder)!r} cannot be written", cause) from error
        reason = why_refused(Exception(f"{type(cause).__name__}: {cause}"))
        raise UnsupportedError(f"step {step} cannot be written by DCP: {reason}") from error
    return out


def _compare(folder: Path, state: dict[str, Any], new: Mapping[str, DcpPath], path: Path, progress: Progress) -> None:
    """Compare what was written with the state, item by item. CorruptError."""
    metadata = read_dcp_metadata(folder)
    with closing(DcpFiles(folder, metadata)) as files:
        for place in new.values():
            name = _dotted(place)
            item = metadata.state_dict_metadata.get(name)
            written: Any = get_element(state, place)
            if isinstance(item, TensorStorageMetadata):
                index = MetadataIndex(name, torch.Size([0] * len(item.size)))
                found = files.tensor(index, shape=tuple(item.size), dtype=item.properties.dtype)
                is_same = torch.equal(_raw(found), _raw(written))
                progress.advance(found.nbytes)
            else:
                is_same = item is not None and _is_same_value(files, name, written)
            if not is_same:
                what = f"{name!r} of {str(path)!r} was not read back as it was written"
                raise CorruptError(what, hint="nothing was published; look at the disk")


def _is_same_value(files: DcpFiles, name: str, written: Any) -> bool:
    try:
        found = files.value(name)
    except UnsupportedError:  # Of a type that only a pickle that may run anything brings back: nobody does that here.
        return True
    return bool(found == written) or encode_value(found, owner=name) == encode_value(written, owner=name)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def _check_places(metadata: Metadata, files: DcpFiles) -> None:
    """Check that every item has a place that is long enough. CorruptError."""
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, TensorStorageMetadata):
            for chunk in item.chunks:
                if all(chunk.sizes) or chunk.sizes == item.size:  # Else a rank held nothing of it.
                    size = math.prod(chunk.sizes) * item.properties.dtype.itemsize
                    files.check(MetadataIndex(name, chunk.offsets), bytes=size)
        else:
            files.check(MetadataIndex(name), bytes=0)


def _check_whole(metadata: Metadata) -> None:
    try:
        check_whole(metadata)
    except UsageError as error:  # The checkpoint is wrong, and not the call.
        raise CorruptError(f"the DCP checkpoint is damaged: {error}") from error


def _plan(
    metadata: Metadata, new: Mapping[str, DcpPath], *, parallel: int
) -> tuple[BoxPlan, list[str], Sequence[MetadataIndex]]:
    """Return the plan of all chunks, the names of the values in the order of the tree, and the chunk of every box.

    new: where every item is going to be. The plan has new names, the rest those of the source.
    """
    items = {_dotted(new[name]): (name, item) for name, item in metadata.state_dict_metadata.items()}
    tensors = {key: item for key, (_, item) in items.items() if isinstance(item, TensorStorageMetadata)}
    keys = LocalKeys(tensors=tuple(tensors), values=tuple(key for key in items if key not in tensors))
    paths = {_dotted(path): path for path in new.values()}
    chunks: list[ChunkFacts] = [
        (key, chunk.offsets, chunk.sizes, item.size, item.properties.dtype)
        for key, item in tensors.items()
        for chunk in item.chunks
    ]
    plan, stored, values = plan_chunks(chunks, keys, paths, {}, rank=0, parallel=parallel)
    places = [MetadataIndex(items[key][0], begin) for key, begin, *_ in map(chunks.__getitem__, stored)]
    return plan, [items[key][0] for key, _ in values], places


def _renamed(metadata: Metadata, names: Names) -> dict[str, DcpPath]:
    """Return where every item is going to be, by its name. UsageError."""
    paths: dict[str, DcpPath] = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    items = list(metadata.state_dict_metadata)
    # A name whose path does not spell it was given by a planner: it is a name, and not a path.
    old = {name: paths[name] if name in paths and _dotted(paths[name]) == name else (name,) for name in items}
    new = {name: names.path(path) for name, path in old.items()}
    names.check_used(items)
    taken = {_dotted(path) for path in new.values()}
    above = {_dotted(path[:end]) for path in new.values() for end in range(1, len(path))}
    if names.new and (len(taken) != len(items) or taken & above):
        raise UsageError("two things would have the same name", found=sorted(taken & above or taken)[:16])
    return new


def _dotted(path: DcpPath) -> str:
    return ".".join(map(str, path))

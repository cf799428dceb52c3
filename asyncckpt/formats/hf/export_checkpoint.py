"""Export the dense tensors of a checkpoint of ours as safetensors files of Hugging Face.

One `model.safetensors`, or shards `model-00001-of-0000N.safetensors` and their index, in a folder that is there all at
once. Tensors go to the shards in their order, each into the last one while there is room.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from asyncckpt.arguments import check_int
from asyncckpt.commit.new_entry import NewEntry
from asyncckpt.errors import NotFoundError, UnsupportedError
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.limits import I64_MAX
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import path_name
from asyncckpt.formats.conversion import Conversion, ExportReport, warn_of_left_out
from asyncckpt.formats.hf.directory import DTYPES, INDEX_FILE, SINGLE_FILE, SUFFIX, HfFiles
from asyncckpt.formats.plain_files import OutArray, write_json, write_plain_files
from asyncckpt.formats.run_export import run_export
from asyncckpt.formats.stored_tensors import tensor_source, tensor_spec
from asyncckpt.model.block import BlockSpec
from asyncckpt.options import Durability
from asyncckpt.plan.contents import StoredDense, contents_of
from asyncckpt.plan.layouts import check_without
from asyncckpt.shard.reader import ChainReader

SHARD_BYTES = 5_000_000_000
HEADER_STRINGS = "__metadata__"
METADATA = {"format": "pt"}  # Without which transformers refuses a file.
_CODES = {name: code for code, name in DTYPES.items()}


@dataclass(frozen=True)
class ExportPlan:
    """What to export, checked. files: their names, and the tensors of each with their specs."""

    chain: Chain
    files: Sequence[tuple[str, Sequence[tuple[StoredDense, BlockSpec]]]]
    left_out: tuple[str, ...]
    tables: tuple[str, ...]

    @staticmethod
    def of(chain: Chain, *, shard_size: int = SHARD_BYTES) -> ExportPlan:
        """Check everything. UnsupportedError for dtypes and names that cannot be written, CorruptError."""
        check_int("shard_size", shard_size, at_least=1, at_most=I64_MAX)
        contents = contents_of(chain)
        for name, dtype in contents.unreadable.items():
            dtype_by_name(dtype, owner=name)
        check_without(contents.tree, "a safetensors file")
        if not contents.dense:
            raise UnsupportedError(f"step {chain.step} holds no dense tensors", hint="there is nothing to export")
        for dense in contents.dense.values():
            if path_name(dense.path) == HEADER_STRINGS:
                what = f"tensor {HEADER_STRINGS!r} of step {chain.step} cannot be in a safetensors file"
                raise UnsupportedError(what, hint="its header has strings under this name: --rename OLD=NEW")
            if dense.name != path_name(dense.path):
                what = f"two tensors of step {chain.step} would be called {path_name(dense.path)!r}"
                raise UnsupportedError(what, hint="keys with dots in them are not told apart there")
            if dense.dtype not in _CODES:
                what = f"tensor {dense.name!r} has a dtype that safetensors does not have"
                raise UnsupportedError(what, found=dense.dtype, expected=sorted(_CODES))
        shards = list(_shards(list(contents.dense.values()), shard_size))
        names = [f"model-{number:05d}-of-{len(shards):05d}{SUFFIX}" for number in range(1, len(shards) + 1)]
        files = list(zip([SINGLE_FILE] if len(shards) == 1 else names, shards, strict=True))
        values = tuple(path_name(path) for path in contents.values)
        return ExportPlan(chain, files, values, tuple(contents.tables))

    @property
    def bytes(self) -> int:
        """The bytes of the tensors."""
        return sum(spec.bytes for _, own in self.files for _, spec in own)

    def report(self, path: Path) -> ExportReport:
        names = tuple(dense.name for _, own in self.files for dense, _ in own)
        return ExportReport(
            self.chain.step,
            path,
            names,
            left_out=self.left_out,
            tables=self.tables,
            files_count=len(self.files),
            bytes_written=self.bytes,
        )

    def arrays(self, reader: ChainReader) -> Iterator[tuple[str, list[OutArray]]]:
        """Return the files with what is in them."""
        for name, own in self.files:
            yield name, [OutArray(d.name, _CODES[d.dtype], spec, tensor_source(d, reader)) for d, spec in own]

    @property
    def index(self) -> dict[str, object]:
        places = {dense.name: name for name, own in self.files for dense, _ in own}
        return {"metadata": {"total_size": self.bytes}, "weight_map": places}


def export_checkpoint(
    path: str | os.PathLike[str],
    hf_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    shard_size: int = SHARD_BYTES,
    durability: Durability = "fsync",
    verify: bool = True,
) -> ExportReport:
    """Write the dense tensors of a checkpoint (default: the newest) into a folder that is there all at once, or not.

    hf_dir      is made, with its parents; ConflictError when there is something under this name
    shard_size  bytes of tensors in one file, at most; one larger tensor has a file of its own
    verify      read all of it once more before it gets its name, and compare

    Names are dotted paths. Tied tensors are written under each of their names. Plain values are left out, and reported;
    tables too, with a RuntimeWarning. Nothing is under the name when an error is raised: NotFoundError, CorruptError,
    UnsupportedError for a dtype or name that cannot be written, UsageError, IOFailedError; but IndeterminateError says
    that it is there, and perhaps not durable. Takes 300 MiB, and all of a tensor that ranks hold in boxes.
    """
    asked = Conversion.of(path, hf_dir, step, durability=durability, verify=verify)
    report = export(asked, shard_size=shard_size)
    warn_of_left_out("tables", report.tables, "safetensors")
    return report


def export(asked: Conversion, *, shard_size: int = SHARD_BYTES) -> ExportReport:
    """Do the same, as it is asked for. Warns of nothing."""
    plan, (written, reused), seconds = run_export(
        asked, partial(ExportPlan.of, shard_size=shard_size), partial(_write, asked)
    )
    report: ExportReport = plan.report(asked.exported)
    return replace(report, bytes_written=written, reused_bytes=reused, seconds=seconds)


def _write(asked: Conversion, plan: ExportPlan, reader: ChainReader, identity: str) -> tuple[int, int]:
    """Write the folder and give it its name; return the bytes of its files of tensors, and how many were there."""
    path, options, progress = asked.exported, asked.options, asked.progress
    asked.expect(plan.bytes)
    with NewEntry(path, kind="hf", durability=options.durability) as entry:
        folder = entry.make_folder(identity)
        files, notes = list(plan.arrays(reader)), entry.written
        written = write_plain_files(files, folder, options, progress, written=notes, metadata=METADATA)
        if len(plan.files) > 1:
            write_json(folder, INDEX_FILE, plan.index, options, indent=2)
        entry.sync()
        with HfFiles.open(entry.temporary) as found:
            if asked.verify:
                written.check(found, found.arrays.values(), path, progress)
        entry.give_name(lambda: _is_there(path))
    return written.bytes_count, 0 if notes is None else notes.reused_bytes


def _is_there(path: Path) -> bool:
    """Return whether a folder is there, and complete."""
    try:
        HfFiles.open(path).close()
    except NotFoundError:
        return False
    return True


def _shards(tensors: Sequence[StoredDense], shard_size: int) -> Iterator[list[tuple[StoredDense, BlockSpec]]]:
    """Return the tensors of every file."""
    own: list[tuple[StoredDense, BlockSpec]] = []
    size = 0
    for dense in tensors:
        spec = tensor_spec(dense)
        if own and size + spec.bytes > shard_size:
            yield _aligned(own)
            own, size = [], 0
        own.append((dense, spec))
        size += spec.bytes
    yield _aligned(own)


def _aligned(own: list[tuple[StoredDense, BlockSpec]]) -> list[tuple[StoredDense, BlockSpec]]:
    """Return tensors with the largest elements first, so that all begin at a multiple of their element."""
    return sorted(own, key=lambda pair: -pair[1].alignment)

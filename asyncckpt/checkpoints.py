"""Inspect a checkpoint directory: what it holds, and whether it is sound. Reads only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from asyncckpt.commit.discover import committed_steps, look_again, newest_step, read_manifest
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.load.run_load import metadata_of
from asyncckpt.engine.load.verify import VerifyReport
from asyncckpt.engine.load.verify import verify as verify_root
from asyncckpt.format.dtypes import supported_dtypes
from asyncckpt.format.limits import check_step
from asyncckpt.format.manifest import BlockFacts, FileFacts, Manifest, ManifestHead, RankPart
from asyncckpt.model.table import Role
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.directory import check_path

__all__ = [
    "BlockInfo",
    "CheckpointInfo",
    "RankInfo",
    "TableInfo",
    "VerifyReport",
    "describe",
    "list_steps",
    "supported_dtypes",
    "verify",
]


@dataclass(frozen=True)
class BlockInfo:
    """One block of a checkpoint. `bytes` is the size in the file; `encoding` names the steps that produced them.

    rank         the rank that wrote it
    whole_shape  the shape of the tensor of which the block is a part that begins at `begin`; else None
    """

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str
    offset: int
    digest: str
    encoding: tuple[str, ...] = ()
    rank: int = 0
    begin: tuple[int, ...] = ()
    whole_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TableInfo:
    """What one checkpoint itself holds of a table.

    rows      rows in its files
    whole     whether these are all rows; else they and the removed ids change what its parents hold
    removed   ids that it removes from what its parents hold
    filters   the row filters that chose the rows, as plain values
    """

    rows: int
    whole: bool
    removed: int
    filters: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class RankInfo:
    """The part of a checkpoint that one rank has written: its files and their bytes, and its rows per table."""

    rank: int
    files: tuple[str, ...]
    bytes: int
    tables: Mapping[str, int]


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, from its manifest.

    kind         "full" or "delta"
    parents      steps that a delta builds upon, newest first; empty for a full one
    compacted    whether it was folded into a full checkpoint after it was saved
    bytes        the size of its own files; a delta needs those of its parents too
    tables       rows per table in its own files, of all ranks
    table_infos  more about the same tables
    blocks       in manifest order, without padding
    ranks        what each rank has written, in their order
    """

    step: int
    kind: str
    parents: tuple[int, ...]
    compacted: bool
    created: str
    writer: str
    bytes: int
    files: tuple[str, ...]
    tables: Mapping[str, int]
    table_infos: Mapping[str, TableInfo]
    blocks: tuple[BlockInfo, ...]
    metadata: Mapping[str, Any]
    digest: str
    ranks: tuple[RankInfo, ...] = ()

    @property
    def ranks_count(self) -> int:
        """How many ranks saved it together."""
        return len(self.ranks)


@uninterrupted
def list_steps(path: str | os.PathLike[str]) -> list[int]:
    """Return the committed steps of a checkpoint directory, ascending. Raises NotFoundError if it is not one."""
    with CheckpointRoot.for_reading(check_path(path)) as root:
        return committed_steps(root)


@uninterrupted
def describe(path: str | os.PathLike[str], step: int | None = None) -> CheckpointInfo:
    """Describe one checkpoint (default: the newest). Raises NotFoundError, CorruptError, IncompatibleError."""
    step = check_step(step)
    with CheckpointRoot.for_reading(check_path(path)) as root:
        manifest = look_again(root, lambda: read_manifest(root, newest_step(root) if step is None else step))
    head = manifest.head
    table_infos = _table_infos(manifest)
    return CheckpointInfo(
        step=head.step,
        kind=head.kind,
        parents=tuple(parent.step for parent in head.parents),
        compacted=head.replaces is not None,
        created=head.created,
        writer=head.writer,
        bytes=manifest.bytes_total,
        files=tuple(file.path for file in head.files),
        tables={name: info.rows for name, info in table_infos.items()},
        table_infos=table_infos,
        blocks=tuple(_block_info(block, head) for block in manifest.blocks if block.placed.spec.role is not Role.PAD),
        metadata=metadata_of(manifest),
        digest=manifest.digest,
        ranks=tuple(map(_rank_info, manifest.parts, head.files_of_ranks)),
    )


def _block_info(block: BlockFacts, head: ManifestHead) -> BlockInfo:
    spec, file = block.placed.spec, head.files[block.placed.file_index]
    return BlockInfo(
        name=spec.name,
        role=spec.role.value,
        dtype=spec.dtype,
        shape=spec.shape,
        bytes=spec.bytes,
        file=Path(file.path).name,
        offset=block.placed.offset,
        digest=block.digest.hex(),
        encoding=tuple(str(step["kind"]) for step in spec.encoding),
        rank=file.rank,
        begin=spec.begin,
        whole_shape=spec.whole_shape,
    )


def _table_infos(manifest: Manifest) -> dict[str, TableInfo]:
    infos: dict[str, TableInfo] = {}
    for table in manifest.tables:
        known = infos.get(table.name, TableInfo(rows=0, whole=True, removed=0, filters=table.filters))
        infos[table.name] = replace(
            known,
            rows=known.rows + table.rows_count,
            whole=known.whole and table.whole,
            removed=known.removed + table.removed_count,
        )
    return infos


def _rank_info(part: RankPart, files: list[FileFacts]) -> RankInfo:
    return RankInfo(
        rank=part.rank,
        files=tuple(file.path for file in files),
        bytes=sum(file.bytes for file in files),
        tables={table.name: table.rows_count for table in part.tables},
    )


@uninterrupted
def verify(path: str | os.PathLike[str], step: int | None = None) -> VerifyReport:
    """Read and check every byte of one checkpoint (default: the newest), and for a delta of its whole chain.

    Raises CorruptError that says what is wrong.
    """
    step = check_step(step)
    with CheckpointRoot.for_reading(check_path(path)) as root:
        return verify_root(root, step)

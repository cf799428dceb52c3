"""Look at a checkpoint directory: what is there, and is it sound. Reads only."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncckpt.commit.discover import committed_steps, newest_step, read_manifest
from asyncckpt.commit.root import CheckpointRoot
from asyncckpt.engine.load import metadata_of
from asyncckpt.engine.verify import VerifyReport
from asyncckpt.engine.verify import verify as verify_root
from asyncckpt.model.table import Role
from asyncckpt.storage.directory import check_path


@dataclass(frozen=True)
class BlockInfo:
    """One block of a checkpoint. `bytes` are those in the file; `encoding` names the steps that made them."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str
    offset: int
    digest: str
    encoding: tuple[str, ...] = ()


@dataclass(frozen=True)
class TableInfo:
    """What one checkpoint itself holds of a table.

    rows      rows in its files
    whole     these are all; else they and the removed ids are laid over what its parents hold
    removed   ids that it takes out of what its parents hold
    filters   the row filters that chose the rows, as plain values
    """

    rows: int
    whole: bool
    removed: int
    filters: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, as its manifest tells it.

    kind         "full" or "delta"
    parents      steps that a delta builds upon, newest first; empty for a full one
    compacted    it was folded into a full checkpoint after it was saved
    bytes        of its own files; a delta needs those of its parents too
    tables       rows per table in its own files
    table_infos  the same tables, with more
    blocks       in manifest order, without what only fills a file up to a page
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


def list_steps(path: str | os.PathLike[str]) -> list[int]:
    """Committed steps of a checkpoint directory, ascending. NotFoundError when it is none."""
    with CheckpointRoot.for_reading(check_path(path)) as root:
        return committed_steps(root)


def describe(path: str | os.PathLike[str], step: int | None = None) -> CheckpointInfo:
    """What one checkpoint (default: the newest) holds. NotFoundError, CorruptError, IncompatibleError."""
    with CheckpointRoot.for_reading(check_path(path)) as root:
        manifest = read_manifest(root, newest_step(root) if step is None else step)
    head = manifest.head
    blocks = tuple(
        BlockInfo(
            name=block.placed.spec.name,
            role=block.placed.spec.role.value,
            dtype=block.placed.spec.dtype,
            shape=block.placed.spec.shape,
            bytes=block.placed.spec.bytes,
            file=Path(head.files[block.placed.file_index].path).name,
            offset=block.placed.offset,
            digest=block.digest.hex(),
            encoding=tuple(str(step["kind"]) for step in block.placed.spec.encoding),
        )
        for block in manifest.blocks
        if block.placed.spec.role is not Role.PAD
    )
    return CheckpointInfo(
        step=head.step,
        kind=head.kind,
        parents=tuple(parent.step for parent in head.parents),
        compacted=head.replaces is not None,
        created=head.created,
        writer=head.writer,
        bytes=manifest.bytes_total,
        files=tuple(file.path for file in head.files),
        tables={table.name: table.rows_count for table in manifest.tables},
        table_infos={
            table.name: TableInfo(
                rows=table.rows_count, whole=table.whole, removed=table.removed_count, filters=table.filters
            )
            for table in manifest.tables
        },
        blocks=blocks,
        metadata=metadata_of(manifest),
        digest=manifest.digest,
    )


def verify(path: str | os.PathLike[str], step: int | None = None) -> VerifyReport:
    """Read and check every byte of one checkpoint (default: the newest), of a delta with all it builds upon.

    CorruptError says what is wrong with it.
    """
    with CheckpointRoot.for_reading(check_path(path)) as root:
        return verify_root(root, step)

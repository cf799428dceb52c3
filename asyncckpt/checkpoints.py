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
from asyncckpt.storage.directory import check_path


@dataclass(frozen=True)
class BlockInfo:
    """One block of a checkpoint."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str
    offset: int
    digest: str


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint, as its manifest tells it."""

    step: int
    kind: str
    created: str
    writer: str
    bytes: int
    files: tuple[str, ...]
    tables: Mapping[str, int]
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
        )
        for block in manifest.blocks
    )
    return CheckpointInfo(
        step=head.step,
        kind=head.kind,
        created=head.created,
        writer=head.writer,
        bytes=manifest.bytes_total,
        files=tuple(file.path for file in head.files),
        tables={table.name: table.rows_count for table in manifest.tables},
        blocks=blocks,
        metadata=metadata_of(manifest),
        digest=manifest.digest,
    )


def verify(path: str | os.PathLike[str], step: int | None = None) -> VerifyReport:
    """Read and check every byte of one checkpoint (default: the newest). CorruptError says what is wrong with it."""
    with CheckpointRoot.for_reading(check_path(path)) as root:
        return verify_root(root, step)

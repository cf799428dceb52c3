"""Inspect a checkpoint directory, what it holds and whether it is sound; choose what stays in it (removals.py).

What only looks needs neither torch nor NumPy: the rest is imported when it is first used.
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncckpt.commit.discover import (
    Listing,
    committed_steps,
    look_again,
    newest_step,
    read_manifest,
    read_summary,
)
from asyncckpt.commit.root import ReadRoot, open_root
from asyncckpt.errors import CheckpointError, NotFoundError
from asyncckpt.format.dtypes import supported_dtypes
from asyncckpt.format.head import FileFacts, ManifestHead, SaveTimes, SealedHead
from asyncckpt.format.manifest import BlockFacts, Manifest, RankPart
from asyncckpt.format.names import check_step
from asyncckpt.model.block import TableFacts
from asyncckpt.model.result import GarbageReport, PruneReport, VerifyReport
from asyncckpt.model.table import Role
from asyncckpt.plan.contents import metadata_of, named_values, tied_names
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.folder import check_place

if TYPE_CHECKING:
    from asyncckpt.removals import collect_garbage, pin, pinned_steps, prune, remove, remove_after, unpin

_REMOVALS = ("collect_garbage", "pin", "pinned_steps", "prune", "remove", "remove_after", "unpin")

__all__ = [
    "BlockInfo",
    "CheckpointInfo",
    "CheckpointSummary",
    "GarbageReport",
    "PruneReport",
    "RankInfo",
    "SaveTimes",
    "TableInfo",
    "VerifyReport",
    "collect_garbage",
    "describe",
    "list_steps",
    "pin",
    "pinned_steps",
    "prune",
    "remove",
    "remove_after",
    "summaries",
    "supported_dtypes",
    "unpin",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _REMOVALS:
        return getattr(import_module("asyncckpt.removals"), name)
    raise AttributeError(f"module 'asyncckpt.checkpoints' has no attribute {name!r}", name=name)


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
class CheckpointSummary:
    """One committed checkpoint in brief.

    kind           "full" or "delta"
    parents        bases of a delta, newest first, down to a full one; empty for a full one
    compacted      whether it was folded into a full checkpoint after it was saved
    bytes          the size of its own files; a delta needs those of its parents too
    tables         rows per table in its own files, of all ranks
    table_infos    more about the same tables
    tensors_count  of all ranks
    blocks_count   of all ranks, without padding
    ranks_count    how many ranks saved it together
    pinned         whether retention must keep it
    metadata       the user's
    times          how long the save took; None where that is not known: of imports, of DCP, of earlier versions
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
    tensors_count: int
    blocks_count: int
    ranks_count: int
    digest: str
    pinned: bool
    metadata: Mapping[str, Any]
    times: SaveTimes | None


@dataclass(frozen=True)
class CheckpointInfo(CheckpointSummary):
    """One committed checkpoint, from its manifest.

    blocks    in manifest order, without padding
    values    plain values of the state by dotted name; where those of ranks differ, the lower rank's
    ranks     what each rank has written, in their order
    tied      names of tensors without blocks, each with the name of the tensor that is stored for both
    """

    blocks: tuple[BlockInfo, ...]
    values: Mapping[str, Any]
    ranks: tuple[RankInfo, ...]
    tied: Mapping[str, str]


@uninterrupted
def list_steps(path: str | os.PathLike[str]) -> list[int]:
    """Return the committed steps of a checkpoint directory, ascending. Raises NotFoundError if it is not one."""
    with open_root(check_place(path)) as root:
        return committed_steps(root)


def summaries(path: str | os.PathLike[str]) -> dict[int, CheckpointSummary | CheckpointError]:
    """Return every committed checkpoint of a directory in brief, or why it cannot be read, by step, ascending.

    Raises NotFoundError if it is not a checkpoint directory.
    """
    return KnownSummaries(path, remembers=False).now()


class KnownSummaries:
    """The same, again and again: a manifest that can be read is read once, as long as it is the same file.

    remembers: whether there will be another time; else no file is asked whether it is still the same.
    """

    def __init__(self, path: str | os.PathLike[str], *, remembers: bool = True) -> None:
        self._path, self._remembers = check_place(path), remembers
        self._known: dict[int, tuple[object, CheckpointSummary]] = {}

    @uninterrupted
    def now(self) -> dict[int, CheckpointSummary | CheckpointError]:
        found: dict[int, CheckpointSummary | CheckpointError] = {}
        kept: dict[int, tuple[object, CheckpointSummary]] = {}
        with open_root(self._path) as root:
            listing = Listing.of(root)
            compacted = listing.compacted
            for step, names in sorted(listing.manifests.items()):
                uninterrupted.look()
                try:
                    files = names if self._remembers else ()
                    version = (step in listing.pins, *((name, *root.manifests.version(name)) for name in files))
                    known = self._known.get(step)
                    if known is None or known[0] != version:
                        known = version, _short(root, step, names, pinned=step in listing.pins)
                    kept[step] = known
                    found[step] = known[1]
                    if compacted and known[1].parents:
                        found[step] = replace(known[1], parents=_down_to_full(known[1].parents, compacted))
                except NotFoundError:  # It was removed since it was listed.
                    continue
                except CheckpointError as error:
                    found[step] = error
        self._known = kept
        return found


def _short(root: ReadRoot, step: int, names: Sequence[str], *, pinned: bool) -> CheckpointSummary:
    try:
        read = read_summary(root, step, names)
    except CheckpointError:
        read = look_again(root, lambda: read_summary(root, step))
    counts = {"tensors_count": read.tensors_count, "blocks_count": read.blocks_count}
    return _summary(read, read.tables, **counts, pinned=pinned)


@uninterrupted
def describe(path: str | os.PathLike[str], step: int | None = None) -> CheckpointInfo:
    """Describe one checkpoint (default: the newest). Raises NotFoundError, CorruptError, IncompatibleError."""
    step = check_step(step)
    with open_root(check_place(path)) as root:
        manifest = look_again(root, lambda: read_manifest(root, newest_step(root) if step is None else step))
        listing = Listing.of(root)
    info = _info(manifest, pinned=manifest.step in listing.pins)
    return replace(info, parents=_down_to_full(info.parents, listing.compacted))


def _down_to_full(parents: Sequence[int], compacted: Container[int]) -> tuple[int, ...]:
    """Return the parents that a delta still needs: one that was compacted after its save is full."""
    end = next((number for number, step in enumerate(parents, 1) if step in compacted), len(parents))
    return tuple(parents[:end])


def _info(manifest: Manifest, *, pinned: bool) -> CheckpointInfo:
    head = manifest.head
    blocks = [_block_info(block, head) for block in manifest.blocks if block.placed.spec.role is not Role.PAD]
    tensors_count = len({block.name for block in blocks if block.role == Role.DENSE})
    counts = {"tensors_count": tensors_count, "blocks_count": len(blocks)}
    short = _summary(manifest, manifest.tables, **counts, pinned=pinned)
    return CheckpointInfo(
        **vars(short),
        blocks=tuple(blocks),
        values=named_values(manifest),
        ranks=tuple(map(_rank_info, manifest.parts, head.files_of_ranks)),
        tied=tied_names(manifest),
    )


def _summary(
    sealed: SealedHead, tables: tuple[TableFacts, ...], *, tensors_count: int, blocks_count: int, pinned: bool
) -> CheckpointSummary:
    head = sealed.head
    table_infos = _table_infos(tables)
    return CheckpointSummary(
        step=head.step,
        kind=head.kind,
        parents=tuple(parent.step for parent in head.parents),
        compacted=head.replaces is not None,
        created=head.created,
        writer=head.writer,
        bytes=sum(file.bytes for file in head.files),
        files=tuple(file.path for file in head.files),
        tables={name: info.rows for name, info in table_infos.items()},
        table_infos=table_infos,
        tensors_count=tensors_count,
        blocks_count=blocks_count,
        ranks_count=head.ranks_count,
        digest=sealed.digest,
        pinned=pinned,
        metadata=metadata_of(sealed),
        times=head.times,
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


def _table_infos(tables: tuple[TableFacts, ...]) -> dict[str, TableInfo]:
    infos: dict[str, TableInfo] = {}
    for table in tables:
        known = infos.get(table.name)  # Another rank's part of it.
        infos[table.name] = TableInfo(
            rows=table.rows_count + (known.rows if known else 0),
            whole=table.whole and (known is None or known.whole),
            removed=table.removed_count + (known.removed if known else 0),
            filters=known.filters if known else table.filters,
        )
    return infos


def _rank_info(part: RankPart, files: list[FileFacts]) -> RankInfo:
    return RankInfo(
        rank=part.rank,
        files=tuple(file.path for file in files),
        bytes=sum(file.bytes for file in files),
        tables={table.name: table.rows_count for table in part.tables},
    )


def verify(path: str | os.PathLike[str], step: int | None = None) -> VerifyReport:
    """Read and check every byte of one checkpoint (default: the newest), and for a delta of its whole chain.

    Raises CorruptError that says what is wrong.
    """
    from asyncckpt.engine.load.verify import verify as verify_root  # With NumPy and the core, which a list needs not.

    step = check_step(step)
    with uninterrupted, open_root(check_place(path)) as root:
        return verify_root(root, step)

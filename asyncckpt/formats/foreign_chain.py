"""Files of another library in the form of a checkpoint of ours: one manifest that nobody has written, over its files.

So what loads and copies checkpoints does so with these files as well, with the same checks. There are no digests:
blocks count as sound when they were read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.head import FileFacts, ManifestHead
from asyncckpt.format.manifest import BlockFacts, Chain, Manifest, RankPart
from asyncckpt.format.names import check_step
from asyncckpt.formats.data_files import DataFiles, FileArray
from asyncckpt.model.block import BlockSpec, PlacedBlock
from asyncckpt.model.table import Role
from asyncckpt.model.table_shard import slice_info
from asyncckpt.native import Progress
from asyncckpt.plan.image import array_spec, split_rows
from asyncckpt.shard.reader import ChainReader, FilesOfManifest
from asyncckpt.storage.directory import Directory
from asyncckpt.storage.folder import ReadFolder

WHOLE = (0, 1)


def chain_of(parts: Sequence[RankPart], files: DataFiles, *, step: int, writer: str) -> Chain:
    """Return the checkpoint that these parts are."""
    check_step(step)
    head = ManifestHead(
        step=step,
        kind="full",
        parents=(),
        attempt="0" * 32,
        created="",
        writer=writer,
        ranks_count=len(parts),
        files=tuple(
            FileFacts(path=name, rank=0, header_bytes=0, header_digest=b"", bytes=size)
            for name, size in zip(files.names, files.sizes, strict=True)
        ),
        values=(),
        metadata={},
    )
    return Chain(manifests=(Manifest(head=head, digest="", parts=tuple(parts)),))


def dense_blocks(name: str, array: FileArray, leaf: int) -> Iterator[BlockFacts]:
    """Return the blocks of a dense tensor."""
    spec = BlockSpec(
        name=name,
        role=Role.DENSE,
        dtype=array.dtype.name,
        stored_dtype=array.dtype.stored,
        stored_itemsize=array.dtype.itemsize,
        shape=array.shape,
        stored_shape=array.shape,
        leaf=leaf,
    )
    yield from placed_blocks(spec, array)


def table_spec(table: str, column: str, dtype: str, shape: tuple[int, ...], role: Role) -> BlockSpec:
    """Return a column of a table that holds all ids."""
    spec = array_spec(f"{table}@{column}", dtype_by_name(dtype, owner=column).dtype, shape, role)
    return replace(spec, table=table, column=column, slice_info=slice_info(WHOLE))


def unplaced(spec: BlockSpec) -> BlockFacts:
    """Return a block that is in no file."""
    return BlockFacts(placed=PlacedBlock(spec=spec, key=spec.name, file_index=0, offset=0), digest=b"", filtered=False)


def placed_blocks(spec: BlockSpec, array: FileArray) -> Iterator[BlockFacts]:
    """Return the blocks of an array, at their places: several of one that is too large for one."""
    offset = array.offset
    for piece in split_rows(spec):
        placed = PlacedBlock(spec=piece, key=f"{array.key}#{offset}", file_index=array.file, offset=offset)
        yield BlockFacts(placed=placed, digest=b"", filtered=False)
        offset += piece.bytes


class ForeignReader(ChainReader):
    """Reads blocks of files that somebody else keeps open. What was read counts as sound."""

    has_digests = False

    def __init__(self, files: DataFiles, folder: Directory, chain: Chain, *, threads: int, progress: Progress) -> None:
        self._data_files = files
        super().__init__(folder, chain, threads=threads, verify=False, progress=progress)

    def _open(self, data: ReadFolder, manifest: Manifest, wanted: Collection[int] | None) -> FilesOfManifest:
        return _Borrowed(self._data_files)

    def check(self, number: int, digest: bytes, *, begin: int = 0, end: int | None = None) -> None:
        """Take note that a block was read: there is nothing to compare it with."""
        self.pass_over(number)


@dataclass(frozen=True)
class _Borrowed:
    """Open files that their owner closes."""

    files: DataFiles

    @property
    def fds(self) -> Sequence[int]:
        return self.files.fds

    @property
    def direct(self) -> Sequence[bool]:
        return self.files.direct

    def close(self) -> None:
        """The owner does."""

"""What a checkpoint says of itself: its manifest, and the header of each of its shard files.

The manifest is one strict JSON file that is the whole truth about one checkpoint:

    {"format": "asyncckpt", "version": 1, ..., "blocks": [...], "digest": "<xxh3-128 of every byte before this member>"}

With several ranks, files, values, tables, tree and blocks are rank 0's part of the checkpoint, and "others" are those
of the other ranks. Every rank renders its own part; the committer puts the texts together without looking into them
(write_manifest.py).

A header is plain safetensors, padded with spaces so that data starts on a page:

    8 bytes little-endian length, JSON object, spaces up to a multiple of 4096, then the arrays without gaps

It names the attempt and the step it belongs to, so that files of two saves can never be taken for one. Its text is
rendered once per plan; attempt and step of a save are written into their fixed places (write_manifest.py).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import xxhash

from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.format.dtypes import STORED_ITEMSIZE
from asyncckpt.format.head import SealedHead
from asyncckpt.format.strict_json import Fields, Json, loads, looks_like
from asyncckpt.format.tree import Node
from asyncckpt.model.block import DIGEST_BYTES, LEAF_BYTES, PlacedBlock, TableFacts
from asyncckpt.model.sharing import NOTHING_SHARED, Sharing

HEADER_ALIGNMENT = 4096


@dataclass(frozen=True)
class BlockFacts:
    """One block as the manifest lists it.

    leaf_digests: those of its leaves, 16 bytes each; empty where there is only one, or an earlier version wrote it.
    """

    placed: PlacedBlock
    digest: bytes
    filtered: bool
    leaf_digests: bytes = b""

    def part_around(self, begin: int, end: int) -> tuple[int, int]:
        """Return the smallest range of its bytes that holds these and has a digest: without those of leaves, all."""
        if not self.leaf_digests or begin >= end:
            return 0, self.placed.spec.bytes
        return begin // LEAF_BYTES * LEAF_BYTES, min(-(-end // LEAF_BYTES) * LEAF_BYTES, self.placed.spec.bytes)

    def digest_of(self, begin: int, end: int) -> bytes:
        """Return the digest of a range that `part_around` has returned."""
        if (begin, end) == (0, self.placed.spec.bytes):
            return self.digest
        first, last = begin // LEAF_BYTES, -(-end // LEAF_BYTES)
        return xxhash.xxh3_128_digest(self.leaf_digests[first * DIGEST_BYTES : last * DIGEST_BYTES])


@dataclass(frozen=True)
class Summary(SealedHead):
    """What a list shows of a manifest: its head, the tables of all ranks, and how many tensors and blocks it has."""

    tables: tuple[TableFacts, ...]
    tensors_count: int
    blocks_count: int


@dataclass(frozen=True)
class RankPart:
    """What one rank has contributed: its tables, its state's tree and plain values, and the blocks that it has written.

    A leaf of the tree without a block is tied to another one, or was written by another rank, if not left out. `leaf`
    of a block numbers the leaves of this tree, file_index the files of all ranks. classes: names of those of the tree's
    objects, one item for each; empty where they are not known.
    """

    rank: int
    tables: tuple[TableFacts, ...]
    tree: Node
    values: tuple[Json, ...]
    blocks: tuple[BlockFacts, ...]
    sharing: Sharing = NOTHING_SHARED
    classes: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Manifest(SealedHead):
    """A decoded manifest, whose `version` and `requires` have been checked."""

    parts: tuple[RankPart, ...]

    @property
    def step(self) -> int:
        return self.head.step

    @cached_property
    def tables(self) -> tuple[TableFacts, ...]:
        """The tables of all ranks: one that is spread is there once for every rank that holds some of it."""
        return tuple(table for part in self.parts for table in part.tables)

    @cached_property
    def blocks(self) -> tuple[BlockFacts, ...]:
        """The blocks of all ranks. Its place here numbers a block."""
        return tuple(block for part in self.parts for block in part.blocks)

    @property
    def bytes_total(self) -> int:
        return sum(file.bytes for file in self.head.files)


@dataclass(frozen=True)
class Chain:
    """The manifests of one checkpoint, newest first: a full one's alone, or a delta's with those of its bases.

    Blocks are numbered through all of them. inside, only: what of it is looked at, see plan/chosen_contents.py; None
    and "": everything.
    """

    manifests: tuple[Manifest, ...]
    inside: str = ""
    only: Collection[str] | None = None

    @property
    def is_part(self) -> bool:
        """Whether some of it is not looked at."""
        return bool(self.inside) or self.only is not None

    @property
    def newest(self) -> Manifest:
        return self.manifests[0]

    @property
    def step(self) -> int:
        return self.newest.step

    @property
    def steps(self) -> tuple[int, ...]:
        return tuple(manifest.step for manifest in self.manifests)

    @property
    def bytes_total(self) -> int:
        """The bytes of all shard files."""
        return sum(manifest.bytes_total for manifest in self.manifests)

    @cached_property
    def blocks(self) -> tuple[BlockFacts, ...]:
        """All blocks of the newest manifest, then all of the next one, and so on. Its place here numbers a block."""
        return tuple(block for manifest in self.manifests for block in manifest.blocks)


@dataclass(frozen=True)
class HeaderEntry:
    """One array of a shard file; offset counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """A decoded header: the attempt that it names, and its arrays."""

    attempt: str | None
    entries: dict[str, HeaderEntry]


def header_length(prefix: bytes, *, file_bytes: int, owner: str) -> int:
    """Return bytes of the header including its length field, from the first 8 bytes of a file."""
    if len(prefix) < 8:
        raise CorruptError(f"{owner} is too short for a safetensors header", found=len(prefix), expected="8 bytes")
    (length,) = struct.unpack("<Q", prefix[:8])
    if length > limits.HEADER_BYTES_MAX or length + 8 > file_bytes:
        raise CorruptError(
            f"{owner} has an impossible header length",
            found=length,
            expected=f"at most {min(limits.HEADER_BYTES_MAX, file_bytes - 8)}",
            hint=looks_like(prefix),
        )
    return int(length) + 8


def decode_header(raw: bytes, *, file_bytes: int, owner: str) -> Header:
    """Check and decode the header in `raw` (header_length bytes): no gaps, no overlaps, nothing after the last."""
    body = loads(raw[8:].rstrip(b" "), owner=f"header of {owner}")
    fields = Fields(body, owner=owner, where="header")
    metadata = body.get("__metadata__", {})
    if type(metadata) is not dict or len(body) > limits.HEADER_ARRAYS_MAX:
        raise CorruptError(f"{owner} has a header of no known form")
    entries = {name: _entry(fields, name, base=len(raw), owner=owner) for name in body if name != "__metadata__"}
    end = len(raw)
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        if entry.offset != end:
            raise CorruptError(f"{owner}: array {name!r} overlaps or leaves a hole", found=entry.offset, expected=end)
        end += entry.bytes
    if end != file_bytes:
        raise CorruptError(f"{owner} has the wrong size", found=file_bytes, expected=end)
    return Header(attempt=metadata.get("asyncckpt.attempt"), entries=entries)


def _entry(header: Fields, name: str, *, base: int, owner: str) -> HeaderEntry:
    fields = Fields(header.value(name), owner=owner, where=f"array {name!r}")
    dtype = fields.text("dtype")
    shape = fields.integers("shape", count_max=limits.DIMENSIONS_MAX)
    offsets = fields.integers("data_offsets", count_max=2)
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptError(f"{owner}: array {name!r} has wrong data_offsets", found=offsets, expected="[begin, end]")
    count = offsets[1] - offsets[0]
    # How large an element of an unknown dtype is, is not known; its array cannot be used, but be passed over.
    if dtype in STORED_ITEMSIZE and math.prod(shape) * STORED_ITEMSIZE[dtype] != count:
        raise CorruptError(
            f"{owner}: array {name!r} has data_offsets that do not fit",
            found=offsets,
            expected=f"{math.prod(shape) * STORED_ITEMSIZE[dtype]} bytes",
        )
    return HeaderEntry(dtype=dtype, shape=shape, offset=base + offsets[0], bytes=count)

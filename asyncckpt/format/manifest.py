"""The manifest: one strict JSON file that is the whole truth about one checkpoint.

    {"format": "asyncckpt", "version": 1, ..., "blocks": [...], "digest": "<xxh3-128 of every byte before this member>"}

Of several ranks, files, values, tables, tree and blocks are rank 0's part of the checkpoint, and "others" are those of
the other ranks. Every rank renders its own part; whoever commits puts the texts together without looking into them
(write_manifest.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import xxhash

from asyncckpt.errors import CorruptError
from asyncckpt.format.body_members import BODY_FEATURES, MAPPING_KINDS
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name
from asyncckpt.format.strict_json import Json, looks_like
from asyncckpt.format.tree import Node
from asyncckpt.format.values import holds_typed_mappings
from asyncckpt.model.block import PlacedBlock, TableFacts
from asyncckpt.model.leaf import DIGEST_BYTES, LEAF_BYTES
from asyncckpt.model.sharing import NOTHING_SHARED, Sharing

FORMAT = "asyncckpt"
VERSION = 1
DIGEST_ALGORITHM = "xxh3-128/4MiB"
CREATED_FORMAT = "%Y-%m-%dT%H:%M:%SZ"  # Of `created`, the time of the commit in UTC.

# What a reader must know beyond the plain format, as `requires` names it.
DELTA = "delta"
COMPACTED = "compacted"
RANKS = "ranks"
FEATURES = frozenset({DELTA, COMPACTED, RANKS, *BODY_FEATURES})

DIGEST_MARK = b',"digest":"'
END_BYTES = len(DIGEST_MARK) + 35  # With 32 digits and what closes the object.


def features_of_values(values: Iterable[Json]) -> frozenset[str]:
    """Return what plain values ask of a reader."""
    return frozenset({MAPPING_KINDS} if any(map(holds_typed_mappings, values)) else ())


@dataclass(frozen=True)
class FileFacts:
    """One shard file as the manifest lists it."""

    path: str
    rank: int
    header_bytes: int
    header_digest: bytes
    bytes: int


@dataclass(frozen=True)
class BlockFacts:
    """One block as the manifest lists it.

    leaf_digests: of its leaves, 16 bytes each; empty where there is only one, or an earlier version wrote it.
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
class ParentFacts:
    """A checkpoint that a delta builds upon: its step, its attempt, and the own digest of its manifest, in hexadecimal.

    Both pin it: another checkpoint of that step is not the parent.
    """

    step: int
    attempt: str
    digest: str


@dataclass(frozen=True)
class SaveTimes:
    """How long a save has taken, up to where the manifest was written, in microseconds; of several ranks, rank 0.

    called_us   when it was called, UNIX time
    stall_us    how long training waited in the call; None: until the save had ended, it was a blocking one
    begun_us    so long after the call the background has begun with it: what was before it had ended
    written_us  so long after the call all shard files were written. The commit comes behind
    """

    called_us: int
    stall_us: int | None
    begun_us: int
    written_us: int


@dataclass(frozen=True)
class ManifestHead:
    """What differs from save to save.

    kind      "full" or "delta"
    parents   of a delta: its complete chain, newest first, down to a full checkpoint; else empty
    files     of all ranks, in their order
    values    the plain values of rank 0
    replaces  of a compacted checkpoint: the digest of the manifest that it stands for
    times     None where it is not known: of what was not saved by a Saver, or by an earlier version
    """

    step: int
    kind: str
    parents: tuple[ParentFacts, ...]
    attempt: str
    created: str
    writer: str
    ranks_count: int
    files: tuple[FileFacts, ...]
    values: tuple[Json, ...]
    metadata: Json
    replaces: str | None = None
    times: SaveTimes | None = None

    @property
    def features(self) -> frozenset[str]:
        """What the head asks of a reader."""
        uses = {DELTA: self.kind == "delta", COMPACTED: self.replaces is not None, RANKS: self.ranks_count > 1}
        metadata = self.metadata.values() if type(self.metadata) is dict else ()
        return features_of_values((*self.values, *metadata)).union(name for name, used in uses.items() if used)

    @property
    def files_of_ranks(self) -> list[list[FileFacts]]:
        """The files of rank 0, those of rank 1, ..."""
        return [list(files) for _, files in itertools.groupby(self.files, key=lambda file: file.rank)]

    @cached_property
    def file_name(self) -> str:
        """The name of the manifest in manifests/."""
        return manifest_name(self.step) if self.replaces is None else compacted_manifest_name(self.step)

    @cached_property
    def folder_name(self) -> str:
        """The name in data/ of the folder with all files."""
        return Attempt(step=self.step, id=self.attempt).directory


@dataclass(frozen=True)
class SealedHead:
    """The head of a manifest that is written, and the own digest of the manifest, in hexadecimal."""

    head: ManifestHead
    digest: str


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
    """The manifests of one checkpoint, newest first: a full one's alone, or a delta's with those of all it builds upon.

    Blocks are numbered through all of them.
    """

    manifests: tuple[Manifest, ...]

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
        """Of all shard files."""
        return sum(manifest.bytes_total for manifest in self.manifests)

    @cached_property
    def blocks(self) -> tuple[BlockFacts, ...]:
        """All blocks of the newest manifest, then all of the next one, and so on. Its place here numbers a block."""
        return tuple(block for manifest in self.manifests for block in manifest.blocks)


def manifest_digest(raw: bytes, *, owner: str) -> str:
    """Check the manifest's own digest and return it; CorruptError when a byte differs or the end is missing."""
    if not raw:
        raise CorruptError(f"{owner} is empty")
    if raw[-END_BYTES:-35] != DIGEST_MARK or raw[-3:] != b'"}\n':
        hint = looks_like(raw) or "it is truncated or has foreign bytes"
        raise CorruptError(f"{owner} does not end as a manifest ends", hint=hint)
    stored = raw[-35:-3].decode("ascii", "replace")
    computed = xxhash.xxh3_128_hexdigest(raw[:-END_BYTES])
    if stored != computed:
        raise CorruptError(f"{owner} is damaged: its digest is wrong", found=computed, expected=stored)
    return computed

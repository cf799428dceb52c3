"""The manifest: one strict JSON file that is the whole truth about one checkpoint.

    {"format": "asyncckpt", "version": 1, ..., "blocks": [...], "digest": "<xxh3-128 of every byte before this member>"}

Of several ranks, files, values, tables, tree and blocks are rank 0's part of the checkpoint, and "others" are those of
the other ranks. Every rank renders its own part; whoever commits puts the texts together without looking into them.

Encoding 10,000 blocks for every save would hold the GIL for tens of milliseconds, so the part that stays the same from
save to save (tables, tree, blocks) is rendered once per plan, with holes for the digests.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.errors import CorruptError
from asyncckpt.format import limits
from asyncckpt.format.names import Attempt, compacted_manifest_name, manifest_name
from asyncckpt.format.strict_json import Json, dumps, looks_like
from asyncckpt.format.tree import Node, encode_tree
from asyncckpt.model.block import PlacedBlock, TableFacts
from asyncckpt.model.table import Role

FORMAT = "asyncckpt"
VERSION = 1
DIGEST_ALGORITHM = "xxh3-128/4MiB"

# What a reader must know beyond the plain format, as `requires` names it.
DELTA = "delta"
COMPACTED = "compacted"
ENCODING = "encoding"
PAD = "pad"
RANKS = "ranks"
BOXES = "boxes"
FEATURES = frozenset({DELTA, COMPACTED, ENCODING, PAD, RANKS, BOXES})

_HOLE = b"-" * 32
_DIGEST_MARK = b',"digest":"'
_END_BYTES = len(_DIGEST_MARK) + 35  # With 32 digits and what closes the object.
# The two hexadecimal digits of every byte value, uint8 [256, 2].
_HEX = np.frombuffer("".join(f"{value:02x}" for value in range(256)).encode(), dtype=np.uint8).reshape(256, 2)


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
    """One block as the manifest lists it."""

    placed: PlacedBlock
    digest: bytes
    filtered: bool


@dataclass(frozen=True)
class ParentFacts:
    """A checkpoint that a delta builds upon: its step, its attempt, and the own digest of its manifest, in hexadecimal.

    Both pin it: another checkpoint of that step is not the parent.
    """

    step: int
    attempt: str
    digest: str


@dataclass(frozen=True)
class ManifestHead:
    """What differs from save to save.

    kind      "full" or "delta"
    parents   of a delta: its complete chain, newest first, down to a full checkpoint; else empty
    files     of all ranks, in their order
    values    the plain values of rank 0
    replaces  of a compacted checkpoint: the digest of the manifest that it stands for
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

    @property
    def features(self) -> frozenset[str]:
        """What the head asks of a reader."""
        uses = {DELTA: self.kind == "delta", COMPACTED: self.replaces is not None, RANKS: self.ranks_count > 1}
        return frozenset(name for name, used in uses.items() if used)

    @property
    def files_of_ranks(self) -> list[list[FileFacts]]:
        """The files of rank 0, those of rank 1, ..."""
        return [list(files) for _, files in itertools.groupby(self.files, key=lambda file: file.rank)]

    @property
    def file_name(self) -> str:
        """The name of the manifest in manifests/."""
        return manifest_name(self.step) if self.replaces is None else compacted_manifest_name(self.step)

    @property
    def folder_name(self) -> str:
        """The name in data/ of the folder with all files."""
        return Attempt(step=self.step, id=self.attempt).directory


@dataclass(frozen=True)
class SealedHead:
    """The head of a manifest that is written, and the own digest of the manifest, in hexadecimal."""

    head: ManifestHead
    digest: str


@dataclass(frozen=True)
class RankPart:
    """What one rank has contributed: its tables, its state's tree and plain values, and the blocks that it has written.

    A leaf of the tree without a block was written by another rank, if not left out. `leaf` of a block numbers the
    leaves of this tree, file_index the files of all ranks.
    """

    rank: int
    tables: tuple[TableFacts, ...]
    tree: Node
    values: tuple[Json, ...]
    blocks: tuple[BlockFacts, ...]


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


@dataclass(frozen=True)
class BodyTemplate:
    """Tables, tree and blocks as JSON text with a hole of 32 characters, beginning at `holes`, for a block's digest.

    features: what the blocks ask of a reader. tables_end: where the text of the tables ends.
    """

    text: bytes
    holes: NDArray[np.int64]
    features: frozenset[str] = field(default=frozenset())
    tables_end: int = 0


def render_body(
    tables: Sequence[TableFacts], tree: Node, blocks: Sequence[PlacedBlock], *, filtered: Collection[int] = ()
) -> BodyTemplate:
    """Render the part of a manifest that only a change of the plan changes. `filtered`: numbers of replaced blocks."""
    text = b',"tree":%s,"blocks":[]' % dumps(encode_tree(tree))
    empty = BodyTemplate(text=text, holes=np.empty(0, dtype=np.int64))
    return extend_body(empty, tables, blocks, filtered=filtered)


def extend_body(
    body: BodyTemplate, tables: Sequence[TableFacts], blocks: Sequence[PlacedBlock], *, filtered: Collection[int] = ()
) -> BodyTemplate:
    """Return the body with these tables, and with further blocks behind its own: without rendering those again."""
    limits.check_blocks_count(len(body.holes) + len(blocks))
    limits.check_tables(tables)
    listed = b'"tables":%s' % dumps([_table_json(table) for table in tables])
    own = listed + body.text[body.tables_end : -1]
    if len(body.holes) and blocks:
        own += b","
    rendered = [_block_text(placed, filtered=number in filtered) for number, placed in enumerate(blocks)]
    lengths = np.fromiter((len(part) + 1 for part in rendered), dtype=np.int64, count=len(rendered))
    # The last of a block's members is its digest.
    holes = len(own) + np.cumsum(lengths) - 1 - len(b'"}') - 32
    text = own + b",".join(rendered) + b"]"
    assert all(text[hole : hole + 32] == _HOLE for hole in holes[:3].tolist())
    return BodyTemplate(
        text=text,
        holes=np.concatenate([body.holes + len(listed) - body.tables_end, holes]),
        features=body.features | features_of(blocks),
        tables_end=len(listed),
    )


def features_of(blocks: Collection[PlacedBlock]) -> frozenset[str]:
    """Return what blocks ask of a reader."""
    uses = {
        ENCODING: any(placed.spec.encoding for placed in blocks),
        PAD: any(placed.spec.role is Role.PAD for placed in blocks),
        BOXES: any(placed.spec.is_box for placed in blocks),
    }
    return frozenset(name for name, used in uses.items() if used)


@dataclass(frozen=True)
class PartText:
    """The part of a rank other than 0 as it stands in the manifest, and what it asks of a reader."""

    text: bytes | bytearray
    features: frozenset[str]


def encode_part(
    files: Sequence[FileFacts], values: Sequence[Json], body: BodyTemplate, digests: NDArray[np.uint8]
) -> PartText:
    """Render the part of a rank other than 0; digests (uint8 [blocks, 16]) go into the holes of the body."""
    limits.check_values_count(len(values))
    begin = dumps({"files": [_file_json(file) for file in files], "values": list(values)})[:-1] + b","
    limits.check_manifest_bytes(len(begin) + len(body.text))
    text = bytearray().join((begin, body.text, b"}"))
    _fill_holes(text, body, digests, first_byte=len(begin))
    return PartText(text=text, features=body.features)


def _fill_holes(text: bytearray, body: BodyTemplate, digests: NDArray[np.uint8], *, first_byte: int) -> None:
    array = np.frombuffer(text, dtype=np.uint8)
    array[(body.holes + first_byte)[:, None] + np.arange(32)] = _HEX[digests].reshape(len(body.holes), 32)


def encode_manifest(
    head: ManifestHead, body: BodyTemplate, digests: NDArray[np.uint8], others: Sequence[PartText] = ()
) -> bytearray:
    """Return the bytes of a manifest file; digests (uint8 [blocks, 16]) go into the holes of the body.

    others: the parts of ranks 1, 2, ... of a checkpoint of several, with their files. All in one buffer: for thousands
    of blocks it is megabytes, and fresh memory is slow.
    """
    limits.check_values_count(len(head.values))
    limits.check_chain_length(len(head.parents))
    opening: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "requires": sorted(head.features.union(body.features, *(part.features for part in others))),
        "writer": head.writer,
        "created": head.created,
        "step": head.step,
        "kind": head.kind,
        "parents": [{"step": item.step, "attempt": item.attempt, "digest": item.digest} for item in head.parents],
        "attempt": head.attempt,
        "byteorder": "little",
        "digest_algorithm": DIGEST_ALGORITHM,
        "ranks_count": head.ranks_count,
        "files": [_file_json(file) for file in head.files if file.rank == 0],
        "values": list(head.values),
        "metadata": head.metadata,
    }
    if head.replaces is not None:
        opening["replaces"] = head.replaces
    assert (head.kind == "delta") == bool(head.parents)
    assert head.ranks_count == 1 + len(others)
    begin = dumps(opening)[:-1] + b","
    listed: list[bytes | bytearray] = []
    for part in others:
        listed += [b"," if listed else b',"others":[', part.text]
    texts = (begin, body.text, *listed, b"]" if listed else b"", _DIGEST_MARK, bytes(32), b'"}\n')
    limits.check_manifest_bytes(sum(map(len, texts)))
    raw = bytearray().join(texts)
    _fill_holes(raw, body, digests, first_byte=len(begin))
    raw[-35:-3] = xxhash.xxh3_128_hexdigest(memoryview(raw)[:-_END_BYTES]).encode("ascii")
    return raw


def written_digest(raw: bytes | bytearray) -> str:
    """Return the own digest of a manifest that encode_manifest made, in hexadecimal: what a child pins."""
    return raw[-35:-3].decode("ascii")


def manifest_digest(raw: bytes, *, owner: str) -> str:
    """Check the manifest's own digest and return it; CorruptError when a byte differs or the end is missing."""
    if not raw:
        raise CorruptError(f"{owner} is empty")
    if raw[-_END_BYTES:-35] != _DIGEST_MARK or raw[-3:] != b'"}\n':
        hint = looks_like(raw) or "it is truncated or has foreign bytes"
        raise CorruptError(f"{owner} does not end as a manifest ends", hint=hint)
    stored = raw[-35:-3].decode("ascii", "replace")
    computed = xxhash.xxh3_128_hexdigest(raw[:-_END_BYTES])
    if stored != computed:
        raise CorruptError(f"{owner} is damaged: its digest is wrong", found=computed, expected=stored)
    return computed


def _table_json(table: TableFacts) -> Json:
    facts: dict[str, Json] = {"name": table.name, "rows": table.rows_count, "shard": list(table.shard)}
    if not table.whole:
        facts["whole"] = False
    if table.removed_count:
        facts["removed"] = table.removed_count
    if table.filters:
        facts["filters"] = [dict(item) for item in table.filters]
    return facts


def _file_json(file: FileFacts) -> Json:
    return {
        "path": file.path,
        "rank": file.rank,
        "bytes": file.bytes,
        "header_bytes": file.header_bytes,
        "header_digest": file.header_digest.hex(),
    }


def _block_text(placed: PlacedBlock, *, filtered: bool) -> bytes:
    """Return a block's JSON, digest last; written by hand, as json.dumps of 10,000 dicts takes too long."""
    spec = placed.spec
    name = json.dumps(spec.name, ensure_ascii=False)
    parts = [f'{{"name":{name},"role":"{spec.role.value}"']
    if placed.key != spec.name:
        parts.append(f',"key":{json.dumps(placed.key, ensure_ascii=False)}')
    if spec.table is not None:
        parts.append(f',"table":{json.dumps(spec.table, ensure_ascii=False)}')
        parts.append(f',"column":{json.dumps(spec.column, ensure_ascii=False)},"slice":"{spec.slice_info}"')
    if spec.leaf is not None:
        parts.append(f',"leaf":{spec.leaf}')
    parts.append(f',"dtype":"{spec.dtype}","shape":{list(spec.shape)}'.replace(" ", ""))
    if spec.encoding:
        stored = dumps({"dtype": spec.stored_dtype, "shape": list(spec.stored_shape)}).decode()
        parts.append(f',"encoding":{dumps([dict(step) for step in spec.encoding]).decode()},"stored":{stored}')
    if spec.whole_shape is not None:
        parts.append(f',"row_begin":{spec.row_begin},"whole_shape":{list(spec.whole_shape)}'.replace(" ", ""))
        if any(spec.column_begins):
            parts.append(f',"column_begins":{list(spec.column_begins)}'.replace(" ", ""))
    if filtered:
        parts.append(',"filtered":true')
    parts.append(f',"file":{placed.file_index},"offset":{placed.offset},"bytes":{spec.bytes}')
    parts.append(f',"digest":"{_HOLE.decode()}"}}')
    return "".join(parts).encode("utf-8")

"""Render a manifest, and headers: see `manifest.py` for what is in them, and `read_manifest.py` for the way back.

Encoding 10,000 blocks for every save would hold the GIL for tens of milliseconds, so the part that stays the same from
save to save (tables, tree, blocks) is rendered once per plan, with holes for the digests.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from asyncckpt.errors import UnsupportedError, UsageError, Words
from asyncckpt.format import limits
from asyncckpt.format.body_members import (
    encode_modules,
    encode_sharing,
    features_of_sharing,
    features_of_tree,
)
from asyncckpt.format.head import (
    DIGEST_ALGORITHM,
    DIGEST_MARK,
    END_BYTES,
    FORMAT,
    VERSION,
    FileFacts,
    ManifestHead,
    SaveTimes,
    features_of,
    features_of_values,
)
from asyncckpt.format.manifest import HEADER_ALIGNMENT
from asyncckpt.format.names import Attempt
from asyncckpt.format.strict_json import Json, dumps
from asyncckpt.format.tree import Node, encode_tree
from asyncckpt.model.block import BlockSpec, PlacedBlock, TableFacts, leaves_count
from asyncckpt.model.sharing import NOTHING_SHARED, Sharing
from asyncckpt.model.table_shard import is_shard
from asyncckpt.native import row_begins

_HOLE = b"-" * 32
# Quotes within strings have a backslash before them, so in a body this is found in blocks alone.
_LEAF_DIGESTS = re.compile(rb'("bytes":[0-9]+),"leaf_digests":"[0-9a-f]+"(?=,"digest":"[0-9a-f]{32}"})')
_ATTEMPT_HOLE = "0" * 32
_STEP_HOLE = "0" * 12
# The two hexadecimal digits of every byte value, uint8 [256, 2].
_HEX = np.frombuffer("".join(f"{value:02x}" for value in range(256)).encode(), dtype=np.uint8).reshape(256, 2)


@dataclass(frozen=True)
class BodyTemplate:
    """Tables, tree and blocks as JSON text with a hole of 32 characters, beginning at `holes`, for each digest of a
    block or a leaf, in the order of native.row_begins.

    features: what it asks of a reader. tables_end: where the text of the tables ends.
    """

    text: bytes
    holes: NDArray[np.int64]
    blocks_count: int = 0
    features: frozenset[str] = field(default=frozenset())
    tables_end: int = 0


def render_body(
    tables: Sequence[TableFacts],
    tree: Node,
    blocks: Sequence[PlacedBlock],
    *,
    filtered: Collection[int] = (),
    sharing: Sharing = NOTHING_SHARED,
    classes: Sequence[Sequence[str]] = (),
) -> BodyTemplate:
    """Render the part of a manifest that only a change of the plan changes. `filtered`: numbers of replaced blocks."""
    named = b',"classes":%s' % dumps([list(names) for names in classes]) if any(classes) else b""
    parts = dumps(encode_tree(tree)), named, encode_modules(tree), encode_sharing(sharing)
    features = features_of_tree(tree) | features_of_sharing(sharing)
    text = b',"tree":%s%s%s%s,"blocks":[]' % parts
    empty = BodyTemplate(text=text, holes=np.empty(0, dtype=np.int64), features=features)
    return extend_body(empty, tables, blocks, filtered=filtered)


def check_tables(tables: Sequence[TableFacts]) -> None:
    """Refuse tables that no reader takes: UsageError that names one."""
    names = {table.name for table in tables}
    if len(names) != len(tables):
        raise UsageError("a table is given twice", found=sorted(table.name for table in tables)[:20])
    for table in tables:
        if not is_shard(table.shard):
            expected = "(index, count) or (begin, end, size)"
            raise UsageError(f"table {table.name!r} has an impossible shard", found=table.shard, expected=expected)
    if len(tables) > limits.TABLES_MAX or any(len(table.filters) > limits.TABLE_FILTERS_MAX for table in tables):
        limits.check_tables_count(tables)


def extend_body(
    body: BodyTemplate, tables: Sequence[TableFacts], blocks: Sequence[PlacedBlock], *, filtered: Collection[int] = ()
) -> BodyTemplate:
    """Return the body with these tables, and with further blocks after its own: without rendering those again."""
    if body.blocks_count + len(blocks) > limits.BLOCKS_MAX:
        limits.check_blocks_count(body.blocks_count + len(blocks))
    check_tables(tables)
    listed = b'"tables":%s' % dumps([_table_json(table) for table in tables])
    own = listed + body.text[body.tables_end : -1]
    if body.blocks_count and blocks:
        own += b","
    rendered = [_block_text(placed, filtered=number in filtered) for number, placed in enumerate(blocks)]
    lengths = np.fromiter((len(part) + 1 for part in rendered), dtype=np.int64, count=len(rendered))
    # The last of a block's members is its digest, the one before it those of its leaves.
    digests = len(own) + np.cumsum(lengths) - 1 - len(b'"}') - 32
    begins = row_begins([placed.spec.bytes for placed in blocks])
    holes = np.empty(begins[-1], dtype=np.int64)
    holes[begins[:-1]] = digests
    for number in np.flatnonzero(np.diff(begins) > 1).tolist():
        leaves = holes[begins[number] + 1 : begins[number + 1]]
        leaves[:] = digests[number] - len(b'","digest":"') - 32 * np.arange(len(leaves), 0, -1)
    text = own + b",".join(rendered) + b"]"
    assert all(text[hole : hole + 32] == _HOLE for hole in holes[:3].tolist())
    return BodyTemplate(
        text=text,
        holes=np.concatenate([body.holes + len(listed) - body.tables_end, holes]),
        blocks_count=body.blocks_count + len(blocks),
        features=body.features | features_of(blocks),
        tables_end=len(listed),
    )


@dataclass(frozen=True)
class PartText:
    """The part of a rank other than 0 as it stands in the manifest, and what it asks of a reader."""

    text: bytes | bytearray
    features: frozenset[str]


def encode_part(
    files: Sequence[FileFacts], values: Sequence[Json], body: BodyTemplate, digests: NDArray[np.uint8]
) -> PartText:
    """Render the part of a rank other than 0; digests (native.row_begins) go into the holes of the body."""
    limits.check_values_count(len(values))
    begin = dumps({"files": [_file_json(file) for file in files], "values": list(values)})[:-1] + b","
    text = bytearray().join((begin, body.text, b"}"))
    _fill_holes(text, body, digests, first_byte=len(begin))
    features = body.features | features_of_values(values)
    if len(text) > limits.MANIFEST_BYTES_MAX:
        text = _without_leaf_digests(text, first_byte=len(begin))
    return PartText(text=text, features=features)


def _fill_holes(text: bytearray, body: BodyTemplate, digests: NDArray[np.uint8], *, first_byte: int) -> None:
    array = np.frombuffer(text, dtype=np.uint8)
    array[(body.holes + first_byte)[:, None] + np.arange(32)] = _HEX[digests].reshape(len(body.holes), 32)


def _without_leaf_digests(text: bytearray, *, first_byte: int) -> bytearray:
    """Return the text of a manifest, or of a part, without the digests of leaves: with them it is too long for readers,
    at some 100 TB. UsageError when it is too long without them.

    first_byte: the body's; metadata, which come before, may look like a block.
    """
    text[first_byte:] = _LEAF_DIGESTS.sub(rb"\1", text[first_byte:])
    limits.check_manifest_bytes(len(text))
    return text


def encode_manifest(
    head: ManifestHead, body: BodyTemplate, digests: NDArray[np.uint8], others: Sequence[PartText] = ()
) -> bytearray:
    """Return the bytes of a manifest file; digests (native.row_begins) go into the holes of the body.

    others: the parts of ranks 1, 2, ... if several saved it, with their files. All in one buffer: for thousands of
    blocks it is megabytes, and fresh memory is slow.
    """
    if len(head.values) > limits.VALUES_MAX or len(head.parents) > limits.CHAIN_STEPS_MAX:
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
    if head.times is not None:
        opening["times"] = _times_json(head.times)
    assert (head.kind == "delta") == bool(head.parents)
    assert head.ranks_count == 1 + len(others)
    begin = dumps(opening)[:-1] + b","
    listed: list[bytes | bytearray] = []
    for part in others:
        listed += [b"," if listed else b',"others":[', part.text]
    texts = (begin, body.text, *listed, b"]" if listed else b"", DIGEST_MARK, bytes(32), b'"}\n')
    raw = bytearray().join(texts)
    _fill_holes(raw, body, digests, first_byte=len(begin))
    if len(raw) > limits.MANIFEST_BYTES_MAX:
        raw = _without_leaf_digests(raw, first_byte=len(begin))
    raw[-35:-3] = xxhash.xxh3_128_hexdigest(memoryview(raw)[:-END_BYTES]).encode("ascii")
    return raw


def written_digest(raw: bytes | bytearray) -> str:
    """Return the own digest of a manifest that encode_manifest made, in hexadecimal: what a child pins."""
    return raw[-35:-3].decode("ascii")


def _times_json(times: SaveTimes) -> Json:
    facts: dict[str, Json] = {"called": times.called_us, "begun": times.begun_us, "written": times.written_us}
    return facts if times.stall_us is None else {**facts, "stall": times.stall_us}


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
    if leaves := leaves_count(spec.bytes):
        parts.append(f',"leaf_digests":"{_HOLE.decode() * leaves}"')
    parts.append(f',"digest":"{_HOLE.decode()}"}}')
    return "".join(parts).encode("utf-8")


@dataclass(frozen=True)
class HeaderTemplate:
    """A rendered header with holes for attempt and step."""

    text: bytes
    attempt_at: int
    step_at: int

    def stamp(self, attempt: Attempt) -> bytes:
        """Return the header's bytes for one attempt."""
        raw = bytearray(self.text)
        raw[self.attempt_at : self.attempt_at + 32] = attempt.id.encode("ascii")
        raw[self.step_at : self.step_at + 12] = f"{attempt.step:012d}".encode("ascii")
        return bytes(raw)


def render_header(blocks: Sequence[tuple[str, BlockSpec]], *, rank: int) -> HeaderTemplate:
    """Render the header of a file whose arrays are (key, spec) in file order."""
    metadata = f'"asyncckpt.attempt":"{_ATTEMPT_HOLE}","asyncckpt.step":"{_STEP_HOLE}","asyncckpt.rank":"{rank}"'
    parts = [f'"__metadata__":{{"format":"pt",{metadata}}}']
    end = 0
    for key, spec in blocks:
        limits.check_block(spec)
        begin, end = end, end + spec.bytes
        shape = ",".join(map(str, spec.stored_shape))
        name = json.dumps(key, ensure_ascii=False)
        parts.append(f'{name}:{{"dtype":"{spec.stored_dtype}","shape":[{shape}],"data_offsets":[{begin},{end}]}}')
    body = ("{" + ",".join(parts) + "}").encode("utf-8")
    total = -(-(len(body) + 8) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    names = [key for key, _ in blocks]
    if total > limits.HEADER_BYTES_MAX or len(blocks) >= limits.HEADER_ARRAYS_MAX:
        raise UnsupportedError(
            f"the names and shapes of tensors are too long for one shard file, that of {max(names, key=len)[:80]!r}",
            found=Words(f"{total} bytes for {len(blocks)} tensors"),
            expected=f"at most {limits.HEADER_BYTES_MAX} bytes",
            hint="save fewer tensors, or shorten their names",
        )
    text = struct.pack("<Q", total - 8) + body.ljust(total - 8)
    attempt_at = text.index(_ATTEMPT_HOLE.encode(), 8)
    step_at = text.index(_STEP_HOLE.encode(), attempt_at + 32)
    return HeaderTemplate(text=text, attempt_at=attempt_at, step_at=step_at)

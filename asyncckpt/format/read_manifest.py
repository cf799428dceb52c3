"""Decode and check a manifest: every field's type and range, every block against its file, every part against its
whole.

Nothing here trusts the bytes; whatever is wrong is a CorruptError (or IncompatibleError for a newer version) naming the
field.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

from asyncckpt.errors import CorruptError, IncompatibleError, UnsupportedError
from asyncckpt.format.dtypes import known_dtype
from asyncckpt.format.fields import I64_MAX, Fields
from asyncckpt.format.header import DIMENSIONS_MAX
from asyncckpt.format.manifest import (
    DIGEST_ALGORITHM,
    FORMAT,
    MANIFEST_BYTES_MAX,
    VERSION,
    BlockFacts,
    FileFacts,
    Manifest,
    ManifestHead,
    manifest_digest,
)
from asyncckpt.format.names import STEP_MAX, Attempt, attempt_of_directory, split_shard_path
from asyncckpt.format.strict_json import loads
from asyncckpt.format.tree import VALUE, decode_tree, leaves
from asyncckpt.model.block import BlockSpec, PlacedBlock, TableFacts
from asyncckpt.model.table import Role

FILES_MAX = 1_000_000
BLOCKS_MAX = 10_000_000
TABLES_MAX = 1_000_000
RANKS_MAX = 1_000_000


def decode_manifest(raw: bytes, *, owner: str, step: int) -> Manifest:
    """Decode the bytes of a manifest file; `step` is the one its file name tells."""
    fields, head, digest = _opened(raw, owner, step)
    tree = decode_tree(fields.value("tree"), owner=owner)
    if tree[0] != "dict":
        raise CorruptError(f"{owner}: manifest.tree is wrong", found=tree[0], expected="an object with names")
    tables = tuple(_table(item) for item in fields.objects("tables", count_max=TABLES_MAX))
    blocks = tuple(_block(item, head.files) for item in fields.objects("blocks", count_max=BLOCKS_MAX))
    manifest = Manifest(head=head, tables=tables, tree=tree, blocks=blocks, digest=digest)
    _check_files(manifest, owner)
    _check_parts(manifest, owner)
    _check_leaves(manifest, owner)
    return manifest


def decode_head(raw: bytes, *, owner: str, step: int) -> ManifestHead:
    """Only the head of a manifest: a fraction of the work when its blocks do not matter."""
    return _opened(raw, owner, step)[1]


def _opened(raw: bytes, owner: str, step: int) -> tuple[Fields, ManifestHead, str]:
    if len(raw) > MANIFEST_BYTES_MAX:
        raise CorruptError(f"{owner} is too large", found=len(raw), expected=MANIFEST_BYTES_MAX)
    # The digest first: before it is right, not even the version can be believed. Its place is the same in all versions.
    digest = manifest_digest(raw, owner=owner)
    fields = Fields(loads(raw, owner=owner), owner=owner, where="manifest")
    _check_version(fields)
    head = _head(fields)
    if head.step != step:
        raise CorruptError(f"{owner} tells another step than its name", found=head.step, expected=step)
    return fields, head, digest


def _check_version(fields: Fields) -> None:
    if fields.text("format") != FORMAT:
        raise CorruptError(f"{fields.owner} is of another format", found=fields.text("format"), expected=FORMAT)
    version = fields.integer("version", at_least=1)
    required = fields.texts("requires", count_max=1000)
    if version > VERSION or required:
        raise IncompatibleError(
            f"{fields.owner} was written by {fields.text('writer')} in a newer format",
            found=(version, *required),
            expected=f"version {VERSION} without required features",
            hint="upgrade asyncckpt to read it",
        )
    algorithm = fields.text("digest_algorithm")
    if algorithm != DIGEST_ALGORITHM:
        raise UnsupportedError(f"{fields.owner} uses another digest", found=algorithm, expected=DIGEST_ALGORITHM)
    if fields.text("byteorder") != "little":
        raise UnsupportedError(f"{fields.owner} has another byte order", found=fields.text("byteorder"))


def _head(fields: Fields) -> ManifestHead:
    kind = fields.text("kind")
    if kind != "full":
        raise UnsupportedError(f"{fields.owner} is a checkpoint of a kind that this version cannot read", found=kind)
    attempt = Attempt(step=fields.integer("step", at_most=STEP_MAX), id=fields.digest("attempt").hex())
    ranks_count = fields.integer("ranks_count", at_least=1, at_most=RANKS_MAX)
    files = tuple(_file(item, attempt, ranks_count) for item in fields.objects("files", count_max=FILES_MAX))
    paths = {file.path for file in files}
    if len(paths) != len(files):
        raise CorruptError(f"{fields.owner} lists a file twice")
    _check_ranks(fields, files, ranks_count)
    return ManifestHead(
        step=attempt.step,
        kind=kind,
        parents=fields.integers("parents", count_max=10_000),
        attempt=attempt.id,
        created=fields.text("created"),
        writer=fields.text("writer"),
        ranks_count=ranks_count,
        files=files,
        values=tuple(fields.items("values", count_max=BLOCKS_MAX)),
        metadata=fields.value("metadata"),
    )


def _check_ranks(fields: Fields, files: Sequence[FileFacts], ranks_count: int) -> None:
    """Every rank has written a file."""
    silent = set(range(ranks_count)) - {file.rank for file in files}
    if silent:
        raise CorruptError(
            f"{fields.owner} has no file of rank {min(silent)}", expected=f"files of {ranks_count} ranks"
        )
    if ranks_count > 1:
        raise UnsupportedError(f"{fields.owner} is a checkpoint of several ranks", found=ranks_count, expected=1)


def _file(fields: Fields, attempt: Attempt, ranks_count: int) -> FileFacts:
    path = fields.text("path")
    directory, _ = split_shard_path(path, owner=fields.owner)
    if attempt_of_directory(directory) != attempt:
        raise CorruptError(f"{fields.owner} mixes files of two saves", found=path, expected=attempt.directory)
    size = fields.integer("bytes", at_least=8)
    return FileFacts(
        path=path,
        rank=fields.integer("rank", at_most=ranks_count - 1),
        bytes=size,
        header_bytes=fields.integer("header_bytes", at_least=8, at_most=size),
        header_digest=fields.digest("header_digest"),
    )


def _table(fields: Fields) -> TableFacts:
    shard = fields.integers("shard", count_max=2)
    if len(shard) != 2 or shard[0] >= shard[1]:
        raise CorruptError(f"{fields.owner}: {fields.where}.shard is wrong", found=shard, expected="[index, count]")
    return TableFacts(name=fields.text("name"), rows_count=fields.integer("rows"), shard=(shard[0], shard[1]))


def _block(fields: Fields, files: Sequence[FileFacts]) -> BlockFacts:
    name = fields.text("name")
    size = fields.integer("bytes")
    shape = fields.integers("shape", count_max=DIMENSIONS_MAX)
    dtype = known_dtype(fields.text("dtype"))
    itemsize = 1 if dtype is None else dtype.itemsize
    row_begin = fields.optional_integer("row_begin")
    whole = None if row_begin is None else fields.integers("whole_shape", count_max=DIMENSIONS_MAX)
    if max(_elements_count(shape), _elements_count(whole or ())) * itemsize > I64_MAX:
        raise CorruptError(f"{fields.owner}: block {name!r} has a shape of impossible size", found=whole or shape)
    file_index = fields.integer("file", at_most=len(files) - 1)
    spec = BlockSpec(
        name=name,
        role=_role(fields),
        dtype=fields.text("dtype"),
        stored_dtype="" if dtype is None else dtype.stored,
        stored_itemsize=1 if dtype is None else dtype.stored_itemsize,
        shape=shape,
        stored_shape=(size,) if dtype is None else dtype.stored_shape(shape),
        table=fields.optional_text("table"),
        column=fields.optional_text("column"),
        leaf=fields.optional_integer("leaf"),
        row_begin=row_begin or 0,
        whole_shape=whole,
        slice_info=fields.optional_text("slice") or " ",
    )
    offset = fields.integer("offset", at_least=files[file_index].header_bytes)
    if size != spec.bytes or offset + size > files[file_index].bytes:
        raise CorruptError(
            f"{fields.owner}: block {name!r} does not fit its shape or its file",
            found=f"{size} bytes at {offset}",
            expected=f"{spec.bytes} bytes within {files[file_index].bytes}",
        )
    key = fields.optional_text("key")
    placed = PlacedBlock(spec=spec, key=name if key is None else key, file_index=file_index, offset=offset)
    return BlockFacts(placed=placed, digest=fields.digest("digest"), filtered=_flag(fields, "filtered"))


def _elements_count(shape: Sequence[int]) -> int:
    """Of a shape, a dimension of 0 counted as 1: torch makes no strides for more than 64 bits of them either."""
    return math.prod(max(1, size) for size in shape)


def _role(fields: Fields) -> Role:
    text = fields.text("role")
    try:
        role = Role(text)
    except ValueError:
        raise CorruptError(f"{fields.owner}: {fields.where}.role is unknown", found=text) from None
    table, column = fields.optional_text("table"), fields.optional_text("column")
    if role is Role.DENSE:
        fits = table is None and column is None
    else:
        # Parts are put together by name, columns are filled by table and column: the two must be the same.
        fits = table is not None and column is not None and fields.text("name") == f"{table}@{column}"
    if not fits:
        raise CorruptError(
            f"{fields.owner}: {fields.where} is neither a table's nor dense", found=(text, table, column)
        )
    return role


def _flag(fields: Fields, key: str) -> bool:
    try:
        return fields.value(key) is True
    except CorruptError:
        return False


def _check_files(manifest: Manifest, owner: str) -> None:
    """Every byte behind a header belongs to exactly one block."""
    by_file: dict[int, list[PlacedBlock]] = defaultdict(list)
    for block in manifest.blocks:
        by_file[block.placed.file_index].append(block.placed)
    for index, file in enumerate(manifest.head.files):
        end = file.header_bytes
        for placed in sorted(by_file[index], key=lambda p: (p.offset, p.spec.bytes)):
            if placed.offset != end:
                raise CorruptError(
                    f"{owner}: block {placed.spec.name!r} overlaps or leaves a hole", found=placed.offset, expected=end
                )
            end += placed.spec.bytes
        if end != file.bytes:
            raise CorruptError(f"{owner}: blocks do not fill {file.path}", found=end, expected=file.bytes)


def _check_parts(manifest: Manifest, owner: str) -> None:
    """The blocks of one name are one whole, or parts that cover a whole without gap, overlap or disagreement."""
    names: dict[tuple[str, int], list[BlockSpec]] = defaultdict(list)
    for block in manifest.blocks:
        rank = manifest.head.files[block.placed.file_index].rank if block.placed.spec.table is not None else 0
        names[block.placed.spec.name, rank].append(block.placed.spec)
    for (name, _), specs in names.items():
        if len(specs) == 1 and not specs[0].is_part:
            continue
        specs.sort(key=lambda spec: spec.row_begin)
        whole = specs[0].whole_shape
        kind = (whole, specs[0].dtype, specs[0].role, specs[0].leaf)
        if whole is None or any((s.whole_shape, s.dtype, s.role, s.leaf) != kind for s in specs):
            raise CorruptError(f"{owner}: tensor {name!r} is there twice, or its parts disagree")
        if not whole or any(s.shape[1:] != whole[1:] or len(s.shape) != len(whole) for s in specs):
            raise CorruptError(f"{owner}: parts of tensor {name!r} have another shape than the whole", expected=whole)
        ends = list(itertools.accumulate((s.shape[0] for s in specs), initial=0))
        if [s.row_begin for s in specs] != ends[:-1] or ends[-1] != whole[0]:
            raise CorruptError(f"{owner}: rows of tensor {name!r} are missing or covered twice", expected=whole)


def _check_leaves(manifest: Manifest, owner: str) -> None:
    """Leaf numbers are those of the tree, each of one tensor; columns of a table agree on its rows."""
    kinds = [node for _, node in leaves(manifest.tree)]
    tensors_count = sum(1 for node in kinds if node is not VALUE)
    if len(kinds) - tensors_count != len(manifest.head.values):
        raise CorruptError(f"{owner}: the tree and its values disagree", found=len(manifest.head.values))
    rows = {table.name: table.rows_count for table in manifest.tables}
    if len(rows) != len(manifest.tables):
        raise CorruptError(f"{owner} lists a table twice")
    owners: dict[int, str] = {}
    for block in manifest.blocks:
        spec = block.placed.spec
        if spec.leaf is not None:
            if spec.table is not None or spec.leaf >= tensors_count:
                raise CorruptError(f"{owner}: block {spec.name!r} names a leaf that is not there", found=spec.leaf)
            if owners.setdefault(spec.leaf, spec.name) != spec.name:
                raise CorruptError(
                    f"{owner}: block {spec.name!r} names a leaf of {owners[spec.leaf]!r}", found=spec.leaf
                )
        if spec.table is not None:
            shape = spec.whole_shape or spec.shape
            if spec.table not in rows or not shape or shape[0] != rows[spec.table]:
                raise CorruptError(f"{owner}: block {spec.name!r} does not fit its table", found=shape)

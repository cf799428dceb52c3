"""Decode and check a manifest: every field's type and range, every block against its file, every part against its
whole.

Nothing here trusts the bytes; whatever is wrong is a CorruptError (or IncompatibleError for a newer version) naming the
field. The head of a manifest is decoded in head.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import xxhash

from asyncckpt.errors import CorruptError, Words, must_be
from asyncckpt.format import limits
from asyncckpt.format.body_members import (
    decode_sharing,
    features_of_sharing,
    features_of_tree,
    with_modules,
)
from asyncckpt.format.coverage import covers
from asyncckpt.format.dtypes import STORED_ITEMSIZE, StoredDtype, array_bytes, known_dtype
from asyncckpt.format.head import (
    FileFacts,
    ManifestHead,
    check_features,
    features_of,
    features_of_values,
    open_manifest,
    rank_fields,
)
from asyncckpt.format.manifest import HEADER_ALIGNMENT, BlockFacts, Manifest, RankPart, Summary
from asyncckpt.format.strict_json import Fields
from asyncckpt.format.tree import VALUE, Path, decode_tree, leaves, object_paths, tensor_paths
from asyncckpt.model.block import (
    DIGEST_BYTES,
    REMOVED_COLUMN,
    BlockSpec,
    EncodingStep,
    PlacedBlock,
    TableFacts,
    leaves_count,
)
from asyncckpt.model.table import Role
from asyncckpt.model.table_shard import is_shard

_PAD_NAME = re.compile(r"#pad\.[0-9]+")
_HEX = re.compile("[0-9a-f]+")


def decode_manifest(raw: bytes, name: str) -> Manifest:
    """Decode the bytes of the manifest file of this name."""
    fields, sealed = open_manifest(raw, name)
    head, owner = sealed.head, fields.owner
    parts: list[RankPart] = []
    first_file = 0
    own_parts = rank_fields(fields, head.ranks_count)
    for rank, (own, files) in enumerate(zip(own_parts, head.files_of_ranks, strict=True)):
        parts.append(decode_part(own, head, rank, files, first_file=first_file))
        first_file += len(files)
    manifest = Manifest(head=head, digest=sealed.digest, parts=tuple(parts))
    _check_files(manifest, owner)
    for part in parts:
        _check_leaves(part, owner)
        _check_tables(part, owner)
    _check_dense(manifest, owner)
    used = features_of([block.placed for block in manifest.blocks])
    for part in parts:
        used |= features_of_tree(part.tree) | features_of_sharing(part.sharing) | features_of_values(part.values)
    check_features(fields, used)
    return manifest


def decode_summary(raw: bytes, name: str) -> Summary:
    """Decode what a list shows, checked less deeply: a fraction of the work."""
    fields, sealed = open_manifest(raw, name)
    tables: list[TableFacts] = []
    tensors: set[str] = set()
    blocks_count = 0
    for part in rank_fields(fields, sealed.head.ranks_count):
        listed = part.objects("tables", count_max=limits.TABLES_MAX)
        tables += [_table(item, kind=sealed.head.kind) for item in listed]
        for block in part.items("blocks", count_max=limits.BLOCKS_MAX):
            role = block.get("role") if type(block) is dict else None
            blocks_count += role != Role.PAD
            if role == Role.DENSE:
                tensors.add(str(block.get("name")))
    return Summary(
        head=sealed.head,
        digest=sealed.digest,
        tables=tuple(tables),
        tensors_count=len(tensors),
        blocks_count=blocks_count,
    )


def decode_part(
    fields: Fields, head: ManifestHead, rank: int, files: Sequence[FileFacts], *, first_file: int
) -> RankPart:
    """Decode what one rank has contributed, without a look at what others have."""
    tree = decode_tree(fields.value("tree"), owner=fields.owner)
    if tree[0] != "dict":
        raise must_be(f"{fields.owner}: {fields.where}.tree", "an object with names", tree[0], kind=CorruptError)
    blocks = fields.objects("blocks", count_max=limits.BLOCKS_MAX)
    return RankPart(
        rank=rank,
        tables=tuple(_table(item, kind=head.kind) for item in fields.objects("tables", count_max=limits.TABLES_MAX)),
        tree=with_modules(tree, fields),
        values=tuple(fields.items("values", count_max=limits.VALUES_MAX)),
        blocks=tuple(_block(item, files, first_file=first_file) for item in blocks),
        sharing=decode_sharing(fields, leaves_count=len(tensor_paths(tree))),
        classes=_classes(fields, objects_count=sum(1 for _ in object_paths(tree))),
    )


def _classes(fields: Fields, *, objects_count: int) -> tuple[tuple[str, ...], ...]:
    """Return the names of the classes of every object in the tree; empty where they were not stored."""
    if fields.absent("classes"):
        return ()
    items = fields.items("classes", count_max=limits.VALUES_MAX)
    if len(items) != objects_count or not all(type(names) is list for names in items):
        raise fields.wrong("classes", f"an array of names for each of {objects_count} objects")
    if not all(type(name) is str for names in items if isinstance(names, list) for name in names):
        raise fields.wrong("classes", "arrays of strings")
    return tuple(tuple(map(str, names)) for names in items if isinstance(names, list))


def _table(fields: Fields, *, kind: str) -> TableFacts:
    shard = fields.integers("shard", count_max=3)
    if not is_shard(shard):
        raise fields.wrong("shard", "[index, count] or [begin, end, size]")
    whole = fields.flag("whole", default=True)
    removed_count = fields.optional_integer("removed") or 0
    if (not whole and kind != "delta") or (whole and removed_count):
        raise CorruptError(
            f"{fields.owner}: {fields.where} is a change to a table where there is nothing to change",
            found={"kind": kind, "whole": whole, "removed": removed_count},
        )
    filters = fields.objects("filters", count_max=limits.TABLE_FILTERS_MAX, optional=True)
    return TableFacts(
        name=fields.text("name"),
        rows_count=fields.integer("rows"),
        shard=shard,
        whole=whole,
        removed_count=removed_count,
        filters=tuple(item.members for item in filters),  # What they say is for people.
    )


def _check_files(manifest: Manifest, owner: str) -> None:
    """Every byte after a header belongs to exactly one block."""
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


def _check_dense(manifest: Manifest, owner: str) -> None:
    """The blocks of one dense tensor, whichever ranks wrote them, are one whole, or boxes that make up one."""
    paths: dict[Path | str, list[BlockSpec]] = defaultdict(list)
    leaf_names: dict[tuple[int, int], str] = {}
    names: dict[tuple[int, str], Path | str] = {}
    for part in manifest.parts:
        own_paths = tensor_paths(part.tree)
        for block in part.blocks:
            spec = block.placed.spec
            if spec.table is not None or spec.role is Role.PAD:
                continue
            if spec.leaf is not None and leaf_names.setdefault((part.rank, spec.leaf), spec.name) != spec.name:
                what = f"{owner}: block {spec.name!r} names a leaf of {leaf_names[part.rank, spec.leaf]!r}"
                raise CorruptError(what, found=spec.leaf)
            found = spec.name if spec.leaf is None else own_paths[spec.leaf]
            if names.setdefault((part.rank, spec.name), found) != found:
                raise CorruptError(f"{owner}: tensor {spec.name!r} is there twice, or its parts disagree")
            paths[found].append(spec)
    for specs in paths.values():
        check_whole(specs, specs[0].name, owner)


def check_whole(specs: Sequence[BlockSpec], name: str, owner: str) -> None:
    """Blocks of one name agree about their whole, and cover it without gap or overlap."""
    if len(specs) == 1 and not specs[0].is_part:
        return
    whole = specs[0].whole_shape
    kind = (whole, specs[0].dtype, specs[0].role, specs[0].is_known)
    if whole is None or any((s.whole_shape, s.dtype, s.role, s.is_known) != kind for s in specs):
        raise CorruptError(f"{owner}: tensor {name!r} is there twice, or its parts disagree")
    if not whole or any(len(s.shape) != len(whole) for s in specs):
        raise CorruptError(f"{owner}: parts of tensor {name!r} have another shape than the whole", expected=whole)
    boxes = [tuple((b, b + size) for b, size in zip(s.begin, s.shape, strict=True)) for s in specs]
    if any(end > size for box in boxes for (_, end), size in zip(box, whole, strict=True)):
        raise CorruptError(f"{owner}: parts of tensor {name!r} have another shape than the whole", expected=whole)
    if not covers(boxes, whole, name=name):
        raise CorruptError(f"{owner}: elements of tensor {name!r} are missing or covered twice", expected=whole)


def _check_leaves(part: RankPart, owner: str) -> None:
    """Leaf numbers are those of the tree."""
    kinds = [node for _, node in leaves(part.tree)]
    tensors_count = sum(1 for node in kinds if node is not VALUE)
    if len(kinds) - tensors_count != len(part.values):
        raise CorruptError(f"{owner}: the tree and its values disagree", found=len(part.values))
    for block in part.blocks:
        spec = block.placed.spec
        if spec.leaf is not None and (spec.table is not None or spec.leaf >= tensors_count):
            raise CorruptError(f"{owner}: block {spec.name!r} names a leaf that does not exist", found=spec.leaf)
    if not part.sharing.tied:
        return
    stored = {block.placed.spec.leaf for block in part.blocks}
    names = {block.placed.spec.name for block in part.blocks}
    for item in part.sharing.tied:
        if item.leaf in stored or item.name in names:
            raise CorruptError(f"{owner}: tied tensor {item.name!r} has a block of its own", found=item.leaf)
        names.add(item.name)


def _check_tables(part: RankPart, owner: str) -> None:
    """Columns of a table agree on its rows, each in whole or in ranges of rows; removed ids are as many as it says."""
    tables = {table.name: table for table in part.tables}
    if len(tables) != len(part.tables):
        raise CorruptError(f"{owner} lists a table twice")
    without_removed = {table.name for table in part.tables if table.removed_count}
    columns: dict[str, list[BlockSpec]] = defaultdict(list)
    for block in part.blocks:
        spec = block.placed.spec
        if spec.table is None:
            continue
        table, shape = tables.get(spec.table), spec.whole_shape or spec.shape
        is_removed = spec.role is Role.REMOVED
        if table is None or not shape or shape[0] != (table.removed_count if is_removed else table.rows_count):
            raise CorruptError(f"{owner}: block {spec.name!r} does not fit its table", found=shape)
        if spec.is_box:
            raise CorruptError(f"{owner}: column {spec.name!r} has a block that holds no whole rows")
        if is_removed:
            without_removed.discard(spec.table)
        columns[spec.name].append(spec)
    if without_removed:
        raise CorruptError(f"{owner}: removed ids of table {min(without_removed)!r} are missing")
    for name, specs in columns.items():
        check_whole(specs, name, owner)


def _block(fields: Fields, files: Sequence[FileFacts], *, first_file: int = 0) -> BlockFacts:
    """Decode one element of `blocks`; CorruptError naming block or field.

    files: those of the block's part; the first of them is the file of number first_file among all.
    """
    name = fields.text("name")
    size = fields.integer("bytes")
    shape = fields.integers("shape", count_max=limits.DIMENSIONS_MAX)
    dtype = known_dtype(fields.text("dtype"))
    itemsize = 1 if dtype is None else dtype.itemsize
    row_begin = fields.optional_integer("row_begin")
    whole = None if row_begin is None else fields.integers("whole_shape", count_max=limits.DIMENSIONS_MAX)
    column_begins = _column_begins(fields, shape, whole)
    if max(array_bytes(shape, itemsize), array_bytes(whole or (), itemsize)) > limits.ARRAY_BYTES_MAX:
        raise CorruptError(f"{fields.owner}: block {name!r} has a shape of impossible size", found=whole or shape)
    file_index = fields.integer("file", at_most=len(files) - 1)
    encoding = _encoding(fields)
    stored = _stored(fields, dtype, shape, size, is_encoded=bool(encoding))
    spec = BlockSpec(
        name=name,
        role=_role(fields),
        dtype=fields.text("dtype"),
        stored_dtype=stored[0],
        stored_itemsize=stored[1],
        shape=shape,
        stored_shape=stored[2],
        table=fields.optional_text("table"),
        column=fields.optional_text("column"),
        leaf=fields.optional_integer("leaf"),
        row_begin=row_begin or 0,
        whole_shape=whole,
        column_begins=column_begins,
        slice_info=fields.optional_text("slice") or " ",
        encoding=encoding,
    )
    _check_role(fields, spec)
    offset = fields.integer("offset", at_least=files[file_index].header_bytes)
    if size != spec.bytes or offset + size > files[file_index].bytes:
        raise CorruptError(
            f"{fields.owner}: block {name!r} does not fit its shape or its file",
            found=Words(f"{size} bytes at {offset}"),
            expected=f"{spec.bytes} bytes within {files[file_index].bytes}",
        )
    key = fields.optional_text("key")
    placed = PlacedBlock(spec=spec, key=name if key is None else key, file_index=first_file + file_index, offset=offset)
    digest = fields.digest("digest")
    return BlockFacts(
        placed=placed,
        digest=digest,
        filtered=fields.flag("filtered", default=False),
        leaf_digests=_leaf_digests(fields, size, digest),
    )


def _leaf_digests(fields: Fields, size: int, digest: bytes) -> bytes:
    """Return the digests of the leaves, of which the block's own is made; empty where there are none."""
    if fields.absent("leaf_digests"):
        return b""
    text, count = fields.text("leaf_digests"), leaves_count(size)
    if not count:
        raise fields.wrong("leaf_digests", f"none: a block of {size} bytes has no leaves beside itself")
    if len(text) != 2 * DIGEST_BYTES * count or not _HEX.fullmatch(text):
        raise fields.wrong("leaf_digests", f"{count} digests of 32 lower-case hexadecimal digits")
    leaves = bytes.fromhex(text)
    if xxhash.xxh3_128_digest(leaves) != digest:
        raise fields.wrong("leaf_digests", "those of which the digest is made")
    return leaves


def _column_begins(fields: Fields, shape: Sequence[int], whole: Sequence[int] | None) -> tuple[int, ...]:
    """Return where a box begins in the dimensions but the first; empty where it holds whole rows."""
    if fields.absent("column_begins"):
        return ()
    begins = fields.integers("column_begins", count_max=limits.DIMENSIONS_MAX)
    if whole is None or not any(begins) or len(begins) + 1 != len(shape):
        raise fields.wrong("column_begins", f"begins of a box within {whole}")
    return begins


def _encoding(fields: Fields) -> tuple[EncodingStep, ...]:
    """Return the steps, each with its kind; decoding the block checks whether they are known."""
    steps = fields.objects("encoding", count_max=limits.ENCODING_STEPS_MAX, optional=True)
    if not all(step.text("kind") for step in steps) or (not steps and not fields.absent("encoding")):
        raise fields.wrong("encoding", "steps with their kinds")
    return tuple(step.members for step in steps)


def _stored(
    fields: Fields, dtype: StoredDtype | None, shape: tuple[int, ...], size: int, *, is_encoded: bool
) -> tuple[str, int, tuple[int, ...]]:
    """Return dtype, itemsize and shape in the shard file; only the bytes count if the dtype is unknown."""
    if not is_encoded:
        return ("", 1, (size,)) if dtype is None else (dtype.stored, dtype.stored_itemsize, dtype.stored_shape(shape))
    stored = Fields(fields.value("stored"), owner=fields.owner, where=f"{fields.where}.stored")
    code = stored.text("dtype")
    stored_shape = stored.integers("shape", count_max=limits.DIMENSIONS_MAX)
    if dtype is None or code not in STORED_ITEMSIZE:
        return "", 1, (size,)
    if array_bytes(stored_shape, STORED_ITEMSIZE[code]) > limits.ARRAY_BYTES_MAX:
        raise CorruptError(f"{fields.owner}: {fields.where}.stored is of impossible size", found=stored_shape)
    return code, STORED_ITEMSIZE[code], stored_shape


def _role(fields: Fields) -> Role:
    try:
        return Role(fields.text("role"))
    except ValueError:
        raise fields.wrong("role", "a known role") from None


def _check_role(fields: Fields, spec: BlockSpec) -> None:
    """Whether the block is a table's, dense, or a pad, agrees with its name and its form."""
    if spec.role in (Role.DENSE, Role.PAD):
        fits = spec.table is None and spec.column is None
    else:
        # Parts are put together by name, columns are filled by table and column: the two must be the same.
        fits = spec.table is not None and spec.column is not None and spec.name == f"{spec.table}@{spec.column}"
    if not fits:
        raise CorruptError(
            f"{fields.owner}: {fields.where} is neither a table's nor dense",
            found=(spec.role.value, spec.table, spec.column),
        )
    plain = not spec.encoding and len(spec.shape) == 1
    if spec.role is Role.PAD:
        fits = plain and not spec.is_part and spec.leaf is None and _PAD_NAME.fullmatch(spec.name) is not None
        fits = fits and spec.dtype == "uint8" and spec.bytes < HEADER_ALIGNMENT
    elif spec.role is Role.REMOVED:
        fits = plain and spec.column == REMOVED_COLUMN and spec.dtype == "int64"
    if not fits:
        raise CorruptError(
            f"{fields.owner}: block {spec.name!r} has not the form of its role",
            found=(spec.role.value, spec.dtype, spec.shape),
        )

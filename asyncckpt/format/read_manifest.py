"""Decode and check a manifest: every field's type and range, every block against its file, every part against its
whole.

Nothing here trusts the bytes; whatever is wrong is a CorruptError (or IncompatibleError for a newer version) naming the
field. The head of a manifest is read_head.py's, a block's own fields are read_block.py's.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from asyncckpt.errors import CorruptError
from asyncckpt.format.fields import Fields
from asyncckpt.format.manifest import Manifest, features_of
from asyncckpt.format.read_block import read_block
from asyncckpt.format.read_head import check_features, open_manifest
from asyncckpt.format.tree import VALUE, decode_tree, leaves
from asyncckpt.model.block import BlockSpec, PlacedBlock, TableFacts
from asyncckpt.model.table import Role

BLOCKS_MAX = 10_000_000
TABLES_MAX = 1_000_000
TABLE_FILTERS_MAX = 1000


def decode_manifest(raw: bytes, *, owner: str, step: int, compacted: bool = False) -> Manifest:
    """Decode the bytes of a manifest file; `step` and `compacted` are what its file name tells."""
    fields, head, digest = open_manifest(raw, owner=owner, step=step, compacted=compacted)
    tree = decode_tree(fields.value("tree"), owner=owner)
    if tree[0] != "dict":
        raise CorruptError(f"{owner}: manifest.tree is wrong", found=tree[0], expected="an object with names")
    tables = tuple(_table(item, kind=head.kind) for item in fields.objects("tables", count_max=TABLES_MAX))
    blocks = tuple(read_block(item, head.files) for item in fields.objects("blocks", count_max=BLOCKS_MAX))
    manifest = Manifest(head=head, tables=tables, tree=tree, blocks=blocks, digest=digest)
    check_features(fields, features_of(block.placed for block in blocks))
    _check_files(manifest, owner)
    _check_parts(manifest, owner)
    _check_leaves(manifest, owner)
    _check_tables(manifest, owner)
    return manifest


def _table(fields: Fields, *, kind: str) -> TableFacts:
    shard = fields.integers("shard", count_max=2)
    if len(shard) != 2 or shard[0] >= shard[1]:
        raise CorruptError(f"{fields.owner}: {fields.where}.shard is wrong", found=shard, expected="[index, count]")
    whole = fields.flag("whole", default=True)
    removed_count = fields.optional_integer("removed") or 0
    if (not whole and kind != "delta") or (whole and removed_count):
        raise CorruptError(
            f"{fields.owner}: {fields.where} is a change to a table where there is nothing to change",
            found={"kind": kind, "whole": whole, "removed": removed_count},
        )
    if not fields.absent("filters"):
        fields.objects("filters", count_max=TABLE_FILTERS_MAX)  # Each is an object; what it says is for people.
    return TableFacts(
        name=fields.text("name"),
        rows_count=fields.integer("rows"),
        shard=(shard[0], shard[1]),
        whole=whole,
        removed_count=removed_count,
        filters=() if fields.absent("filters") else tuple(fields.items("filters", count_max=TABLE_FILTERS_MAX)),
    )


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
        if block.placed.spec.role is Role.PAD:
            continue
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
    """Leaf numbers are those of the tree, each of one tensor."""
    kinds = [node for _, node in leaves(manifest.tree)]
    tensors_count = sum(1 for node in kinds if node is not VALUE)
    if len(kinds) - tensors_count != len(manifest.head.values):
        raise CorruptError(f"{owner}: the tree and its values disagree", found=len(manifest.head.values))
    owners: dict[int, str] = {}
    for block in manifest.blocks:
        spec = block.placed.spec
        if spec.leaf is None:
            continue
        if spec.table is not None or spec.leaf >= tensors_count:
            raise CorruptError(f"{owner}: block {spec.name!r} names a leaf that is not there", found=spec.leaf)
        if owners.setdefault(spec.leaf, spec.name) != spec.name:
            raise CorruptError(f"{owner}: block {spec.name!r} names a leaf of {owners[spec.leaf]!r}", found=spec.leaf)


def _check_tables(manifest: Manifest, owner: str) -> None:
    """Columns of a table agree on its rows, and its removed ids are as many as it says."""
    tables = {table.name: table for table in manifest.tables}
    if len(tables) != len(manifest.tables):
        raise CorruptError(f"{owner} lists a table twice")
    without_removed = {table.name for table in manifest.tables if table.removed_count}
    for block in manifest.blocks:
        spec = block.placed.spec
        if spec.table is None:
            continue
        table, shape = tables.get(spec.table), spec.whole_shape or spec.shape
        is_removed = spec.role is Role.REMOVED
        if table is None or not shape or shape[0] != (table.removed_count if is_removed else table.rows_count):
            raise CorruptError(f"{owner}: block {spec.name!r} does not fit its table", found=shape)
        if is_removed:
            without_removed.discard(spec.table)
    if without_removed:
        raise CorruptError(f"{owner}: removed ids of table {min(without_removed)!r} are not there")

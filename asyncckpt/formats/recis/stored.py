"""A directory of RecIS in the form of a checkpoint of ours (formats/foreign_chain.py), which loads into any sharding.

Every shard of RecIS is the part of a rank, a slot is a column, and dense tensors are in the part of the first rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path as FolderPath

import numpy as np

from asyncckpt.errors import CorruptError, IncompatibleError, UsageError, Words, must_be
from asyncckpt.format.manifest import BlockFacts, Chain, RankPart
from asyncckpt.format.tree import TENSOR, Node, Path, unique_names
from asyncckpt.formats.foreign_chain import ForeignReader, chain_of, dense_blocks, placed_blocks
from asyncckpt.formats.recis.directory import RecisDirectory, StoredArray, StoredPart
from asyncckpt.formats.recis.names import EMBEDDING_SLOT, STEP_FILTER_SLOT, default_columns
from asyncckpt.model.block import BlockSpec, TableFacts
from asyncckpt.model.owned_ids import owned_mask
from asyncckpt.model.table import ID_COLUMN, Role, TableSchema
from asyncckpt.model.table_shard import described, slice_info
from asyncckpt.native import Progress
from asyncckpt.tables.embedding import COUNT_COLUMN, LAST_SEEN_COLUMN

Columns = Mapping[str, str]
_STEP_FOLDER = re.compile(r"ckpt_([0-9]{1,12})")
_METADATA = (STEP_FILTER_SLOT, LAST_SEEN_COLUMN, COUNT_COLUMN)


@dataclass(frozen=True)
class StoredAs:
    """What the manifest says of RecIS' files beyond what they say themselves.

    schemas   of the tables that are filled: a slot becomes the column that the table has for it, in its row shape
    columns   slot -> column, where that shall be another one than by default
    paths     where the dense tensors are in the state, those that are elsewhere than under their own name
    """

    step: int
    schemas: Mapping[str, TableSchema]
    columns: Columns
    paths: Mapping[str, Path]


def step_of(path: FolderPath) -> int | None:
    """Return the step that a folder's name says, as RecIS' `ckpt_<step>`; None where it says none."""
    match = _STEP_FOLDER.fullmatch(path.name)
    return None if match is None else int(match[1])


def check_columns(columns: Columns | None, slots: Collection[str]) -> Columns:
    """Check a mapping of slot to column against all slots that there are; UsageError."""
    if columns is None:
        return {}
    if not isinstance(columns, Mapping) or not all(isinstance(text, str) for item in columns.items() for text in item):
        raise must_be("columns", "a mapping of slot to column", columns)
    unknown = sorted(columns.keys() - set(slots))
    if unknown:
        raise UsageError("columns names slots that no table has", found=unknown, expected=sorted(slots))
    for slot, column in columns.items():
        if (slot == ID_COLUMN) != (column == ID_COLUMN) or not column or "@" in column or column.startswith("#"):
            raise UsageError(f"columns has no fitting name for slot {slot!r}", found=column)
    return columns


def as_chain(directory: RecisDirectory, wanted: StoredAs) -> Chain:
    """Return the checkpoint. UsageError for two slots that would be the same column."""
    parts: list[list[tuple[str, StoredPart]]] = [[]]
    for name, stored in directory.tables.items():
        parts += [[] for _ in range(len(stored) - len(parts))]
        for rank, part in enumerate(stored):
            parts[rank].append((name, part))
    tree, leaves = _tree(directory.dense, wanted.paths)
    columns = {name: _columns(name, stored[0], wanted) for name, stored in directory.tables.items()}
    listed = []
    for rank, tables in enumerate(parts):
        blocks = [block for name, part in tables for block in _table_blocks(name, part, columns[name], wanted)]
        if rank == 0:
            blocks += [
                block
                for name, array in directory.dense.items()
                for block in dense_blocks(_block_name(name, directory), array, leaves[name])
            ]
        facts = tuple(TableFacts(name=name, rows_count=part.rows_count, shard=part.shard) for name, part in tables)
        listed.append(RankPart(rank=rank, tables=facts, tree=tree, values=(), blocks=tuple(blocks)))
    return chain_of(listed, directory.files, step=wanted.step, writer="RecIS")


class RecisReader(ForeignReader):
    """Reads blocks of RecIS' files, which the directory keeps open."""

    def __init__(self, directory: RecisDirectory, chain: Chain, *, threads: int, progress: Progress) -> None:
        super().__init__(directory.files, directory.folder, chain, threads=threads, progress=progress)

    def check_ids(self, wanted: Collection[tuple[int, str]] | None = None) -> None:
        """Read the ids of slices, by (rank, table), or of all; CorruptError unless each holds its own ids, each once.

        So a load begins to change a table only when it has rows for all of them. Takes 16 bytes for each row of the
        largest slice.
        """
        first = 0
        for part in self._chain.newest.parts:
            for facts in part.tables:
                if wanted is None or (part.rank, facts.name) in wanted:
                    self._check_ids(facts, part, first)
            first += len(part.blocks)

    def _check_ids(self, facts: TableFacts, part: RankPart, first: int) -> None:
        ids = np.empty(facts.rows_count, dtype=np.int64)
        for number, block in enumerate(part.blocks, first):
            spec = block.placed.spec
            if (spec.table, spec.column) == (facts.name, ID_COLUMN):
                self.add(number, ids[spec.row_begin :].ctypes.data, begin=0, bytes=spec.bytes)
        self.run()
        owner = f"table {facts.name!r}, {described(facts.shard)}, of a checkpoint of RecIS"
        foreign = ids[~owned_mask(ids, shard=facts.shard)]
        if len(foreign):
            raise CorruptError(f"{owner} holds ids of other slices", found=foreign[:5].tolist())
        ids.sort()
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            raise CorruptError(f"{owner} holds the same id twice", found=int(twice[0]))


def _columns(table: str, part: StoredPart, wanted: StoredAs) -> dict[str, str]:
    """Return the column of every slot of a table."""
    schema = wanted.schemas.get(table)
    names = None if schema is None else frozenset(column.name for column in schema.columns)
    columns = default_columns(list(part.arrays), names)
    columns |= {slot: column for slot, column in wanted.columns.items() if slot in columns}
    twice = sorted({column for column in columns.values() if list(columns.values()).count(column) > 1})
    if twice:
        raise UsageError(
            f"two slots of table {table!r} would be the same column",
            found=columns,
            hint=f"columns says which is {twice}",
        )
    return columns


def _table_blocks(name: str, part: StoredPart, columns: Columns, wanted: StoredAs) -> Iterator[BlockFacts]:
    for slot, array in part.arrays.items():
        column = columns[slot]
        row_shape = _row_shape(name, slot, column, array, wanted.schemas.get(name))
        spec = BlockSpec(
            name=f"{name}@{column}",
            role=_role(slot, column),
            dtype=array.dtype.name,
            stored_dtype=array.dtype.stored,
            stored_itemsize=array.dtype.itemsize,
            shape=(part.rows_count, *row_shape),
            stored_shape=(part.rows_count, *row_shape),
            table=name,
            column=column,
            slice_info=slice_info(part.shard),
        )
        yield from placed_blocks(spec, array)


def _role(slot: str, column: str) -> Role:
    if slot == ID_COLUMN:
        return Role.ID
    if slot == EMBEDDING_SLOT:
        return Role.WEIGHT
    return Role.METADATA if slot in _METADATA or column in _METADATA else Role.OPTIMIZER


def _row_shape(table: str, slot: str, column: str, array: StoredArray, schema: TableSchema | None) -> tuple[int, ...]:
    """Return the shape of a row: as the column to fill has it, if it has as many elements; [rows, 1] of RecIS' step
    filter is one number a row."""
    own = array.shape[1:]
    target = None if schema is None else schema.column(column)
    if target is not None:
        if [size for size in target.row_shape if size != 1] == [size for size in own if size != 1]:
            return tuple(target.row_shape)
        if math.prod(own) != math.prod(target.row_shape):
            raise IncompatibleError(
                f"slot {slot!r} of table {table!r} does not fit column {column!r}",
                found=Words(f"rows of {tuple(own)}"),
                expected=f"rows of {tuple(target.row_shape)}",
                hint="nothing was changed",
            )
        return own
    return () if slot == STEP_FILTER_SLOT and own == (1,) else own


def _block_name(name: str, directory: RecisDirectory) -> str:
    """Return what a dense tensor is called here: never as a table is."""
    tables, dense = directory.tables, directory.dense
    return unique_names([name], taken=(*tables, *dense))[0] if name in tables else name


def _tree(dense: Mapping[str, StoredArray], paths: Mapping[str, Path]) -> tuple[Node, dict[str, int]]:
    """Return the tree of the dense tensors, and the number of each one's leaf. Those without a path are at the top."""
    root: dict[object, object] = {}
    for name in dense:
        if name in paths:
            below = root
            for key in paths[name][:-1]:
                found = below.setdefault(key, {})
                assert isinstance(found, dict), "paths are those of one tree"
                below = found
            below[paths[name][-1]] = name
    for name in dense:
        if name not in paths:
            key = name
            while key in root:
                key += "#"
            root[key] = name
    leaves: dict[str, int] = {}
    return _node(root, leaves), leaves


def _node(found: object, leaves: dict[str, int]) -> Node:
    if isinstance(found, str):
        leaves[found] = len(leaves)
        return TENSOR
    assert isinstance(found, dict)
    return ("dict", tuple(found), tuple(_node(child, leaves) for child in found.values()))

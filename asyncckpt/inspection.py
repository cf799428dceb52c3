"""Look into checkpoints without loading them: their tree, what differs between two, rows by id. Reads only."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncckpt.arguments import check_int
from asyncckpt.commit.chain import read_chain
from asyncckpt.commit.discover import look_again, newest_step, read_manifest
from asyncckpt.commit.root import open_root
from asyncckpt.errors import NotFoundError, UsageError, nearest
from asyncckpt.format.composite import Composite
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import check_step
from asyncckpt.format.tree import VALUE, Node, Path, key_value
from asyncckpt.format.values import COMPOSITE, MAPPINGS, decode_value
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.table import Role
from asyncckpt.plan.contents import (
    Contents,
    StoredDense,
    contents_of,
    joined_tree,
    joined_values,
    metadata_of,
    named_values,
    stored_dense,
)
from asyncckpt.signals import uninterrupted
from asyncckpt.storage.folder import check_place

if TYPE_CHECKING:
    from asyncckpt.engine.inspect.compare import TableChange, TensorChange
    from asyncckpt.engine.inspect.stored_values import StoredValues
    from asyncckpt.engine.inspect.table_rows import FoundRows
    from asyncckpt.format.manifest import Chain
    from asyncckpt.shard.reader import ChainReader

__all__ = ["Comparison", "Entry", "Outline", "compare", "find_rows", "outline"]


@dataclass(frozen=True)
class Outline:
    """The state of a checkpoint without its bytes: containers, tensors and plain values in their order."""

    step: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Comparison:
    """What differs between two checkpoints; what is the same is left out.

    tensors   by name
    tables    by name
    values    plain values by dotted name: (before, after), each a tuple of one value, or of none where it is not there
    metadata  alike
    compared  how many tensors, tables and plain values there are in at least one of both
    """

    step: int
    other_step: int
    tensors: Mapping[str, TensorChange]
    tables: Mapping[str, TableChange]
    values: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]]
    metadata: Mapping[str, tuple[tuple[Any, ...], tuple[Any, ...]]]
    compared: int

    @property
    def is_same(self) -> bool:
        """Whether both hold the same state. Metadata may differ."""
        return not (self.tensors or self.tables or self.values)


@uninterrupted
def outline(path: str | os.PathLike[str], step: int | None = None) -> Outline:
    """Return the tree of a checkpoint (default: the newest), of several ranks those of all, the lowest first.

    Raises NotFoundError, CorruptError, IncompatibleError.
    """
    step = check_step(step)
    with open_root(check_place(path)) as root:
        manifest = look_again(root, lambda: read_manifest(root, newest_step(root) if step is None else step))
    return Outline(step=manifest.step, entries=tuple(entries_of(manifest)))


@uninterrupted
def compare(
    path: str | os.PathLike[str],
    step: int | None,
    other_step: int | None,
    *,
    other_path: str | os.PathLike[str] | None = None,
) -> Comparison:
    """Compare two checkpoints (None: the newest), of one directory or of two: rows by their ids, tensors by name.

    Reads what may differ, in windows; see engine/inspect/compare.py for what it needs in memory. What is read is
    not checked against its digests: `verify` does that. Raises NotFoundError, CorruptError, IncompatibleError,
    UnsupportedError, IOFailedError.
    """
    from asyncckpt.engine.inspect.compare import compare_tensors

    with _opened(path, step) as first, _opened(path if other_path is None else other_path, other_step) as second:
        tensors = compare_tensors(first.contents, first.values, second.contents, second.values)
        names = {**first.contents.tables, **second.contents.tables}
        tables = {name: _compare_table(name, first, second) for name in names}
        values = [named_values(opened.chain.newest) for opened in (first, second)]
        metadata = [metadata_of(opened.chain.newest) for opened in (first, second)]
        return Comparison(
            step=first.chain.step,
            other_step=second.chain.step,
            tensors=tensors,
            tables={name: change for name, change in tables.items() if not change.is_same},
            values=_changes(*values),
            metadata=_changes(*metadata),
            compared=len({**first.contents.dense, **second.contents.dense}) + len(names) + len(values[0] | values[1]),
        )


@uninterrupted
def find_rows(
    path: str | os.PathLike[str], table: str, ids: Sequence[int] | None, step: int | None = None, *, most: int = 40
) -> FoundRows:
    """Return rows of a table of a checkpoint (default: the newest) by their ids, int64, without loading the table. ids
    None: those of the `most` lowest ids.

    Reads the ids of the table until all are found, then these rows alone; what is read is not checked against digests.
    Raises as compare; NotFoundError also where there is no such table, UsageError for invalid ids.
    """
    import numpy as np

    from asyncckpt.engine.inspect.table_rows import TableRows
    from asyncckpt.engine.inspect.table_rows import find_rows as find

    check_int("most", most, at_least=0)
    try:
        wanted = np.array([] if ids is None else list(ids), dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"ids are not int64 numbers: {error}") from error
    with _opened(path, step) as opened:
        tables = opened.contents.tables
        if table not in tables:
            held = f"which holds {sorted(tables) or 'no tables'}"
            what = f"there is no table {table!r} in step {opened.chain.step} of {os.fspath(path)!r}, {held}"
            raise NotFoundError(what, hint=nearest(table, tables))
        if ids is None:
            wanted = np.sort(TableRows(tables[table], opened.chain, opened.reader, opened.values).ids)[:most]
        return find(tables[table], opened.values, wanted)


@dataclass(frozen=True)
class _Opened:
    """A checkpoint with its files open."""

    chain: Chain
    contents: Contents
    reader: ChainReader
    values: StoredValues


@contextmanager
def _opened(path: str | os.PathLike[str], step: int | None) -> Iterator[_Opened]:
    from asyncckpt.engine.inspect.stored_values import StoredValues
    from asyncckpt.native import Progress
    from asyncckpt.shard.reader import READ_THREADS, ChainReader

    step = check_step(step)

    def look() -> tuple[Chain, ChainReader]:
        chain = read_chain(root, newest_step(root) if step is None else step)
        return chain, ChainReader(root.data, chain, threads=READ_THREADS, verify=True, progress=Progress())

    with open_root(check_place(path)) as root:
        chain, reader = look_again(root, look)
    with reader, enough_memory(f"a comparison with step {chain.step} of {str(path)!r}"):
        yield _Opened(chain, contents_of(chain), reader, StoredValues(reader))


def _compare_table(name: str, first: _Opened, second: _Opened) -> TableChange:
    from asyncckpt.engine.inspect.compare import TableChange, compare_tables
    from asyncckpt.engine.inspect.table_rows import TableRows

    stored = [opened.contents.tables.get(name) for opened in (first, second)]
    rows = [
        None if table is None else TableRows(table, opened.chain, opened.reader, opened.values)
        for table, opened in zip(stored, (first, second), strict=True)
    ]
    if rows[0] is None or rows[1] is None:
        before, after = (None if own is None else len(own.ids) for own in rows)
        return TableChange(rows_before=before, rows_after=after)
    return compare_tables(rows[0], rows[1])


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """Return what differs, as text: nan is itself."""
    pairs = {
        name: tuple((found[name],) if name in found else () for found in (before, after))
        for name in {**before, **after}
    }
    return {name: (old, new) for name, (old, new) in pairs.items() if repr(old) != repr(new)}


_KINDS = {"state": "object", "ordered": "ordered dict"}


@dataclass(frozen=True)
class Entry:
    """Something in a checkpoint; what is in it follows, with longer paths.

    path   the keys that lead to it, as they were
    kind   "dict", "ordered dict", "list", "tuple", "object" (with a state_dict()), "tensor", "array", "numpy scalar",
           "value", "table", "column" of a table, or "torch.sparse_coo float32 [4]"
    count  entries of a container; rows of a table, of a delta those that it holds itself
    dtype  of tensors, arrays, scalars and columns; None where a filter has left the bytes out
    shape  of tensors and arrays, of a column that of a row
    value  the plain value
    """

    path: tuple[Any, ...]
    kind: str
    count: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    value: Any = None


def entries_of(manifest: Manifest) -> Iterator[Entry]:
    """Return the state of all ranks in its order, then the tables. CorruptError for what cannot be decoded."""
    stored = {item.path: item for item in stored_dense(manifest)[0].values()}
    values = joined_values(manifest.parts)
    tree = joined_tree([part.tree for part in manifest.parts])
    for key, child in zip(tree[1], tree[2], strict=True):
        yield from _entries(child, (key,), stored, values)
    yield from _tables(manifest)


def _entries(
    node: Node, path: Path, stored: Mapping[Path, StoredDense], values: Mapping[Path, tuple[int, Any]]
) -> Iterator[Entry]:
    keys = tuple(map(key_value, path))
    if node is VALUE:
        yield Entry(keys, "value", value=decode_value(values[path][1], owner=f"value {keys}"))
    elif len(node) == 1:
        found = stored.get(path)
        dtype, shape = (None, None) if found is None else (found.dtype, found.shape)
        yield Entry(keys, node[0], dtype=dtype, shape=shape)
    else:
        kind = str(Composite.of(node[3])) if node[0] == COMPOSITE else _KINDS.get(str(node[0]), str(node[0]))
        while node[0] == "state":
            node = node[1]
        if len(node) == 1:  # A state_dict() that is no container.
            yield from _entries(node, path, stored, values)
            return
        children = node[2] if node[0] in MAPPINGS else node[1]
        yield Entry(keys, kind, count=len(children))
        below = node[1] if node[0] in MAPPINGS else [("int", index) for index in range(len(children))]
        for key, child in zip(below, children, strict=True):
            yield from _entries(child, (*path, key), stored, values)


def _tables(manifest: Manifest) -> Iterator[Entry]:
    rows: dict[str, int] = defaultdict(int)
    columns: dict[str, dict[str, Entry]] = defaultdict(dict)
    for part in manifest.parts:
        for table in part.tables:
            rows[table.name] += table.rows_count
    for block in manifest.blocks:
        spec = block.placed.spec
        if spec.table is not None and spec.column is not None and spec.role is not Role.REMOVED:
            entry = Entry((spec.table, spec.column), "column", dtype=spec.dtype, shape=spec.shape[1:])
            columns[spec.table].setdefault(spec.column, entry)
    for name, count in rows.items():
        yield Entry((name,), "table", count=count)
        yield from columns[name].values()

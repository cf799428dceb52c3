"""The tree of a checkpoint for people: what it holds, without its bytes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.manifest import Manifest
from asyncckpt.format.tree import VALUE, Node, Path, key_value
from asyncckpt.format.values import MAPPINGS, decode_value
from asyncckpt.model.table import Role
from asyncckpt.plan.contents import StoredDense, joined_tree, joined_values, stored_dense

_KINDS = {"state": "object", "ordered": "ordered dict"}


@dataclass(frozen=True)
class Entry:
    """Something in a checkpoint; what is in it follows, with longer paths.

    path   the keys that lead to it, as they were
    kind   "dict", "ordered dict", "list", "tuple", "object" (with a state_dict()), "tensor", "array", "numpy scalar",
           "value", "table", or "column" of a table
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
        kind = _KINDS.get(str(node[0]), str(node[0]))
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

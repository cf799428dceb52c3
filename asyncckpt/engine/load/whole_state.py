"""Targets for all that a checkpoint holds, made after it: its tree with leaves to fill, and tables as plain columns.

So the state comes back as it was saved, through the same load as into any other targets.

Tensors that shared memory when they were saved share it again, when they are loaded.

Each is loaded into memory of its own first, and moves to the memory that it shares if all that lie there can have their
values there. So no value depends on what the manifest says of memory: of ranks, one may have shared what another one,
whose blocks are stored, had apart. One alone that fills its memory in an order of its own may be loaded so at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.errors import CorruptError, UsageError, nearest
from asyncckpt.format.dtypes import dtype_by_name
from asyncckpt.format.manifest import Chain
from asyncckpt.format.tree import (
    TENSOR,
    VALUE,
    Compose,
    Node,
    Path,
    kinds_in,
    leaf_of,
    leaves,
    mapping_node,
    module_metadata,
    path_name,
    rebuild,
    unique_names,
)
from asyncckpt.format.values import COMPOSITE, MAPPINGS
from asyncckpt.model.enough_memory import enough_memory
from asyncckpt.model.sharing import SharedView
from asyncckpt.model.table import ID_COLUMN, Column, TableCut, TableSchema
from asyncckpt.model.table_shard import Shard
from asyncckpt.plan.contents import Contents, StoredDense
from asyncckpt.plan.leaf_memory import BLOW_UP_BYTES_MAX, once, overlaps_itself, span
from asyncckpt.plan.load_targets import DenseTargets, writable
from asyncckpt.plan.overlapping_targets import same_bits
from asyncckpt.plan.stored_tables import StoredTable


@dataclass(frozen=True)
class WholeRequest:
    """device: where tensors are made; arrays stay on the host. tables: names of those to load, True: all of them.

    empty: makes those on the host, of a shape and dtype; None: torch does. only, inside: see Chain.
    """

    device: torch.device | str = "cpu"
    tables: Collection[str] | bool = False
    empty: Callable[[Sequence[int], torch.dtype], torch.Tensor] | None = None
    only: Collection[str] | None = None
    inside: str = ""


class WholeState:
    """The targets for one checkpoint; `tree`, once they are filled.

    A tensor that a write filter has dropped is left out, of a list it is None. One that a filter has renamed is under
    its new name, after all others.
    """

    def __init__(self, chain: Chain, contents: Contents, wanted: WholeRequest) -> None:
        stored = {item.path: item for item in contents.dense.values()}
        self._node = _without_dropped(contents.tree, stored, ())
        self._values = [contents.values.get(path) for path, node in leaves(self._node) if node is VALUE]
        kinds = {path: node for path, node in leaves(self._node) if node is not VALUE}
        renamed = {path: TENSOR for path in stored if path not in kinds}
        kinds |= renamed
        devices = {path: torch.device(wanted.device if node is TENSOR else "cpu") for path, node in kinds.items()}
        self._made: dict[Path, torch.Tensor] = {}
        of_blocks: dict[object, torch.Tensor] = {}
        orders = {
            stored[path].blocks: strides for path, strides in orders_alone(contents.shared).items() if path in stored
        }
        for path, device in devices.items():
            key = stored[path].blocks, device
            if key not in of_blocks:
                of_blocks[key] = _made(stored[path], device, wanted, orders.get(stored[path].blocks))
            self._made[path] = of_blocks[key]
        self._kinds, self._shared = kinds, contents.shared
        top = [] if self._node[0] not in MAPPINGS else self._node[1]
        self._renamed = unique_names((stored[path].name for path in renamed), taken=top)
        in_place = [writable(stored[path].name, path, leaf) for path, leaf in self._made.items()]
        self.targets = DenseTargets(tuple(in_place), (), ())
        self.tables = {name: _columns_of(chain, contents.tables[name], wanted) for name in _chosen(contents, wanted)}
        self._stored = [contents.tables[name] for name in self.tables]
        for name in self.tables:
            if name in top or name in self._renamed:
                raise UsageError(
                    f"{name!r} is a table of step {chain.step} and an entry of its state",
                    hint="load them one after the other: the table with a Loader into a HashTable",
                )

    def tree(self) -> dict[str, Any]:
        """Return the state; its leaves are the filled targets themselves, except those that share memory again."""
        for table in self._stored:
            table.warn_of_part()
        leaves = shared_again(self._made, self._shared)
        filled = iter([leaf_of(node, leaves[path]) for path, node in self._kinds.items()])
        compose: Compose | None = None
        if COMPOSITE in kinds_in(self._node):
            from asyncckpt.plan.layouts import composed as compose  # Few states hold any.

        state: dict[str, Any] = rebuild(self._node, filled, iter(self._values), compose)
        state |= dict(zip(self._renamed, filled, strict=True))
        state |= {name: table.columns() for name, table in self.tables.items()}  # In place: it may have `_metadata`.
        return state


class TableColumns:
    """A table that is loaded once, into plain columns: every id gets the next row."""

    shard: Shard = (0, 1)

    def __init__(self, name: str, schema: TableSchema, device: torch.device | str) -> None:
        self.name = name
        self._schema = schema
        self._device = device
        self._columns: dict[str, torch.Tensor] = {}
        self._count = 0

    def schema(self) -> TableSchema:
        return self._schema

    def begin_cut(self) -> TableCut:
        raise UsageError(f"table {self.name!r} is only loaded")

    def begin_load(self, *, clear: bool, rows_count: int, filled: Collection[str]) -> TableColumns:
        for column in self._schema.columns:
            shape = (rows_count, *column.row_shape)
            with torch.inference_mode(False):  # Other threads write to them.
                self._columns[column.name] = torch.empty(shape, dtype=column.dtype, device=self._device)
        return self

    def insert(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(self._count, self._count + len(ids), dtype=torch.int64, device="cpu")
        self._columns[ID_COLUMN][self._count : self._count + len(ids)] = ids
        self._count += len(ids)
        return rows

    def first_row(self) -> int:
        return self._count

    def column(self, name: str) -> torch.Tensor:
        return self._columns[name]

    def end(self, ok: bool) -> None:
        if ok and len(torch.unique(self._columns[ID_COLUMN])) != self._count:
            raise CorruptError(f"table {self.name!r} holds the same id twice")

    def columns(self) -> dict[str, torch.Tensor]:
        """Return the columns by name, `id` first, all in the same order of rows."""
        return dict(self._columns)


def _without_dropped(node: Node, stored: Mapping[Path, StoredDense], path: Path) -> Node:
    """Return a node without the tensors that were not stored; in a list or tuple a value stands for such a one."""
    if len(node) == 1:
        return node if node is VALUE or path in stored else VALUE
    if node[0] == "state":
        return _without_dropped(node[1], stored, path)
    if node[0] in MAPPINGS:
        pairs = [
            (key, _without_dropped(child, stored, (*path, key)))
            for key, child in zip(node[1], node[2], strict=True)
            if len(child) > 1 or child is VALUE or (*path, key) in stored
        ]
        keys, below = [key for key, _ in pairs], [child for _, child in pairs]
        made = mapping_node(node[0], keys, below, metadata=module_metadata(node))
        return (*made, node[3]) if node[0] == COMPOSITE and len(pairs) == len(node[1]) else made
    children = (_without_dropped(child, stored, (*path, ("int", index))) for index, child in enumerate(node[1]))
    return (node[0], tuple(children))


def _made(
    stored: StoredDense, device: torch.device, wanted: WholeRequest, strides: tuple[int, ...] | None
) -> torch.Tensor:
    dtype = dtype_by_name(stored.dtype, owner=stored.name).dtype
    if wanted.empty is not None and device.type == "cpu":
        return wanted.empty(stored.shape, dtype)
    # An optimizer could not update one of inference mode later.
    with (
        torch.inference_mode(False),
        enough_memory(f"tensor {stored.name!r}, {math.prod(stored.shape) * dtype.itemsize} bytes"),
    ):
        if strides is not None and len(strides) == len(stored.shape) and is_dense(stored.shape, strides):
            return torch.empty_strided(stored.shape, strides, dtype=dtype, device=device)
        return torch.empty(stored.shape, dtype=dtype, device=device)


def _chosen(contents: Contents, wanted: WholeRequest) -> list[str]:
    if isinstance(wanted.tables, bool):
        return list(contents.tables) if wanted.tables else []
    for name in wanted.tables:
        if name not in contents.tables:
            what = f"there is no table {name!r}; this checkpoint holds {sorted(contents.tables) or 'none'}"
            raise UsageError(what, hint=nearest(name, contents.tables))
    return list(wanted.tables)


def _columns_of(chain: Chain, stored: StoredTable, wanted: WholeRequest) -> TableColumns:
    columns = []
    for name, numbers in stored.columns.items():
        spec = chain.blocks[numbers[0]].placed.spec
        dtype = dtype_by_name(spec.dtype, owner=spec.name).dtype
        columns.append(Column(name=name, dtype=dtype, row_shape=tuple(spec.shape[1:]), role=spec.role))
    return TableColumns(stored.name, TableSchema(tuple(columns)), wanted.device)


def shared_again(
    loaded: Mapping[Path, torch.Tensor], shared: Sequence[tuple[int, Mapping[Path, SharedView]]]
) -> dict[Path, torch.Tensor]:
    """Return loaded tensors as views of the memory that they shared; tied ones are the same tensor.

    shared: see Contents. Only tensors on one device share memory. CorruptError for views beyond their memory.
    """
    views: dict[int, torch.Tensor] = {}
    for bytes, places in shared:
        by_device: dict[torch.device, list[tuple[torch.Tensor, SharedView]]] = defaultdict(list)
        for path, view in places.items():
            if path in loaded:
                _check(path, loaded[path], view, bytes)
                by_device[loaded[path].device].append((loaded[path], view))
        for own in by_device.values():
            if len(own) > 1 or own[0][0].stride() != own[0][1].strides:
                views |= _views(own)
    return {path: views.get(id(tensor), tensor) for path, tensor in loaded.items()}


def orders_alone(shared: Sequence[tuple[int, Mapping[Path, SharedView]]]) -> dict[Path, tuple[int, ...]]:
    """Return the strides of tensors that have their memory alone. shared: see Contents."""
    return {path: view.strides for _, places in shared if len(places) == 1 for path, view in places.items()}


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether the elements of a tensor fill its memory, each a place of its own."""
    filled = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride != filled:
            return False
        filled *= size
    return True


def _views(own: Sequence[tuple[torch.Tensor, SharedView]]) -> dict[int, torch.Tensor]:
    """Return the views for tensors by their identities; none where these do not fit into it together."""
    size = max(_end(tensor, view) for tensor, view in own)
    if size > sum(tensor.nbytes for tensor, _ in own) + BLOW_UP_BYTES_MAX:
        return {}
    # What lies between the views is not there.
    with enough_memory(f"tensors that share memory, {size} bytes"):
        memory = torch.zeros(size, dtype=torch.uint8, device=own[0][0].device)
    found = [(tensor, _view(memory, tensor, view)) for tensor, view in own]
    for tensor, shown in found:
        first = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in shown.stride())
        shown[first].copy_(tensor[first])
    return {id(tensor): shown for tensor, shown in found} if all(same_bits(*pair) for pair in found) else {}


def _check(path: Path, tensor: torch.Tensor, view: SharedView, bytes: int) -> None:
    fits = len(view.strides) == tensor.dim() and view.offset % tensor.element_size() == 0
    if not fits or _end(tensor, view) > bytes:
        raise CorruptError(f"tensor {path_name(path)!r} does not fit the memory that it shares", found=view)


def _end(tensor: torch.Tensor, view: SharedView) -> int:
    return view.offset + span(tensor.shape, view.strides) * tensor.element_size()


def _view(memory: torch.Tensor, like: torch.Tensor, view: SharedView) -> torch.Tensor:
    with torch.inference_mode(False):
        tensor = torch.empty(0, dtype=like.dtype, device=memory.device)
        tensor.set_(memory.untyped_storage(), view.offset // like.element_size(), like.shape, view.strides)
    if overlaps_itself(once(tensor)):
        raise CorruptError("a tensor overlaps itself in the memory that it shares", found=view)
    return tensor

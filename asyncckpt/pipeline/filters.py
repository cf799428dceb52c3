"""Run the user's write filter on staged blocks and check what it returned.

    filter_func(list[WriteBlock]) -> list[WriteBlock]

Whatever is wrong with the answer fails the save with a FilterError that names the block; nothing is committed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from asyncckpt.errors import FILTER_HINT, CheckpointError, FilterError, one_line
from asyncckpt.format.dtypes import stored_dtype
from asyncckpt.format.tree import check_name
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.table import ID_COLUMN, Role
from asyncckpt.model.write_block import WriteBlock
from asyncckpt.plan.leaf_memory import check_leaf

FilterFunction = Callable[[list[WriteBlock]], Sequence[WriteBlock]]


def identity(blocks: Any) -> Any:
    """Return everything as it is: the default filter."""
    return blocks


@dataclass(frozen=True)
class FilteredBlock:
    """A block to write: number of the planned block it came from, its new spec, and its values if replaced."""

    number: int
    spec: BlockSpec
    data: torch.Tensor | None


def run_filter(function: FilterFunction, blocks: list[WriteBlock]) -> list[FilteredBlock] | None:
    """Apply the filter. None means: all blocks, unchanged and in order."""
    owner = f"filter {getattr(function, '__qualname__', type(function).__qualname__)!r}"
    numbers = {id(block): number for number, block in enumerate(blocks)}
    try:
        answer = function(list(blocks))
    except CheckpointError as error:
        raise FilterError(f"{owner} raised: {error}") from error
    except BaseException as error:  # On a thread of ours, sys.exit() in a filter is no exit but an error too.
        raise FilterError(f"{owner} raised {type(error).__name__}: {one_line(error)}", hint=FILTER_HINT) from error
    if not isinstance(answer, (list, tuple)):
        raise FilterError(f"{owner} returned nonsense", found=type(answer), expected="a list of WriteBlock")
    if len(answer) == len(blocks) and all(a is b for a, b in zip(answer, blocks, strict=True)):
        return None
    filtered = [_checked(block, numbers, owner) for block in answer]
    _check_whole(filtered, [block._spec for block in blocks], owner)
    return filtered


def _checked(block: Any, numbers: dict[int, int], owner: str) -> FilteredBlock:
    if not isinstance(block, WriteBlock):
        raise FilterError(f"{owner} returned nonsense", found=type(block), expected="a WriteBlock")
    origin = block
    while origin._origin is not None:
        origin = origin._origin
    number = numbers.get(id(origin))
    if number is None:
        raise FilterError(f"{owner} returned block {block.tensor_name()!r} of another save")
    spec = origin._spec
    if not block.replaced:
        return FilteredBlock(number=number, spec=spec, data=None)
    spec = _renamed(spec, block.tensor_name(), owner)
    data = block._data
    if data is not None:
        spec = _with_data(spec, data, owner)
    return FilteredBlock(number=number, spec=spec, data=data)


def _renamed(spec: BlockSpec, name: Any, owner: str) -> BlockSpec:
    if name == spec.name:
        return spec
    if not isinstance(name, str):
        raise FilterError(f"{owner} gave block {spec.name!r} a name that is not a string", found=name)
    try:
        check_name(name)
    except CheckpointError as error:
        raise FilterError(f"{owner} renamed block {spec.name!r} badly: {error}") from error
    if spec.table is None:
        return replace(spec, name=name, leaf=None)
    table, at, column = name.rpartition("@")
    if not at or not column or "@" in table or column.startswith("#"):
        raise FilterError(f"{owner} renamed block {spec.name!r} badly", found=name, expected="'table@column'")
    return replace(spec, name=name, table=table, column=column)


def _with_data(spec: BlockSpec, data: Any, owner: str) -> BlockSpec:
    owner = f"{owner} replaced block {spec.name!r}"
    if not isinstance(data, torch.Tensor):
        raise FilterError(f"{owner} by something that is not a tensor", found=type(data))
    try:
        check_leaf(data, spec.name)
    except CheckpointError as error:
        raise FilterError(f"{owner} badly: {error}") from error
    shape = tuple(data.shape)
    if (spec.table is not None or spec.is_part) and (not shape or shape[0] != spec.shape[0]):
        raise FilterError(f"{owner} by another number of rows", found=shape, expected=spec.shape)
    if spec.role is Role.ID and (data.dtype is not torch.int64 or len(shape) != 1):
        raise FilterError(f"{owner} by no ids", found=(str(data.dtype), shape), expected="int64 [rows]")
    if spec.is_box and shape != spec.shape:
        raise FilterError(f"{owner}, a box of a tensor, by another shape", found=shape, expected=spec.shape)
    stored = stored_dtype(data.dtype, owner=spec.name)
    return replace(
        spec,
        dtype=stored.name,
        stored_dtype=stored.stored,
        stored_itemsize=stored.stored_itemsize,
        shape=shape,
        stored_shape=stored.stored_shape(shape),
        whole_shape=spec.whole_shape if spec.whole_shape is None or spec.is_box else (spec.whole_shape[0], *shape[1:]),
    )


def _check_whole(filtered: Sequence[FilteredBlock], planned: Sequence[BlockSpec], owner: str) -> None:
    """Refuse a name twice, a part of a split block missing or unlike its other parts, and tables that no load takes.

    All of this rank's parts of a tensor that is spread over ranks must be there.
    """
    places = Counter((item.spec.name, item.spec.begin) for item in filtered)
    twice = next((name for (name, _), count in places.items() if count > 1), None)
    if twice is not None:
        raise FilterError(f"{owner} returned block {twice!r} twice")
    planned_counts = Counter(spec.name for spec in planned)
    counts = Counter((planned[item.number].name, item.spec.name) for item in filtered)
    kinds: dict[str, tuple[str, tuple[int, ...] | None]] = {}
    for item in filtered:
        spec, was = item.spec, planned[item.number].name
        if kinds.setdefault(spec.name, (spec.dtype, spec.whole_shape)) != (spec.dtype, spec.whole_shape):
            raise FilterError(f"{owner} treated parts of block {spec.name!r} differently")
        if spec.is_part and counts[was, spec.name] != planned_counts[was]:
            raise FilterError(f"{owner} dropped a part of block {spec.name!r}")
    tables: dict[str, dict[str, str | None]] = {}  # The tables that columns were of.
    for item in filtered:
        table = item.spec.table
        if table is None:
            continue
        if f"{table}@{ID_COLUMN}" not in kinds:
            raise FilterError(
                f"{owner} kept block {item.spec.name!r} of a table without its ids",
                hint=f"keep block {table + '@' + ID_COLUMN!r} or drop the whole table",
            )
        if (item.spec.column == ID_COLUMN) != (item.spec.role is Role.ID):
            raise FilterError(
                f"{owner} renamed block {planned[item.number].name!r} badly",
                found=item.spec.name,
                hint=f"column {ID_COLUMN!r} holds the ids of a table, and nothing else does",
            )
        tables.setdefault(table, {})[item.spec.name] = planned[item.number].table
    dense = {item.spec.name: planned[item.number].name for item in filtered if item.spec.table is None}
    renamed = {name for name, was in dense.items() if name != was}
    entries = {*dense, *(name.partition(".")[0] for name in dense)}
    for table, columns in tables.items():
        if len(joined := sorted(map(repr, set(columns.values())))) > 1:
            raise FilterError(f"{owner} joined columns of tables {' and '.join(joined)} in {table!r}")
        if len(columns) == 1:
            raise FilterError(f"{owner} kept nothing but the ids of table {table!r}", hint="drop the whole table")
        # A table and an entry of the state may have had one name before: then a load knows them apart.
        if table in (renamed if repr(table) in joined else entries):
            raise FilterError(f"{owner} gave table {table!r} the name of a tensor", hint="choose another name")

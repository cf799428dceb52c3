"""Checks of the arguments of tables, and of the ids and rows that callers pass, before anything is changed.

An id is an int64 bit pattern. Other dtypes are refused, not converted: a float id above 2**53 has already lost bits,
and an int32 id is usually a mistake of the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import torch

from asyncckpt.arguments import check_type
from asyncckpt.errors import UnsupportedError, UsageError, Words, must_be, nearest
from asyncckpt.model.owned_ids import owned_mask, remainders
from asyncckpt.model.table import IdsHeld, Role, TableSchema
from asyncckpt.model.table_shard import Shard, buckets_of, described, is_shard
from asyncckpt.native import I64, core
from asyncckpt.tables.slots import EMBEDDING_COLUMN


def check_name(name: object) -> None:
    """Check the name of a table."""
    if not isinstance(name, str) or not name or "@" in name:
        raise must_be("name of a table", "a non-empty str without '@'", name)


def check_shard(name: str, shard: object, *, replicated: object) -> None:
    """Check the shard of a table, and that it is not a replica and a shard."""
    if not is_shard(shard):
        expected = "(index, count), 0 <= index < count, or (begin, end, size), 0 <= begin < end <= size"
        raise must_be(f"shard of table {name!r}", expected, shard)
    check_type(f"replicated of table {name!r}", replicated, bool)
    if replicated and shard != (0, 1):
        hint = "a replica holds all ids, a shard those of its rank"
        raise UsageError(f"table {name!r} cannot be a shard and a replica", found=shard, hint=hint)


def checked_device(name: str, device: torch.device | str) -> torch.device:
    """Return the device of a table's rows, a CUDA device with its index, because the current one may change.

    Raises UnsupportedError for a CUDA device that does not exist.
    """
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise must_be(f"device of table {name!r}", "a device of torch", device) from error
    if checked.type == "meta":
        raise must_be(f"device of table {name!r}", "one that has memory", device)
    if checked.type != "cuda":
        return checked
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (checked.index or 0) >= count:
        raise UnsupportedError(f"device of table {name!r} does not exist", found=device, expected=f"{count} devices")
    return torch.device("cuda", torch.cuda.current_device() if checked.index is None else checked.index)


def check_slot(schema: TableSchema, name: object, *, table: str) -> None:
    """Check that name is an optimizer slot or a metadata column."""
    slots = [column.name for column in schema.columns if column.role in (Role.OPTIMIZER, Role.METADATA)]
    if name not in slots:
        raise UsageError(f"table {table!r} has no slot {name!r}", expected=slots, hint=nearest(name, slots))


def checked_values(
    schema: TableSchema, rows: object, slots: Mapping[str, object], *, ids_shape: tuple[int, ...], table: str
) -> dict[str, torch.Tensor]:
    """Return values per column as `[n, *row_shape]`, from embedding rows and slots in the shape of their ids."""
    for name in slots:
        check_slot(schema, name, table=table)
    values: dict[str, torch.Tensor] = {}
    for name, value in {EMBEDDING_COLUMN: rows, **slots}.items():
        what = f"values for column {name!r} of table {table!r}"
        column = schema.column(name)
        assert column is not None
        if not isinstance(value, torch.Tensor):
            raise must_be(what, "a torch.Tensor", type(value))
        if value.dtype is not column.dtype:
            hint = f"use values.to({column.dtype})"
            raise UsageError(f"{what} have the wrong dtype", found=value.dtype, expected=column.dtype, hint=hint)
        shape = (*ids_shape, *column.row_shape)
        if tuple(value.shape) != shape:
            raise UsageError(f"{what} have the wrong shape", found=tuple(value.shape), expected=shape)
        values[name] = value.detach().reshape(math.prod(ids_shape), *column.row_shape)
    return values


def check_eviction(schema: TableSchema, column: object, below: object, older_than: object, *, table: str) -> None:
    """Check the arguments of `evict`: a metadata column of one number a row, and a bound or an age."""
    found = schema.column(column) if isinstance(column, str) else None
    if found is None or found.role is not Role.METADATA or found.row_shape != ():
        known = [c.name for c in schema.columns if c.role is Role.METADATA and c.row_shape == ()]
        rule = f"a metadata column of row shape (), one of {known}"
        raise must_be(f"column for an eviction from table {table!r}", rule, column, hint=nearest(column, known))
    if (below is None) == (older_than is None):
        found_both = {"below": below, "older_than": older_than}
        raise UsageError(f"an eviction from table {table!r} needs either below or older_than", found=found_both)
    if below is not None and not _is_number(below):
        raise must_be(f"below of an eviction from table {table!r}", "a number", below)
    if older_than is not None and not (_is_number(older_than) and older_than >= 0):  # type: ignore[operator]
        raise must_be(f"older_than of an eviction from table {table!r}", "a number >= 0", older_than)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def last_mentions(values: I64) -> I64:
    """Return where each value is mentioned last, ordered by value: index_copy_ has no order among equal rows."""
    _, first_from_end = np.unique(values[::-1], return_index=True)
    return np.asarray(values.size - 1 - first_from_end, dtype=np.int64)


IdsLike: TypeAlias = torch.Tensor | I64
RowsLike: TypeAlias = torch.Tensor | I64


def flat_ids(ids: IdsLike, *, table: str) -> I64:
    """Return ids as a contiguous int64 [n] array on the CPU; a view if possible. Raises UsageError."""
    flat = _flat(ids)
    if flat is not None:
        return flat
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        raise _wrong_dtype(table, ids)
    raise must_be(f"ids for table {table!r}", "an int64 torch.Tensor or numpy.ndarray", type(ids))


def flat_rows(rows: RowsLike, *, end: int, table: str) -> I64:
    """Return rows of [-1, end) as a contiguous int64 [n] array on the CPU, a view if possible. Raises UsageError."""
    what = f"rows of table {table!r}"
    flat = _flat(rows)
    if flat is None:
        found = rows.dtype if isinstance(rows, (torch.Tensor, np.ndarray)) else type(rows)
        raise must_be(what, "an int64 torch.Tensor or numpy.ndarray", found)
    if flat.size and (int(flat.min()) < -1 or int(flat.max()) >= end):
        wrong = flat[(flat < -1) | (flat >= end)]
        hint = "rows are what lookup returned, -1 for an id without one"
        raise UsageError(f"{what} are out of range", found=int(wrong[0]), expected=f"from -1 to {end - 1}", hint=hint)
    return flat


def one_id(value: object, *, table: str) -> I64:
    """Return one id as an int64 [1] array. Raises UsageError for anything else."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        ids = flat_ids(value, table=table)
        if ids.size != 1:
            raise must_be(f"id for table {table!r}", "one id", Words(f"shape {tuple(value.shape)}"))
        return ids
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not -(2**63) <= int(value) < 2**63:  # type: ignore[call-overload]
        raise must_be(f"id for table {table!r}", "an int that fits int64", value)
    return np.array([value], dtype=np.int64)


def ids_held(ids: I64) -> IdsHeld:
    """Return the number of distinct ids, contiguous int64 [n], and the sum of their fingerprints, in any order."""
    column = np.array([[ids.ctypes.data, ids.itemsize]], dtype=np.uint64)
    return IdsHeld(len(ids), int(core.fingerprints(column, len(ids)).sum(dtype=np.uint64)))


def check_owned(ids: I64, *, shard: Shard, table: str) -> None:
    """Raise UsageError, naming the first one, if an id of ids (int64 [n]) belongs to another shard."""
    if shard == (0, 1):
        return
    owned = owned_mask(ids, shard=shard)
    if owned.all():
        return
    begin, end, size = buckets_of(shard)
    first = ids[[int(np.argmin(owned))]]
    bucket = int(remainders(first, size=size)[0])
    where = f"shard {bucket} of {size}" if end == begin + 1 else f"bucket {bucket} of {size}"
    what = f"id {int(first[0])} belongs to {where}, and table {table!r} holds {described(shard)}"
    raise UsageError(what, hint="select ids with table.owns(ids) first")


def _flat(values: object) -> I64 | None:
    """Return int64 values as a contiguous array on the CPU; None for anything else."""
    if isinstance(values, torch.Tensor) and values.dtype is torch.int64:
        flat: I64 = values.detach().cpu().contiguous().view(-1).numpy()
        return flat
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        return np.ascontiguousarray(values).reshape(-1)
    return None


def _wrong_dtype(table: str, ids: IdsLike) -> UsageError:
    name = str(ids.dtype).removeprefix("torch.") if isinstance(ids, torch.Tensor) else ids.dtype.name
    module = "torch" if isinstance(ids, torch.Tensor) else "np"
    if name == "uint64":
        hint = f"use ids.view({module}.int64): an id is a bit pattern"
    elif not name.startswith(("int", "uint")):
        hint = "ids are integers; a float has lost bits of large ids already"
    else:
        hint = "use ids.long()" if module == "torch" else "use ids.astype(np.int64)"
    what = f"ids for table {table!r} have the wrong dtype"
    return UsageError(what, found=ids.dtype, expected=torch.int64, hint=hint)

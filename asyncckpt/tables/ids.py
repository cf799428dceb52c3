"""Checks of the ids and rows that callers pass.

An id is an int64 bit pattern. Other dtypes are refused, not converted: a float id above 2**53 has already lost bits,
and an int32 id is usually a mistake of the caller's.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch

from asyncckpt.errors import UsageError
from asyncckpt.model.owned_ids import owned_mask, remainders
from asyncckpt.model.table import IdsHeld
from asyncckpt.model.table_shard import Shard, buckets_of, described
from asyncckpt.native import I64, core

IdsLike: TypeAlias = torch.Tensor | I64
RowsLike: TypeAlias = torch.Tensor | I64


def flat_ids(ids: IdsLike, *, table: str) -> I64:
    """Return ids as a contiguous int64 [n] array on the CPU; a view if possible. Raises UsageError."""
    flat = _flat(ids)
    if flat is not None:
        return flat
    if isinstance(ids, (torch.Tensor, np.ndarray)):
        raise _wrong_dtype(table, ids)
    expected = "an int64 torch.Tensor or numpy.ndarray"
    raise UsageError(f"ids for table {table!r} are wrong", found=type(ids), expected=expected)


def flat_rows(rows: RowsLike, *, end: int, table: str) -> I64:
    """Return rows of [-1, end) as a contiguous int64 [n] array on the CPU, a view if possible. Raises UsageError."""
    what = f"rows of table {table!r}"
    flat = _flat(rows)
    if flat is None:
        found = rows.dtype if isinstance(rows, (torch.Tensor, np.ndarray)) else type(rows)
        raise UsageError(f"{what} are wrong", found=found, expected="an int64 torch.Tensor or numpy.ndarray")
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
            raise UsageError(f"one id for table {table!r} was asked for", found=tuple(value.shape))
        return ids
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not -(2**63) <= int(value) < 2**63:  # type: ignore[call-overload]
        raise UsageError(f"id for table {table!r} is wrong", found=value, expected="an int that fits int64")
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
    what = f"id {int(first[0])} does not belong to {described(shard)} of table {table!r}"
    expected = begin if end == begin + 1 else f"from {begin} to {end - 1}"
    found = int(remainders(first, size=size)[0])
    raise UsageError(what, expected=expected, found=found, hint="select ids with table.owns(ids) first")


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

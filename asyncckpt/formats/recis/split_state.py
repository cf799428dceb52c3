"""RecIS' split of a state dict into what its Saver, Loader and optimizers take apart: tables, and everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.errors import UnsupportedError, UsageError
from asyncckpt.model.table import Table
from asyncckpt.modules.dense_state import MODULE_PART, dense_state_of
from asyncckpt.modules.walk import tables_of
from asyncckpt.tables.noted_tables import GIVE_MODULE, check_not_copied, noted_tables


def split_sparse_dense_state_dict(
    state: Mapping[str, Any] | torch.nn.Module,
) -> tuple[dict[str, Table], dict[str, Any]]:
    """Split a state into tables and the rest, by name: the `hashtables` and `tensors` of a Saver or a Loader.

    state: a mapping with tables among its values, which stays as it is (RecIS takes them out of it); or a module, or
    its `state_dict()`, which does not hold the tables here, unlike in RecIS, but knows of them. A copy of it does not:
    it is refused where a module of this process has tables. Tensors of a module are the live ones. Raises UsageError,
    and UnsupportedError for a module whose state is more than tables and tensors by name.
    """
    if isinstance(state, torch.nn.Module):
        tables, parts = tables_of(state), dense_state_of(state).state_dict()
        dense: dict[str, Any] = parts.pop(MODULE_PART)
        if parts:
            hint = 'tensors={"model": asyncckpt.adapters.dense_state_of(module)} takes them all'
            raise UnsupportedError("a module has state of other kinds, too", found=sorted(parts), hint=hint)
        return tables, dense
    if not isinstance(state, Mapping):
        raise UsageError("state is neither a mapping nor a module", found=type(state))
    tables = {name: value for name, value in state.items() if isinstance(value, Table)}
    for name, noted in noted_tables(state).items():
        if name in state or not isinstance(noted, Table):
            what = f"the table {name!r} of a state_dict() cannot be taken from it"
            raise UsageError(what, found="an entry of its name" if name in state else noted, hint=GIVE_MODULE)
        tables[name] = noted
    if not tables:
        check_not_copied(state)
    return tables, {name: value for name, value in state.items() if name not in tables}

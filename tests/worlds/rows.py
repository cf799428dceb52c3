"""What tables hold, by id."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from tests.worlds.bits import raw_of


def batch(ids: Sequence[int]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def rows_of(table: Any, *columns: str) -> dict[int, tuple[Any, ...]]:
    """Return all rows by id: the values of these columns, or of all, one after the other."""
    ids = table.ids()
    values = table.read(ids)
    parts = [values[name].unsqueeze(-1).flatten(1).tolist() for name in columns or values]
    return {id: tuple(chain(*row)) for id, *row in zip(ids.tolist(), *parts, strict=True)}


def columns_of(table: Any) -> dict[str, torch.Tensor]:
    """Return all columns, rows in the order of their ids."""
    ids = table.ids().sort().values
    return {"id": ids, **table.read(ids)}


def named_rows(table: Any) -> dict[int, dict[str, Any]]:
    """Return all rows by id, in each the values by the names of their columns."""
    ids = table.ids()
    values = {name: column.tolist() for name, column in table.read(ids).items()}
    return {id: {name: column[at] for name, column in values.items()} for at, id in enumerate(ids.tolist())}


def table_image(table: Any) -> dict[int, bytes]:
    """Return all rows by id, in each the bytes of every column."""
    ids = table.ids()
    parts = [(raw, len(raw) // max(1, len(ids))) for raw in map(raw_of, table.read(ids).values())]
    return {id: b"".join(raw[at * size : (at + 1) * size] for raw, size in parts) for at, id in enumerate(ids.tolist())}

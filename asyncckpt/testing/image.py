"""The rows of a table as bytes, which compare NaNs, signed zeros and exotic dtypes correctly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.source import as_bytes
from asyncckpt.model.table import ID_COLUMN
from asyncckpt.native import I64

Contents: TypeAlias = Mapping[str, torch.Tensor | NDArray[Any]]
"""Column name -> its rows, `[n, *row_shape]`; all columns in one row order, `id` (int64) among them."""

IDS_SHOWN_MAX = 5


@dataclass(frozen=True)
class Image:
    """The rows of a table by ascending id: `ids` int64 [n], every other column as its bytes, uint8 [n, row bytes]."""

    ids: I64
    columns: Mapping[str, NDArray[np.uint8]]

    @staticmethod
    def of(contents: Contents) -> Image:
        """Copy contents in any row order. Raises AssertionError if a column lacks rows or an id occurs twice."""
        assert ID_COLUMN in contents, f"contents lack the column {ID_COLUMN!r}, they have {sorted(contents)}"
        ids = raw_rows(contents[ID_COLUMN]).view(np.int64).reshape(-1)
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        twice = ids[1:][ids[1:] == ids[:-1]]
        assert not twice.size, f"the table holds ids more than once: {_shown(twice)}"
        columns = {}
        for name, values in contents.items():
            if name != ID_COLUMN:
                rows = raw_rows(values)
                assert len(rows) == len(ids), f"column {name!r} has {len(rows)} rows, {ID_COLUMN!r} has {len(ids)}"
                columns[name] = rows[order]
        return Image(ids=ids, columns=columns)

    def __len__(self) -> int:
        return len(self.ids)

    def difference(self, expected: Image) -> str | None:
        """Describe how this image differs from the expected one; None if they are equal bit for bit."""
        if sorted(self.columns) != sorted(expected.columns):
            return f"columns are {sorted(self.columns)}, expected {sorted(expected.columns)}"
        missing = np.setdiff1d(expected.ids, self.ids)
        extra = np.setdiff1d(self.ids, expected.ids)
        if missing.size or extra.size:
            return f"{missing.size} ids are missing {_shown(missing)}, {extra.size} are too many {_shown(extra)}"
        for name, rows in expected.columns.items():
            found = self.columns[name]
            if found.shape != rows.shape:
                return f"column {name!r} has {found.shape} bytes, expected {rows.shape}"
            wrong = np.flatnonzero((found != rows).any(axis=1))
            if wrong.size:
                return f"column {name!r} differs in {wrong.size} of {len(rows)} rows, ids {_shown(self.ids[wrong])}"
        return None

    def assert_equals(self, expected: Image, *, what: str) -> None:
        """Raise AssertionError with `what` and the difference unless both are equal bit for bit."""
        difference = self.difference(expected)
        assert difference is None, f"{what}: {difference}"

    def part(self, mask: NDArray[np.bool_]) -> Image:
        """Return the rows where mask, bool [n], is set."""
        return Image(ids=self.ids[mask], columns={name: rows[mask] for name, rows in self.columns.items()})

    def only(self, *names: str) -> Image:
        """Return the ids and these columns."""
        return Image(ids=self.ids, columns={name: self.columns[name] for name in names})

    def merged(self, newer: Image) -> Image:
        """Return the rows of both; those of newer win."""
        kept = self.part(~np.isin(self.ids, newer.ids))
        ids = np.concatenate([kept.ids, newer.ids])
        order = np.argsort(ids, kind="stable")
        columns = {name: np.concatenate([kept.columns[name], rows])[order] for name, rows in newer.columns.items()}
        return Image(ids=ids[order], columns=columns)


def raw_rows(values: torch.Tensor | NDArray[Any]) -> NDArray[np.uint8]:
    """Copy rows, `[n, *row_shape]`, as bytes, uint8 [n, row bytes]."""
    if isinstance(values, torch.Tensor):
        plain = values.detach().resolve_conj().resolve_neg().cpu().contiguous()
        raw = as_bytes(plain)
        item_bytes = plain.element_size()
    else:
        raw = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        item_bytes = values.itemsize
    copied: NDArray[np.uint8] = raw.reshape(len(values), item_bytes * math.prod(values.shape[1:])).copy()
    return copied


def _shown(ids: I64) -> str:
    return f"{ids[:IDS_SHOWN_MAX].tolist()}{'...' if ids.size > IDS_SHOWN_MAX else ''}"

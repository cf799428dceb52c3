"""Read a table through its cut like a save, but slowly and simply: an oracle for the snapshot stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from asyncckpt.model.table import CacheCopy, Column, DeferredCut, OverlaidCut, TableCut, TableSchema
from asyncckpt.native import I64
from asyncckpt.testing.image import Image, raw_rows

Cut = TypeVar("Cut", bound=TableCut)


@contextmanager
def ended(cut: Cut, ok: bool = True) -> Iterator[Cut]:
    """End a cut after a block of code."""
    try:
        yield cut
    finally:
        cut.end(ok)


def cut_image(cut: TableCut, schema: TableSchema, *, overlay: bool = True) -> Image:
    """Return the rows of a cut before its fence: those of the storage, overlaid with cached ones if there are any."""
    return Image.of({column.name: _column_rows(cut, column.name, overlay=overlay) for column in schema.columns})


def cut_rows(cut: TableCut, schema: TableSchema) -> NDArray[np.uint8]:
    """Return the rows of a cut in the order of the storage, all columns side by side, uint8 [rows, bytes]."""
    return np.concatenate([_column_rows(cut, column.name, overlay=True) for column in schema.columns], axis=1)


def _column_rows(cut: TableCut, name: str, *, overlay: bool) -> NDArray[np.uint8]:
    stored = raw_rows(cut.column(name))
    if overlay and isinstance(cut, OverlaidCut):
        cached = cut.cached_column(name)
        if cached is not None:
            held = cut.cache_map.numpy() >= 0
            stored[cut.cache_map.numpy()[held]] = raw_rows(cached[: len(held)])[held]
    rows: NDArray[np.uint8] = stored[run_rows(cut.runs)]
    return rows


def run_rows(runs: I64) -> I64:
    """Return the storage rows of runs, in order, int64 [n]."""
    parts = [np.arange(begin, end, dtype=np.int64) for begin, end in runs.tolist()]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


def cache_copy(cut: OverlaidCut, schema: TableSchema) -> CacheCopy:
    """Return the copy of the cache level that a save makes before the fence."""
    cache_map = cut.cache_map.numpy().copy()
    columns: dict[str, torch.Tensor] = {}
    for column in schema.columns:
        cached = cut.cached_column(column.name)
        if cached is not None:
            columns[column.name] = cached[: len(cache_map)].detach().cpu().clone()
    return CacheCopy(map=cache_map, columns=columns)


class Windows:
    """The windows of a deferred cut, exported one by one into their own memory."""

    def __init__(self, cut: DeferredCut, schema: TableSchema, *, window_rows: int) -> None:
        self._cut = cut
        self._window_rows = window_rows
        self._rows_count = cut.rows_count
        self._buffers = {
            column.name: np.zeros((cut.rows_count, _row_bytes(column)), dtype=np.uint8) for column in schema.columns
        }
        self.left = list(range(-(-cut.rows_count // window_rows)))

    def export(self, index: int) -> None:
        """Export one of the windows that are left."""
        self.left.remove(index)
        begin = index * self._window_rows
        targets = {
            name: int(buffer.ctypes.data) + begin * int(buffer.shape[1]) for name, buffer in self._buffers.items()
        }
        self._cut.export(index, targets)

    def export_all(self, order: Iterable[int]) -> None:
        for index in order:
            self.export(index)

    def image(self) -> Image:
        """Return what was exported, after all windows were."""
        assert not self.left, f"windows {self.left} were not exported"
        return Image.of(self._buffers)


def _row_bytes(column: Column) -> int:
    return column.dtype.itemsize * math.prod(column.row_shape)

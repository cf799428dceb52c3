"""The values of blocks of a save, in an arena, in the live state, or in a tensor that a filter gave instead; and
sources of their bytes.

Each of the *Data has `rows(begin, end)`, contiguous on the CPU, and a `source` of all its bytes. A number without shape
is one row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from asyncckpt.devices.current_runtime import device_of
from asyncckpt.devices.fetch import to_host
from asyncckpt.model.block import BlockSpec
from asyncckpt.model.row_runs import spans, window
from asyncckpt.model.source import ByteSource, DeviceRows, RowsSource, SpanSource, as_bytes, byte_view
from asyncckpt.model.table import TableCut
from asyncckpt.native import I64, U8, U64
from asyncckpt.plan.leaf_memory import check_extent, is_plain
from asyncckpt.plan.save_plan import CutTable, SavePlan
from asyncckpt.plan.state import FlatState, still
from asyncckpt.snapshot.capture import as_tensor, look_at
from asyncckpt.snapshot.overlay import Overlay, rows_of_cut


class TensorData:
    """A tensor on any device, with any strides. UsageError where its storage was freed or shrunk meanwhile."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor = tensor.detach()  # Nobody can give this one another form or other memory.
        self._name = name

    def whole(self) -> torch.Tensor:
        check_extent(self._tensor, self._name)
        return to_host(self._tensor)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        check_extent(self._tensor, self._name)
        return to_host(self._tensor[begin:end] if self._tensor.shape else self._tensor)

    def source(self) -> ByteSource:
        return tensor_source(self._tensor, self._name)


class ArenaData:
    """Bytes of an arena, which whoever uses them holds."""

    def __init__(self, raw: U8, spec: BlockSpec) -> None:
        self._raw = raw
        self._spec = spec

    def whole(self) -> torch.Tensor:
        return as_tensor(self._raw, self._spec)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self.whole()[begin:end] if self._spec.shape else self.whole()

    def source(self) -> ByteSource:
        return SpanSource(self._raw.ctypes.data, self._raw)


class ColumnData:
    """Rows [begin, end) of a column of a table, until its cut is fenced."""

    def __init__(self, cut: TableCut, overlay: Overlay | None, column: str, begin: int, end: int) -> None:
        self._cut, self._overlay, self._column = cut, overlay, column
        self._begin, self._end = begin, end

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return rows_of_cut(self._cut, self._overlay, self._column, self._begin + begin, self._begin + end)

    def source(self) -> ByteSource:
        storage = self._cut.column(self._column)
        row_bytes = max(1, storage.nbytes // max(1, len(storage)))
        if self._overlay is None and storage.is_cpu and storage.is_contiguous() and device_of(storage) is None:
            return RunsSource(storage, window(self._cut.runs, self._begin, self._end), row_bytes=row_bytes)
        return RowsSource(lambda first, last: as_bytes(self.rows(first, last)), row_bytes=row_bytes)


def live_data(plan: SavePlan, flat: FlatState, cuts: Sequence[CutTable]) -> list[TensorData | ColumnData]:
    """Return every block of a plan in the live state of a save without an arena; rows may be the live memory.

    UsageError for tensors that are not what was planned.
    """
    held = look_at(plan, list(map(still, flat.now))).tensors
    overlays = [Overlay.of(item.cut) for item in cuts]
    found: list[TensorData | ColumnData] = []
    for number, placed in enumerate(plan.image.blocks):
        if number in plan.columns:
            (table, column), spec = plan.columns[number], placed.spec
            end = spec.row_begin + spec.shape[0]
            found.append(ColumnData(cuts[table].cut, overlays[table], column, spec.row_begin, end))
        else:
            found.append(TensorData(plan.dense_rows(number, held), placed.spec.name))
    return found


class LiveData:
    """A block of the live state. What a filter function looks at is a copy, and the copy is written."""

    def __init__(self, data: TensorData | ColumnData, spec: BlockSpec) -> None:
        self._data = data
        self._name = spec.name
        self._rows_count = spec.shape[0] if spec.shape else 1
        self._copied: TensorData | None = None

    def whole(self) -> torch.Tensor:
        if self._copied is None:
            copied = self._data.rows(0, self._rows_count).clone()
            self._data = self._copied = TensorData(copied, self._name)
        return self._copied.whole()

    def rows(self, begin: int, end: int) -> torch.Tensor:
        return self._data.rows(begin, end)

    def source(self) -> ByteSource:
        return self._data.source()


class RunsSource:
    """Rows of a column's contiguous CPU storage."""

    def __init__(self, tensor: torch.Tensor, runs: I64, *, row_bytes: int) -> None:
        self._tensor = tensor
        self._runs = runs
        self._row_bytes = row_bytes

    def pieces(self, begin: int, end: int) -> U64:
        size = self._row_bytes
        first, last = begin // size, -(-end // size)
        found = spans(window(self._runs, first, last), address=self._tensor.data_ptr(), row_bytes=size)
        if len(found):
            found[0] += np.array([begin - first * size, -(begin - first * size)], dtype=np.int64).view(np.uint64)
            found[-1, 1] -= np.uint64(last * size - end)
        return found

    def release(self) -> None:
        """Nothing was made for the pieces."""


class _TensorSpan:
    """The plain memory of a tensor, looked at for each chunk: its storage may have moved, or be gone."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor, self._name = tensor, name

    def pieces(self, begin: int, end: int) -> U64:
        check_extent(self._tensor, self._name)
        return np.array([[self._tensor.data_ptr() + begin, end - begin]], dtype=np.uint64)

    def release(self) -> None:
        """Nothing was made for the pieces."""


def tensor_source(tensor: torch.Tensor, name: str) -> ByteSource:
    """Return the source of one dense tensor."""
    tensor = tensor.detach()
    has_plain_memory = is_plain(tensor)
    if device_of(tensor) is not None and tensor.numel() and (has_plain_memory or tensor.dim()):
        # Of plain memory, just the bytes that are asked for: a single row may be all of it.
        return DeviceRows(byte_view(tensor) if has_plain_memory else tensor)
    if has_plain_memory and tensor.is_cpu:
        return _TensorSpan(tensor, name)
    if tensor.dim() == 0 or tensor.numel() == 0:
        kept = to_host(tensor)
        return SpanSource(kept.data_ptr(), kept)

    def rows(begin: int, end: int) -> U8:
        check_extent(tensor, name)
        return as_bytes(to_host(tensor[begin:end]))

    return RowsSource(rows, row_bytes=tensor.nbytes // len(tensor))
